// Which of one source's tokens go to which holder. The tokens of an expert are laid on a line by the rank they start on,
// and the holders' places on another; a source sends where its stretch of the first overlaps a holder's of the second:
// first what stays on its own rank, then, without that, what stays on its node, then the rest.
#pragma once
#include "quotas.cuh"

namespace fssdp {

struct Span64 {
  i64 begin, end;
  FSSDP_FN i64 overlap(const Span64& other) const {
    const i64 low = begin > other.begin ? begin : other.begin;
    return positive(least(end, other.end) - low);
  }
  FSSDP_FN Span64 without(i64 first) const { return {positive(begin - first), positive(end - first)}; }
  FSSDP_FN Span64 after(i64 others) const { return {begin + others, end + others}; }
};

struct Sources {
  const Group& g;
  const Holders& h;
  const Work& w;
  const i32* loads;  // [N, E]

  FSSDP_FN i64 between(i32 first, i32 last, i32 expert) const {
    i64 sum = 0;
    for (i32 s = first; s < last; ++s) sum += loads[(i64)g.order[s] * g.experts + expert];
    return sum;
  }
  // Tokens of its own rank that a holder serves: counted once, by the whole block.
  template <class Thread>
  FSSDP_FN void keep(Thread& th) const {
    for (i32 c = (i32)th.id(); c < h.begin[g.experts]; c += (i32)th.count()) {
      const i32 rank = h.rank[c];
      w.taken[c] = least(between(sources_begin(g, rank), sources_end(g, rank), h.expert[c]), w.served[c]);
    }
    th.all(true);
  }
  FSSDP_FN i64 kept(i32 c) const { return w.taken[c]; }
  // What the holders from c on, on one node, keep of their own ranks' tokens, and have room for beside.
  struct Node {
    i64 kept, room, met;  // met: tokens of the node's other ranks that find room there
    i32 end;
  };
  FSSDP_FN Node node_from(i32 c) const {
    const i32 expert = h.expert[c], node = node_of(g, h, c), last = h.begin[expert + 1];
    Node n = {0, 0, 0, c};
    for (; n.end < last && node_of(g, h, n.end) == node; ++n.end) {
      const i64 own = kept(n.end);
      n.kept += own;
      n.room += w.served[n.end] - own;
    }
    n.met = least(w.by_node[(i64)node * g.experts + expert] - n.kept, n.room);
    return n;
  }

  // Writes `last`, for each holder of a shared `expert`: the source's tokens, in order, before `last` and not before
  // that of the holder before it are its own. `own`: the source's place in g.order; `rank`: its own.
  FSSDP_FN void deal(i32 expert, i32 own, i32 rank, i32* last) const {
    const i32 source = g.order[own], begin = h.begin[expert], end = h.begin[expert + 1];
    const i32 node = g.node[rank], first = sources_begin(g, rank);
    const i64 mine = loads[(i64)source * g.experts + expert], earlier = between(first, own, expert);

    i64 own_kept = 0, kept_before = 0;          // by the own rank's holder; by those of the node before it
    i64 away = 0;                               // tokens that leave the nodes before this one
    i64 met = 0;                                // on this node
    for (i32 k = 0; k < node; ++k) away += w.by_node[(i64)k * g.experts + expert];
    for (i32 c = begin; c < end;) {
      const Node n = node_from(c);
      const i32 k = node_of(g, h, c);
      if (k < node) away -= n.kept + n.met;
      if (k == node) {
        met = n.met;
        for (i32 d = c; d < n.end; ++d) {
          if (h.rank[d] == rank) own_kept = kept(d);
          if (g.place[h.rank[d]] < g.place[rank]) kept_before += kept(d);
        }
      }
      c = n.end;
    }
    const Span64 leaves_rank = Span64{earlier, earlier + mine}.without(own_kept);
    const Span64 on_node =
        leaves_rank.after(between(g.first_source[g.first_rank[node]], first, expert) - kept_before);
    const Span64 leaves_node = on_node.without(met).after(away);

    i64 rooms = 0;  // left on the nodes before
    i32 given = 0;
    for (i32 c = begin; c < end;) {
      const Node n = node_from(c);
      i64 before = 0;
      for (; c < n.end; ++c) {
        const i64 room = w.served[c] - kept(c);
        const Span64 place = {before, before + room};
        i64 tokens = place.without(n.met).after(rooms).overlap(leaves_node);
        if (node_of(g, h, c) == node) tokens += place.overlap(on_node);
        if (h.rank[c] == rank) tokens += mine - (leaves_rank.end - leaves_rank.begin);
        before += room;
        given += (i32)tokens;
        last[c] = given;
      }
      rooms += n.room - n.met;
    }
  }
};

// The parts of one source, by the whole block.
template <class Thread>
FSSDP_FN void deal_source(Thread& th, const Sources& sources, i32 own, i32 rank, i32* parts) {
  const Group& g = sources.g;
  const Holders& h = sources.h;
  i32* last = parts;
  for (i32 c = (i32)th.id(); c < h.begin[g.experts]; c += (i32)th.count()) parts[g.ranks * g.per_rank + c] = h.physical[c];
  for (i32 e = (i32)th.id(); e <= g.experts; e += (i32)th.count()) parts[2 * g.ranks * g.per_rank + e] = h.begin[e];
  for (i32 expert = (i32)th.id(); expert < g.experts; expert += (i32)th.count()) {
    if (h.begin[expert + 1] - h.begin[expert] > 1)
      sources.deal(expert, own, rank, last);
    else
      last[h.begin[expert]] = sources.loads[(i64)g.order[own] * g.experts + expert];
  }
}

// Quotas of all holders, and the parts of one source.
template <class Thread>
FSSDP_FN void quotas(Thread& th, const i32* group, const i32* holders, const i32* loads, i64* work, i32 own, i32 rank,
                     i32* parts) {
  const Group g = group_at(group);
  const Holders h = holders_at(holders, g);
  const Work w = work_at(work, g, th.count());
  const Sources sources = {g, h, w, loads};
  Quotas<Thread>{th, g, h, w, 0, false, 0}.solve(loads);
  th.all(true);
  sources.keep(th);
  deal_source(th, sources, own, rank, parts);
}

}  // namespace fssdp
