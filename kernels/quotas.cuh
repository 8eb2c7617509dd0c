// Quotas: number of an expert's tokens that each holder serves. The largest rank load is minimal,
// and tokens stay on their node where that allows it. All numbers are integers, equal on all ranks.
//
// 1. Start: tokens that start on a node with holders of their expert are split evenly over these
//    holders. Tokens that start on a node without a holder are assigned to ranks with room.
// 2. Flow: tokens move from ranks above the `level` to ranks below it, over experts that both hold.
//    The level is the upper bound on rank loads and starts at the mean rank load. A breadth-first
//    search computes distances to the ranks below the level; then all ranks push concurrently
//    along shortest paths, from far to near (Dinic's blocking flow, in the waves of Tarjan, "A
//    simple version of Karzanov's blocking flow algorithm", 1984). Several ranks may fill the same
//    room: nothing returns, but the receiver, above the level then, pushes in the next round. In
//    the first LOCAL_ROUNDS rounds only tokens that are away from their own node may change nodes,
//    if there are more replicas than ranks. With fewer, these rounds keep no more tokens on their
//    nodes. They push from near ranks only, because far ones get nearer in later rounds.
// 3. Cut: if a rank above the level reaches no rank below it, the ranks that reach none cannot pass
//    on their tokens. At best their loads are equal: their mean load, a lower bound for every
//    split, is the new level. Dinkelbach's method finds the tightest cut in few rounds.
//
// The kernel is one thread block. A *team* of lanes processes one rank at a time, each lane one of
// the rank's holders. Sums over a warp are collective, so all teams of a warp reach one or none
// (`places_end`). A barrier (`all`) separates every write from the reads of other threads. Loops
// are rolled except where unrolling overlaps loads: each pass runs many times, so the code of all
// passes has to fit into the instruction cache.
//
// A set of ranks is a bitmap of 64-bit words. The bit of a rank is its `place`, its position in
// node order. The breadth-first search for the ranks at each distance (`levels`) costs a few word
// operations per rank. If all ranks fit into one word, every warp runs the whole search
// redundantly, without a barrier. Tokens that leave an expert's holders at one distance are summed
// per expert and per stretch (integers, so the order of additions does not matter) and split by the
// bits of the next distance. A push therefore visits only the holders of its own ranks.
//
// Int, the type of token counts, is 32 bits, with all tables and working arrays in shared memory;
// or 64 bits in global memory, if shared memory is too small or the level times the ranks is 2^31
// or more. Words is 1 for up to 64 ranks, and 0 for any number of ranks. All variants compute the
// same numbers.
#pragma once
#include "gate.cuh"

namespace fssdp {

// LOCAL_DEPTH: distance beyond which local rounds do not search for a further rank above the level.
// MAX_DEPTH: limit on the search's distances, summed over all rounds.
enum { LOCAL_ROUNDS = 3, LOCAL_DEPTH = 3, MAX_ROUNDS = 256, MAX_DEPTH = 4096 };
// The level may exceed the smallest possible one by 1 / SLACK, which saves rounds.
enum { SLACK = 4096 };
// Unit of a noted load: 1 / NOTED of the mean rank load.
enum { NOTED = 65536 };
enum { NO_WAY = 0, IN_NODE = 1, ANYWHERE = 2 };

template <class Int>
struct Work {
  i64* partial;  // [threads] one sum per warp
  u64* reach;    // [R, words] by place: ranks that one push can move tokens to
  u64* levels;   // [R + 1, words] by distance: ranks that many pushes away from one below the level
  u64* known;    // [words] ranks with a known distance, where a set has several words
  Int* by_node;  // [K, E] tokens that start on a node
  // By the entries of shared holders (gate.cuh), [R * P]:
  Int* served;   // tokens that the holder serves
  Int* taken;    // before any push: the even start; in a push: tokens that may leave
  Int* surplus;  // in local rounds: tokens of the holder's stretch that start on other nodes
  // By place, [R]:
  Int* base;     // tokens of experts with one holder
  Int* load;     // [2, R] tokens of all experts, for two rounds in turn
  // [3, E + R * P] for three pushes in turn (read, written, zeroed): tokens that left an expert's
  // holders for any node, by expert, then for the same node, by the first holder of the stretch.
  Int* moved;
  // By holder, [R * P], at the end:
  Int* serves;   // `served`
  Int* kept;     // tokens among `serves` that start on the holder's rank
};
// Lay out the working arrays from `at` on, which is aligned to 8 bytes.
template <class Int>
FSSDP_FN Work<Int> work_at(i64* at, const Group& g, u32 threads) {
  const i32 most = g.ranks * g.per_rank, words = words_of(g);
  Work<Int> w;
  w.partial = at;
  w.reach = (u64*)(w.partial + threads);
  w.levels = w.reach + (i64)g.ranks * words;
  w.known = w.levels + (i64)(g.ranks + 1) * words;
  w.by_node = (Int*)(w.known + words);
  w.served = w.by_node + (i64)g.nodes * g.experts;
  w.taken = w.served + most;
  w.surplus = w.taken + most;
  w.base = w.surplus + most;
  w.load = w.base + g.ranks;
  w.moved = w.load + 2 * g.ranks;
  // `serves` and `kept` reuse the memory of `moved`: they are written after the last push.
  w.serves = w.moved;
  w.kept = w.serves + most;
  return w;
}

// Set of ranks: by value if it is one word, else a pointer to its words.
template <i32 Words>
struct RankSet {
  u64 bits;
  FSSDP_FN u64 word(i32) const { return bits; }
};
template <>
struct RankSet<0> {
  const u64* at;
  FSSDP_FN u64 word(i32 v) const { return at[v]; }
};
// Bits of word v for the places in [first, last).
FSSDP_FN u64 bits_below(i32 place) { return place >= 64 ? ~0ull : place > 0 ? (1ull << place) - 1 : 0; }
FSSDP_FN u64 bits_between(i32 v, i32 first, i32 last) { return bits_below(last - 64 * v) & ~bits_below(first - 64 * v); }

template <class Int, i32 Words, class Thread>
struct Quotas {
  Thread& th;
  const Group& g;
  const Holders& h;
  const Work<Int>& w;
  Int level;
  // In local rounds a token leaves a node only if it does not start there.
  bool local;
  // The last push of the last round took tokens, for the ranks below the level.
  bool arriving;
  i32 round;
  // Number of passes that took tokens from ranks, over all rounds.
  i32 pushed;
  // Ranks at the distance that pushes next, ranks at the distance that receives, and all ranks with
  // a known distance.
  RankSet<Words> here, next, known;

  FSSDP_FN bool is_shared(i32 expert) const { return h.begin[expert + 1] - h.begin[expert] > 1; }
  // Expert of a place's n-th entry, or -1.
  FSSDP_FN i32 expert_of(i32 place, i32 n) const {
    return n < h.most_shared ? h.entry_expert[place * g.per_rank + n] : -1;
  }
  FSSDP_FN i32 words() const { return Words ? Words : words_of(g); }
  FSSDP_FN bool has(const RankSet<Words>& ranks, i32 place) const { return ranks.word(place / 64) >> place % 64 & 1; }
  FSSDP_FN Int total(i32 expert) const {
    Int sum = 0;
    FSSDP_UNROLL_4
    for (i32 k = 0; k < g.nodes; ++k) sum += w.by_node[(i64)k * g.experts + expert];
    return sum;
  }
  // Loop bounds, rounded up so that all teams of a warp make the same number of iterations over
  // ranks, and all lanes of a team the same number over its holders: sums inside are collective.
  FSSDP_FN i32 places_end() const { return (g.ranks + th.warp_teams() - 1) / th.warp_teams() * th.warp_teams(); }
  FSSDP_FN i32 shared_end() const { return (h.most_shared + th.lanes() - 1) / th.lanes() * th.lanes(); }
  FSSDP_FN Int level_of(Int tokens, Int ranks) const {
    const Int mean = (tokens + ranks - 1) / ranks;
    return mean + mean / SLACK;
  }

  FSSDP_FN i32 moved_size() const { return g.experts + g.ranks * g.per_rank; }
  FSSDP_FN Int* moved_by(i32 push) const { return w.moved + push % 3 * moved_size(); }
  // By place: load of the rank in the current round, or in another one.
  FSSDP_FN Int* loads_of(i32 which) const { return w.load + which % 2 * g.ranks; }
  FSSDP_FN Int load(i32 place) const { return loads_of(round)[place]; }

  // The largest sum is the room of all ranks below the level.
  FSSDP_FN bool fits() const { return sizeof(Int) > sizeof(i32) || (i64)level * g.ranks < (1ll << 31); }

  // Set the first level, the mean rank load. Return false if Int is too narrow.
  FSSDP_FN bool count(const i32* loads) {
    i64 mine = 0;
    FSSDP_ROLLED
    for (i32 i = th.id(); i < g.nodes * g.experts; i += th.count()) {
      const i32 k = i / g.experts, expert = i % g.experts;
      i64 sum = 0;
      // Sequential loads from global memory would take most of the kernel's time.
      FSSDP_UNROLL_8
      for (i32 s = g.first_source[g.first_rank[k]]; s < g.first_source[g.first_rank[k + 1]]; ++s)
        sum += loads[(i64)g.order[s] * g.experts + expert];
      w.by_node[i] = (Int)sum;
      mine += sum;
    }
    FSSDP_ROLLED
    for (i32 i = th.id(); i < 3 * moved_size(); i += th.count()) w.moved[i] = 0;
    mine = th.warp_sum(mine);
    if (th.in_warp() == 0) w.partial[th.warp()] = mine;
    th.all(true);
    i64 all = 0;
    FSSDP_UNROLL_4
    for (i32 i = 0; i < th.warps(); ++i) all += w.partial[i];
    // No level exceeds that of one rank with all tokens.
    if (sizeof(Int) == sizeof(i32) && all + all / SLACK + g.ranks >= (1ll << 31)) return false;
    level = level_of((Int)all, g.ranks);
    return fits();
  }

  // Split the tokens that start on a node evenly over the expert's holders on this node.
  FSSDP_FN void deal_local() {
    FSSDP_ROLLED
    for (i32 r = th.team(); r < places_end(); r += th.teams()) {
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
        const Int own = Deal<Int, Thread>(th, h.stretch_end[c] - first).part(tokens, c - first, 1);
        w.taken[h.entry[c]] = own;
        dealt += own;
      }
      base = th.sum(base);
      dealt = th.sum(dealt);
      if (th.lane() != 0 || r >= g.ranks) continue;
      w.base[g.place[r]] = base;
      w.load[g.place[r]] = base + dealt;
    }
    th.all(true);
  }

  // Split the tokens that start on nodes without a holder by the holders' room below the level, or
  // evenly if no holder has room.
  FSSDP_FN void deal_foreign() {
    FSSDP_ROLLED
    for (i32 c = th.id(); c < h.begin[g.experts]; c += th.count()) {
      const i32 expert = h.expert[c], begin = h.begin[expert], end = h.begin[expert + 1];
      if (end - begin < 2) continue;
      Int here = 0, room = 0, before = 0;
      FSSDP_UNROLL_4
      for (i32 d = begin; d < end; ++d) {
        const Int below = positive(level - load(h.place[d]));
        here += w.taken[h.entry[d]];
        room += below;
        if (d < c) before += below;
      }
      const Int foreign = total(expert) - here;
      const Deal<Int, Thread> deal(th, room ? room : end - begin);
      const Int own = room ? positive(level - load(h.place[c])) : 1;
      w.served[h.entry[c]] = w.taken[h.entry[c]] + deal.part(foreign, room ? before : c - begin, own);
    }
    th.all(true);
  }

  // Begin a round: ranks below the level receive the tokens of the last push. Update loads, and the
  // sets of ranks that tokens can move to. Return false if no rank is above the level.
  FSSDP_FN bool begin_round() {
    const Int* came = moved_by(pushed);
    const Int* before = loads_of(round++);
    if (round > LOCAL_ROUNDS) local = false;
    bool balanced = true;
    FSSDP_ROLLED
    for (i32 p = th.team(); p < places_end(); p += th.teams()) {
      const bool receives = arriving && p < g.ranks && has(here, p);
      Int load = 0;
      FSSDP_ROLLED
      for (i32 v = 0; v < words(); ++v) {
        u64 bits = 0;
        FSSDP_ROLLED
        for (i32 n = th.lane(); p < g.ranks && n < h.most_shared; n += th.lanes()) {
          const i32 at = p * g.per_rank + n, expert = expert_of(p, n);
          if (expert < 0) break;
          Int served = w.served[at];
          if (v == 0 && receives) w.served[at] = served += coming<true>(expert, at, p, came, before);
          if (v == 0) load += served;
          if (served > 0 && !local) bits |= h.holding(expert, v);
        }
        if (!local) reaches(p, v, bits);
      }
      load = th.sum(load);
      if (p >= g.ranks) continue;
      load += w.base[p];
      if (th.lane() == 0) loads_of(round)[p] = load;
      balanced = balanced && load <= level;
    }
    arriving = false;
    return !th.all(balanced);
  }

  // Store the union of the lanes' sets as word v of the place's set.
  FSSDP_FN void reaches(i32 place, i32 v, u64 bits) const {
    bits = th.either(bits);
    if (th.lane() == 0 && place < g.ranks) w.reach[(i64)place * words() + v] = bits;
  }

  // Compute the sets of ranks that tokens can move to if no token leaves the node it starts on.
  FSSDP_FN void reach_in_nodes() {
    FSSDP_ROLLED
    for (i32 p = th.team(); p < places_end(); p += th.teams()) {
      FSSDP_ROLLED
      for (i32 v = 0; v < words(); ++v) {
        u64 bits = 0;
        FSSDP_ROLLED
        for (i32 n = th.lane(); p < g.ranks && n < h.most_shared; n += th.lanes()) {
          const i32 at = p * g.per_rank + n, expert = expert_of(p, n);
          if (expert < 0) break;
          if (v == 0) w.surplus[at] = surplus_of(expert, at);
          if (w.served[at] <= 0) continue;
          const u64 all = h.holding(expert, v);
          bits |= w.surplus[at] > 0 ? all : all & bits_between(v, g.node_begin[p], g.node_end[p]);
        }
        reaches(p, v, bits);
      }
    }
    th.all(true);
  }
  FSSDP_FN Int surplus_of(i32 expert, i32 at) const {
    const i32 first = h.entry_stretch[at];
    Int sum = -w.by_node[(i64)node_of(g, h, first) * g.experts + expert];
    FSSDP_UNROLL_4
    for (i32 d = first; d < h.stretch_end[first]; ++d) sum += w.served[h.entry[d]];
    return sum;
  }

  // Find the ranks at each distance. `enough`: a distance from which on one rank above the level is
  // enough; below it, the search goes on until every such rank has a distance. Return false if it
  // ends before, because no further rank is found. `deepest`: the last distance, 0 if no rank is
  // above the level; `depths`: incremented per distance.
  FSSDP_FN bool search(i32& deepest, i32& depths, i32 enough) {
    deepest = 0;
    if constexpr (Words == 1) {
      const u64 above = th.bits([&](i32 p) { return p < g.ranks && load(p) > level; });
      here.bits = th.bits([&](i32 p) { return p < g.ranks && load(p) < level; });
      known = here;
      if (th.id() == 0) w.levels[0] = here.bits;
      FSSDP_ROLLED
      while (above & ~known.bits && !(deepest >= enough && above & known.bits)) {
        ++depths;
        const u64 open = ~known.bits, last = here.bits;
        const u64 found = th.bits([&](i32 p) { return p < g.ranks && open >> p & 1 && (w.reach[p] & last); });
        if (!found) return false;
        next.bits = last;
        here.bits = found;
        known.bits |= found;
        ++deepest;
        if (th.id() == 0) w.levels[deepest] = found;
      }
      return true;
    } else {
      FSSDP_ROLLED
      for (i32 v = th.warp(); v < words(); v += th.warps()) {
        const u64 below = th.bits([&](i32 i) { return 64 * v + i < g.ranks && load(64 * v + i) < level; });
        if (th.in_warp() == 0) w.levels[v] = w.known[v] = below;
      }
      th.all(true);
      known.at = w.known;
      bool above = false, none = false;
      FSSDP_ROLLED
      for (i32 p = th.in_warp(); p < g.ranks; p += th.warp_size()) above = above || load(p) > level;
      bool done = !th.warp_any(above);
      FSSDP_ROLLED
      while (!done && !none) {
        done = find_level(deepest + 1, enough, none);
        if (!none) ++deepest;
        ++depths;
      }
      here.at = w.levels + (i64)deepest * words();
      next.at = here.at - words();
      return done;
    }
  }

  // Find the ranks at distance `pushes`, for sets of several words. `none`: no rank was found.
  // Return true if this ends the `search`.
  FSSDP_FN bool find_level(i32 pushes, i32 enough, bool& none) const {
    const u64* last = w.levels + (i64)(pushes - 1) * words();
    bool all = true, any = false;
    none = true;
    FSSDP_ROLLED
    for (i32 v = th.warp(); v < words(); v += th.warps()) {
      const u64 known = w.known[v];
      const u64 found = th.bits([&](i32 i) {
        const i32 p = 64 * v + i;
        u64 meet = 0;
        if (p >= g.ranks || known >> i & 1) return false;
        FSSDP_UNROLL_4
        for (i32 u = 0; u < words(); ++u) meet |= w.reach[(i64)p * words() + u] & last[u];
        return meet != 0;
      });
      const u64 above = th.bits([&](i32 i) { return 64 * v + i < g.ranks && load(64 * v + i) > level; });
      if (th.in_warp() == 0) {
        w.levels[(i64)pushes * words() + v] = found;
        w.known[v] = known | found;
      }
      all = all && !(above & ~known & ~found);
      any = any || above & (known | found);
      none = none && !found;
    }
    none = th.all(none);
    const bool is_enough = pushes >= enough && !th.all(!any);
    return th.all(all) || is_enough;
  }

  // Raise the level to the cut's mean load, because a rank above the level reaches none below it.
  FSSDP_FN void raise() {
    Int tokens = 0, ranks = 0;
    FSSDP_ROLLED
    for (i32 p = th.in_warp(); p < g.ranks; p += th.warp_size())
      if (!has(known, p)) {
        tokens += load(p);
        ++ranks;
      }
    tokens = th.warp_sum(tokens);
    const Int higher = level_of(tokens, th.warp_sum(ranks));
    level = higher > level ? higher : level + 1;
    th.all(true);
  }

  // Destination of a holder's tokens in a push: its own node if a receiver there holds the expert,
  // else any node (in local rounds only for a surplus), else none. `at`: entry of the holder;
  // `place`: place of its rank.
  FSSDP_FN i32 way_of(i32 expert, i32 at, i32 place) const {
    u64 inside = 0, all = 0;
    FSSDP_ROLLED
    for (i32 v = 0; v < words(); ++v) {
      const u64 near = h.holding(expert, v) & next.word(v);
      all |= near;
      inside |= near & bits_between(v, g.node_begin[place], g.node_end[place]);
    }
    if (inside) return IN_NODE;
    return all && (!local || w.surplus[at] > 0) ? ANYWHERE : NO_WAY;
  }

  // Room of an expert's holders among the next receivers, ranks below the level, in [first, last).
  FSSDP_FN Int room(i32 expert, i32 first, i32 last) const {
    Int sum = 0;
    FSSDP_ROLLED
    for (i32 v = Words ? 0 : first / 64; v < words() && 64 * v < last; ++v) {
      u64 bits = h.holding(expert, v) & next.word(v) & bits_between(v, first, last);
      FSSDP_ROLLED
      for (; bits; bits &= bits - 1) sum += level - load(64 * v + th.lowest_bit(bits));
    }
    return sum;
  }

  // Weights of an expert's holders in `here`: of all of them, and of those on the node of a place;
  // and of those before this place, among all, and on the node.
  struct Weights {
    Int all, inside, before, before_inside;
  };
  // Every holder weighs 1.
  FSSDP_FN Weights equal_weights(i32 expert, i32 place) const {
    Weights sum = {0, 0, 0, 0};
    FSSDP_ROLLED
    for (i32 v = 0; v < words(); ++v) {
      const u64 bits = h.holding(expert, v) & here.word(v), earlier = bits & bits_below(place - 64 * v);
      const u64 node = bits_between(v, g.node_begin[place], g.node_end[place]);
      sum.all += th.count_bits(bits);
      sum.inside += th.count_bits(bits & node);
      sum.before += th.count_bits(earlier);
      sum.before_inside += th.count_bits(earlier & node);
    }
    return sum;
  }
  // A holder weighs its room below the level, by `loads`.
  FSSDP_FN Weights rooms(i32 expert, i32 place, const Int* loads) const {
    Weights sum = {0, 0, 0, 0};
    FSSDP_ROLLED
    for (i32 v = 0; v < words(); ++v) {
      u64 bits = h.holding(expert, v) & here.word(v);
      FSSDP_ROLLED
      for (; bits; bits &= bits - 1) {
        const i32 other = 64 * v + th.lowest_bit(bits);
        const Int room = level - loads[other];
        const Int inside = g.node_begin[place] <= other && other < g.node_end[place] ? room : 0;
        sum.all += room;
        sum.inside += inside;
        sum.before += other < place ? room : 0;
        sum.before_inside += other < place ? inside : 0;
      }
    }
    return sum;
  }

  // Tokens that arrive at a holder: its part of the tokens that the previous push (`moved`) took
  // from the expert's holders at the next larger distance, on the same node or on all nodes. At
  // distance 0, parts are proportional to the room below the level, by `loads`; else equal.
  template <bool Rooms>
  FSSDP_FN Int coming(i32 expert, i32 at, i32 place, const Int* moved, const Int* loads) const {
    const Int anywhere = moved[expert], inside = moved[g.experts + h.entry_stretch[at]];
    if (!(anywhere | inside)) return 0;
    const Weights sum = Rooms ? rooms(expert, place, loads) : equal_weights(expert, place);
    const Int own = Rooms ? level - loads[place] : 1;
    Int got = 0;
    if (anywhere) got += Deal<Int, Thread>(th, sum.all).part(anywhere, sum.before, own);
    if (inside) got += Deal<Int, Thread>(th, sum.inside).part(inside, sum.before_inside, own);
    return got;
  }

  // Ranks at distance `pushes`, 1 or more, receive their part of the tokens that the previous push
  // took. They release the excess over the level, first tokens that stay on the node; at distance 1
  // at most the receivers' room, expert by expert. Several ranks may fill the same room: a receiver
  // that is above the level then releases tokens in the next round. `before`: the previous push
  // took tokens. Return false if no rank had tokens above the level.
  FSSDP_FN bool push(i32 pushes, bool before) {
    const Int* came = moved_by(pushed++);
    Int* leaving = moved_by(pushed);
    FSSDP_ROLLED
    for (i32 i = th.id(); i < moved_size(); i += th.count()) moved_by(pushed + 1)[i] = 0;
    bool none = true;
    FSSDP_ROLLED
    for (i32 p = th.team(); p < places_end(); p += th.teams()) {
      const bool mine = p < g.ranks && has(here, p);
      if (!th.warp_any(mine)) continue;
      Int load = 0, inside = 0;
      FSSDP_ROLLED
      for (i32 n = th.lane(); mine && n < h.most_shared; n += th.lanes()) {
        const i32 at = p * g.per_rank + n, expert = expert_of(p, n);
        if (expert < 0) break;
        const Int got = (before ? coming<false>(expert, at, p, came, nullptr) : 0) + w.served[at];
        w.served[at] = got;
        load += got;
        const i32 way = way_of(expert, at, p);
        Int most = way == NO_WAY ? 0 : got;
        if (way == ANYWHERE && local) most = least(got, w.surplus[at]);
        if (pushes == 1 && most) {
          const i32 first = way == IN_NODE ? g.node_begin[p] : 0, last = way == IN_NODE ? g.node_end[p] : g.ranks;
          most = least(most, room(expert, first, last));
        }
        if (way == IN_NODE) inside += most;
        // A negative value, -1 - n, marks n tokens that stay on the node.
        w.taken[at] = way == IN_NODE ? -1 - most : most;
      }
      load = th.sum(load);
      inside = th.sum(inside);
      const Int above = mine ? positive(w.base[p] + load - level) : 0;
      none = none && !above;
      Running<Int> near = {0}, far = {0};
      FSSDP_ROLLED
      for (i32 n = th.lane(); n < shared_end(); n += th.lanes()) {
        const i32 at = p * g.per_rank + n, expert = mine ? expert_of(p, n) : -1;
        const Int leaves = expert >= 0 ? w.taken[at] : 0;
        const bool inner = leaves < 0;
        const Int most = inner ? -1 - leaves : leaves;
        const Int upto_near = near.upto(th, inner ? most : 0), upto_far = far.upto(th, inner ? 0 : most);
        const Int ahead = inner ? upto_near - most : inside + upto_far - most;
        const Int taken = least(most, positive(above - ahead));
        if (!taken) continue;
        w.served[at] -= taken;
        th.add(leaving + (inner ? g.experts + h.entry_stretch[at] : expert), taken);
      }
    }
    here = next;
    if constexpr (Words == 1) {
      const bool moved = !th.all(none);
      if (pushes > 1) next.bits = w.levels[pushes - 2];
      return moved;
    } else {
      next.at -= words();
      return !th.all(none);
    }
  }

  // Run rounds until no rank is above the level or a limit is reached. Return false if Int is too
  // narrow.
  FSSDP_FN bool balance() {
    i32 depths = 0, deepest;
    bool raised = false;
    local = g.nodes > 1 && h.begin[g.experts] - g.experts > g.ranks;
    // The last call of `begin_round` starts no round: ranks receive the tokens of the last push.
    FSSDP_ROLLED
    while (raised || (begin_round() && round <= MAX_ROUNDS && depths < MAX_DEPTH)) {
      if (local) reach_in_nodes();
      const i32 enough = !local ? g.ranks : round == 1 ? 1 : LOCAL_DEPTH;
      // A new level needs a new search, but no new round.
      raised = !search(deepest, depths, enough) && !local;
      if (raised) {
        raise();
        if (!fits()) return false;
        continue;
      }
      bool moved = false;
      FSSDP_ROLLED
      for (i32 pushes = deepest; pushes > 0; --pushes) {
        arriving = push(pushes, arriving);
        moved = moved || arriving;
      }
      if (!moved) {
        local = false;
        // Without a push there was no barrier since the search, which reads what a round writes.
        th.all(true);
      }
    }
    return true;
  }

  // Raise `noted` to the largest rank load over the mean, in units of 1 / NOTED, rounded up: [0] of
  // these quotas, [1] with each expert on the rank where Megatron builds it.
  FSSDP_FN void note(i64* noted) const {
    const i32 built = (g.experts + g.ranks - 1) / g.ranks;
    i64 all = 0;
    FSSDP_UNROLL_4
    for (i32 i = 0; i < th.warps(); ++i) all += w.partial[i];
    if (!all) return;
    FSSDP_ROLLED
    for (i32 p = th.id(); p < g.ranks; p += th.count()) {
      Int stock = 0;
      FSSDP_ROLLED
      for (i32 expert = p * built; expert < least(g.experts, (p + 1) * built); ++expert) stock += total(expert);
      th.raise(noted, ((i64)load(p) * g.ranks * NOTED + all - 1) / all);
      th.raise(noted + 1, ((i64)stock * g.ranks * NOTED + all - 1) / all);
    }
  }

  // Compute `served` of all shared holders, and `note` unless `noted` is null. Return false if Int
  // is too narrow. If no holder is shared, there is nothing to split: only loads are noted.
  FSSDP_FN bool solve(const i32* loads, i64* noted) {
    const bool splits = h.most_shared > 0;
    if (!splits && !noted) return true;
    if (!count(loads)) return false;
    deal_local();
    if (splits) {
      deal_foreign();
      if (!balance()) return false;
    }
    if (noted) note(noted);
    return true;
  }
};

}  // namespace fssdp
