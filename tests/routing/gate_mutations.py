"""Bugs to plant in the kernels after the gate, one at a time; the host runs of ``test_gate_kernels.py`` must catch
each."""

from __future__ import annotations

# name: (file, text, its replacement, sanitizer)
# fmt: off
MUTATIONS: dict[str, tuple[str, str, str, str]] = {
    "the level is not a barrier apart": ("quotas.cuh", "    w.partial[th.id()] = mine;\n    th.all(true);\n", "    w.partial[th.id()] = mine;\n", "thread"),
    "tokens of a node are counted once too often": ("quotas.cuh", "s < g.first_source[g.first_rank[k + 1]]; ++s", "s <= g.first_source[g.first_rank[k + 1]]; ++s", "address"),
    "no barrier after the even start": ("quotas.cuh", "      if (th.lane() == 0) w.base[r] = sum;\n    }\n    th.all(true);\n", "      if (th.lane() == 0) w.base[r] = sum;\n    }\n", "thread"),
    "no barrier before foreign tokens are dealt": ("quotas.cuh", "r += th.teams()) add_up(r);\n    th.all(true);\n", "r += th.teams()) add_up(r);\n", "thread"),
    "every lane deals foreign tokens": ("quotas.cuh", "        if (c < end) w.served[c] += dealt(foreign", "        if (c <= end) w.served[c] += dealt(foreign", "thread"),
    "foreign tokens are dealt twice": ("quotas.cuh", "const i64 foreign = total(expert) - here.before", "const i64 foreign = total(expert)", "address"),
    "a round begins without a barrier": ("quotas.cuh", "    return !th.all(balanced);", "    return !(th.lanes() == 1 ? th.all(balanced) : balanced);", "thread"),
    "offers of the last round stay": ("quotas.cuh", "      w.offered[c] = 0;\n      if (!local", "      if (!local", "address"),
    "labels are read while they are written": ("quotas.cuh", "i32* after = w.depth + pushes % 2 * g.ranks;", "i32* after = w.depth + (pushes - 1) % 2 * g.ranks;", "thread"),
    "ranks without a label count as near": ("quotas.cuh", "if (labels[h.rank[d]] == pushes - 1) way", "if (labels[h.rank[d]] >= pushes - 1) way", "address"),
    "every holder is in the stretch": ("quotas.cuh", "way |= first <= d && d < last ? IN_NODE : ANYWHERE;", "way |= first <= d ? IN_NODE : ANYWHERE;", "address"),
    "only lane 0 looks for a way": ("quotas.cuh", "        if (th.any(found)) {", "        if (found) {", "thread"),
    "labels of some ranks get lost": ("quotas.cuh", "      if (th.lane() == 0) after[r] = label;", "      if (th.lane() == 0 && label != FAR) after[r] = label;", "address"),
    "no barrier after a raise": ("quotas.cuh", "    level = next > level ? next : level + 1;\n    th.all(true);\n", "    level = next > level ? next : level + 1;\n", "thread"),
    "a raise counts every rank": ("quotas.cuh", "      if (depth[r] == FAR) {\n        tokens", "      if (depth[r] != 0) {\n        tokens", "address"),
    "what was offered is not accepted on the way": ("quotas.cuh", "if (c >= 0) w.served[c] += w.offered[c];", "if (c >= 0 && pushes > 1) w.served[c] += w.offered[c];", "address"),
    "more is taken than there is above": ("quotas.cuh", "least(most, positive(above - (upto - most)))", "least(most, positive(above))", "address"),
    "what is taken is served too": ("quotas.cuh", "          w.served[c] -= w.taken[c];\n", "", "address"),
    "what leaves is counted at all distances": ("quotas.cuh", "return depth[h.rank[c]] == pushes && w.way[c] == way ?", "return depth[h.rank[c]] >= pushes && w.way[c] == way ?", "address"),
    "offers go to farther ranks": ("quotas.cuh", "    if (depth[rank] != pushes) return 0;", "    if (depth[rank] < pushes) return 0;", "address"),
    "the last of a stretch is all of it": ("quotas.cuh", "          whole += other;", "          whole = other;", "address"),
    "no barrier after offers": ("quotas.cuh", "dealt(anywhere, upto - own, own, all);\n      }\n    }\n    th.all(true);\n", "dealt(anywhere, upto - own, own, all);\n      }\n    }\n", "thread"),
    "more is accepted than there is room": ("quotas.cuh", "if (all > room) w.offered[c]", "if (all > 2 * room) w.offered[c]", "address"),
    "nothing is given back": ("quotas.cuh", "if (pushes == 1 && !accept()) give_back();", "if (pushes == 1) accept();", "address"),
    "all is given back": ("quotas.cuh", "const i64 back = all - team_sum(accepted);", "const i64 back = all - 0 * team_sum(accepted);", "address"),
    "no barrier after giving back": ("quotas.cuh", "w.served[c] += dealt(back, upto - own, own, all);\n      }\n    }\n    th.all(true);\n", "w.served[c] += dealt(back, upto - own, own, all);\n      }\n    }\n", "thread"),
    "lanes leave a loop early": ("quotas.cuh", "c < padded(begin, end); c += th.lanes()) {\n        const i64 own = c < end ? weight(", "c < end; c += th.lanes()) {\n        const i64 own = c < end ? weight(", "thread"),
    "a share is rounded up": ("gate.cuh", "  return quotient;", "  return quotient + (rest > 0);", "address"),
    "a running sum starts anew": ("gate.cuh", "    before = th.last(sum);", "    before = th.last(value);", "address"),
    "kept tokens are read too early": ("sources.cuh", "w.served[c]);\n    }\n    th.all(true);\n", "w.served[c]);\n    }\n", "thread"),
    "a source starts where the rank does": ("sources.cuh", "const i64 mine = loads[(i64)source * g.experts + expert], earlier = between(first, own, expert);", "const i64 mine = loads[(i64)source * g.experts + expert], earlier = between(first, own + 1, expert);", "address"),
    "what met on a node before is met again": ("sources.cuh", "if (k < node) away -= n.kept + n.met;", "if (k < node) away -= n.kept;", "address"),
    "room of other nodes begins at zero": ("sources.cuh", "      rooms += n.room - n.met;\n", "", "address"),
    "all blocks add up": ("reroute.cuh", "  if (!th.all(last)) return;\n", "  th.all(last);\n", "thread"),
    "no barrier before a block arrives": ("reroute.cuh", "  th.all(true);\n  bool last", "  bool last", "thread"),
    "arrivals are not reset": ("reroute.cuh", "    if (last) th.store_relaxed(arrived, 0u);\n", "", "address"),
    "the last tile is whole": ("reroute.cuh", "return tokens - i * tile < tile ? tokens : (i + 1) * tile;", "return (i + 1) * tile;", "address"),
    "tiles begin at their own count": ("reroute.cuh", "      *at = sum;\n      sum += own;", "      sum += own;\n      *at = sum;", "address"),
    "a holder takes one token too many": ("reroute.cuh", "part.begin <= place && place < part.end", "part.begin <= place && place <= part.end", "address"),
    "places are counted by holder": ("reroute.cuh", "        place += chosen[i];", "        place += own;", "address"),
    "gradients come from the holder before": ("reroute.cuh", "place >= p.last[c]) ++c;", "place > p.last[c]) ++c;", "address"),
}
# fmt: on
