// Split of one source's tokens over holders. The tokens of an expert are numbered in order of the
// rank they start on; the room of its holders is numbered in order of the holders. Where a source's
// range of tokens overlaps a holder's range of room, the source sends its tokens to the holder.
// This happens in three steps: tokens that stay on their own rank, further tokens that stay on
// their node, and the rest.
#pragma once
#include "quotas.cuh"

namespace fssdp {

// Range [begin, end) of numbers of tokens or of room.
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
  // Compute the tokens of its own rank that each holder serves, once, with the whole block.
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
  // Sums over the holders of one stretch from c on. `kept`: tokens that they serve of their own
  // ranks; `room`: tokens that they serve beyond `kept`; `met`: further tokens that start on the
  // node and find room in it; `end`: end of the stretch.
  struct Node {
    Int kept, room, met;
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

  // Return the tokens of a source that holder `asked` of a shared `expert` gets. Unless it is null,
  // write `last` for each holder of the expert: the source's tokens, in order, from the previous
  // holder's `last` to its own are routed to the holder. `own`: index of the source in g.order;
  // `rank`: rank of the source.
  FSSDP_FN i32 deal(i32 expert, i32 own, i32 rank, i32 asked, i32* last) const {
    const i32 source = g.order[own], begin = h.begin[expert], end = h.begin[expert + 1];
    const i32 node = g.node[rank], first = sources_begin(g, rank);
    const Int mine = loads[(i64)source * g.experts + expert], earlier = between(first, own, expert);

    // Tokens kept by the holder on this rank, and by the holders before it on this node.
    Int own_kept = 0, kept_before = 0;
    // Tokens that leave the nodes before this node.
    Int away = 0;
    // `met` of this node.
    Int met = 0;
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

    // Room left on the nodes before, after their own tokens.
    Int rooms = 0;
    i32 given = 0, answer = 0;
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
        if (c == asked) answer = (i32)tokens;
        if (last) last[c] = given;
      }
      rooms += n.room - n.met;
    }
    return answer;
  }
};

// Token counts of the all-to-all from sources to ranks, as one rank needs them. All are sums of
// tokens, initially zero.
struct Exchange {
  i64* received;   // [N, P] by source and by slot of this rank: tokens for its physical expert
  i64* of_slot;    // [P] of all sources
  i64* of_source;  // [N] for all physical experts of this rank
  i64* sent;       // [R] tokens of this rank's source for each rank
  i64* total;      // [1] of all sources, for all physical experts of this rank
};
FSSDP_FN Exchange exchange_at(i64* at, const Group& g) {
  Exchange x = {at, 0, 0, 0, 0};
  x.of_slot = x.received + (i64)g.sources * g.per_rank;
  x.of_source = x.of_slot + g.per_rank;
  x.sent = x.of_source + g.sources;
  x.total = x.sent + g.ranks;
  return x;
}
FSSDP_FN i32 exchange_size(const Group& g) { return g.sources * g.per_rank + g.per_rank + g.sources + g.ranks + 1; }

// Write the `Exchange` of source `own` in g.order, of rank `rank`, with the whole block. `parts`: of
// the same source, complete.
template <class Int, class Thread>
FSSDP_FN void exchange(Thread& th, const Sources<Int>& sources, i32 own, i32 rank, const i32* parts, i64* at) {
  const Group& g = sources.g;
  const Holders& h = sources.h;
  const Exchange x = exchange_at(at, g);
  FSSDP_ROLLED
  for (i32 c = (i32)th.id(); c < h.begin[g.experts]; c += (i32)th.count())
    th.add(x.sent + h.rank[c], (i64)(parts[c] - (c > h.begin[h.expert[c]] ? parts[c - 1] : 0)));
  FSSDP_ROLLED
  for (i32 i = (i32)th.id(); i < g.ranks * g.per_rank; i += (i32)th.count()) {
    const i32 from = i / g.per_rank, slot = i % g.per_rank, c = h.held[rank * g.per_rank + slot];
    if (c < 0) continue;
    const i32 expert = h.expert[c];
    const bool shared = h.entry[c] >= 0;
    FSSDP_ROLLED
    for (i32 s = sources_begin(g, from); s < sources_end(g, from); ++s) {
      const i32 source = g.order[s];
      const i64 tokens = shared ? sources.deal(expert, s, from, c, nullptr) : sources.loads[(i64)source * g.experts + expert];
      x.received[(i64)source * g.per_rank + slot] = tokens;
      th.add(x.of_slot + slot, tokens);
      th.add(x.of_source + source, tokens);
      th.add(x.total, tokens);
    }
  }
}

// Write the `Parts` of one source, with the whole block.
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
      sources.deal(expert, own, rank, -1, last);
    else
      last[h.begin[expert]] = sources.loads[(i64)g.order[own] * g.experts + expert];
  }
}

// Compute the quotas of all holders, as `Quotas::solve` does. Return false if Int is too narrow.
template <class Int, class Thread>
FSSDP_FN bool solve(Thread& th, const Group& g, const Holders& h, const Work<Int>& w, const i32* loads, i64* noted) {
  if (sizeof(Int) == sizeof(i32) && g.ranks <= 64) {
    if (!Quotas<Int, 1, Thread>{th, g, h, w, 0, false, false, 0, 0, {}, {}, {}}.solve(loads, noted)) return false;
  } else if (!Quotas<Int, 0, Thread>{th, g, h, w, 0, false, false, 0, 0, {}, {}, {}}.solve(loads, noted)) {
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

// Write the `Parts` of one source, and its `Exchange` unless `exchanged` is null.
template <class Int, class Thread>
FSSDP_FN void write_source(Thread& th, const Sources<Int>& sources, i32 own, i32 rank, i32* parts, i64* exchanged) {
  deal_source(th, sources, own, rank, parts);
  if (!exchanged) return;
  th.all(true);
  exchange(th, sources, own, rank, parts, exchanged);
}

// Compute the quotas of all holders, the `Parts` of one source, and its `Exchange` unless
// `exchanged` is null. `shared`: shared memory for all tables and working arrays, aligned to 8
// bytes; `shared_bytes`: its size, 0 if there is too little. `work`: global memory for the working
// arrays with 64-bit counts. `noted`: see `Quotas::note`; null for none.
template <class Thread>
FSSDP_FN void quotas(Thread& th, const i32* group, const i32* holders, const i32* loads, i64* work, i64* shared,
                     u32 shared_bytes, i32 own, i32 rank, i32* parts, i64* exchanged, i64* noted) {
  const Group far = group_at(group);
  // The barriers of `solve` separate these writes from the sums.
  if (exchanged) {
    FSSDP_ROLLED
    for (i32 i = (i32)th.id(); i < exchange_size(far); i += (i32)th.count()) exchanged[i] = 0;
  }
  if (shared_bytes) {
    i32* at = (i32*)shared;
    copy_table(th, at, group, group_size(far));
    const i32 group_words = (group_size(far) + 1) / 2;  // of 8 bytes
    copy_table(th, at + 2 * group_words, holders, holders_size(far));
    th.all(true);
    const Group g = group_at(at);
    const Holders h = holders_at(at + 2 * group_words, g);
    const Work<i32> w = work_at<i32>(shared + group_words + holders_size(far) / 2, g, th.count());
    if (solve<i32>(th, g, h, w, loads, noted)) {
      write_source(th, Sources<i32>{g, h, w, loads}, own, rank, parts, exchanged);
      return;
    }
  }
  const Holders h = holders_at(holders, far);
  const Work<i64> w = work_at<i64>(work, far, th.count());
  solve<i64>(th, far, h, w, loads, noted);
  write_source(th, Sources<i64>{far, h, w, loads}, own, rank, parts, exchanged);
}

}  // namespace fssdp
