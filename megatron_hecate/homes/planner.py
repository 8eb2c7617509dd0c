"""Periodic search for better homes: a permutation of the experts of every layer.

An assignment is the order of experts over *positions*: ``order[p]`` is the expert at position p. A
position belongs to the same rank forever. Replicas are planned for loads by position,
``load[order]``, so their planner is independent of expert numbers.

Hot experts have replicas, so the weight of an expert is the load that remains on its home's rank
and node while its currently planned replicas share its tokens; a second pass weighs experts without
replicas. Pairs of experts swap positions, the best pair first, as long as that evens out the
weights. Prefixes of the swap list are then scored by planning replicas for other loads. Letters in
shapes: L layers, E experts, T iterations, R ranks, K nodes, F kinds of weights.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np

from megatron_hecate.plan.cost import CopyCost
from megatron_hecate.plan.maxflow import balance, compiled
from megatron_hecate.plan.placement import Placement
from megatron_hecate.plan.replicas import plan_replicas, problem_of
from megatron_hecate.plan.search import SCATTERED, SLACK, Problem, cost_beside_load
from megatron_hecate.plan.world import World

# iterations whose loads score the swaps
JUDGED: int = 3
# minimum relative saving of a layer; smaller savings are below the error of forecast and model
LEAST: float = 0.02
# prefixes of the swap list that are scored: all n swaps, the first n/4, n/16, ...
FEWER: int = 4
Kinds = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]


@dataclasses.dataclass(frozen=True, eq=False)
class HomeAssignment:
    """Better homes.

    Args:
        order: [L, E] int64, the expert at each position.
        num_bytes: bytes sent by all ranks together for the move.
        seconds: duration of the move if all ranks send and receive concurrently and nothing hides.
        saved: seconds saved per iteration, by the cost model.
    """

    order: np.ndarray
    num_bytes: float
    seconds: float
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
        margin: minimum ratio of a move's saving to its cost.
        most_bytes: limit for bytes sent by one rank per search.

    Raises:
        ValueError: for a number that is not above 0.
    """

    homes: Placement
    world: World
    cost: CopyCost
    expert_bytes: float
    token_seconds: float
    horizon: int
    margin: float = 2.0
    most_bytes: float = math.inf

    def __post_init__(self) -> None:
        for name in ("expert_bytes", "token_seconds", "horizon", "margin", "most_bytes"):
            if not (value := getattr(self, name)) > 0:
                raise ValueError(f"{name}={value} must be more than 0")

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

        Raises:
            ValueError: for shapes that do not fit, loads that are negative or not finite, or an
                order that is no permutation.
        """
        homes, world, cost = self.homes, self.world, self.cost
        window = self._checked_window(load, order)
        half = len(window) // 2
        problem = problem_of(homes.homes_only, world, cost)
        past = window[: max(half, 1)].mean(axis=0)
        judged = np.unique(np.linspace(half, len(window) - 1, JUDGED).astype(int))
        # A swap is scored only if it wins half of its cost, at the price of all ranks swapping
        # concurrently in pairs.
        each = self.margin / world.num_ranks / self.horizon / self.token_seconds
        near, far = (
            each * link.seconds(self.expert_bytes)
            for link in (world.speeds.intra, world.speeds.inter)
        )
        limits = (near, far, self.most_bytes / self.expert_bytes)

        def tokens(layer: int, now: np.ndarray) -> float:
            """Average the layer's cost over recent iterations, in tokens.

            Each iteration has the replicas that are planned for the loads of the iteration before.
            """
            plan = homes.homes_only
            total = 0.0
            loads = np.ascontiguousarray(window[:, layer, now])
            for t in judged:
                plan = plan_replicas(loads[max(t - 1, 0)], homes, world, cost=cost, previous=plan)
                total += _layer_tokens(loads[t], plan.table.copy(), problem)
            return total / len(judged)

        choices = []
        for layer in layers:
            now = order[layer].astype(np.int64)
            plan = plan_replicas(past[layer, now], homes, world, cost=cost)
            before = tokens(layer, now)
            for placed in (plan, homes.homes_only)[: 2 if plan.num_replicas else 1]:
                kinds = _weights(past[layer, now], placed.holders, problem)
                pairs = _swaps(kinds, problem.home, world.node_index, limits)
                while len(pairs):
                    new = _swapped(now, pairs, problem.home)
                    if (saved := before - tokens(layer, new)) > LEAST * before:
                        choices.append(Choice(layer, new, saved))
                    pairs = pairs[: len(pairs) // FEWER]
        return choices

    def _checked_window(self, load: np.ndarray, order: np.ndarray) -> np.ndarray:
        """Return ``load`` as [T, L, E] float64; arguments and errors as in `choose`."""
        homes, world = self.homes, self.world
        window = np.asarray(load, dtype=np.float64)
        if window.ndim == 2:
            window = window[None]
        fits = (
            window.ndim == 3
            and len(window)
            and window.shape[1:] == order.shape == (len(order), homes.num_experts)
        )
        fits = fits and (np.sort(order, axis=1) == np.arange(homes.num_experts)).all()
        if (
            not fits
            or world.num_ranks != homes.num_ranks
            or not (np.isfinite(window) & (window >= 0)).all()
        ):
            raise ValueError(
                f"load {np.shape(load)} must be finite and 0 or more, order {order.shape} must "
                f"name each of {homes.num_experts} experts once in every layer, and "
                f"{world.num_ranks} ranks be {homes.num_ranks}"
            )
        return window

    def afford(self, choices: Iterable[Choice], order: np.ndarray) -> HomeAssignment | None:
        """Combine at most one choice per layer, by descending gain per move, within limits."""
        world = self.world
        size = self.expert_bytes
        best = None
        most = 0.0
        taken: dict[int, tuple[float, Choice, np.ndarray]] = {}

        def gain(saved: float, moves: np.ndarray) -> float:
            return self.horizon * self.token_seconds * saved - self.margin * _seconds(
                moves, world, size
            )

        ways = [
            (choice, _moves(order[choice.layer], choice.order, self.homes.home, world))
            for choice in choices
        ]
        pays = [(gain(choice.saved, moves), choice, moves) for choice, moves in ways]
        for own in sorted(pays, key=lambda way: -way[0] / way[2][::2].sum()):
            chosen = {**taken, own[1].layer: own}
            moves = np.sum([of_layer for _, _, of_layer in chosen.values()], axis=0)
            worse = own[0] <= taken[own[1].layer][0] if own[1].layer in taken else False
            if worse or moves[::2].sum(axis=0).max() * size > self.most_bytes:
                continue
            taken = chosen
            saved = sum(choice.saved for _, choice, _ in chosen.values())
            if (now := gain(saved, moves)) > most:
                new = order.astype(np.int64)
                for layer, (_, choice, _) in chosen.items():
                    new[layer] = choice.order
                seconds = _seconds(moves, world, size)
                num_bytes = float(moves[::2].sum() * size)
                best = HomeAssignment(new, num_bytes, seconds, saved * self.token_seconds)
                most = now
        return best


@compiled
def _layer_tokens(load: np.ndarray, table: np.ndarray, problem: Problem) -> float:
    """Compute a plan's cost like `plan_cost`, with the crossings of a balanced split.

    Tokens also cross nodes if their own node has a holder without room.
    """
    num_ranks = len(table)
    size = problem.begin[1:] - problem.begin[:-1]
    whole = np.rint(load).astype(np.int64)
    begin, rank, share, computed, _ = balance(
        whole, table, int(load.sum() / num_ranks / SLACK), False
    )
    leaves = np.zeros(len(size))
    arrives = np.zeros(len(size))
    taken = np.zeros(len(size))
    for e in range(len(load)):
        taken[:] = 0
        for c in range(begin[e], begin[e + 1]):
            taken[problem.node[rank[c]]] += share[c]
        more = taken - load[e] * size / num_ranks
        arrives += np.maximum(more, 0)
        leaves += np.maximum(-more, 0)
    crossing = problem.crossing * (np.maximum(leaves, arrives) / size).max()
    return max(computed) + crossing + cost_beside_load(load, problem, table)[1]


def _weights(load: np.ndarray, holders: np.ndarray, problem: Problem) -> Kinds:
    """Weigh experts by the load that remains on their home's rank and node.

    Args:
        load: [E] tokens.
        holders: [E, R] bool, ranks that share an expert's tokens.
        problem: homes, nodes and costs.

    Returns:
        [E, F] weights relative to the fullest group; [E, F] group of the position (its rank or its
        node); [E, F] 1 over the group's ranks; [F] tokens that the fullest group costs beyond an
        even distribution.
    """
    home = problem.home
    num_ranks = len(problem.node)
    size = np.diff(problem.begin)
    # [E, K] holders by node
    per_node = [holders[:, problem.node == k].sum(axis=1) for k in range(len(size))]
    held = np.stack(per_node, axis=1)
    count = held.sum(axis=1)
    own = held[np.arange(len(home)), problem.node[home]]
    crossing = load * (1 - ((held > 0) * size).sum(axis=1) / num_ranks)
    sent = np.where(own > SCATTERED, 1, own - 1) if problem.scatters else count - 1

    def exposed(copying: float) -> float:
        hidden = min(copying * problem.out, problem.hidden) + min(
            copying * (1 - problem.out), problem.hidden
        )
        return copying - (1 - problem.contention) * hidden

    by_rank = (home, np.ones(len(home)))
    by_node = (problem.node[home], 1 / size[problem.node[home]])
    kinds: list[tuple[np.ndarray, tuple[np.ndarray, np.ndarray], Callable[[float], float]]] = [
        (load / count, by_rank, lambda tokens: tokens),
        (crossing / count, by_node, lambda tokens: problem.crossing * tokens),
        ((held > 0).sum(axis=1) - 1.0, by_node, lambda copies: exposed(problem.far * copies)),
        (
            sent * 1.0,
            by_rank,
            lambda copies: exposed((problem.near if problem.scatters else problem.far) * copies),
        ),
    ]
    fullest = [
        np.bincount(group, weights=values * part).max() for values, (group, part), _ in kinds
    ]
    prices = np.array(
        [
            price(most) - price(v.sum() / num_ranks)
            for most, (v, _, price) in zip(fullest, kinds, strict=True)
        ]
    )
    pays = prices > 0
    columns = [
        (v / max(most, 1e-300), *by) for most, (v, by, _) in zip(fullest, kinds, strict=True)
    ]
    weights, groups, parts = (
        np.stack(column, axis=1)[:, pays].copy("C") for column in zip(*columns, strict=True)
    )
    return weights, groups, parts, prices[pays]


@compiled
def _swaps(
    kinds: Kinds, home: np.ndarray, node: np.ndarray, limits: tuple[float, float, float]
) -> np.ndarray:
    """List pairs of positions that swap experts, [S, 2]; each is the best for a fullest group.

    The best pair lowers the sum of fourth powers most. That sum is dominated by the largest weight,
    and still decreases when one of several equally full groups gets lighter.
    """
    adds, group, part, price = kinds
    near, far, most = limits
    num_experts, num_kinds = adds.shape
    moved = np.zeros(len(node))
    total = np.zeros((num_kinds, len(node)))
    held = np.empty(adds.shape)
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
                held[p, f] = total[f, group[p, f]]
        best = 0.0
        for p in range(num_experts):
            if not (group[p] == full).any() or moved[home[p]] + 1 > most:
                continue
            for q in range(num_experts):
                if home[p] == home[q] or moved[home[q]] + 1 > most:
                    continue
                gain = -near if node[home[p]] == node[home[q]] else -far
                for f in range(num_kinds):
                    if group[p, f] != group[q, f]:
                        more, x, y = adds[q, f] - adds[p, f], held[p, f], held[q, f]
                        v, w = x + more * part[p, f], y - more * part[q, f]
                        x, y, v, w = x * x, y * y, v * v, w * w
                        gain += price[f] * (x * x + y * y - v * v - w * w)
                if gain > best:
                    best, pairs[step, 0], pairs[step, 1] = gain, p, q
        if best == 0:
            return pairs[:step]
        i, j = pairs[step]
        for f in range(num_kinds):
            more = adds[j, f] - adds[i, f]
            total[f, group[i, f]] += more * part[i, f]
            total[f, group[j, f]] -= more * part[j, f]
            adds[i, f], adds[j, f] = adds[j, f], adds[i, f]
        moved[home[i]] += 1
        moved[home[j]] += 1
    return pairs


def _swapped(now: np.ndarray, pairs: np.ndarray, home: np.ndarray) -> np.ndarray:
    """Apply swaps to an order; experts that end on their old rank keep their old position."""
    new = now.copy()
    order = now.copy()
    position = np.argsort(home, kind="stable")
    for pair in pairs:
        new[pair] = new[pair[::-1]]
    came = (home[np.argsort(now)[new]] != home)[position]
    left = (home[np.argsort(new)[now]] != home)[position]
    order[position[left]] = new[position[came]]
    return order


def _moves(now: np.ndarray, order: np.ndarray, home: np.ndarray, world: World) -> np.ndarray:
    """Count moved experts by rank, [4, R]: sent and received in the node, then across nodes."""
    origin = home[np.argsort(now)[order]]
    node = world.node_index
    inside = node[origin] == node[home]
    ways = [end[of] for of in ((origin != home) & inside, ~inside) for end in (origin, home)]
    return np.array([np.bincount(way, minlength=world.num_ranks) for way in ways])


def _seconds(moves: np.ndarray, world: World, expert_bytes: float) -> float:
    """Estimate the duration of ``moves`` [4, R] if all ranks send and receive concurrently."""
    node, links = world.node_index, world.speeds
    # the ranks of a node share their network adapters, so a node's mean counts
    across = max((np.bincount(node, weights=way) / np.bincount(node)).max() for way in moves[2:])
    return max(
        links.intra.seconds(moves[:2].max() * expert_bytes),
        links.inter.seconds(across * expert_bytes),
    )
