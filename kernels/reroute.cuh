// Routing map and probabilities of one source over physical experts, and their gradient.
//
// Tokens are cut into tiles. `count_tokens` counts the tokens of each tile per expert. The last
// block to finish replaces the counts by prefix sums, the tokens before each tile, and writes the
// source's loads. `reroute` processes one column of a physical expert per thread. A token belongs
// to the column if its index among the tokens of its expert is in the holder's range.
//
// Where routers return indices of experts in place of a map, `count_choices` numbers each choice
// within its tile and expert, and `reroute_choices` looks up the holder of each choice. Both read k
// numbers per token. Probabilities have a column per expert in either form.
#pragma once
#include "gate.cuh"
#include "loads.cuh"

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

// What is counted of one source.
struct Counts {
  i32* before;               // [tiles, E] tokens before each tile
  i32* loads;                // [E]
  i64* total;                // [E] sum over several launches, to which the loads are added, or null
  const Transfer* exchange;  // in which the loads are sent to all ranks (loads.cuh), or null
};

// Replace the counts of tiles by prefix sums, write the loads and send them, in the block that
// finishes last. Arguments: as of `count_tokens`.
template <class Thread>
FSSDP_FN void sum_tiles(Thread& th, const Tokens& t, u32 experts, const Counts& counts, u32* arrived) {
  i32* before = counts.before;
  th.all(true);
  bool last = true;
  if (th.id() == 0) {
    last = th.add_acq_rel(arrived, 1u) == th.blocks() - 1;
    if (last) th.store_relaxed(arrived, 0u);
  }
  if (!th.all(last)) return;
  const u32 exchange = counts.exchange ? next_exchange(th, *counts.exchange) : 0u;
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
    counts.loads[e] = sum;
    if (counts.total) counts.total[e] += sum;
    if (counts.exchange) send_load(*counts.exchange, exchange, experts, e, sum);
  }
  if (counts.exchange) tell_loads(th, *counts.exchange, exchange);
}

// Count tokens per tile and expert. `counts`: results; `map`: [T, E] routing map; `arrived`: counter
// of blocks, zero before and after.
template <class Thread>
FSSDP_FN void count_tokens(Thread& th, const Tokens& t, u32 experts, const u8* map, const Counts& counts, u32* arrived) {
  for (u32 tile = th.block(); tile < t.tiles(); tile += th.blocks())
    for (u32 e = th.id(); e < experts; e += th.count()) {
      i32 sum = 0;
      FSSDP_UNROLL_8
      for (u32 i = t.begin(tile); i < t.end(tile); ++i) sum += map[(u64)i * experts + e];
      counts.before[(u64)tile * experts + e] = sum;
    }
  sum_tiles(th, t, experts, counts, arrived);
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

// Indices of experts, [T, k], of 16, 32 or 64 bits. A negative index is no choice. A token chooses
// an expert once.
struct Choices {
  void* at;
  u32 top, bits;  // top: k
  // The index as u32: that of no choice is above all experts.
  FSSDP_FN u32 load(u32 i) const {
    return bits == 16 ? (u32)((const short*)at)[i] : bits == 32 ? ((const u32*)at)[i] : (u32)((const u64*)at)[i];
  }
  FSSDP_FN void store(u32 i, i32 index) const {
    if (bits == 16) ((short*)at)[i] = (short)index;
    else if (bits == 32) ((i32*)at)[i] = index;
    else ((i64*)at)[i] = index;
  }
};

// Count as `count_tokens` does, from choices. `within`: [T, k] result, choices of the same expert
// in the same tile before each one; `seen`: [E] in shared memory. One warp numbers a tile's choices,
// in their order.
template <class Thread>
FSSDP_FN void count_choices(Thread& th, const Tokens& t, u32 experts, const Choices& chosen, i32* within, i32* seen,
                            const Counts& counts, u32* arrived) {
  const u32 lanes = (u32)th.warp_size(), lane = (u32)th.in_warp();
  for (u32 tile = th.block(); tile < t.tiles(); tile += th.blocks()) {
    for (u32 e = th.id(); e < experts; e += th.count()) seen[e] = 0;
    th.all(true);
    const u32 end = th.warp() == 0 ? t.end(tile) * chosen.top : 0u;
    for (u32 first = t.begin(tile) * chosen.top; first < end; first += TOGETHER * lanes) {
      u32 expert[TOGETHER];
      FSSDP_UNROLL
      for (u32 i = 0; i < TOGETHER; ++i) {
        const u32 choice = first + i * lanes + lane;
        expert[i] = choice < end ? chosen.load(choice) : experts;
      }
      FSSDP_UNROLL
      for (u32 i = 0; i < TOGETHER; ++i) {
        const u64 same = th.match(expert[i]);
        const bool is_chosen = expert[i] < experts;
        const i32 place = is_chosen ? seen[expert[i]] + th.count_bits(same & ((1ull << lane) - 1)) : 0;
        if (is_chosen) within[first + i * lanes + lane] = place;
        th.sync_warp();
        // the last of the lanes with this expert
        if (is_chosen && same >> lane == 1) seen[expert[i]] = place + 1;
        th.sync_warp();
      }
    }
    th.all(true);
    for (u32 e = th.id(); e < experts; e += th.count()) counts.before[(u64)tile * experts + e] = seen[e];
  }
  sum_tiles(th, t, experts, counts, arrived);
}

// Zero `rows`, [T, width], and call each(tile, token, choice) for all choices, [T, k]. The rows of a
// tile are complete before its first call.
template <class Bits, class Thread, class Each>
FSSDP_FN void over_choices(Thread& th, const Tokens& t, u32 top, u32 width, Bits* rows, Each each) {
  for (u32 tile = th.block(); tile < t.tiles(); tile += th.blocks()) {
    const u64 end = (u64)t.end(tile) * width;
    for (u64 i = (u64)t.begin(tile) * width + th.id(); i < end; i += th.count()) rows[i] = 0;
    th.all(true);
    for (u32 i = t.begin(tile) * top + th.id(); i < t.end(tile) * top; i += th.count()) each(tile, i / top, i);
  }
}

// Return the physical expert of the token with index `place` among those of `expert`.
FSSDP_FN i32 physical_of(const Parts& p, u32 expert, i32 place) {
  i32 first = p.begin[expert], last = p.begin[expert + 1] - 1;
  while (first < last) {
    const i32 middle = (first + last) / 2;
    if (place < p.last[middle]) last = middle;
    else first = middle + 1;
  }
  return p.physical[first];
}

// Write the physical expert of each choice, and the probabilities. `out_chosen`: [T, k]; `out`:
// [T, R * P].
template <class Bits, class Thread>
FSSDP_FN void reroute_choices(Thread& th, const Tokens& t, u32 experts, u32 columns, const i32* before,
                              const i32* within, const i32* parts, const Choices& chosen, const Bits* probs,
                              const Choices& out_chosen, Bits* out) {
  const Parts p = parts_at(parts, columns);
  over_choices(th, t, chosen.top, columns, out, [&](u32 tile, u64 token, u32 choice) {
    const u32 expert = chosen.load(choice);
    i32 physical = -1;
    if (expert < experts) {
      physical = physical_of(p, expert, before[(u64)tile * experts + expert] + within[choice]);
      out[token * columns + (u32)physical] = probs[token * experts + expert];
    }
    out_chosen.store(choice, physical);
  });
}

// Compute the gradient of `probs`, [T, E], from the gradient of `out`, for `out_chosen`.
template <class Bits, class Thread>
FSSDP_FN void reroute_choices_gradient(Thread& th, const Tokens& t, u32 experts, const Choices& chosen,
                                       const Choices& out_chosen, const Gradient<Bits>& out, Bits* grad) {
  over_choices(th, t, chosen.top, experts, grad, [&](u32, u64 token, u32 choice) {
    const u32 expert = chosen.load(choice);
    if (expert < experts)
      grad[token * experts + expert] = out.at[token * out.row + out_chosen.load(choice) * out.column];
  });
}

}  // namespace fssdp
