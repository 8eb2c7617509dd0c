// Which of one source's tokens go to which holder. The tokens of an expert are laid on a line by the rank they start on,
// and the holders' places on another; a source sends where its stretch of the first overlaps a holder's of the second:
// first what stays on its own rank, then, without that, what stays on its node, then the rest.
#pragma once
#include "quotas.cuh"

namespace fssdp {

// Places on a line, from begin to before end.
template <class Int>
struct Places {
  Int begin, end;
  FSSDP_FN Int overlap(const Places& other) const {
    const Int low = begin > other.begin ? begin : other.begin;
    return positive(least(end, other.end) - low);
  }
  FSSDP_FN Places without(Int first) const { return {positive(begin - first), positive(end - first)}; }
  FSSDP_FN Places after(Int others) const { return {begin + others, end + others}; }
};

template <class Int>
struct Sources {
  const Group& g;
  const Holders& h;
  const Work<Int>& w;
  const i32* loads;  // [N, E]

  FSSDP_FN Int between(i32 first, i32 last, i32 expert) const {
    Int sum = 0;
    FSSDP_ROLLED
    for (i32 s = first; s < last; ++s) sum += loads[(i64)g.order[s] * g.experts + expert];
    return sum;
  }
  // Tokens of its own rank that a holder serves: counted once, by the whole block.
  template <class Thread>
  FSSDP_FN void keep(Thread& th) const {
    FSSDP_ROLLED
    for (i32 c = (i32)th.id(); c < h.begin[g.experts]; c += (i32)th.count()) {
      const i32 rank = h.rank[c];
      if (h.entry[c] < 0) continue;
      w.serves[c] = w.served[h.entry[c]];
      w.kept[c] = least(between(sources_begin(g, rank), sources_end(g, rank), h.expert[c]), w.serves[c]);
    }
    th.all(true);
  }
  FSSDP_FN Int kept(i32 c) const { return w.kept[c]; }
  // What the holders from c on, on one node, keep of their own ranks' tokens, and have room for beside.
  struct Node {
    Int kept, room, met;  // met: tokens of the node's other ranks that find room there
    i32 end;
  };
  FSSDP_FN Node node_from(i32 c) const {
    const i32 expert = h.expert[c], node = node_of(g, h, c), last = h.begin[expert + 1];
    Node n = {0, 0, 0, c};
    FSSDP_ROLLED
    for (; n.end < last && node_of(g, h, n.end) == node; ++n.end) {
      const Int own = kept(n.end);
      n.kept += own;
      n.room += w.serves[n.end] - own;
    }
    n.met = least(w.by_node[(i64)node * g.experts + expert] - n.kept, n.room);
    return n;
  }

  // Writes `last`, for each holder of a shared `expert`: the source's tokens, in order, before `last` and not before
  // that of the holder before it are its own. `own`: the source's place in g.order; `rank`: its own.
  FSSDP_FN void deal(i32 expert, i32 own, i32 rank, i32* last) const {
    const i32 source = g.order[own], begin = h.begin[expert], end = h.begin[expert + 1];
    const i32 node = g.node[rank], first = sources_begin(g, rank);
    const Int mine = loads[(i64)source * g.experts + expert], earlier = between(first, own, expert);

    Int own_kept = 0, kept_before = 0;          // by the own rank's holder; by those of the node before it
    Int away = 0;                               // tokens that leave the nodes before this one
    Int met = 0;                                // on this node
    FSSDP_ROLLED
    for (i32 k = 0; k < node; ++k) away += w.by_node[(i64)k * g.experts + expert];
    FSSDP_ROLLED
    for (i32 c = begin; c < end;) {
      const Node n = node_from(c);
      const i32 k = node_of(g, h, c);
      if (k < node) away -= n.kept + n.met;
      if (k == node) {
        met = n.met;
        FSSDP_ROLLED
        for (i32 d = c; d < n.end; ++d) {
          if (h.rank[d] == rank) own_kept = kept(d);
          if (g.place[h.rank[d]] < g.place[rank]) kept_before += kept(d);
        }
      }
      c = n.end;
    }
    const Places<Int> leaves_rank = Places<Int>{earlier, earlier + mine}.without(own_kept);
    const Places<Int> on_node =
        leaves_rank.after(between(g.first_source[g.first_rank[node]], first, expert) - kept_before);
    const Places<Int> leaves_node = on_node.without(met).after(away);

    Int rooms = 0;  // left on the nodes before
    i32 given = 0;
    FSSDP_ROLLED
    for (i32 c = begin; c < end;) {
      const Node n = node_from(c);
      Int before = 0;
      FSSDP_ROLLED
      for (; c < n.end; ++c) {
        const Int room = w.serves[c] - kept(c);
        const Places<Int> place = {before, before + room};
        Int tokens = place.without(n.met).after(rooms).overlap(leaves_node);
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
template <class Int, class Thread>
FSSDP_FN void deal_source(Thread& th, const Sources<Int>& sources, i32 own, i32 rank, i32* parts) {
  const Group& g = sources.g;
  const Holders& h = sources.h;
  i32* last = parts;
  FSSDP_ROLLED
  for (i32 c = (i32)th.id(); c < h.begin[g.experts]; c += (i32)th.count()) parts[g.ranks * g.per_rank + c] = h.physical[c];
  FSSDP_ROLLED
  for (i32 e = (i32)th.id(); e <= g.experts; e += (i32)th.count()) parts[2 * g.ranks * g.per_rank + e] = h.begin[e];
  FSSDP_ROLLED
  for (i32 expert = (i32)th.id(); expert < g.experts; expert += (i32)th.count()) {
    if (h.begin[expert + 1] - h.begin[expert] > 1)
      sources.deal(expert, own, rank, last);
    else
      last[h.begin[expert]] = sources.loads[(i64)g.order[own] * g.experts + expert];
  }
}

// Quotas of all holders. False: Int is too small.
template <class Int, class Thread>
FSSDP_FN bool solve(Thread& th, const Group& g, const Holders& h, const Work<Int>& w, const i32* loads) {
  if (sizeof(Int) == sizeof(i32) && g.ranks <= 64) {
    if (!Quotas<Int, 1, Thread>{th, g, h, w, 0, false, false, 0, 0, {}, {}, {}}.solve(loads)) return false;
  } else if (!Quotas<Int, 0, Thread>{th, g, h, w, 0, false, false, 0, 0, {}, {}, {}}.solve(loads)) {
    return false;
  }
  Sources<Int>{g, h, w, loads}.keep(th);
  return true;
}

template <class Thread>
FSSDP_FN void copy_table(Thread& th, i32* to, const i32* from, i32 size) {
  FSSDP_UNROLL_8
  for (i32 i = (i32)th.id(); i < size; i += (i32)th.count()) to[i] = from[i];
}

// Quotas of all holders, and the parts of one source. `shared`: memory near the block, aligned to 8 bytes, for all
// tables and working arrays; `shared_bytes` 0: there is too little. `work`: the same in global memory, for 64 bits.
template <class Thread>
FSSDP_FN void quotas(Thread& th, const i32* group, const i32* holders, const i32* loads, i64* work, i64* shared,
                     u32 shared_bytes, i32 own, i32 rank, i32* parts) {
  if (shared_bytes) {
    const Group far = group_at(group);
    i32* at = (i32*)shared;
    copy_table(th, at, group, group_size(far));
    const i32 group_words = (group_size(far) + 1) / 2;  // of 8 bytes
    copy_table(th, at + 2 * group_words, holders, holders_size(far));
    th.all(true);
    const Group g = group_at(at);
    const Holders h = holders_at(at + 2 * group_words, g);
    const Work<i32> w = work_at<i32>(shared + group_words + holders_size(far) / 2, g, th.count());
    if (solve<i32>(th, g, h, w, loads)) {
      deal_source(th, Sources<i32>{g, h, w, loads}, own, rank, parts);
      return;
    }
  }
  const Group g = group_at(group);
  const Holders h = holders_at(holders, g);
  const Work<i64> w = work_at<i64>(work, g, th.count());
  solve<i64>(th, g, h, w, loads);
  deal_source(th, Sources<i64>{g, h, w, loads}, own, rank, parts);
}

}  // namespace fssdp
