// Threads as one block with teams of lanes, for the kernels after the gate, under ThreadSanitizer
// and AddressSanitizer. Compares the results with the expected ones of a file, which
// tests/routing/test_gate_kernels.py writes.
//
//     g++ -std=c++17 -pthread -fsanitize=thread -DFSSDP_STALLS -o selftest_gate selftest_gate.cpp
//     ./selftest_gate FILE
//
// A file is a sequence of arrays, in the order in which `main` reads them. An array is a u64 number
// of bytes, then the bytes.
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "host.cpp"

namespace {

using namespace fssdp;

// Exchange of values between the lanes of a warp. As on a GPU it is collective: all lanes of the
// warp take part, or none.
struct Warp {
  explicit Warp(u32 lanes) : barrier(lanes), values(lanes) {}
  Barrier barrier;
  std::vector<i64> values;
};

// A warp has two teams if that leaves more than one warp.
i32 teams_of_warp(i32 teams) { return teams > 2 && teams % 2 == 0 ? 2 : 1; }

class Lanes : public Host {
 public:
  Lanes(const Host& th, i32 lanes, std::vector<Warp*>& warps) : Host(th), lanes_(lanes), warps_(warps) {}
  i32 lanes() const { return lanes_; }
  i32 lane() const { return (i32)id() % lanes_; }
  i32 team() const { return (i32)id() / lanes_; }
  i32 teams() const { return (i32)count() / lanes_; }
  i32 warp_teams() const { return teams_of_warp(teams()); }
  i32 warp_size() const { return warp_teams() * lanes_; }
  i32 in_warp() const { return (i32)id() % warp_size(); }
  i32 warp() const { return (i32)id() / warp_size(); }
  i32 warps() const { return (i32)count() / warp_size(); }
  template <class Int>
  Int scan(Int value) {
    return (Int)over(value, first(), in_warp() + 1);
  }
  template <class Int>
  Int last(Int value) {
    return (Int)over(value, first() + lanes_ - 1, first() + lanes_);
  }
  template <class Int>
  Int sum(Int value) {
    return (Int)over(value, first(), first() + lanes_);
  }
  template <class Int>
  Int warp_sum(Int value) {
    return (Int)over(value, 0, warp_size());
  }
  u64 either(u64 bits) {
    u64 all = 0;
    // Bit by bit, because `over` adds.
    for (i32 half = 0; half < 2; ++half)
      for (i32 i = 32 * half; i < 32 * half + 32; ++i) all |= (u64)(sum<i64>(bits >> i & 1) != 0) << i;
    return all;
  }
  template <class Is>
  u64 bits(Is is) {
    u64 own = 0;
    for (i32 i = in_warp(); i < 64; i += warp_size()) own |= (u64)is(i) << i;
    return (u64)warp_sum<i64>((i64)own);
  }
  bool warp_any(bool value) { return warp_sum<i64>(value) != 0; }
  u64 match(u32 value) {
    u64 same = 0;
    for (i32 i = 0; i < warp_size(); ++i) same |= (u64)(over(value, i, i + 1) == value) << i;
    return same;
  }
  void sync_warp() { warps_[warp()]->barrier.all(true); }

 private:
  // First lane of this lane's team, within the warp.
  i32 first() const { return in_warp() / lanes_ * lanes_; }
  i64 over(i64 value, i32 begin, i32 end) {
    Warp& own = *warps_[warp()];
    own.values[in_warp()] = value;
    own.barrier.all(true);
    i64 sum = 0;
    for (i32 i = begin; i < end; ++i) sum += own.values[i];
    own.barrier.all(true);
    return sum;
  }
  const i32 lanes_;
  std::vector<Warp*>& warps_;
};

FILE* file;

// Array that fills its allocation, so that AddressSanitizer detects an access past the end.
template <class T>
struct Array {
  u64 bytes = 0;
  T* at;
  Array() {
    if (std::fread(&bytes, 8, 1, file) != 1) std::_Exit(2);
    at = (T*)std::malloc(bytes);
    if (bytes && std::fread(at, bytes, 1, file) != 1) std::_Exit(2);
  }
  explicit Array(u64 count) : bytes(count * sizeof(T)), at((T*)std::malloc(bytes)) { std::memset(at, 0xab, bytes); }
  Array(const Array&) = delete;
  ~Array() { std::free(at); }
};

template <class T>
void compare(const char* what, const Array<T>& found, const Array<T>& expected) {
  for (u64 b = 0; b < expected.bytes; ++b)
    if (((const char*)found.at)[b] != ((const char*)expected.at)[b]) {
      std::printf("FAIL %s: element %llu is not as it should be\n", what, b / sizeof(T));
      std::fflush(stdout), std::_Exit(1);
    }
}

}  // namespace

int main(int argc, char** argv) {
  file = argc == 2 ? std::fopen(argv[1], "rb") : nullptr;
  if (!file) return 2;
  enum { THREADS, LANES, BLOCKS, TOKENS, TILE, OWN, RANK, WORK, SHARED, EXPERTS, COLUMNS, TOP, BITS };
  const Array<i32> head, group, holders, loads, parts_wanted;
  const Array<u8> map;
  const Array<i32> before_wanted, loads_wanted;
  const Array<u32> probs;
  const Array<u8> out_map_wanted;
  const Array<u32> out_wanted, out_grad, grad_wanted;
  const Array<i64> exchange_wanted, noted, noted_wanted;
  const Array<u8> indices;
  const Array<i32> within_wanted;
  const Array<u8> physical_wanted;
  const i32* n = head.at;
  const Tokens tokens = {(u32)n[TOKENS], (u32)n[TILE]};

  Array<i64> work((u64)n[WORK]), shared((u64)n[SHARED] / 8);
  Array<i32> parts(parts_wanted.bytes / 4), before(before_wanted.bytes / 4), own_loads(loads_wanted.bytes / 4);
  Array<i64> exchanged(exchange_wanted.bytes / 8);
  // The kernel does not write the entries past the last holder.
  std::memcpy(parts.at, parts_wanted.at, parts.bytes);
  for (i32 c = 0; c < holders.at[1 + n[EXPERTS]]; ++c) parts.at[c] = -1;
  const u32 blocks = (u32)n[BLOCKS], threads = (u32)n[THREADS], experts = (u32)n[EXPERTS];
  std::vector<std::vector<Warp*>> warps(blocks);
  const i32 in_warp = n[LANES] * teams_of_warp(n[THREADS] / n[LANES]);
  for (auto& own : warps)
    for (i32 i = 0; i < n[THREADS] / in_warp; ++i) own.push_back(new Warp((u32)in_warp));
  const auto solve = [&](Host& host) {
    Lanes th(host, n[LANES], warps[0]);
    quotas(th, group.at, holders.at, loads.at, work.at, shared.at, (u32)n[SHARED], n[OWN], n[RANK], parts.at,
           exchanged.at, noted.at);
  };
  launch(solve, 1, threads);
  compare("parts", parts, parts_wanted);
  compare("exchange", exchanged, exchange_wanted);
  compare("noted loads", noted, noted_wanted);

  u32 arrived = 0;
  // A sum that begins above 32 bits.
  Array<i64> total(8 * (u64)n[EXPERTS]), begun(8 * (u64)n[EXPERTS]);
  for (i32 e = 0; e < n[EXPERTS]; ++e) total.at[e] = begun.at[e] = (1ll << 40) + e;
  const auto count = [&](Host& th) {
    count_tokens(th, tokens, experts, map.at, {before.at, own_loads.at, total.at, nullptr}, &arrived);
  };
  for (int again = 0; again < 2; ++again) launch(count, blocks, threads);
  compare("tokens before tiles", before, before_wanted);
  compare("loads", own_loads, loads_wanted);
  for (i32 e = 0; e < n[EXPERTS]; ++e) total.at[e] -= 2 * (i64)loads_wanted.at[e];
  compare("sum of two counts", total, begun);

  Array<u8> out_map(out_map_wanted.bytes);
  Array<u32> out(out_wanted.bytes / 4), grad(grad_wanted.bytes / 4);
  const auto forward = [&](Host& th) {
    reroute<u32>(th, tokens, group.at, holders.at, before.at, parts.at, map.at, probs.at, 0u, out_map.at, out.at);
  };
  launch(forward, blocks, threads);
  compare("routing map", out_map, out_map_wanted);
  compare("probabilities", out, out_wanted);
  const auto backward = [&](Host& th) {
    const Gradient<u32> gradient = {out_grad.at, 1, tokens.tokens};  // column by column
    reroute_gradient<u32>(th, tokens, experts, (u32)n[COLUMNS], before.at, parts.at, map.at, gradient, grad.at);
  };
  launch(backward, blocks, threads);
  compare("gradient", grad, grad_wanted);

  // The same tokens as indices.
  const Choices chosen = {indices.at, (u32)n[TOP], (u32)n[BITS]};
  Array<i32> within(within_wanted.bytes / 4), seen((u64)blocks * experts);
  std::memset(before.at, 0xab, before.bytes), std::memset(own_loads.at, 0xab, own_loads.bytes);
  const auto count_indices = [&](Host& host) {
    Lanes th(host, n[LANES], warps[host.block()]);
    count_choices(th, tokens, experts, chosen, within.at, seen.at + host.block() * experts,
                  {before.at, own_loads.at, total.at, nullptr}, &arrived);
  };
  for (int again = 0; again < 2; ++again) launch(count_indices, blocks, threads);
  compare("choices before tiles", before, before_wanted);
  compare("loads of choices", own_loads, loads_wanted);
  for (i32 e = 0; e < n[EXPERTS]; ++e) total.at[e] -= 2 * (i64)loads_wanted.at[e];
  compare("sum of two counts of choices", total, begun);
  for (u32 i = 0; i < tokens.tokens * chosen.top; ++i)
    if (chosen.load(i) >= experts) within.at[i] = within_wanted.at[i];
  compare("choices before each one", within, within_wanted);
  Array<u8> physical(physical_wanted.bytes);
  const Choices out_chosen = {physical.at, chosen.top, chosen.bits};
  std::memset(out.at, 0xab, out.bytes), std::memset(grad.at, 0xab, grad.bytes);
  const auto forward_choices = [&](Host& th) {
    reroute_choices<u32>(th, tokens, experts, (u32)n[COLUMNS], before.at, within.at, parts.at, chosen, probs.at,
                         out_chosen, out.at);
  };
  launch(forward_choices, blocks, threads);
  compare("physical experts", physical, physical_wanted);
  compare("probabilities of choices", out, out_wanted);
  const auto backward_choices = [&](Host& th) {
    const Gradient<u32> gradient = {out_grad.at, 1, tokens.tokens};
    reroute_choices_gradient<u32>(th, tokens, experts, chosen, out_chosen, gradient, grad.at);
  };
  launch(backward_choices, blocks, threads);
  compare("gradient of choices", grad, grad_wanted);
  for (auto& own : warps)
    for (Warp* warp : own) delete warp;
  std::fclose(file);
  std::puts("OK");
}
