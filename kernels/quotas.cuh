// How many tokens of an expert each of its holders serves: the largest rank load becomes as small as it can be, and
// tokens stay on their node where that allows it. Whole numbers, and the same on every rank.
//
// 1. What starts on a node is dealt evenly to the expert's holders there; what starts on nodes without a holder goes
//    where there is room.
// 2. Tokens flow from ranks above the `level`, first the mean rank load, to ranks below it, over experts that both hold:
//    breadth-first distances to the ranks below, then pushes along shortest ways, from far to near, all ranks at once
//    (Dinic's blocking flows; the waves of Tarjan, "A simple version of Karzanov's blocking flow algorithm", 1984). The
//    first few rounds move tokens only inside nodes, and such as were away from their node anyhow.
// 3. Where no rank above the level reaches one below it, the ranks that cannot share their load equally among
//    themselves at best: this is the new level (a cut; Dinkelbach's method finds the tightest in few rounds).
//
// One block. A *team* of lanes takes a rank or an expert at a time; ranks write what is theirs, then experts do.
#pragma once
#include "gate.cuh"

namespace fssdp {

enum { LOCAL_ROUNDS = 4, MAX_ROUNDS = 256, MAX_DEPTH = 4096 };  // MAX_DEPTH: distances looked at, over all rounds
enum { SLACK = 4096 };  // the level may lie a part in SLACK above the least possible: it saves rounds
enum { FAR = 1 << 30 };

struct Work {
  i64* by_node;  // [K, E] tokens that start on a node
  i64* served;   // [C] tokens that a holder serves
  i64* taken;    // [C] of them, leaving in this push
  i64* offered;  // [C] coming in this push
  i64* surplus;  // [C] tokens of the holder's stretch that do not start on its node
  i64* base;     // [R] tokens of experts with one holder
  i64* load;     // [R]
  i64* partial;  // [threads]
  i32* depth;    // [R] pushes to a rank below the level
  i32* near;     // [C] one more than the least depth in the holder's stretch
  i32* reach;    // [E] and among all holders
};
FSSDP_FN Work work_at(i64* at, const Group& g, u32 threads) {
  const i32 most = g.ranks * g.per_rank;
  Work w;
  w.by_node = at;
  w.served = w.by_node + (i64)g.nodes * g.experts;
  w.taken = w.served + most;
  w.offered = w.taken + most;
  w.surplus = w.offered + most;
  w.base = w.surplus + most;
  w.load = w.base + g.ranks;
  w.partial = w.load + g.ranks;
  w.depth = (i32*)(w.partial + threads);
  w.near = w.depth + g.ranks;
  w.reach = w.near + most;
  return w;
}

template <class Thread>
struct Quotas {
  Thread& th;
  const Group& g;
  const Holders& h;
  const Work& w;
  i64 level;
  bool local;  // tokens leave a node only if they do not start there

  FSSDP_FN bool is_shared(i32 expert) const { return h.begin[expert + 1] - h.begin[expert] > 1; }
  FSSDP_FN bool same_node(i32 a, i32 b) const {
    return h.expert[a] == h.expert[b] && node_of(g, h, a) == node_of(g, h, b);
  }
  FSSDP_FN i32 stretch_begin(i32 c) const {
    while (c > 0 && same_node(c - 1, c)) --c;
    return c;
  }
  FSSDP_FN i32 stretch_end(i32 c) const {
    const i32 all = h.begin[g.experts];
    while (c + 1 < all && same_node(c + 1, c)) ++c;
    return c + 1;
  }
  // The shared holder in a rank's slot, or -1.
  FSSDP_FN i32 shared_in(i32 rank, i32 slot) const {
    const i32 c = slot < g.per_rank ? h.held[rank * g.per_rank + slot] : -1;
    return c >= 0 && is_shared(h.expert[c]) ? c : -1;
  }
  FSSDP_FN i64 total(i32 expert) const {
    i64 sum = 0;
    for (i32 k = 0; k < g.nodes; ++k) sum += w.by_node[(i64)k * g.experts + expert];
    return sum;
  }
  // All lanes of a team go through a loop as often as one of them.
  FSSDP_FN i32 padded(i32 begin, i32 end) const {
    return begin + (end - begin + th.lanes() - 1) / th.lanes() * th.lanes();
  }
  FSSDP_FN i32 slots() const { return padded(0, g.per_rank); }

  // The sum of all threads' values, for each of them.
  FSSDP_FN i64 sum_of(i64 value) {
    w.partial[th.id()] = value;
    th.all(true);
    i64 sum = 0;
    if (th.id() < 32)
      for (u32 i = th.id(); i < th.count(); i += 32) sum += w.partial[i];
    th.all(true);
    if (th.id() < 32) w.partial[th.id()] = sum;
    th.all(true);
    sum = 0;
    for (u32 i = 0; i < 32 && i < th.count(); ++i) sum += w.partial[i];
    th.all(true);
    return sum;
  }

  FSSDP_FN void count(const i32* loads) {
    i64 mine = 0;
    for (i64 i = th.id(); i < (i64)g.nodes * g.experts; i += th.count()) {
      const i32 k = (i32)(i / g.experts), expert = (i32)(i % g.experts);
      i64 sum = 0;
      for (i32 s = g.first_source[g.first_rank[k]]; s < g.first_source[g.first_rank[k + 1]]; ++s)
        sum += loads[(i64)g.order[s] * g.experts + expert];
      w.by_node[i] = sum;
      mine += sum;
    }
    const i64 all = sum_of(mine), mean = (all + g.ranks - 1) / g.ranks;
    level = mean + mean / SLACK;
  }

  FSSDP_FN void deal_local() {
    for (i32 c = th.id(); c < h.begin[g.experts]; c += th.count()) {
      if (!is_shared(h.expert[c])) continue;
      const i64 tokens = w.by_node[(i64)node_of(g, h, c) * g.experts + h.expert[c]];
      const i32 first = stretch_begin(c), holders = stretch_end(c) - first;
      w.served[c] = tokens * (c - first + 1) / holders - tokens * (c - first) / holders;
    }
    for (i32 r = th.team(); r < g.ranks; r += th.teams()) {
      Running sum = {0};
      for (i32 slot = th.lane(); slot < slots(); slot += th.lanes()) {
        const i32 c = slot < g.per_rank ? h.held[r * g.per_rank + slot] : -1;
        sum.upto(th, c >= 0 && !is_shared(h.expert[c]) ? total(h.expert[c]) : 0);
      }
      if (th.lane() == 0) w.base[r] = sum.before;
    }
    th.all(true);
  }

  // Each rank adds up what it serves.
  FSSDP_FN i64 add_up(i32 rank) {
    Running sum = {w.base[rank]};
    for (i32 slot = th.lane(); slot < slots(); slot += th.lanes()) {
      const i32 c = shared_in(rank, slot);
      sum.upto(th, c >= 0 ? w.served[c] : 0);
    }
    if (th.lane() == 0) w.load[rank] = sum.before;
    return sum.before;
  }

  FSSDP_FN void deal_foreign() {
    for (i32 r = th.team(); r < g.ranks; r += th.teams()) add_up(r);
    th.all(true);
    for (i32 i = th.team(); i < h.shared; i += th.teams()) {
      const i32 expert = h.shared_at[i], begin = h.begin[expert], end = h.begin[expert + 1];
            Running dealt = {0}, room = {0}, part = {0};
      for (i32 c = begin + th.lane(); c < padded(begin, end); c += th.lanes()) {
        dealt.upto(th, c < end ? w.served[c] : 0);
        room.upto(th, c < end ? positive(level - w.load[h.rank[c]]) : 0);
      }
      const i64 foreign = total(expert) - dealt.before, all = room.before ? room.before : end - begin;
      if (foreign == 0) continue;
      for (i32 c = begin + th.lane(); c < padded(begin, end); c += th.lanes()) {
        const i64 own = c >= end ? 0 : room.before ? positive(level - w.load[h.rank[c]]) : 1;
        const i64 upto = part.upto(th, own);
        if (c < end) w.served[c] += share(foreign, upto, all) - share(foreign, upto - own, all);
      }
    }
    th.all(true);
  }

  // Begins a round: loads, and which ranks are below the level. False: no rank is above it.
  FSSDP_FN bool begin_round() {
    bool balanced = true;
    for (i32 r = th.team(); r < g.ranks; r += th.teams()) {
      const i64 load = add_up(r);
      if (th.lane() == 0) w.depth[r] = load < level ? 0 : FAR;
      balanced = balanced && load <= level;
    }
    for (i32 i = th.id(); i < h.shared; i += th.count()) w.reach[h.shared_at[i]] = FAR;
    for (i32 c = th.id(); c < h.begin[g.experts]; c += th.count()) {
      w.near[c] = FAR;
      if (!local || !is_shared(h.expert[c])) continue;
      i64 sum = -w.by_node[(i64)node_of(g, h, c) * g.experts + h.expert[c]];
      for (i32 d = stretch_begin(c); d < stretch_end(c); ++d) sum += w.served[d];
      w.surplus[c] = sum;
    }
    return !th.all(balanced);
  }

  FSSDP_FN bool may_cross(i32 c) const { return !local || w.surplus[c] > 0; }

  // Labels ranks whose tokens need `depth` pushes. False: no rank was left to label, or every rank above the level is.
  FSSDP_FN bool label(i32 depth) {
    for (i32 i = th.team(); i < h.shared; i += th.teams()) {
      const i32 expert = h.shared_at[i], begin = h.begin[expert], end = h.begin[expert + 1];
      Running found = {0};
      for (i32 c = begin + th.lane(); c < padded(begin, end); c += th.lanes()) {
        found.upto(th, c < end && w.depth[h.rank[c]] == depth - 1);
        if (c >= end || w.near[c] != FAR) continue;
        for (i32 d = stretch_begin(c); d < end && same_node(c, d); ++d)
          if (w.depth[h.rank[d]] == depth - 1) {
            w.near[c] = depth;
            break;
          }
      }
      if (th.lane() == 0 && found.before && w.reach[expert] == FAR) w.reach[expert] = depth;
    }
    th.all(true);
    bool none = true, all = true;
    for (i32 r = th.id(); r < g.ranks; r += th.count()) {
      if (w.depth[r] != FAR) continue;
      for (i32 slot = 0; slot < g.per_rank; ++slot) {
        const i32 c = shared_in(r, slot);
        if (c < 0 || w.served[c] == 0) continue;
        if (w.near[c] == depth || (w.reach[h.expert[c]] == depth && may_cross(c))) {
          w.depth[r] = depth;
          none = false;
          break;
        }
      }
      all = all && (w.depth[r] != FAR || w.load[r] <= level);
    }
    const bool found = !th.all(none);
    return found && !th.all(all);
  }

  // No rank above the level reaches one below it: a higher level.
  FSSDP_FN void raise() {
    i64 tokens = 0, ranks = 0;
    for (i32 r = th.id(); r < g.ranks; r += th.count())
      if (w.depth[r] == FAR) {
        tokens += w.load[r];
        ++ranks;
      }
    tokens = sum_of(tokens);
    ranks = sum_of(ranks);
    const i64 mean = (tokens + ranks - 1) / ranks, next = mean + mean / SLACK;
    level = next > level ? next : level + 1;
  }

  // Ranks at `depth` take what they have above the level out of what they serve. False: there is none.
  FSSDP_FN bool take(i32 depth) {
    bool none = true;
    for (i32 r = th.team(); r < g.ranks; r += th.teams()) {
      i64 above = w.depth[r] == depth ? positive(add_up(r) - level) : 0;
      if (above) none = false;
      for (i32 slot = th.lane(); slot < g.per_rank; slot += th.lanes()) {
        const i32 c = shared_in(r, slot);
        if (c >= 0) w.taken[c] = w.offered[c] = 0;
      }
      for (int across = 0; across < 2 && above; ++across) {
        Running sum = {0};
        for (i32 slot = th.lane(); slot < slots(); slot += th.lanes()) {
          const i32 c = shared_in(r, slot);
          i64 most = 0;
          if (c >= 0 && !across && w.near[c] == depth) most = w.served[c];
          if (c >= 0 && across && w.near[c] != depth && w.reach[h.expert[c]] == depth && may_cross(c))
            most = local ? least(w.served[c], w.surplus[c]) : w.served[c];
          const i64 upto = sum.upto(th, most);
          if (most) w.taken[c] = least(most, positive(above - (upto - most)));
        }
        above = positive(above - sum.before);
      }
    }
    return !th.all(none);
  }

  // What a rank at `depth` can be offered, as a weight.
  FSSDP_FN i64 weight(i32 c, i32 depth) const {
    const i32 rank = h.rank[c];
    if (w.depth[rank] != depth) return 0;
    return depth == 0 ? level - w.load[rank] : 1;
  }

  // Experts offer what was taken to their holders one push nearer: of the same stretch, or of all.
  FSSDP_FN void offer(i32 depth) {
    for (i32 i = th.team(); i < h.shared; i += th.teams()) {
      const i32 expert = h.shared_at[i], begin = h.begin[expert], end = h.begin[expert + 1];
            if (w.reach[expert] > depth) continue;
      Running across = {0}, all = {0}, part = {0};
      for (i32 c = begin + th.lane(); c < padded(begin, end); c += th.lanes()) {
        across.upto(th, c < end && w.near[c] != depth ? w.taken[c] : 0);
        all.upto(th, c < end ? weight(c, depth - 1) : 0);
      }
      for (i32 c = begin + th.lane(); c < padded(begin, end); c += th.lanes()) {
        const i64 own = c < end ? weight(c, depth - 1) : 0, upto = part.upto(th, own);
        if (own == 0) continue;
        i64 inside = 0, before = 0, whole = 0;
        for (i32 d = stretch_begin(c); d < stretch_end(c); ++d) {
          if (w.near[d] == depth) inside += w.taken[d];
          const i64 other = weight(d, depth - 1);
          whole += other;
          if (d < c) before += other;
        }
        i64 sum = share(inside, before + own, whole) - share(inside, before, whole);
        if (across.before) sum += share(across.before, upto, all.before) - share(across.before, upto - own, all.before);
        w.offered[c] = sum;
      }
    }
    th.all(true);
  }

  // Ranks below the level accept as much as they have room for.
  FSSDP_FN void accept() {
    for (i32 r = th.team(); r < g.ranks; r += th.teams()) {
      if (w.depth[r] != 0) continue;
      const i64 room = level - w.load[r];
      Running all = {0}, part = {0};
      for (i32 slot = th.lane(); slot < slots(); slot += th.lanes()) {
        const i32 c = shared_in(r, slot);
        all.upto(th, c >= 0 ? w.offered[c] : 0);
      }
      if (all.before <= room) continue;
      for (i32 slot = th.lane(); slot < slots(); slot += th.lanes()) {
        const i32 c = shared_in(r, slot);
        const i64 own = c >= 0 ? w.offered[c] : 0, upto = part.upto(th, own);
        if (own) w.offered[c] = share(room, upto, all.before) - share(room, upto - own, all.before);
      }
    }
    th.all(true);
  }

  // What was not accepted stays where it was.
  FSSDP_FN void move() {
    for (i32 i = th.team(); i < h.shared; i += th.teams()) {
      const i32 expert = h.shared_at[i], begin = h.begin[expert], end = h.begin[expert + 1];
            Running accepted = {0}, taken = {0}, part = {0};
      for (i32 c = begin + th.lane(); c < padded(begin, end); c += th.lanes()) {
        accepted.upto(th, c < end ? w.offered[c] : 0);
        taken.upto(th, c < end ? w.taken[c] : 0);
      }
      if (taken.before == 0) continue;
      for (i32 c = begin + th.lane(); c < padded(begin, end); c += th.lanes()) {
        const i64 own = c < end ? w.taken[c] : 0, upto = part.upto(th, own);
        if (c >= end) continue;
        const i64 leaves = share(accepted.before, upto, taken.before) - share(accepted.before, upto - own, taken.before);
        w.served[c] += w.offered[c] - leaves;
      }
    }
    th.all(true);
  }

  FSSDP_FN void balance() {
    i32 depths = 0;
    local = g.nodes > 1;
    for (i32 round = 0; round < MAX_ROUNDS && depths < MAX_DEPTH; ++round) {
      if (round == LOCAL_ROUNDS) local = false;
      if (!begin_round()) return;
      i32 deepest = 1;
      while (label(deepest)) ++deepest;
      depths += deepest;
      bool moved = false;
      for (i32 depth = deepest; depth > 0; --depth) {
        if (!take(depth)) continue;
        moved = true;
        offer(depth);
        if (depth == 1) accept();
        move();
      }
      if (moved) continue;
      if (local)
        local = false;
      else
        raise();
    }
  }

  FSSDP_FN void solve(const i32* loads) {
    count(loads);
    deal_local();
    deal_foreign();
    balance();
  }
};

}  // namespace fssdp
