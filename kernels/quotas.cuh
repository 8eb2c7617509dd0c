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
// One block. A *team* of lanes takes a rank at a time, a lane one of its holders. A holder's lane looks up itself what
// leaves the other holders of its expert, so that one pass both brings tokens to ranks and takes others from them. The
// lanes of a warp add up together: all teams of a warp come to a sum, or none (`ranks_end`). Whatever one thread writes and
// another reads has a barrier between (`all`); how many there are is what the time depends on: bench/quota_steps.py counts
// them. Loops are not unrolled except where loads would wait for each other: the code of all passes has to stay in the
// instruction cache, since each runs many times.
//
// Int is the type of numbers of tokens: 32 bits, with all tables and working arrays in shared memory; or 64 bits in global
// memory, where shared memory is too small, or a level on all ranks is 2^31 tokens and more. Both give the same numbers.
#pragma once
#include "gate.cuh"

namespace fssdp {

enum { LOCAL_ROUNDS = 3, MAX_ROUNDS = 256, MAX_DEPTH = 4096 };  // MAX_DEPTH: distances looked at, over all rounds
enum { SLACK = 4096 };  // the level may lie a part in SLACK above the least possible: it saves rounds
enum { FAR = 1 << 30 };
// Passes over ranks, each with a barrier behind it; a policy may count them (`begins`).
enum Pass { ROUND, LABEL, RAISE, PUSH, ACCEPT, PASSES };
enum { NO_WAY = 0, IN_NODE = 1, ANYWHERE = 2 };

template <class Int>
struct Work {
  Int* by_node;   // [K, E] tokens that start on a node
  Int* served;    // [C] tokens that a holder serves
  Int* taken;     // [C] of them, leaving by the last push of its rank, below zero: on its node; first the even start, at
                  // the end those that start on the holder's rank
  Int* room;      // [C] below the level, of the holder's rank, where it is below
  Int* accepted;  // [C] of what came to it, where its rank is below the level
  Int* surplus;   // [C] tokens of the holder's stretch that do not start on its node, where its way is ANYWHERE
  Int* base;      // [R] tokens of experts with one holder
  Int* load;      // [R]
  i64* partial;   // [threads]
  i32* depth;     // [R] pushes from a rank to one below the level
  i32* label;     // [2, C] the same of the holder's rank, in this round and the one before, in turns
  i32* way;       // [C] whether the holder's tokens can leave by a push from its rank, and how far
  i32* near;      // [2, E] the label, by its number in the whole run, that one of the expert's ranks got last
  i32* near_in;   // [2, C] the same of one of the ranks of a stretch, by its first holder
  i32* leaving;   // [2, E] the push, by its number in the whole run, in which tokens of the expert left a rank last
  i32* found;     // [2] the last label, by its number, that a rank got
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
  w.room = w.taken + most;
  w.accepted = w.room + most;
  w.surplus = w.accepted + most;
  w.base = w.surplus + most;
  w.load = w.base + g.ranks;
  w.depth = (i32*)(w.load + g.ranks);
  w.label = w.depth + g.ranks;
  w.way = w.label + 2 * most;
  w.near = w.way + most;
  w.near_in = w.near + 2 * g.experts;
  w.leaving = w.near_in + 2 * most;
  w.found = w.leaving + 2 * g.experts;
  return w;
}

template <class Int, class Thread>
struct Quotas {
  Thread& th;
  const Group& g;
  const Holders& h;
  const Work<Int>& w;
  Int level;
  bool local;     // tokens leave a node only if they do not start there
  bool returning;  // not all that the last push took was accepted
  i32 round;
  i32 labels;  // passes that gave ranks a label, in all rounds
  i32 pushed;  // and those that took tokens from ranks

  FSSDP_FN bool is_shared(i32 expert) const { return h.begin[expert + 1] - h.begin[expert] > 1; }
  // The n-th shared holder of a rank, or -1.
  FSSDP_FN i32 shared_in(i32 rank, i32 n) const {
    return n < h.most_shared ? h.shared_held[rank * g.per_rank + n] : -1;
  }
  FSSDP_FN Int total(i32 expert) const {
    Int sum = 0;
    FSSDP_UNROLL_4
    for (i32 k = 0; k < g.nodes; ++k) sum += w.by_node[(i64)k * g.experts + expert];
    return sum;
  }
  // All teams of a warp go through a loop over ranks as often as one of them, and all lanes of a team through one over
  // its holders.
  FSSDP_FN i32 ranks_end() const { return (g.ranks + th.warp_teams() - 1) / th.warp_teams() * th.warp_teams(); }
  FSSDP_FN i32 shared_end() const { return (h.most_shared + th.lanes() - 1) / th.lanes() * th.lanes(); }
  FSSDP_FN i32* labels_of(i32 which) const { return w.label + which % 2 * g.ranks * g.per_rank; }
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
    FSSDP_ROLLED
    for (i32 i = th.id(); i < 4 * g.experts + 2 * g.ranks * g.per_rank + 2; i += th.count()) w.near[i] = 0;
    mine = th.warp_sum(mine);
    if (th.in_warp() == 0) w.partial[th.warp()] = mine;
    th.all(true);
    i64 all = 0;
    FSSDP_UNROLL_4
    for (i32 i = 0; i < th.warps(); ++i) all += w.partial[i];
    if (sizeof(Int) == sizeof(i32) && all >= (1ll << 31)) return false;
    level = level_of((Int)all, g.ranks);
    return fits();
  }

  FSSDP_FN void deal_local() {
    FSSDP_ROLLED
    for (i32 r = th.team(); r < ranks_end(); r += th.teams()) {
      Int base = 0, dealt = 0;
      FSSDP_ROLLED
      for (i32 slot = th.lane(); r < g.ranks && slot < g.per_rank; slot += th.lanes()) {
        const i32 c = h.held[r * g.per_rank + slot];
        if (c < 0) continue;
        if (!is_shared(h.expert[c])) {
          base += total(h.expert[c]);
          continue;
        }
        const Int tokens = w.by_node[(i64)node_of(g, h, c) * g.experts + h.expert[c]];
        const i32 first = h.stretch_begin[c];
        w.taken[c] = Deal<Int, Thread>(th, h.stretch_end[c] - first).part(tokens, c - first, 1);
        dealt += w.taken[c];
      }
      base = th.sum(base);
      dealt = th.sum(dealt);
      if (th.lane() != 0 || r >= g.ranks) continue;
      w.base[r] = base;
      w.load[r] = base + dealt;
    }
    th.all(true);
  }

  FSSDP_FN void deal_foreign() {
    FSSDP_ROLLED
    for (i32 c = th.id(); c < h.begin[g.experts]; c += th.count()) {
      const i32 expert = h.expert[c], begin = h.begin[expert], end = h.begin[expert + 1];
      if (end - begin < 2) continue;
      Int here = 0, room = 0, before = 0;
      th.walks(end - begin);
      FSSDP_UNROLL_4
      for (i32 d = begin; d < end; ++d) {
        const Int below = positive(level - w.load[h.rank[d]]);
        here += w.taken[d];
        room += below;
        if (d < c) before += below;
      }
      const Int foreign = total(expert) - here;
      const Deal<Int, Thread> deal(th, room ? room : end - begin);
      const Int own = room ? positive(level - w.load[h.rank[c]]) : 1;
      w.served[c] = w.taken[c] + deal.part(foreign, room ? before : c - begin, own);
    }
    th.all(true);
  }

  // A rank has got the newest label: its experts are near.
  FSSDP_FN void mark(i32 rank, i32 pushes) {
    FSSDP_ROLLED
    for (i32 n = th.lane(); n < h.most_shared; n += th.lanes()) {
      const i32 c = shared_in(rank, n);
      if (c < 0) break;
      labels_of(round)[c] = pushes;
      // Several threads may write the same number there.
      th.mark(w.near + labels % 2 * g.experts + h.expert[c], labels);
      th.mark(w.near_in + labels % 2 * g.ranks * g.per_rank + h.stretch_begin[c], labels);
    }
  }

  // What left a holder by the last push and was not accepted: it stays where it was.
  FSSDP_FN Int given_back(i32 c) const {
    const i32 expert = h.expert[c];
    const i32* label = labels_of(round - 1);
    if (w.leaving[pushed % 2 * g.experts + expert] != pushed || label[c] != 1) return 0;
    Int all = 0, accepted = 0, before = 0;
    th.walks(h.begin[expert + 1] - h.begin[expert]);
    FSSDP_UNROLL_4
    for (i32 d = h.begin[expert]; d < h.begin[expert + 1]; ++d) {
      if (label[d] == 0) accepted += w.accepted[d];
      const Int taken = label[d] == 1 ? magnitude(w.taken[d]) : 0;
      all += taken;
      if (d < c) before += taken;
    }
    return Deal<Int, Thread>(th, all).part(all - accepted, before, magnitude(w.taken[c]));
  }

  // Begins a round: loads, and which ranks are below the level. False: no rank is above it.
  FSSDP_FN bool begin_round() {
    th.begins(ROUND);
    ++labels;
    ++round;
    bool balanced = true;
    FSSDP_ROLLED
    for (i32 r = th.team(); r < ranks_end(); r += th.teams()) {
      Int load = 0;
      FSSDP_ROLLED
      for (i32 n = th.lane(); r < g.ranks && n < h.most_shared; n += th.lanes()) {
        const i32 c = shared_in(r, n);
        if (c < 0) break;
        if (returning) w.served[c] += given_back(c);
        load += w.served[c];
      }
      load = th.sum(load);
      if (r >= g.ranks) continue;
      load += w.base[r];
      if (th.lane() == 0) w.load[r] = load;
      if (th.lane() == 0) w.depth[r] = load < level ? 0 : FAR;
      FSSDP_ROLLED
      for (i32 n = th.lane(); n < h.most_shared; n += th.lanes()) {
        const i32 c = shared_in(r, n);
        if (c < 0) break;
        labels_of(round)[c] = FAR;
        w.room[c] = level - load;
      }
      if (load < level) mark(r, 0);
      balanced = balanced && load <= level;
    }
    returning = false;
    return !th.all(balanced);
  }

  // The way of a holder's tokens from a rank without a label to one that got the label before this one.
  FSSDP_FN i32 way_of(i32 c) const {
    const i32 before = labels - 1;
    if (w.near_in[before % 2 * g.ranks * g.per_rank + h.stretch_begin[c]] == before) return IN_NODE;
    if (w.near[before % 2 * g.experts + h.expert[c]] != before) return NO_WAY;
    if (!local) return ANYWHERE;
    Int sum = -w.by_node[(i64)node_of(g, h, c) * g.experts + h.expert[c]];
    FSSDP_ROLLED
    for (i32 d = h.stretch_begin[c]; d < h.stretch_end[c]; ++d) sum += w.served[d];
    w.surplus[c] = sum;
    return sum > 0 ? ANYWHERE : NO_WAY;
  }

  // Labels ranks whose tokens need so many pushes. `all`: every rank above the level has a label now. False: no new one.
  FSSDP_FN bool label(i32 pushes, bool& all) {
    th.begins(LABEL);
    ++labels;
    bool mine = true;
    FSSDP_ROLLED
    for (i32 r = th.team(); r < ranks_end(); r += th.teams()) {
      const bool open = r < g.ranks && w.depth[r] == FAR;
      if (!th.warp_any(open)) continue;
      bool found = false;
      FSSDP_ROLLED
      for (i32 n = th.lane(); open && n < h.most_shared; n += th.lanes()) {
        const i32 c = shared_in(r, n);
        if (c < 0) break;
        w.way[c] = way_of(c);
        found = found || (w.way[c] != NO_WAY && w.served[c] > 0);
      }
      if (th.any(found)) {
        mark(r, pushes);
        if (th.lane() == 0) w.depth[r] = pushes;
        if (th.lane() == 0) th.mark(w.found + labels % 2, labels);
      } else if (open) {
        mine = mine && w.load[r] <= level;
      }
    }
    all = th.all(mine);
    return w.found[labels % 2] == labels;
  }

  // Some rank above the level reaches none below it: a higher level.
  FSSDP_FN void raise() {
    th.begins(RAISE);
    Int tokens = 0, ranks = 0;
    FSSDP_ROLLED
    for (i32 r = th.in_warp(); r < g.ranks; r += th.warp_size())
      if (w.depth[r] == FAR) {
        tokens += w.load[r];
        ++ranks;
      }
    tokens = th.warp_sum(tokens);
    const Int next = level_of(tokens, th.warp_sum(ranks));
    level = next > level ? next : level + 1;
    th.all(true);
  }

  FSSDP_FN Int may_leave(i32 c, i32 way) const {
    if (way == NO_WAY) return 0;
    return local && way == ANYWHERE ? least(w.served[c], w.surplus[c]) : w.served[c];
  }

  // What comes to a holder of a rank at `pushes`: its part of what the push before took from the holders of its expert one
  // push farther, on the same node or on all.
  FSSDP_FN Int coming(i32 c, i32 pushes, i32 push) const {
    const i32 expert = h.expert[c], first = h.stretch_begin[c], last = h.stretch_end[c];
    if (w.leaving[push % 2 * g.experts + expert] != push) return 0;
    const i32* label = labels_of(round);
    Int anywhere = 0, inside = 0, all = 0, before = 0, whole = 0, before_in = 0;
    th.walks(h.begin[expert + 1] - h.begin[expert]);
    FSSDP_UNROLL_4
    for (i32 d = h.begin[expert]; d < h.begin[expert + 1]; ++d) {
      const bool in = first <= d && d < last;
      const Int taken = label[d] == pushes + 1 ? w.taken[d] : 0;
      anywhere += positive(taken);
      if (in) inside += positive(-taken);
      const Int weight = label[d] != pushes ? 0 : pushes ? 1 : w.room[d];
      all += weight;
      if (in) whole += weight;
      if (d < c) before += weight;
      if (d < first) before_in += weight;
    }
    const Int own = pushes ? 1 : w.room[c];
    Int sum = 0;
    if (anywhere) sum += Deal<Int, Thread>(th, all).part(anywhere, before, own);
    if (inside) sum += Deal<Int, Thread>(th, whole).part(inside, before - before_in, own);
    return sum;
  }

  // Ranks at `pushes` get what was taken for them. What they then have above the level they let go out of what they serve:
  // first what stays on its node. Ranks below the level, at 0, accept no more than they have room for. `before`: the push
  // before took something. False: no rank had anything above the level.
  FSSDP_FN bool push(i32 pushes, bool before) {
    th.begins(pushes ? PUSH : ACCEPT);
    const i32 last = pushed;
    if (pushes) ++pushed;
    bool none = true;
    FSSDP_ROLLED
    for (i32 r = th.team(); r < ranks_end(); r += th.teams()) {
      const bool mine = r < g.ranks && w.depth[r] == pushes;
      if (!th.warp_any(mine)) continue;
      Int load = 0, inside = 0;
      FSSDP_ROLLED
      for (i32 n = th.lane(); mine && n < h.most_shared; n += th.lanes()) {
        const i32 c = shared_in(r, n);
        if (c < 0) break;
        const Int here = (before ? coming(c, pushes, last) : 0) + (pushes ? w.served[c] : 0);
        (pushes ? w.served : w.accepted)[c] = here;
        load += here;
        if (pushes && w.way[c] == IN_NODE) inside += here;
      }
      load = th.sum(load);
      inside = th.sum(inside);
      const Int above = mine ? positive((pushes ? w.base : w.load)[r] + load - level) : 0;
      none = none && !above;
      Running<Int> near = {0}, far = {0};
      FSSDP_ROLLED
      for (i32 n = th.lane(); n < shared_end(); n += th.lanes()) {
        const i32 c = mine ? shared_in(r, n) : -1, way = c < 0 || !pushes ? (i32)NO_WAY : w.way[c];
        const Int most = may_leave(c, way), of_near = way == IN_NODE ? most : 0;
        const Int of_far = c >= 0 && !pushes ? w.accepted[c] : most - of_near;
        const Int upto_near = near.upto(th, of_near), upto_far = far.upto(th, of_far);
        if (c < 0) continue;
        if (pushes) {
          const Int ahead = way == IN_NODE ? upto_near - most : inside + upto_far - most;
          const Int taken = least(most, positive(above - ahead));
          w.taken[c] = way == IN_NODE ? -taken : taken;
          w.served[c] -= taken;
          if (taken) th.mark(w.leaving + pushed % 2 * g.experts + h.expert[c], pushed);
        } else {
          const Int fits = Deal<Int, Thread>(th, load).part(load - above, upto_far - of_far, of_far);
          w.accepted[c] = above ? least(of_far, fits) : of_far;
          w.served[c] += w.accepted[c];
        }
      }
    }
    return !th.all(none);
  }

  // False: Int is too small.
  FSSDP_FN bool balance() {
    i32 depths = 0;
    local = g.nodes > 1;
    // The last time, nothing begins but what was not accepted is given back.
    FSSDP_ROLLED
    while (begin_round() && round <= MAX_ROUNDS && depths < MAX_DEPTH) {
      if (round > LOCAL_ROUNDS) local = false;
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
      bool moved = false, took = false;
      FSSDP_ROLLED
      for (i32 pushes = deepest; pushes > 0 || (pushes == 0 && took); --pushes) {
        took = push(pushes, took);
        moved = moved || took;
        returning = took && pushes == 0;
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
