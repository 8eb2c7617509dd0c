// Execution policy of the host: CPU threads in place of GPU threads. For tests of the schedule, for
// CPU ranks of one machine over shared memory, and for benchmarks.
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <vector>

#include "reroute.cuh"
#include "sources.cuh"
#include "transfer.cuh"

// Threads stall at random, which exposes rare interleavings.
#ifdef FSSDP_STALLS
#include <random>
#endif

namespace fssdp {

// Block barrier with the semantics of __syncthreads_and.
class Barrier {
 public:
  explicit Barrier(u32 threads) : threads_(threads) {}
  bool all(bool value) {
    if (threads_ == 1) return value;
    std::unique_lock<std::mutex> lock(mutex_);
    and_ = and_ && value;
    const u64 round = round_;
    if (++arrived_ == threads_) {
      result_ = and_;
      and_ = true;
      arrived_ = 0;
      ++round_;
      wake_.notify_all();
    } else {
      wake_.wait(lock, [&] { return round_ != round; });
    }
    return result_;
  }

 private:
  const u32 threads_;
  u32 arrived_ = 0;
  u64 round_ = 0;
  bool and_ = true, result_ = true;
  std::mutex mutex_;
  std::condition_variable wake_;
};

class Host {
 public:
  Host(u32 id, u32 threads, u32 block, u32 blocks, Barrier& barrier)
      : id_(id), threads_(threads), block_(block), blocks_(blocks), barrier_(barrier) {}
  u32 id() const { return id_; }
  u32 count() const { return threads_; }
  u32 block() const { return block_; }
  u32 blocks() const { return blocks_; }
  // Warps and teams have one lane each.
  i32 warp_size() const { return 1; }
  i32 in_warp() const { return 0; }
  i32 warp() const { return (i32)id_; }
  i32 warps() const { return (i32)threads_; }
  template <class Int>
  Int warp_sum(Int value) const {
    return value;
  }
  bool warp_any(bool value) const { return value; }
  u64 match(u32) const { return 1; }
  void sync_warp() const {}
  i32 warp_teams() const { return 1; }
  i32 lanes() const { return 1; }
  i32 lane() const { return 0; }
  i32 team() const { return (i32)id_; }
  i32 teams() const { return (i32)threads_; }
  template <class Int>
  Int scan(Int value) const {
    return value;
  }
  template <class Int>
  Int last(Int value) const {
    return value;
  }
  template <class Int>
  Int sum(Int value) const {
    return value;
  }
  float inverse(float value) const { return 1.0f / value; }
  u32 bfloat16s(float low, float high) const { return bfloat16(low) | bfloat16(high) << 16; }
  u64 either(u64 bits) const { return bits; }
  template <class Is>
  u64 bits(Is is) const {
    u64 bits = 0;
    for (i32 i = 0; i < 64; ++i) bits |= (u64)is(i) << i;
    return bits;
  }
  i32 count_bits(u64 bits) const { return __builtin_popcountll(bits); }
  i32 lowest_bit(u64 bits) const { return __builtin_ctzll(bits); }
  template <class Int>
  void add(Int* at, Int value) const {
    __atomic_fetch_add(at, value, __ATOMIC_RELAXED);
  }
  void raise(long long* at, long long value) const {
    long long now = __atomic_load_n(at, __ATOMIC_RELAXED);
    while (now < value && !__atomic_compare_exchange_n(at, &now, value, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
    }
  }
  bool all(bool value) {
    stall();
    return barrier_.all(value);
  }
  void pause() const { std::this_thread::sleep_for(std::chrono::microseconds(20)); }
  u64 clock() const {
    return (u64)std::chrono::duration_cast<std::chrono::nanoseconds>(
               std::chrono::steady_clock::now().time_since_epoch())
        .count();
  }
  u32 load_acquire(const u32* at) const { return __atomic_load_n(at, __ATOMIC_ACQUIRE); }
  void store_release(u32* at, u32 value) const {
    stall();
    __atomic_store_n(at, value, __ATOMIC_RELEASE);
  }
  void store_relaxed(u32* at, u32 value) const { __atomic_store_n(at, value, __ATOMIC_RELAXED); }
  u32 add_acq_rel(u32* at, u32 value) const {
    stall();
    return __atomic_fetch_add(at, value, __ATOMIC_ACQ_REL);
  }
  template <class T>
  T load(const T* at) const {
    return *at;
  }
  template <class T>
  void store(T* at, const T& value) const {
    *at = value;
  }
  void fail(Failure* record, const Failure& why) const {
    u32 none = 0;
    if (__atomic_compare_exchange_n(&record->failed, &none, (u32)WRITING, false, __ATOMIC_ACQ_REL, __ATOMIC_RELAXED)) {
      record->rank = why.rank;
      record->peer = why.peer;
      record->expected = why.expected;
      record->seen = why.seen;
      record->id = why.id;
      __atomic_store_n(&record->failed, why.failed, __ATOMIC_RELEASE);
    }
  }

 private:
  static u32 bfloat16(float value) {
    const u32 bits = as_bits(value);
    return value == value ? (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16 : 0x7fffu;
  }
  static void stall() {
#ifdef FSSDP_STALLS
    thread_local std::minstd_rand random((u32)std::hash<std::thread::id>()(std::this_thread::get_id()));
    const u32 drawn = (u32)random() % 64;
    if (drawn < 4) std::this_thread::sleep_for(std::chrono::microseconds(1u << (2 * drawn + 2)));
    if (drawn < 24) std::this_thread::yield();
#endif
  }
  const u32 id_, threads_, block_, blocks_;
  Barrier& barrier_;
};

// Run `kernel` in every thread of one rank's grid, and join the threads.
template <class Kernel>
void launch(Kernel kernel, u32 blocks, u32 threads) {
  std::vector<Barrier*> barriers;
  std::vector<std::thread> running;
  for (u32 b = 0; b < blocks; ++b) {
    barriers.push_back(new Barrier(threads));
    for (u32 i = 0; i < threads; ++i) {
      Host th(i, threads, b, blocks, *barriers[b]);
      if (blocks * threads == 1)
        kernel(th);
      else
        running.emplace_back([th, &kernel]() mutable { kernel(th); });
    }
  }
  for (auto& thread : running) thread.join();
  for (auto* barrier : barriers) delete barrier;
}
template <class Kind>
void run(const Transfer& t, u32 position, bool away, u32 blocks, u32 threads) {
  // The barrier before the transfer timed out, or the host has ended all waits.
  if (t.failure->failed) return;
  launch([&](Host& th) { transfer<Kind>(th, t, position, away); }, blocks, threads);
}
void run_synchronize(const Transfer& t, u32 position, u32 threads) {
  launch([&](Host& th) { synchronize(th, t, position); }, 1, threads);
}

template <class Int>
bool quotas_of_all(const i32* group, const i32* holders, const i32* loads, i64* work, i32* parts) {
  const Group g = group_at(group);
  const Holders h = holders_at(holders, g);
  const Work<Int> w = work_at<Int>(work, g, 1);
  bool solved = false;
  launch([&](Host& th) { solved = solve<Int>(th, g, h, w, loads, nullptr); }, 1, 1);
  for (i32 rank = 0; solved && rank < g.ranks; ++rank)
    for (i32 own = sources_begin(g, rank); own < sources_end(g, rank); ++own) {
      i32* at = parts + (i64)g.order[own] * (2 * g.ranks * g.per_rank + g.experts + 1);
      launch([&](Host& th) { deal_source(th, Sources<Int>{g, h, w, loads}, own, rank, at); }, 1, 1);
    }
  return solved;
}

}  // namespace fssdp

extern "C" {
#define FSSDP_KERNEL(NAME, ...)                                                                               \
  int NAME(const fssdp::Transfer* t, unsigned position, unsigned away, unsigned blocks, unsigned threads) {  \
    fssdp::run<__VA_ARGS__>(*t, position, away != 0, blocks, threads);                                       \
    return (int)t->failure->failed;                                                                          \
  }
FSSDP_KERNEL(fssdp_gather, fssdp::Gather)
FSSDP_KERNEL(fssdp_reduce_32_32, fssdp::Reduce<fssdp::Float32, fssdp::Float32>)
FSSDP_KERNEL(fssdp_reduce_32_16, fssdp::Reduce<fssdp::Float32, fssdp::Bfloat16>)
FSSDP_KERNEL(fssdp_reduce_16_32, fssdp::Reduce<fssdp::Bfloat16, fssdp::Float32>)
FSSDP_KERNEL(fssdp_reduce_16_16, fssdp::Reduce<fssdp::Bfloat16, fssdp::Bfloat16>)
int fssdp_synchronize(const fssdp::Transfer* t, unsigned position) {
  fssdp::run_synchronize(*t, position, 1);
  return (int)t->failure->failed;
}
unsigned fssdp_size_of_transfer() { return sizeof(fssdp::Transfer); }

// Kernels after the gate, each in one thread.
void fssdp_quotas(const int* group, const int* holders, const int* loads, long long* work, unsigned shared_bytes, int own,
                  int rank, int* parts, long long* exchanged, long long* noted, const fssdp::Transfer* exchange,
                  unsigned id) {
  std::vector<long long> shared((shared_bytes + 7) / 8);
  const auto kernel = [&](fssdp::Host& th) {
    if (exchange && !(loads = fssdp::await_loads(th, *exchange, id))) return;
    fssdp::quotas(th, group, holders, loads, work, shared.data(), shared_bytes, own, rank, parts, exchanged, noted);
  };
  fssdp::launch(kernel, 1, 1);
}
// Compute the parts of all sources, for tests and benchmarks, with integers of 32 or 64 bits.
// Return 0 if the tokens are too many for this width. `parts`: [N, 2 * R * P + E + 1].
int fssdp_quotas_of_all(const int* group, const int* holders, const int* loads, long long* work, int bits, int* parts) {
  return bits == 32 ? fssdp::quotas_of_all<int>(group, holders, loads, work, parts)
                    : fssdp::quotas_of_all<long long>(group, holders, loads, work, parts);
}
void fssdp_count(unsigned tokens, unsigned tile, unsigned experts, const unsigned char* map, int* before, int* loads,
                 long long* total, const fssdp::Transfer* exchange, unsigned* arrived) {
  const auto kernel = [&](fssdp::Host& th) {
    fssdp::count_tokens(th, {tokens, tile}, experts, map, {before, loads, total, exchange}, arrived);
  };
  fssdp::launch(kernel, 1, 1);
}
void fssdp_count_choices(unsigned tokens, unsigned tile, unsigned experts, void* chosen, unsigned top, unsigned bits,
                         int* within, int* before, int* loads, long long* total, const fssdp::Transfer* exchange,
                         unsigned* arrived) {
  std::vector<int> seen(experts);
  const auto kernel = [&](fssdp::Host& th) {
    fssdp::count_choices(th, {tokens, tile}, experts, {chosen, top, bits}, within, seen.data(),
                         {before, loads, total, exchange}, arrived);
  };
  fssdp::launch(kernel, 1, 1);
}
#define FSSDP_REROUTE(BITS, TYPE)                                                                                     \
  void fssdp_reroute_##BITS(                                                                                          \
      unsigned tokens, unsigned tile, const int* group, const int* holders, const int* before, const int* parts,      \
      const unsigned char* map, const TYPE* probs, unsigned long long least, unsigned char* out_map, TYPE* out) {     \
    const auto kernel = [&](fssdp::Host& th) {                                                                        \
      fssdp::reroute<TYPE>(th, {tokens, tile}, group, holders, before, parts, map, probs, (TYPE)least, out_map, out); \
    };                                                                                                                \
    fssdp::launch(kernel, 1, 1);                                                                                      \
  }                                                                                                                   \
  void fssdp_reroute_gradient_##BITS(                                                                                 \
      unsigned tokens, unsigned tile, unsigned experts, unsigned columns, const int* before, const int* parts,        \
      const unsigned char* map, const TYPE* out_grad, unsigned long long row, unsigned long long column,              \
      TYPE* grad) {                                                                                                   \
    const auto kernel = [&](fssdp::Host& th) {                                                                        \
      const fssdp::Gradient<TYPE> out = {out_grad, row, column};                                                      \
      fssdp::reroute_gradient<TYPE>(th, {tokens, tile}, experts, columns, before, parts, map, out, grad);             \
    };                                                                                                                \
    fssdp::launch(kernel, 1, 1);                                                                                      \
  }                                                                                                                   \
  void fssdp_reroute_choices_##BITS(                                                                                  \
      unsigned tokens, unsigned tile, unsigned experts, unsigned columns, const int* before, const int* within,       \
      const int* parts, void* chosen, unsigned top, unsigned bits, const TYPE* probs, void* out_chosen, TYPE* out) {  \
    const auto kernel = [&](fssdp::Host& th) {                                                                        \
      fssdp::reroute_choices<TYPE>(th, {tokens, tile}, experts, columns, before, within, parts, {chosen, top, bits},  \
                                   probs, {out_chosen, top, bits}, out);                                              \
    };                                                                                                                \
    fssdp::launch(kernel, 1, 1);                                                                                      \
  }                                                                                                                   \
  void fssdp_reroute_choices_gradient_##BITS(                                                                         \
      unsigned tokens, unsigned tile, unsigned experts, void* chosen, unsigned top, unsigned bits, void* out_chosen,  \
      const TYPE* out_grad, unsigned long long row, unsigned long long column, TYPE* grad) {                          \
    const auto kernel = [&](fssdp::Host& th) {                                                                        \
      const fssdp::Gradient<TYPE> out = {out_grad, row, column};                                                      \
      fssdp::reroute_choices_gradient<TYPE>(th, {tokens, tile}, experts, {chosen, top, bits}, {out_chosen, top, bits},\
                                            out, grad);                                                               \
    };                                                                                                                \
    fssdp::launch(kernel, 1, 1);                                                                                      \
  }
FSSDP_REROUTE(16, unsigned short)
FSSDP_REROUTE(32, unsigned)
FSSDP_REROUTE(64, unsigned long long)
}
