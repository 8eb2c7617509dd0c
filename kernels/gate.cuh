// What the kernels after the gate know: the group, the placement, and the memory they work in. No #include, as in
// schedule.cuh, whose types are used. All tables are arrays of i32 in one buffer each, written by the host
// (megatron_hecate/routing/tables.py) and never moved.
//
// Letters: E experts, R ranks, P physical experts of a rank, N sources, K nodes. A *holder* is an expert on a rank; the
// holders of all experts are numbered by expert, then node, then rank, and those of an expert on one node are a *stretch*.
#pragma once
#include "schedule.cuh"

namespace fssdp {

typedef long long i64;

// The group: fixed for the whole training.
struct Group {
  i32 experts, ranks, per_rank, sources, nodes;
  const i32* node;          // [R]
  const i32* first_source;  // [R + 1] a rank's sources in `order`; ranks stand there by node, so nodes are stretches too
  const i32* place;         // [R] where a rank stands among them
  const i32* first_rank;    // [K + 1] a node's ranks among them
  const i32* node_begin;    // [R] of a place: the first of its node
  const i32* node_end;      // [R] and one more than the last
  const i32* order;         // [N] sources by node, then rank
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
FSSDP_FN i32 words_of(const Group& g) { return (g.ranks + 63) / 64; }  // of a set of ranks
FSSDP_FN i32 sources_begin(const Group& g, i32 rank) { return g.first_source[g.place[rank]]; }
FSSDP_FN i32 sources_end(const Group& g, i32 rank) { return g.first_source[g.place[rank] + 1]; }

// The placement: written anew whenever replicas change. R * P bounds the number of holders.
struct Holders {
  i32 most_shared;       // holders of one rank whose experts have further holders: the most there are
  const i32* begin;      // [E + 1] an expert's first holder
  const i32* expert;     // [R * P] of a holder
  const i32* rank;       // [R * P] of a holder
  const i32* physical;   // [R * P] of a holder: rank * P + slot
  const i32* held;       // [R * P] the holder of each physical expert, or -1: an empty slot
  const i32* stretch_begin;  // [R * P] of a holder: the first of its stretch
  const i32* stretch_end;    // [R * P] and one more than the last
  const i32* place;          // [R * P] of a holder: that of its rank
  // Entries: the shared holders, those whose experts have further ones. Of each place first its own, in order, then -1.
  const i32* entry;          // [R * P] of a holder, or -1: place * P + a number
  const i32* entry_expert;   // [R * P]
  const i32* entry_stretch;  // [R * P] the first holder of its stretch
  const u64* holders;        // [E, words] places of the ranks that hold an expert
  i32 words;
  FSSDP_FN u64 holding(i32 expert, i32 v) const { return holders[(i64)expert * words + v]; }
};
FSSDP_FN i32 holders_begin(const Group& g) { return (2 + g.experts + 10 * g.ranks * g.per_rank + 1) / 2 * 2; }
// `at`: aligned to 8 bytes.
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

// What one source's tokens do: of those for an expert, in order, [0, last) go to its first holder, the next, up to its
// own `last`, to the second. Enough to find the way back when the placement is another already.
struct Parts {
  const i32* last;      // [R * P] by holder
  const i32* physical;  // [R * P] by holder
  const i32* begin;     // [E + 1]
};
FSSDP_FN Parts parts_at(const i32* at, u32 columns) { return {at, at + columns, at + 2 * columns}; }

// A running sum over items that the lanes of a team take side by side. Int: the type of numbers of tokens.
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

// Deals numbers of tokens out along [0, whole), where whole is above 0: all of them, and nearly in proportion. Of 24 bits,
// and the same on all devices: products and the inverse are rounded to the nearest, and there is no sum to contract.
template <class Int, class Thread>
struct Deal {
  Int whole;
  float inverse;  // one division serves many shares
  FSSDP_FN Deal(Thread& th, Int whole) : whole(whole), inverse(th.inverse((float)whole)) {}

  // Near amount * part / whole, for 0 <= part <= whole; never less for a greater part.
  FSSDP_FN Int share(Int amount, Int part) const {
    const float near = (float)amount * ((float)part * inverse);
    // A float may exceed the largest Int by one.
    const Int below = sizeof(Int) == sizeof(i32) ? (Int)least((u32)near, (u32)amount) : (Int)least((u64)near, (u64)amount);
    return part == whole ? amount : below;
  }
  // What falls to the stretch [before, before + own).
  FSSDP_FN Int part(Int amount, Int before, Int own) const { return share(amount, before + own) - share(amount, before); }
};

}  // namespace fssdp
