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
// One block. A *team* of lanes takes a rank or an expert at a time. Whatever one thread writes and another reads has a
// barrier between (`all`); how many there are is what the time depends on: bench/quota_steps.py counts them. Loops are
// not unrolled except where loads would wait for each other: the code of all passes has to stay in the instruction
// cache, since each runs many times.
//
// Int is the type of numbers of tokens: 32 bits, with all tables and working arrays in shared memory; or 64 bits in global
// memory, where shared memory is too small, or a level on all ranks is 2^31 tokens and more. Both give the same numbers.
#pragma once
#include "gate.cuh"

namespace fssdp {

enum { LOCAL_ROUNDS = 3, MAX_ROUNDS = 256, MAX_DEPTH = 4096 };  // MAX_DEPTH: distances looked at, over all rounds
enum { SLACK = 4096 };  // the level may lie a part in SLACK above the least possible: it saves rounds
enum { FAR = 1 << 30 };
// Passes over ranks or experts, each with a barrier behind it; a policy may count them (`begins`).
enum Pass { ROUND, LABEL, RAISE, TAKE, OFFER, ACCEPT, GIVE_BACK, PASSES };
enum { NO_WAY = 0, IN_NODE = 1, ANYWHERE = 2 };

template <class Int>
struct Work {
  Int* by_node;  // [K, E] tokens that start on a node
  Int* served;   // [C] tokens that a holder serves
  Int* taken;    // [C] of them, leaving in this push; at the end those that start on the holder's rank
  Int* weight;   // [C] of the holder among those that this push may reach: the room of its rank, or 1
  Int* offered;  // [C] coming in this push
  Int* surplus;  // [C] tokens of the holder's stretch that do not start on its node
  Int* base;     // [R] tokens of experts with one holder
  Int* load;     // [R]
  i64* partial;  // [threads]
  i32* depth;    // [2, R] pushes to a rank below the level: as of this label and the one before, in turns
  i32* way;      // [C] whether the holder's tokens can leave by a push from its rank, and how far
  i32* near;     // [2, E] the label, by its number in the whole run, that one of the expert's ranks got last
  i32* near_in;  // [2, C] the same of one of the ranks of a stretch, by its first holder
  i32* leaving;  // [E] the push, by its number in the whole run, in which tokens of the expert left a rank last
};
// `at`: aligned to 8 bytes.
template <class Int>
FSSDP_FN Work<Int> work_at(i64* at, const Group& g, u32 threads) {
  const i32 most = g.ranks * g.per_rank;
  Work<Int> w;
  w.partial = at;
  w.by_node = (Int*)(w.partial + threads);
  w.served = w.by_node + (i64)g.nodes * g.experts;
  w.taken = w.served + most;
  w.weight = w.taken + most;
  w.offered = w.weight + most;
  w.surplus = w.offered + most;
  w.base = w.surplus + most;
  w.load = w.base + g.ranks;
  w.depth = (i32*)(w.load + g.ranks);
  w.way = w.depth + 2 * g.ranks;
  w.near = w.way + most;
  w.near_in = w.near + 2 * g.experts;
  w.leaving = w.near_in + 2 * most;
  return w;
}

template <class Int, class Thread>
struct Quotas {
  Thread& th;
  const Group& g;
  const Holders& h;
  const Work<Int>& w;
  Int level;
  bool local;        // tokens leave a node only if they do not start there
  const i32* depth;  // [R] the last labels
  i32 labels;        // passes that gave ranks a label, in all rounds
  i32 pushed;        // and those that took tokens from ranks

  FSSDP_FN bool is_shared(i32 expert) const { return h.begin[expert + 1] - h.begin[expert] > 1; }
  // The shared holder in a rank's slot, or -1.
  FSSDP_FN i32 shared_in(i32 rank, i32 slot) const {
    return slot < g.per_rank ? h.shared_held[rank * g.per_rank + slot] : -1;
  }
  FSSDP_FN Int total(i32 expert) const {
    Int sum = 0;
    FSSDP_ROLLED
    for (i32 k = 0; k < g.nodes; ++k) sum += w.by_node[(i64)k * g.experts + expert];
    return sum;
  }
  // All lanes of a team go through a loop as often as one of them.
  FSSDP_FN i32 padded(i32 begin, i32 end) const {
    return begin + (end - begin + th.lanes() - 1) / th.lanes() * th.lanes();
  }
  FSSDP_FN i32 slots() const { return padded(0, g.per_rank); }
  template <class Number>
  FSSDP_FN Number team_sum(Number value) const {
    return th.last(th.scan(value));
  }
  FSSDP_FN Int level_of(Int tokens, Int ranks) const {
    const Int mean = (tokens + ranks - 1) / ranks;
    return mean + mean / SLACK;
  }

  // The largest sum there is: of what all ranks have below the level.
  FSSDP_FN bool fits() const { return sizeof(Int) > sizeof(i32) || (i64)level * g.ranks < (1ll << 31); }

  // The first level: the mean rank load. False: Int is too small.
  FSSDP_FN bool count(const i32* loads) {
    i64 mine = 0;
    FSSDP_ROLLED
    for (i32 i = th.id(); i < g.nodes * g.experts; i += th.count()) {
      const i32 k = i / g.experts, expert = i % g.experts;
      i64 sum = 0;
      FSSDP_UNROLL_8  // one after the other, loads from global memory would take most of the kernel's time
      for (i32 s = g.first_source[g.first_rank[k]]; s < g.first_source[g.first_rank[k + 1]]; ++s)
        sum += loads[(i64)g.order[s] * g.experts + expert];
      w.by_node[i] = (Int)sum;
      mine += sum;
    }
    mine = team_sum(mine);
    if (th.lane() == 0) w.partial[th.team()] = mine;
    th.all(true);
    i64 all = 0;
    FSSDP_ROLLED
    for (i32 i = th.lane(); i < th.teams(); i += th.lanes()) all += w.partial[i];
    all = team_sum(all);
    if (sizeof(Int) == sizeof(i32) && all >= (1ll << 31)) return false;
    level = level_of((Int)all, g.ranks);
    return fits();
  }

  FSSDP_FN void deal_local() {
    FSSDP_ROLLED
    for (i32 i = th.id(); i < 3 * g.experts + 2 * g.ranks * g.per_rank; i += th.count()) w.near[i] = 0;
    FSSDP_ROLLED
    for (i32 c = th.id(); c < h.begin[g.experts]; c += th.count()) {
      if (!is_shared(h.expert[c])) continue;
      const Int tokens = w.by_node[(i64)node_of(g, h, c) * g.experts + h.expert[c]];
      const i32 first = h.stretch_begin[c];
      w.served[c] = Deal<Int, Thread>(th, h.stretch_end[c] - first).part(tokens, c - first, 1);
    }
    FSSDP_ROLLED
    for (i32 r = th.team(); r < g.ranks; r += th.teams()) {
      Int sum = 0;
      FSSDP_ROLLED
      for (i32 slot = th.lane(); slot < g.per_rank; slot += th.lanes()) {
        const i32 c = h.held[r * g.per_rank + slot];
        if (c >= 0 && !is_shared(h.expert[c])) sum += total(h.expert[c]);
      }
      sum = team_sum(sum);
      if (th.lane() == 0) w.base[r] = sum;
    }
    th.all(true);
  }

  // Each rank adds up what it serves.
  FSSDP_FN Int add_up(i32 rank) {
    Int sum = 0;
    FSSDP_ROLLED
    for (i32 slot = th.lane(); slot < g.per_rank; slot += th.lanes()) {
      const i32 c = shared_in(rank, slot);
      if (c >= 0) sum += w.served[c];
    }
    sum = w.base[rank] + team_sum(sum);
    if (th.lane() == 0) w.load[rank] = sum;
    return sum;
  }

  FSSDP_FN void deal_foreign() {
    FSSDP_ROLLED
    for (i32 r = th.team(); r < g.ranks; r += th.teams()) add_up(r);
    th.all(true);
    FSSDP_ROLLED
    for (i32 i = th.team(); i < h.shared; i += th.teams()) {
      const i32 expert = h.shared_at[i], begin = h.begin[expert], end = h.begin[expert + 1];
      Running<Int> here = {0}, room = {0}, part = {0};
      FSSDP_ROLLED
      for (i32 c = begin + th.lane(); c < padded(begin, end); c += th.lanes()) {
        here.upto(th, c < end ? w.served[c] : 0);
        room.upto(th, c < end ? positive(level - w.load[h.rank[c]]) : 0);
      }
      const Int foreign = total(expert) - here.before, all = room.before ? room.before : end - begin;
      if (foreign == 0) continue;
      const Deal<Int, Thread> deal(th, all);
      FSSDP_ROLLED
      for (i32 c = begin + th.lane(); c < padded(begin, end); c += th.lanes()) {
        const Int own = c >= end ? 0 : room.before ? positive(level - w.load[h.rank[c]]) : 1;
        const Int upto = part.upto(th, own);
        if (c < end) w.served[c] += deal.part(foreign, upto - own, own);
      }
    }
    th.all(true);
  }

  // A rank has got the newest label: its experts are near.
  FSSDP_FN void mark(i32 rank) {
    FSSDP_ROLLED
    for (i32 slot = th.lane(); slot < g.per_rank; slot += th.lanes()) {
      const i32 c = shared_in(rank, slot);
      if (c < 0) continue;
      // Several threads may write the same number there.
      th.mark(w.near + labels % 2 * g.experts + h.expert[c], labels);
      th.mark(w.near_in + labels % 2 * g.ranks * g.per_rank + h.stretch_begin[c], labels);
    }
  }

  // Begins a round: loads, and which ranks are below the level. False: no rank is above it.
  FSSDP_FN bool begin_round() {
    th.begins(ROUND);
    ++labels;
    bool balanced = true;
    FSSDP_ROLLED
    for (i32 r = th.team(); r < g.ranks; r += th.teams()) {
      const Int load = add_up(r);
      if (th.lane() == 0) w.depth[r] = load < level ? 0 : FAR;
      if (load < level) mark(r);
      balanced = balanced && load <= level;
    }
    FSSDP_ROLLED
    for (i32 c = th.id(); c < h.begin[g.experts]; c += th.count()) {
      w.offered[c] = 0;
      if (!local || !is_shared(h.expert[c])) continue;
      Int sum = -w.by_node[(i64)node_of(g, h, c) * g.experts + h.expert[c]];
      FSSDP_ROLLED
      for (i32 d = h.stretch_begin[c]; d < h.stretch_end[c]; ++d) sum += w.served[d];
      w.surplus[c] = sum;
    }
    return !th.all(balanced);
  }

  // The way of a holder's tokens from a rank without a label to one that got the label before this one.
  FSSDP_FN i32 way_of(i32 c) const {
    const i32 before = labels - 1;
    if (w.near_in[before % 2 * g.ranks * g.per_rank + h.stretch_begin[c]] == before) return IN_NODE;
    if (w.near[before % 2 * g.experts + h.expert[c]] != before) return NO_WAY;
    return !local || w.surplus[c] > 0 ? ANYWHERE : NO_WAY;
  }

  // Labels ranks whose tokens need so many pushes. `all`: every rank above the level has a label now. False: no new one.
  FSSDP_FN bool label(i32 pushes, bool& all) {
    th.begins(LABEL);
    ++labels;
    const i32* before = w.depth + (pushes - 1) % 2 * g.ranks;
    i32* after = w.depth + pushes % 2 * g.ranks;
    bool none = true, mine = true;
    FSSDP_ROLLED
    for (i32 r = th.team(); r < g.ranks; r += th.teams()) {
      i32 label = before[r];
      if (label == FAR) {
        bool found = false;
        FSSDP_ROLLED
        for (i32 slot = th.lane(); slot < g.per_rank; slot += th.lanes()) {
          const i32 c = shared_in(r, slot);
          if (c < 0) continue;
          w.way[c] = way_of(c);
          found = found || (w.way[c] != NO_WAY && w.served[c] > 0);
        }
        if (th.any(found)) {
          label = pushes;
          none = false;
          mark(r);
        }
      }
      if (th.lane() == 0) after[r] = label;
      mine = mine && (label != FAR || w.load[r] <= level);
    }
    depth = after;
    const bool found = !th.all(none);
    all = th.all(mine);
    return found;
  }

  // Some rank above the level reaches none below it: a higher level.
  FSSDP_FN void raise() {
    th.begins(RAISE);
    Int tokens = 0, ranks = 0;
    FSSDP_ROLLED
    for (i32 r = th.lane(); r < g.ranks; r += th.lanes())
      if (depth[r] == FAR) {
        tokens += w.load[r];
        ++ranks;
      }
    tokens = team_sum(tokens);
    const Int next = level_of(tokens, team_sum(ranks));
    level = next > level ? next : level + 1;
    th.all(true);
  }

  FSSDP_FN Int may_leave(i32 c) const {
    if (c < 0 || w.way[c] == NO_WAY) return 0;
    return local && w.way[c] == ANYWHERE ? least(w.served[c], w.surplus[c]) : w.served[c];
  }

  // Ranks at `pushes` accept what was offered, and take what they have above the level out of what they serve: first
  // what stays on its node. False: there is none.
  FSSDP_FN bool take(i32 pushes) {
    th.begins(TAKE);
    ++pushed;
    bool none = true;
    FSSDP_ROLLED
    for (i32 r = th.team(); r < g.ranks; r += th.teams()) {
      const i32 distance = depth[r];
      const Int weight = distance != pushes - 1 ? 0 : pushes == 1 ? level - w.load[r] : 1;
      Int load = 0, inside = 0;
      FSSDP_ROLLED
      for (i32 slot = th.lane(); slot < g.per_rank; slot += th.lanes()) {
        const i32 c = shared_in(r, slot);
        if (c < 0) continue;
        w.weight[c] = weight;
        w.taken[c] = 0;
        if (distance != pushes) continue;
        w.served[c] += w.offered[c];
        load += w.served[c];
        if (w.way[c] == IN_NODE) inside += w.served[c];
      }
      if (distance != pushes) continue;
      const Int above = positive(w.base[r] + team_sum(load) - level);
      inside = team_sum(inside);
      if (!above) continue;
      none = false;
      Running<Int> near = {0}, far = {0};
      FSSDP_ROLLED
      for (i32 slot = th.lane(); slot < slots(); slot += th.lanes()) {
        const i32 c = shared_in(r, slot), way = c < 0 ? (i32)NO_WAY : w.way[c];
        const Int most = may_leave(c), of_near = way == IN_NODE ? most : 0, of_far = most - of_near;
        const Int upto_near = near.upto(th, of_near), upto_far = far.upto(th, of_far);
        if (!most) continue;
        const Int before = way == IN_NODE ? upto_near - most : inside + upto_far - most;
        w.taken[c] = least(most, positive(above - before));
        w.served[c] -= w.taken[c];
        if (w.taken[c]) th.mark(w.leaving + h.expert[c], pushed);
      }
    }
    return !th.all(none);
  }

  FSSDP_FN Int taken(i32 c, i32 way) const { return w.way[c] == way ? w.taken[c] : 0; }

  // Experts offer what was taken to their holders one push nearer: of the same stretch, or of all.
  FSSDP_FN void offer() {
    th.begins(OFFER);
    FSSDP_ROLLED
    for (i32 i = th.team(); i < h.shared; i += th.teams()) {
      const i32 expert = h.shared_at[i], begin = h.begin[expert], end = h.begin[expert + 1];
      if (w.leaving[expert] != pushed) continue;
      Int anywhere = 0, all = 0;
      FSSDP_ROLLED
      for (i32 c = begin + th.lane(); c < end; c += th.lanes()) {
        anywhere += taken(c, ANYWHERE);
        all += w.weight[c];
      }
      anywhere = team_sum(anywhere);
      const Deal<Int, Thread> among_all(th, team_sum(all));
      Running<Int> part = {0};
      FSSDP_ROLLED
      for (i32 c = begin + th.lane(); c < padded(begin, end); c += th.lanes()) {
        const Int own = c < end ? w.weight[c] : 0, upto = part.upto(th, own);
        if (own == 0) continue;
        Int inside = 0, before = 0, whole = 0;
        FSSDP_ROLLED
        for (i32 d = h.stretch_begin[c]; d < h.stretch_end[c]; ++d) {
          inside += taken(d, IN_NODE);
          const Int other = w.weight[d];
          whole += other;
          if (d < c) before += other;
        }
        w.offered[c] = among_all.part(anywhere, upto - own, own);
        if (inside) w.offered[c] += Deal<Int, Thread>(th, whole).part(inside, before, own);
      }
    }
    th.all(true);
  }

  // Ranks below the level accept as much as they have room for. True: that was all.
  FSSDP_FN bool accept() {
    th.begins(ACCEPT);
    bool whole = true;
    FSSDP_ROLLED
    for (i32 r = th.team(); r < g.ranks; r += th.teams()) {
      if (depth[r] != 0) continue;
      const Int room = level - w.load[r];
      Int all = 0;
      FSSDP_ROLLED
      for (i32 slot = th.lane(); slot < g.per_rank; slot += th.lanes()) {
        const i32 c = shared_in(r, slot);
        if (c >= 0) all += w.offered[c];
      }
      all = team_sum(all);
      whole = whole && all <= room;
      const Deal<Int, Thread> deal(th, all);
      Running<Int> part = {0};
      FSSDP_ROLLED
      for (i32 slot = th.lane(); slot < slots(); slot += th.lanes()) {
        const i32 c = shared_in(r, slot);
        const Int own = c >= 0 ? w.offered[c] : 0, upto = part.upto(th, own);
        if (own == 0) continue;
        if (all > room) w.offered[c] = deal.part(room, upto - own, own);
        w.served[c] += w.offered[c];
      }
    }
    return th.all(whole);
  }

  // What was not accepted stays where it was.
  FSSDP_FN void give_back() {
    th.begins(GIVE_BACK);
    FSSDP_ROLLED
    for (i32 i = th.team(); i < h.shared; i += th.teams()) {
      const i32 expert = h.shared_at[i], begin = h.begin[expert], end = h.begin[expert + 1];
      if (w.leaving[expert] != pushed) continue;
      Int accepted = 0, all = 0;
      FSSDP_ROLLED
      for (i32 c = begin + th.lane(); c < end; c += th.lanes()) {
        if (w.weight[c]) accepted += w.offered[c];
        all += w.taken[c];
      }
      all = team_sum(all);
      const Int back = all - team_sum(accepted);
      const Deal<Int, Thread> deal(th, all);
      Running<Int> part = {0};
      FSSDP_ROLLED
      for (i32 c = begin + th.lane(); c < padded(begin, end); c += th.lanes()) {
        const Int own = c < end ? w.taken[c] : 0, upto = part.upto(th, own);
        if (own) w.served[c] += deal.part(back, upto - own, own);
      }
    }
    th.all(true);
  }

  // False: Int is too small.
  FSSDP_FN bool balance() {
    i32 depths = 0;
    local = g.nodes > 1;
    FSSDP_ROLLED
    for (i32 round = 0; round < MAX_ROUNDS && depths < MAX_DEPTH; ++round) {
      if (round == LOCAL_ROUNDS) local = false;
      if (!begin_round()) return true;
      i32 deepest = 0;
      bool all = false, found = true;
      FSSDP_ROLLED
      while (found && !all) {
        found = label(deepest + 1, all);
        if (found) ++deepest;
        ++depths;
      }
      if (!all && !local) {
        raise();
        if (!fits()) return false;
        continue;
      }
      bool moved = false;
      FSSDP_ROLLED
      for (i32 pushes = deepest; pushes > 0; --pushes) {
        if (!take(pushes)) continue;
        moved = true;
        offer();
        if (pushes == 1 && !accept()) give_back();
      }
      if (!moved) local = false;
    }
    return true;
  }

  // False: Int is too small.
  FSSDP_FN bool solve(const i32* loads) {
    if (!count(loads)) return false;
    deal_local();
    deal_foreign();
    return balance();
  }
};

}  // namespace fssdp
