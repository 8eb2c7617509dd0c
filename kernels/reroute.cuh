// Routing map and probabilities of one source over physical experts, and their gradient.
//
// Tokens are cut into tiles. `count_tokens` counts the tokens of each tile per expert. The last
// block to finish replaces the counts by prefix sums, the tokens before each tile, and writes the
// source's loads. `reroute` processes one column of a physical expert per thread. A token belongs
// to the column if its index among the tokens of its expert is in the holder's range.
#pragma once
#include "gate.cuh"

namespace fssdp {

typedef unsigned char u8;

struct Tokens {
  u32 tokens, tile;  // tile: number of tokens of a tile
  FSSDP_FN u32 tiles() const { return (tokens + tile - 1) / tile; }
  FSSDP_FN u32 begin(u32 i) const { return i * tile; }
  FSSDP_FN u32 end(u32 i) const { return tokens - i * tile < tile ? tokens : (i + 1) * tile; }
};
// Tokens whose choices a thread loads before it uses the first.
enum { TOGETHER = 8 };
// Tiles whose counts the last block loads before it adds the first. At that time no other block
// runs that could hide the latency of the loads.
enum { TILES_TOGETHER = 8 };

// Count tokens per tile and expert. `before`: [tiles, E] result, tokens before each tile; `loads`:
// [E] result; `total`: [E] sum over several launches, to which the loads are added, or null; `map`:
// [T, E] routing map; `arrived`: counter of blocks, zero before and after.
template <class Thread>
FSSDP_FN void count_tokens(Thread& th, const Tokens& t, u32 experts, const u8* map, i32* before, i32* loads, i64* total,
                           u32* arrived) {
  for (u32 tile = th.block(); tile < t.tiles(); tile += th.blocks())
    for (u32 e = th.id(); e < experts; e += th.count()) {
      i32 sum = 0;
      FSSDP_UNROLL_8
      for (u32 i = t.begin(tile); i < t.end(tile); ++i) sum += map[(u64)i * experts + e];
      before[(u64)tile * experts + e] = sum;
    }
  th.all(true);
  bool last = true;
  if (th.id() == 0) {
    last = th.add_acq_rel(arrived, 1u) == th.blocks() - 1;
    if (last) th.store_relaxed(arrived, 0u);
  }
  if (!th.all(last)) return;
  for (u32 e = th.id(); e < experts; e += th.count()) {
    i32 sum = 0;
    FSSDP_ROLLED
    for (u32 first = 0; first < t.tiles(); first += TILES_TOGETHER) {
      i32 own[TILES_TOGETHER];
      FSSDP_UNROLL
      for (u32 i = 0; i < TILES_TOGETHER; ++i)
        own[i] = first + i < t.tiles() ? th.load(before + (u64)(first + i) * experts + e) : 0;
      FSSDP_UNROLL
      for (u32 i = 0; i < TILES_TOGETHER; ++i) {
        if (first + i < t.tiles()) before[(u64)(first + i) * experts + e] = sum;
        sum += own[i];
      }
    }
    loads[e] = sum;
    if (total) total[e] += sum;
  }
}

// Range [begin, end) of its expert's tokens that a physical expert computes.
struct Part {
  i32 expert, begin, end;  // expert: -1 for an empty slot
};
FSSDP_FN Part part_of(const Holders& h, const i32* last, i32 physical) {
  const i32 c = h.held[physical];
  if (c < 0) return {-1, 0, 0};
  const i32 expert = h.expert[c];
  return {expert, c == h.begin[expert] ? 0 : last[c - 1], last[c]};
}

// Write the routing map and the probabilities over physical experts. `out_map`: [T, R * P]; `out`:
// [T, R * P] probabilities as bits; the probability of a chosen expert is raised to at least
// `least`.
template <class Bits, class Thread>
FSSDP_FN void reroute(Thread& th, const Tokens& t, const i32* group, const i32* holders, const i32* before,
                      const i32* parts, const u8* map, const Bits* probs, Bits least, u8* out_map, Bits* out) {
  const Group g = group_at(group);
  const Holders h = holders_at(holders, g);
  const u32 columns = (u32)(g.ranks * g.per_rank), experts = (u32)g.experts;
  const u32 chunks = (columns + th.count() - 1) / th.count();
  for (u32 block = th.block(); block < t.tiles() * chunks; block += th.blocks()) {
    const u32 tile = block / chunks, column = block % chunks * th.count() + th.id();
    if (column >= columns) continue;
    const Part part = part_of(h, parts, (i32)column);
    const u32 expert = part.expert < 0 ? 0u : (u32)part.expert;
    i32 place = before[(u64)tile * experts + expert];
    for (u32 first = t.begin(tile); first < t.end(tile); first += TOGETHER) {
      u8 chosen[TOGETHER];
      FSSDP_UNROLL
      for (u32 i = 0; i < TOGETHER; ++i)
        chosen[i] = part.expert >= 0 && first + i < t.end(tile) ? map[(u64)(first + i) * experts + expert] : (u8)0;
      FSSDP_UNROLL
      for (u32 i = 0; i < TOGETHER; ++i) {
        if (first + i >= t.end(tile)) continue;
        const bool own = chosen[i] && part.begin <= place && place < part.end;
        Bits value = 0;
        if (own) {
          value = probs[(u64)(first + i) * experts + expert];
          if (value < least) value = least;
        }
        out_map[(u64)(first + i) * columns + column] = own;
        out[(u64)(first + i) * columns + column] = value;
        place += chosen[i];
      }
    }
  }
}

// Gradient of `out`, [T, R * P] with any strides: Megatron's permutation writes it column-major.
template <class Bits>
struct Gradient {
  const Bits* at;
  u64 row, column;  // strides in elements
};

// Compute the gradient of `probs`, [T, E], from the gradient of `out`.
template <class Bits, class Thread>
FSSDP_FN void reroute_gradient(Thread& th, const Tokens& t, u32 experts, u32 columns, const i32* before, const i32* parts,
                               const u8* map, const Gradient<Bits>& out, Bits* grad) {
  const Parts p = parts_at(parts, columns);
  const u32 chunks = (experts + th.count() - 1) / th.count();
  for (u32 block = th.block(); block < t.tiles() * chunks; block += th.blocks()) {
    const u32 tile = block / chunks, expert = block % chunks * th.count() + th.id();
    if (expert >= experts) continue;
    i32 place = before[(u64)tile * experts + expert], c = p.begin[expert];
    for (u32 first = t.begin(tile); first < t.end(tile); first += TOGETHER) {
      u8 chosen[TOGETHER];
      FSSDP_UNROLL
      for (u32 i = 0; i < TOGETHER; ++i)
        chosen[i] = first + i < t.end(tile) ? map[(u64)(first + i) * experts + expert] : (u8)0;
      FSSDP_UNROLL
      for (u32 i = 0; i < TOGETHER; ++i) {
        if (first + i >= t.end(tile)) continue;
        Bits value = 0;
        if (chosen[i]) {
          while (c + 1 < p.begin[expert + 1] && place >= p.last[c]) ++c;
          value = out.at[(first + i) * out.row + (u32)p.physical[c] * out.column];
          ++place;
        }
        grad[(u64)(first + i) * experts + expert] = value;
      }
    }
  }
}

}  // namespace fssdp
