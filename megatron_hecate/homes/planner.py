"""Periodic search for better homes: a permutation of the experts of every layer.

An assignment is the order of experts over *positions*: ``order[p]`` is the expert at position p. A
position belongs to the same rank forever. Replicas are planned for loads by position,
``load[order]``, so their planner is independent of expert numbers.

Hot experts have replicas, so the weight of an expert is the load that remains on its home's rank
and node while its currently planned replicas share its tokens; a second pass weighs experts without
replicas. Pairs of experts swap positions, the best pair first, as long as that evens out the
weights. Prefixes of the swap list are then scored by planning replicas for other loads. Letters in
shapes: L layers, E experts, T iterations, R ranks, K nodes, F kinds of weights (rank and node).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np

from megatron_hecate.plan.compiled import in_turn
from megatron_hecate.plan.cost import CopyCost
from megatron_hecate.plan.maxflow import balance, compiled
from megatron_hecate.plan.placement import Placement
from megatron_hecate.plan.replicas import plan_replicas, problem_of
from megatron_hecate.plan.search import SLACK, Problem, cost_beside_load
from megatron_hecate.plan.world import World

# iterations whose loads score the swaps
JUDGED: int = 3
# minimum relative saving of a layer; smaller savings are below the error of forecast and model
LEAST: float = 0.02
# minimum ratio of a move's saving to its cost
MARGIN: float = 2.0
# prefixes of the swap list that are scored: all n swaps, the first n/4, n/16, ...
FEWER: int = 4
Kinds = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]


@dataclasses.dataclass(frozen=True, eq=False)
class HomeAssignment:
    """Better homes.

    Args:
        order: [L, E] int64, the expert at each position.
        num_bytes: bytes sent by all ranks together for the move.
        saved: seconds saved per iteration, by the cost model.
    """

    order: np.ndarray
    num_bytes: float
    saved: float


class Choice(NamedTuple):
    """New ``order`` [E] of one layer, and the tokens ``saved`` per iteration."""

    layer: int
    order: np.ndarray
    saved: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class HomeSearch:
    """Search for homes that save more than the move costs; deterministic, so equal on every rank.

    Args:
        homes: placement whose ``home`` [E] is the rank of each position; free slots are for
            replicas.
        world: nodes and links.
        cost: cost of replicas per iteration.
        expert_bytes: bytes that move with an expert, from one rank: weights, main parameters and
            optimizer state.
        token_seconds: seconds of one token in one expert (`LayerShape.token_seconds`).
        horizon: expected lifetime of new homes in iterations.
    """

    homes: Placement
    world: World
    cost: CopyCost
    expert_bytes: float
    token_seconds: float
    horizon: int

    def find(self, load: np.ndarray, order: np.ndarray) -> HomeAssignment | None:
        """Find better homes for all layers of a stage; ``None`` if none pay."""
        return self.afford(self.choose(load, order, range(len(order))), order)

    def choose(self, load: np.ndarray, order: np.ndarray, layers: Iterable[int]) -> list[Choice]:
        """List promising new orders of each layer in ``layers``.

        The older half of the iterations proposes swaps, and the newer half scores them, so a gain
        counts only if it lasts that long.

        Args:
            load: [T, L, E] or [L, E] tokens per expert in past iterations, oldest first, summed
                over the group.
            order: [L, E] int, the expert at each position now.
            layers: indices of the layers.
        """
        homes, world, cost = self.homes, self.world, self.cost
        window = load.astype(np.float64).reshape(-1, *order.shape)
        middle = len(window) // 2
        problem = problem_of(homes.homes_only, world, cost)
        past = window[: max(middle, 1)].mean(axis=0)
        judged = np.unique(np.linspace(middle, len(window) - 1, JUDGED).astype(int))
        # A swap is scored only if it wins half of its cost, at the price of all ranks swapping
        # concurrently in pairs.
        move_tokens = MARGIN / world.num_ranks / self.horizon / self.token_seconds
        near = move_tokens * world.speeds.intra.seconds(self.expert_bytes)
        far = move_tokens * world.speeds.inter.seconds(self.expert_bytes)

        def tokens(layer: int, positions: np.ndarray) -> float:
            """Average the layer's cost over recent iterations, in tokens.

            Each iteration has the replicas that are planned for the loads of the iteration before.
            """
            plan = homes.homes_only
            total = 0.0
            loads = np.ascontiguousarray(window[:, layer, positions])
            for t in judged:
                plan = plan_replicas(loads[max(t - 1, 0)], homes, world, cost=cost, previous=plan)
                total += _layer_tokens(loads[t], plan.table.copy(), problem)
            return total / len(judged)

        choices = []
        for layer in layers:
            current = order[layer].astype(np.int64)
            plan = plan_replicas(past[layer, current], homes, world, cost=cost)
            current_tokens = tokens(layer, current)
            for placed in (plan, homes.homes_only)[: 2 if plan.num_replicas else 1]:
                kinds = _weights(past[layer, current], placed.holders, problem)
                pairs = _swaps(kinds, problem.home, world.node_index, (near, far))
                while len(pairs):
                    new = _swapped(current, pairs, problem.home)
                    if (saved := current_tokens - tokens(layer, new)) > LEAST * current_tokens:
                        choices.append(Choice(layer, new, saved))
                    pairs = pairs[: len(pairs) // FEWER]
        return choices

    def afford(self, choices: Iterable[Choice], order: np.ndarray) -> HomeAssignment | None:
        """Combine at most one choice per layer, by descending gain per move."""
        world = self.world
        size = self.expert_bytes
        best = None
        best_gain = 0.0
        affordable: dict[int, tuple[float, Choice, np.ndarray]] = {}

        def gain(saved: float, moves: np.ndarray) -> float:
            return self.horizon * self.token_seconds * saved - MARGIN * _seconds(moves, world, size)

        options = []
        for choice in choices:
            moves = _moves(order[choice.layer], choice.order, self.homes.home, world)
            options.append((gain(choice.saved, moves), choice, moves))
        for option in sorted(options, key=lambda option: -option[0] / option[2][::2].sum()):
            layer = option[1].layer
            if layer in affordable and option[0] <= affordable[layer][0]:
                continue
            affordable[layer] = option
            moves = np.sum([layer_moves for _, _, layer_moves in affordable.values()], axis=0)
            saved = sum(choice.saved for _, choice, _ in affordable.values())
            if (new_gain := gain(saved, moves)) > best_gain:
                new = order.astype(np.int64)
                for _, chosen, _ in affordable.values():
                    new[chosen.layer] = chosen.order
                num_bytes = float(moves[::2].sum() * size)
                best = HomeAssignment(new, num_bytes, saved * self.token_seconds)
                best_gain = new_gain
        return best


@compiled
def _layer_tokens(load: np.ndarray, table: np.ndarray, problem: Problem) -> float:
    """Compute a plan's cost like `plan_cost`, with the crossings of a balanced split.

    Tokens also cross nodes if their own node has a holder without room.
    """
    num_ranks = len(table)
    size = problem.begin[1:] - problem.begin[:-1]
    tokens = np.rint(load).astype(np.int64)
    begin, rank, share, computed, _ = balance(
        tokens, table, int(load.sum() / num_ranks / SLACK), False
    )
    leaves = np.zeros(len(size))
    arrives = np.zeros(len(size))
    shares = np.zeros(len(size))
    for e in range(len(load)):
        shares[:] = 0
        for c in range(begin[e], begin[e + 1]):
            shares[problem.node[rank[c]]] += share[c]
        excess = shares - load[e] * size / num_ranks
        arrives += np.maximum(excess, 0)
        leaves += np.maximum(-excess, 0)
    crossing = problem.crossing * (np.maximum(leaves, arrives) / size).max()
    return max(computed) + crossing + cost_beside_load(load, problem, table)[1]


def _weights(load: np.ndarray, holders: np.ndarray, problem: Problem) -> Kinds:
    """Weigh experts by the load that remains on their home's rank, and that arrives on its node.

    Args:
        load: [E] tokens.
        holders: [E, R] bool, ranks that share an expert's tokens.
        problem: homes, nodes and costs.

    Returns:
        [E, F] weights relative to the fullest group; [E, F] group of the position (its rank or its
        node); [E, F] 1 over the group's ranks; [F] tokens that the fullest group costs beyond an
        even distribution.
    """
    home, node = problem.home, problem.node
    size = np.diff(problem.begin)
    # [E, K] nodes with a holder: their own tokens do not arrive from elsewhere
    has_holder = np.stack([holders[:, node == k].any(axis=1) for k in range(len(size))], axis=1)
    arriving = problem.crossing * (1 - has_holder @ size / len(node))
    remaining = load / holders.sum(axis=1)
    weights = np.stack([remaining, arriving * remaining], axis=1)
    groups = np.stack([home, node[home]], axis=1)
    parts = np.stack([np.ones(len(home)), 1 / size[node[home]]], axis=1)
    fullest = np.array(
        [np.bincount(groups[:, f], weights[:, f] * parts[:, f]).max() for f in (0, 1)]
    )
    excess = np.maximum(fullest - weights.sum(axis=0) / len(node), 0)
    return weights / np.maximum(fullest, 1e-300), groups, parts, excess


@compiled
def _swaps(
    kinds: Kinds, home: np.ndarray, node: np.ndarray, costs: tuple[float, float]
) -> np.ndarray:
    """List pairs of positions that swap experts, [S, 2]; each is the best for a fullest group.

    The best pair lowers the sum of fourth powers most. That sum is dominated by the largest weight,
    and still decreases when one of several equally full groups gets lighter.
    """
    adds, group, part, price = kinds
    near, far = costs
    num_experts, num_kinds = adds.shape
    total = np.zeros((num_kinds, len(node)))
    weights = np.empty(adds.shape)
    full = np.empty(num_kinds, np.int64)
    pairs = np.empty((num_experts, 2), np.int64)
    adds = adds.copy()
    for p in range(num_experts):
        for f in range(num_kinds):
            total[f, group[p, f]] += adds[p, f] * part[p, f]
    for step in range(num_experts):
        for f in range(num_kinds):
            full[f] = np.argmax(total[f])
            for p in range(num_experts):
                weights[p, f] = total[f, group[p, f]]
        best = 0.0
        for p in range(num_experts):
            if not (group[p] == full).any():
                continue
            for q in range(num_experts):
                if home[p] == home[q]:
                    continue
                gain = -near if node[home[p]] == node[home[q]] else -far
                for f in range(num_kinds):
                    if group[p, f] != group[q, f]:
                        added, x, y = adds[q, f] - adds[p, f], weights[p, f], weights[q, f]
                        v, w = x + added * part[p, f], y - added * part[q, f]
                        x, y, v, w = x * x, y * y, v * v, w * w
                        gain += price[f] * (x * x + y * y - v * v - w * w)
                if gain > best:
                    best, pairs[step, 0], pairs[step, 1] = gain, p, q
        if best == 0:
            return pairs[:step]
        i, j = pairs[step]
        for f in range(num_kinds):
            added = adds[j, f] - adds[i, f]
            total[f, group[i, f]] += added * part[i, f]
            total[f, group[j, f]] -= added * part[j, f]
            adds[i, f], adds[j, f] = adds[j, f], adds[i, f]
    return pairs


def _swapped(current: np.ndarray, pairs: np.ndarray, home: np.ndarray) -> np.ndarray:
    """Apply swaps to an order; experts that end on their old rank keep their old position."""
    new = current.copy()
    order = current.copy()
    position = np.argsort(home, kind="stable")
    for pair in pairs:
        new[pair] = new[pair[::-1]]
    came = (home[np.argsort(current)[new]] != home)[position]
    has_left = (home[np.argsort(new)[current]] != home)[position]
    order[position[has_left]] = new[position[came]]
    return order


def _moves(current: np.ndarray, order: np.ndarray, home: np.ndarray, world: World) -> np.ndarray:
    """Count moved experts by rank, [4, R]: sent and received in the node, then across nodes."""
    origin = home[np.argsort(current)[order]]
    node = world.node_index
    inside = node[origin] == node[home]
    ends = [end[mask] for mask in ((origin != home) & inside, ~inside) for end in (origin, home)]
    return np.array([np.bincount(end_ranks, minlength=world.num_ranks) for end_ranks in ends])


def _seconds(moves: np.ndarray, world: World, expert_bytes: float) -> float:
    """Estimate the duration of ``moves`` [4, R] if all ranks send and receive concurrently."""
    node, links = world.node_index, world.speeds
    # the ranks of a node share their network adapters, so a node's mean counts
    across = max(
        (np.bincount(node, weights=rank_moves) / np.bincount(node)).max()
        for rank_moves in moves[2:]
    )
    return max(
        links.intra.seconds(moves[:2].max() * expert_bytes),
        links.inter.seconds(across * expert_bytes),
    )


def compile_home_planner(notice: Callable[[], None] = lambda: None) -> None:
    """Compile the functions of the search by planning one small layer.

    Args:
        notice: called first if code is not cached, so that compiling takes seconds.
    """
    search = HomeSearch(
        homes=Placement.initial(8, 4, num_slots=1),
        world=World(node=(0, 0, 1, 1)),
        cost=CopyCost(crossing=1.0),
        expert_bytes=1.0,
        token_seconds=1.0,
        horizon=1000,
    )
    load = np.array([90, 1, 30, 1, 5, 0, 2, 0])
    with in_turn(notice):
        search.find(load[None], np.arange(8)[None])
