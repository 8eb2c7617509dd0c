// Execution policy of a GPU, and the kernels. A transfer is a grid of thread blocks. In tests
// several ranks share one GPU: blockIdx.y is the index of the rank, and every rank has the same
// number of blocks.
#include "reroute.cuh"
#include "sources.cuh"
#include "transfer.cuh"

namespace fssdp {

struct Device {
  FSSDP_FN u32 id() const { return threadIdx.x; }
  FSSDP_FN u32 count() const { return blockDim.x; }
  FSSDP_FN u32 block() const { return blockIdx.x; }
  FSSDP_FN u32 blocks() const { return gridDim.x; }
  FSSDP_FN bool all(bool value) const { return __syncthreads_and(value) != 0; }
  // Warp sums are collective over all lanes, so they need no code for diverged lanes.
  enum { WARP = 32, ALL_LANES = -1 };
  FSSDP_FN i32 warp_size() const { return WARP; }
  FSSDP_FN i32 in_warp() const { return (i32)threadIdx.x % WARP; }
  FSSDP_FN i32 warp() const { return (i32)threadIdx.x / WARP; }
  FSSDP_FN i32 warps() const { return (i32)blockDim.x / WARP; }
  template <class Int>
  FSSDP_FN Int warp_sum(Int value) const { return sum_over<WARP>(value); }
  FSSDP_FN bool warp_any(bool value) const { return __any_sync(ALL_LANES, value) != 0; }
  // Lanes of the warp with the same value, as bits.
  FSSDP_FN u64 match(u32 value) const { return __match_any_sync(ALL_LANES, value); }
  FSSDP_FN void sync_warp() const { __syncwarp(); }
  // Team: lanes of one warp that process the same rank.
  enum { LANES = 4 };
  FSSDP_FN i32 lanes() const { return LANES; }
  FSSDP_FN i32 lane() const { return (i32)threadIdx.x % LANES; }
  FSSDP_FN i32 team() const { return (i32)threadIdx.x / LANES; }
  FSSDP_FN i32 teams() const { return (i32)blockDim.x / LANES; }
  FSSDP_FN i32 warp_teams() const { return WARP / LANES; }
  // Inclusive prefix sum over the lanes of a team.
  template <class Int>
  FSSDP_FN Int scan(Int value) const {
    FSSDP_UNROLL
    for (int by = 1; by < LANES; by *= 2) {
      const Int other = __shfl_up_sync(ALL_LANES, value, by, LANES);
      if (lane() >= by) value += other;
    }
    return value;
  }
  // Value of the team's last lane.
  template <class Int>
  FSSDP_FN Int last(Int value) const { return __shfl_sync(ALL_LANES, value, LANES - 1, LANES); }
  template <class Int>
  FSSDP_FN Int sum(Int value) const { return sum_over<LANES>(value); }
  FSSDP_FN u64 either(u64 bits) const {
    FSSDP_UNROLL
    for (int by = LANES / 2; by > 0; by /= 2) bits |= __shfl_xor_sync(ALL_LANES, bits, by);
    return bits;
  }
  // 64 bits; bit i is `is(i)`.
  template <class Is>
  FSSDP_FN u64 bits(Is is) const {
    const u32 low = __ballot_sync(ALL_LANES, is(in_warp())), high = __ballot_sync(ALL_LANES, is(in_warp() + WARP));
    return (u64)high << WARP | low;
  }
  FSSDP_FN i32 count_bits(u64 bits) const { return __popcll(bits); }
  FSSDP_FN i32 lowest_bit(u64 bits) const { return __ffsll((long long)bits) - 1; }
  template <int N, class Int>
  FSSDP_FN Int sum_over(Int value) const {
    FSSDP_UNROLL
    for (int by = N / 2; by > 0; by /= 2) value += __shfl_xor_sync(ALL_LANES, value, by);
    return value;
  }
  FSSDP_FN float inverse(float value) const { return __frcp_rn(value); }
  FSSDP_FN void add(i32* at, i32 value) const { atomicAdd(at, value); }
  FSSDP_FN void add(i64* at, i64 value) const { atomicAdd((u64*)at, (u64)value); }
  FSSDP_FN void raise(i64* at, i64 value) const { atomicMax(at, value); }
  FSSDP_FN void pause() const { __nanosleep(64); }
  FSSDP_FN u64 clock() const {
    u64 now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
    return now;
  }
  FSSDP_FN u32 load_acquire(const u32* at) const {
    u32 value;
    asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(at) : "memory");
    return value;
  }
  FSSDP_FN void store_release(u32* at, u32 value) const {
    asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(at), "r"(value) : "memory");
  }
  FSSDP_FN void store_relaxed(u32* at, u32 value) const {
    asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(at), "r"(value) : "memory");
  }
  FSSDP_FN u32 add_acq_rel(u32* at, u32 value) const {
    u32 before;
    asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], %2;" : "=r"(before) : "l"(at), "r"(value) : "memory");
    return before;
  }
  // Two bf16 numbers in one word, rounded to nearest, ties to even.
  FSSDP_FN u32 bfloat16s(float low, float high) const {
    u32 both;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
    return both;
  }
  // Not through the read-only cache, because peers write this memory while the kernel runs.
  FSSDP_FN Vector load(const Vector* at) const {
    Vector v;
    asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.word[0]), "=r"(v.word[1]), "=r"(v.word[2]), "=r"(v.word[3])
                 : "l"(at)
                 : "memory");
    return v;
  }
  FSSDP_FN void store(Vector* at, const Vector& v) const {
    asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(at), "r"(v.word[0]), "r"(v.word[1]), "r"(v.word[2]),
                 "r"(v.word[3])
                 : "memory");
  }
  template <class T>
  FSSDP_FN T load(const T* at) const {
    return *(const volatile T*)at;
  }
  template <class T>
  FSSDP_FN void store(T* at, T value) const {
    *(volatile T*)at = value;
  }
  // The record is in host memory, so the process can print it after the trap. The trap aborts the
  // context, so that no kernel of a running job computes with data that never arrived.
  FSSDP_FN void fail(Failure* record, const Failure& why) const {
    if (atomicCAS_system(&record->failed, 0u, (u32)WRITING) == 0u) {
      record->rank = why.rank;
      record->peer = why.peer;
      record->expected = why.expected;
      record->seen = why.seen;
      record->id = why.id;
      __threadfence_system();
      store(&record->failed, why.failed);
    }
    // Not before the record is complete, whichever thread writes it.
    while (load(&record->failed) == WRITING) pause();
    __threadfence_system();
    __trap();
  }
};

// Policy of a block that moves bytes. With a constant number of threads the addresses of a thread's
// vectors have constant offsets. A thread has at most 128 registers, most of which hold loads in
// flight. This leaves half of a multiprocessor's registers to blocks that compute.
struct Wide : Device {
  enum { THREADS = 256 };
  FSSDP_FN u32 count() const { return THREADS; }
};

}  // namespace fssdp

// `transfers`: one for each rank on this GPU. `position`, `away`: see transfer.cuh.
#define FSSDP_KERNEL(NAME, ...)                                                                       \
  extern "C" __global__ void __launch_bounds__(fssdp::Wide::THREADS, 2)                               \
      NAME(const fssdp::Transfer* transfers, unsigned position, unsigned away) {                      \
    fssdp::Wide th;                                                                                   \
    fssdp::transfer<__VA_ARGS__>(th, transfers[blockIdx.y], position, away != 0);                     \
  }
FSSDP_KERNEL(fssdp_gather, fssdp::Gather)
// Bits of the gradients in slots, and of main gradients.
FSSDP_KERNEL(fssdp_reduce_32_32, fssdp::Reduce<fssdp::Float32, fssdp::Float32>)
FSSDP_KERNEL(fssdp_reduce_32_16, fssdp::Reduce<fssdp::Float32, fssdp::Bfloat16>)
FSSDP_KERNEL(fssdp_reduce_16_32, fssdp::Reduce<fssdp::Bfloat16, fssdp::Float32>)
FSSDP_KERNEL(fssdp_reduce_16_16, fssdp::Reduce<fssdp::Bfloat16, fssdp::Bfloat16>)

// Launched with one small block.
extern "C" __global__ void __launch_bounds__(96)
    fssdp_synchronize(const fssdp::Transfer* transfers, unsigned position) {
  fssdp::Device th;
  fssdp::synchronize(th, transfers[blockIdx.y], position);
}

// Launched after the gate, with one block.
extern "C" __global__ void __launch_bounds__(256, 1)
    fssdp_quotas(const int* group, const int* holders, const int* loads, long long* work, unsigned shared_bytes, int own,
                 int rank, int* parts, long long* exchanged, long long* noted, const fssdp::Transfer* exchange,
                 unsigned id) {
  extern __shared__ long long shared[];
  fssdp::Device th;
  if (exchange) loads = fssdp::await_loads(th, *exchange, id);
  fssdp::quotas(th, group, holders, loads, work, shared, shared_bytes, own, rank, parts, exchanged, noted);
}

extern "C" __global__ void __launch_bounds__(256, 4)
    fssdp_count(unsigned tokens, unsigned tile, unsigned experts, const unsigned char* map, int* before, int* loads,
                long long* total, const fssdp::Transfer* exchange, unsigned* arrived) {
  fssdp::Device th;
  fssdp::count_tokens(th, {tokens, tile}, experts, map, {before, loads, total, exchange}, arrived);
}

extern "C" __global__ void __launch_bounds__(256, 4)
    fssdp_count_choices(unsigned tokens, unsigned tile, unsigned experts, void* chosen, unsigned top, unsigned bits,
                        int* within, int* before, int* loads, long long* total, const fssdp::Transfer* exchange,
                        unsigned* arrived) {
  extern __shared__ int seen[];
  fssdp::Device th;
  fssdp::count_choices(th, {tokens, tile}, experts, {chosen, top, bits}, within, seen, {before, loads, total, exchange}, arrived);
}

// About one block per multiprocessor runs. Without the bound of 4 the compiler targets 8 blocks per
// multiprocessor, and spills registers for it.
#define FSSDP_REROUTE(BITS, TYPE)                                                                                     \
  extern "C" __global__ void __launch_bounds__(256, 4) fssdp_reroute_##BITS(                                          \
      unsigned tokens, unsigned tile, const int* group, const int* holders, const int* before, const int* parts,      \
      const unsigned char* map, const TYPE* probs, unsigned long long least, unsigned char* out_map, TYPE* out) {     \
    fssdp::Device th;                                                                                                 \
    fssdp::reroute<TYPE>(th, {tokens, tile}, group, holders, before, parts, map, probs, (TYPE)least, out_map, out);   \
  }                                                                                                                   \
  extern "C" __global__ void __launch_bounds__(256, 4) fssdp_reroute_gradient_##BITS(                                 \
      unsigned tokens, unsigned tile, unsigned experts, unsigned columns, const int* before, const int* parts,        \
      const unsigned char* map, const TYPE* out_grad, unsigned long long row, unsigned long long column,              \
      TYPE* grad) {                                                                                                   \
    fssdp::Device th;                                                                                                 \
    const fssdp::Gradient<TYPE> out = {out_grad, row, column};                                                        \
    fssdp::reroute_gradient<TYPE>(th, {tokens, tile}, experts, columns, before, parts, map, out, grad);               \
  }                                                                                                                   \
  extern "C" __global__ void __launch_bounds__(256, 4) fssdp_reroute_choices_##BITS(                                  \
      unsigned tokens, unsigned tile, unsigned experts, unsigned columns, const int* before, const int* within,       \
      const int* parts, void* chosen, unsigned top, unsigned bits, const TYPE* probs, void* out_chosen, TYPE* out) {  \
    fssdp::Device th;                                                                                                 \
    fssdp::reroute_choices<TYPE>(th, {tokens, tile}, experts, columns, before, within, parts, {chosen, top, bits},    \
                                 probs, {out_chosen, top, bits}, out);                                                \
  }                                                                                                                   \
  extern "C" __global__ void __launch_bounds__(256, 4) fssdp_reroute_choices_gradient_##BITS(                         \
      unsigned tokens, unsigned tile, unsigned experts, void* chosen, unsigned top, unsigned bits, void* out_chosen,  \
      const TYPE* out_grad, unsigned long long row, unsigned long long column, TYPE* grad) {                          \
    fssdp::Device th;                                                                                                 \
    const fssdp::Gradient<TYPE> out = {out_grad, row, column};                                                        \
    fssdp::reroute_choices_gradient<TYPE>(th, {tokens, tile}, experts, {chosen, top, bits}, {out_chosen, top, bits},  \
                                          out, grad);                                                                 \
  }
FSSDP_REROUTE(16, unsigned short)
FSSDP_REROUTE(32, unsigned)
FSSDP_REROUTE(64, unsigned long long)
