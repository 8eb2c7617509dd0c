// Tables and integer types of the kernels after the gate. Like schedule.cuh, whose types it uses,
// this file includes no library. Each table is one buffer of i32 arrays at a fixed address,
// written by the host (megatron_hecate/routing/tables.py).
//
// Letters: E experts, R ranks, P physical experts of a rank, N sources, K nodes. A *holder* is an
// expert on a rank. Holders are numbered by expert, then node, then rank. The holders of an expert
// on one node are a *stretch*. The *place* of a rank is its position in node order.
#pragma once
#include "schedule.cuh"

namespace fssdp {

// Sizes and topology of the group, constant during training.
struct Group {
  i32 experts, ranks, per_rank, sources, nodes;
  const i32* node;          // [R] by rank: its node
  // [R + 1] by place: first source of the rank in `order`. Because places are in node order, the
  // sources of a node are contiguous too.
  const i32* first_source;
  const i32* place;         // [R] by rank: its place
  const i32* first_rank;    // [K + 1] by node: its first place
  const i32* node_begin;    // [R] by place: first place of its node
  const i32* node_end;      // [R] by place: end of the places of its node
  const i32* order;         // [N] sources, sorted by node, then rank
};
FSSDP_FN Group group_at(const i32* at) {
  Group g = {at[0], at[1], at[2], at[3], at[4], 0, 0, 0, 0, 0, 0, 0};
  g.node = at + 5;
  g.place = g.node + g.ranks;
  g.first_source = g.place + g.ranks;
  g.first_rank = g.first_source + g.ranks + 1;
  g.node_begin = g.first_rank + g.nodes + 1;
  g.node_end = g.node_begin + g.ranks;
  g.order = g.node_end + g.ranks;
  return g;
}
FSSDP_FN i32 group_size(const Group& g) { return 5 + 5 * g.ranks + 1 + g.nodes + 1 + g.sources; }
// Number of 64-bit words of a set of ranks.
FSSDP_FN i32 words_of(const Group& g) { return (g.ranks + 63) / 64; }
FSSDP_FN i32 sources_begin(const Group& g, i32 rank) { return g.first_source[g.place[rank]]; }
FSSDP_FN i32 sources_end(const Group& g, i32 rank) { return g.first_source[g.place[rank] + 1]; }

// Holders of one placement, rewritten whenever replicas change. R * P is the upper bound on the
// number of holders.
struct Holders {
  i32 most_shared;       // largest number of shared holders (see `entry`) of a rank
  const i32* begin;      // [E + 1] by expert: its first holder
  const i32* expert;     // [R * P] by holder: its expert
  const i32* rank;       // [R * P] by holder: its rank
  const i32* physical;   // [R * P] by holder: its physical expert, rank * P + slot
  const i32* held;       // [R * P] by physical expert: its holder, or -1 for an empty slot
  const i32* stretch_begin;  // [R * P] by holder: first holder of its stretch
  const i32* stretch_end;    // [R * P] by holder: end of the holders of its stretch
  const i32* place;          // [R * P] by holder: place of its rank
  // A shared holder is one whose expert has several holders. An entry is the position of a shared
  // holder: each place has P entries, first its shared holders in order, then -1.
  const i32* entry;          // [R * P] by holder: its entry, place * P + a number; -1: not shared
  const i32* entry_expert;   // [R * P] by entry: its expert
  const i32* entry_stretch;  // [R * P] by entry: first holder of its stretch
  const u64* holders;        // [E, words] by expert: places of the ranks that hold it, as bits
  i32 words;
  FSSDP_FN u64 holding(i32 expert, i32 v) const { return holders[(i64)expert * words + v]; }
};
FSSDP_FN i32 holders_begin(const Group& g) { return (2 + g.experts + 10 * g.ranks * g.per_rank + 1) / 2 * 2; }
// Locate the arrays of a table at `at`, which is aligned to 8 bytes.
FSSDP_FN Holders holders_at(const i32* at, const Group& g) {
  const i32 most = g.ranks * g.per_rank;
  Holders h = {at[0], at + 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, words_of(g)};
  h.expert = h.begin + g.experts + 1;
  h.rank = h.expert + most;
  h.physical = h.rank + most;
  h.held = h.physical + most;
  h.stretch_begin = h.held + most;
  h.stretch_end = h.stretch_begin + most;
  h.place = h.stretch_end + most;
  h.entry = h.place + most;
  h.entry_expert = h.entry + most;
  h.entry_stretch = h.entry_expert + most;
  h.holders = (const u64*)(at + holders_begin(g));
  return h;
}
FSSDP_FN i32 holders_size(const Group& g) { return holders_begin(g) + 2 * g.experts * words_of(g); }
FSSDP_FN i32 node_of(const Group& g, const Holders& h, i32 holder) { return g.node[h.rank[holder]]; }

// Split of one source's tokens over holders. Of an expert's tokens, in order, the range [0, last)
// is routed to the first holder, the range from there to the second holder's `last` to the second
// holder, and so on. This suffices to route gradients back even if the placement has changed since.
struct Parts {
  const i32* last;      // [R * P] by holder: end of its tokens
  const i32* physical;  // [R * P] by holder: its physical expert
  const i32* begin;     // [E + 1] by expert: its first holder
};
FSSDP_FN Parts parts_at(const i32* at, u32 columns) { return {at, at + columns, at + 2 * columns}; }

// Running sum over items that the lanes of a team process in parallel. Int: type of token counts.
template <class Int>
struct Running {
  Int before;
  template <class Thread>
  FSSDP_FN Int upto(Thread& th, Int value) {
    const Int sum = before + th.scan(value);
    before = th.last(sum);
    return sum;
  }
};

template <class Int>
FSSDP_FN Int least(Int a, Int b) { return a < b ? a : b; }
template <class Int>
FSSDP_FN Int positive(Int a) { return a > 0 ? a : 0; }
template <class Int>
FSSDP_FN Int magnitude(Int a) { return a < 0 ? -a : a; }

// Split of token counts over the range [0, whole), with whole above 0: complete, and nearly
// proportional. Precise to 24 bits, and equal on all devices: products and the inverse are rounded
// to nearest, and there is no sum that a compiler could contract to a fused multiply-add.
template <class Int, class Thread>
struct Deal {
  Int whole;
  float inverse;  // stored, so that one division serves many shares
  FSSDP_FN Deal(Thread& th, Int whole) : whole(whole), inverse(th.inverse((float)whole)) {}

  // About amount * part / whole, for 0 <= part <= whole; monotonic in `part`.
  FSSDP_FN Int share(Int amount, Int part) const {
    const float near = (float)amount * ((float)part * inverse);
    // A float may exceed the largest Int by one.
    const Int below = sizeof(Int) == sizeof(i32) ? (Int)least((u32)near, (u32)amount) : (Int)least((u64)near, (u64)amount);
    return part == whole ? amount : below;
  }
  // Share of the subrange [before, before + own).
  FSSDP_FN Int part(Int amount, Int before, Int own) const { return share(amount, before + own) - share(amount, before); }
};

}  // namespace fssdp
