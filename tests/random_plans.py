"""Random layers, loads and placements for the planning tests, and oracles that know nothing of our planners.

Oracles count or ask scipy: the counting bound (the tokens that only a set of ranks can serve must fit on that set;
Hall's theorem makes the best such bound the optimum), a linear program, and every placement there is, one by one.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from scipy.optimize import linprog

from megatron_hecate.plan import Placement, Quotas, World, plan_guests, split_quotas

PROPERTY = settings(max_examples=150, deadline=None, derandomize=True, database=None)
SMALL = settings(PROPERTY, max_examples=60)  # for oracles that take milliseconds


def one_node(num_ranks: int) -> World:
    return World(node=(0,) * num_ranks)


def pairs(placement: Placement) -> list[tuple[int, int]]:
    """(expert, rank) of every guest, sorted."""
    return [(expert, rank) for expert, rank, _ in placement.guests]


def placement_of(holders: Sequence[Sequence[int]], num_ranks: int) -> Placement:
    """``holders[e]`` lists the ranks that hold expert e, its home first; no slot is left over."""
    held = [[e for e, ranks in enumerate(holders) if r in ranks] for r in range(num_ranks)]
    return Placement(home=np.array([ranks[0] for ranks in holders]), table=_table(held, max(map(len, held))))


def homes_only(home: Sequence[int], num_ranks: int, *, room: int) -> Placement:
    """No guests; the fullest rank has ``room`` free slots, the others more, since all tables are as wide."""
    held = [[e for e, owner in enumerate(home) if owner == r] for r in range(num_ranks)]
    return Placement(home=np.array(home), table=_table(held, max(map(len, held)) + room))


def _table(held: list[list[int]], width: int) -> np.ndarray:
    table = np.full((len(held), width), -1)
    for r, experts in enumerate(held):
        table[r, : len(experts)] = experts
    return table


# layers to plan


@dataclasses.dataclass(frozen=True, eq=False)
class Layer:
    """What every tier-1 planner gets: a forecast [E], homes and nodes; and an overlap degree."""

    forecast: np.ndarray
    placement: Placement
    world: World
    overlap_degree: int | None

    def plan(self, **more: Any) -> Placement:
        return plan_guests(self.forecast, self.placement, self.world, overlap_degree=self.overlap_degree, **more)

    def __repr__(self) -> str:  # what hypothesis prints for a failing case
        return (
            f"Layer(forecast={self.forecast.tolist()}, home={self.placement.home.tolist()}, "
            f"table={self.placement.table.tolist()}, node={self.world.node}, overlap_degree={self.overlap_degree})"
        )


@st.composite
def layers(draw: st.DrawFn) -> Layer:
    """Any homes (also none on a rank), any free slots per rank, any nodes, steep forecasts."""
    num_ranks = draw(st.integers(1, 8))
    home = draw(st.lists(st.integers(0, num_ranks - 1), min_size=1, max_size=16))
    load = st.one_of(st.just(0.0), st.integers(0, 9).map(float), st.floats(0, 1e6), st.just(1e300), st.just(1e-300))
    return Layer(
        forecast=np.array(draw(st.lists(load, min_size=len(home), max_size=len(home)))),
        placement=homes_only(home, num_ranks, room=draw(st.integers(0, 4))),
        world=World(node=tuple(draw(st.lists(st.integers(0, 2), min_size=num_ranks, max_size=num_ranks)))),
        overlap_degree=draw(st.one_of(st.none(), st.integers(0, len(home) + 2))),
    )


@st.composite
def plan_limits(draw: st.DrawFn) -> dict[str, float | None]:
    """Limits and prices for `Layer.plan`."""
    count = st.one_of(st.none(), st.integers(0, 6))
    price = st.one_of(st.just(0.0), st.floats(0, 1e4), st.just(1e-300), st.just(float("inf")))
    return dict(copies=draw(count), egress=draw(count), copy_tokens=draw(price), routing_tokens=draw(price))


# loads to split


@dataclasses.dataclass(frozen=True, eq=False)
class Case:
    """Arguments of one `split_quotas`: N sources, E experts, R ranks."""

    load: np.ndarray  # [N, E]
    placement: Placement
    world: World
    source_rank: tuple[int, ...]  # [N]

    def split(self) -> Quotas:
        return split_quotas(self.load, self.placement, self.world, source_rank=self.source_rank)

    def __repr__(self) -> str:
        return (
            f"Case(load={self.load.tolist()}, home={self.placement.home.tolist()}, "
            f"table={self.placement.table.tolist()}, node={self.world.node}, source_rank={self.source_rank})"
        )


@st.composite
def cases(draw: st.DrawFn, *, ranks: int = 6, experts: int = 8, most: int = 10**12, room: int = 0) -> Case:
    """Any homes (also none on a rank), any guests, any nodes; several, one or no sources per rank; bumpy loads.

    Up to ``room`` slots more than the fullest rank needs.
    """
    num_ranks = draw(st.integers(1, ranks))
    rank = st.integers(0, num_ranks - 1)
    holders = draw(st.lists(st.lists(rank, min_size=1, max_size=num_ranks, unique=True), min_size=1, max_size=experts))
    node = draw(st.lists(st.integers(0, 2), min_size=num_ranks, max_size=num_ranks))
    source_rank = draw(st.lists(rank, min_size=1, max_size=8))
    tokens = st.one_of(st.just(0), st.integers(0, 3), st.integers(0, 50), st.integers(0, most))
    row = st.lists(tokens, min_size=len(holders), max_size=len(holders))
    load = draw(st.lists(row, min_size=len(source_rank), max_size=len(source_rank)))
    placement = placement_of(holders, num_ranks)
    if room:
        empty = np.full((num_ranks, draw(st.integers(0, room))), -1)
        placement = Placement(home=placement.home, table=np.hstack([placement.table, empty]))
    return Case(np.array(load), placement, World(node=tuple(node)), tuple(source_rank))


def skewed(num_ranks: int, num_experts: int, *, seed: int, slots: int) -> Case:
    """A layer as training sees it: few hot experts, guests planned from a forecast that is a little off."""
    rng = np.random.default_rng(seed)
    share = rng.dirichlet(np.full(num_experts, 0.3))
    drift = share * rng.lognormal(0, 0.3, num_experts)
    load = rng.multinomial(2000, drift / drift.sum(), size=num_ranks)
    world = World(tuple(rank // 4 for rank in range(num_ranks)))
    placement = plan_guests(share, Placement.initial(num_experts, num_ranks, num_slots=slots), world)
    return Case(load, placement, world, tuple(range(num_ranks)))


def some_total(rng: np.random.Generator, num_experts: int) -> np.ndarray:
    """[E] about a million tokens, flat or steep, none without any."""
    kind = rng.integers(4)
    if kind == 0:
        share = rng.integers(1, 10, num_experts) / 54
    elif kind == 1:
        share = rng.pareto(0.7, num_experts)
    else:
        share = rng.dirichlet(np.full(num_experts, 0.5 if kind == 2 else 2.0))
    return np.array(share * 1_000_000 + 1, dtype=np.int64)


def drifting(rng: np.random.Generator, *, steps: int, num_layers: int, num_experts: int) -> np.ndarray:
    """Loads [T, L, E] whose logarithms wander: some 14 % of the hottest eighth are others in the next step."""
    spread, keep = 0.8, 0.98
    log = rng.normal(0, spread, (num_layers, num_experts))
    loads = np.empty((steps, num_layers, num_experts), dtype=np.int64)
    for t in range(steps):
        share = np.exp(log)
        loads[t] = rng.multinomial(200_000, share / share.sum(axis=1, keepdims=True))
        log = keep * log + math.sqrt(1 - keep**2) * rng.normal(0, spread, log.shape)
    return loads


# oracles


def counting_bound(total: np.ndarray, holders: np.ndarray) -> int:
    """Smallest possible largest rank load of ``total`` [E] for ``holders`` [E, R].

    The best lower bound of any set of ranks: the tokens nobody else can serve, shared evenly within the set.
    """
    tokens = [int(t) for t in total]
    num_ranks = holders.shape[1]
    only = [sum(1 << r for r in np.flatnonzero(holds).tolist()) for holds in holders]
    return max(
        -(-sum(t for t, ranks in zip(tokens, only, strict=True) if ranks | chosen == chosen) // chosen.bit_count())
        for chosen in range(1, 1 << num_ranks)
    )


def lp_largest(total: np.ndarray, holders: np.ndarray) -> int:
    """The same as a linear program: minimize T over x[e, r] >= 0, expert e's sum to its total, rank r's to at most T.

    For integer loads this is a flow problem, so the best integer T is the best real T rounded up.
    """
    expert, rank = np.nonzero(holders)
    num_experts, num_ranks = holders.shape
    sums = np.hstack([np.eye(num_experts)[:, expert], np.zeros((num_experts, 1))])
    loads = np.hstack([np.eye(num_ranks)[:, rank], -np.ones((num_ranks, 1))])
    cost = np.zeros(len(expert) + 1)
    cost[-1] = 1
    result = linprog(cost, A_ub=loads, b_ub=np.zeros(num_ranks), A_eq=sums, b_eq=total, method="highs")
    assert result.status == 0, result.message
    return math.ceil(result.fun - 1e-6)


def lp_least(case: Case, quotas: Quotas, cost: np.ndarray) -> int:
    """Linear program: least sum of ``cost[source rank, holder]`` over all splits with these loads and column sums."""
    num_sources, num_columns = quotas.tokens.shape
    experts = case.load.shape[1]
    index = np.arange(num_sources * num_columns).reshape(num_sources, num_columns)
    rows, targets = [], []
    for n, e in itertools.product(range(num_sources), range(experts)):
        rows.append(np.isin(np.arange(index.size), index[n, quotas.expert == e]))
        targets.append(case.load[n, e])
    for c in range(num_columns):
        rows.append(np.isin(np.arange(index.size), index[:, c]))
        targets.append(quotas.tokens[:, c].sum())
    weights = cost[np.asarray(case.source_rank)[:, None], quotas.rank[None, :]]
    result = linprog(weights.ravel(), A_eq=np.array(rows, dtype=float), b_eq=np.array(targets), method="highs")
    assert result.status == 0, result.message
    return round(result.fun)


def every_split(total: int, parts: int) -> list[tuple[int, ...]]:
    if parts == 1:
        return [(total,)]
    return [(k, *rest) for k in range(total + 1) for rest in every_split(total - k, parts - 1)]


def enumerated(total: np.ndarray, holders: np.ndarray) -> int:
    """Smallest largest rank load over every way to split every expert's tokens over its holders."""
    ranks = [np.flatnonzero(holds) for holds in holders]
    splits = [every_split(tokens, len(r)) for tokens, r in zip(total.tolist(), ranks, strict=True)]
    best = math.inf
    for choice in itertools.product(*splits):
        served = np.zeros(holders.shape[1], dtype=int)
        for r, tokens in zip(ranks, choice, strict=True):
            served[r] += tokens
        best = min(best, served.max())
    return int(best)


def best_largest(total: np.ndarray, home: np.ndarray, slots: Sequence[int]) -> int:
    """The smallest `counting_bound` of all ways to fill ``slots[r]`` slots of every rank r with guests."""
    num_experts, num_ranks = len(home), len(slots)
    # a guest less never helps, so only full ranks are tried
    guests = [
        list(itertools.combinations(elsewhere, min(slots[r], len(elsewhere))))
        for r, elsewhere in enumerate([e for e in range(num_experts) if home[e] != r] for r in range(num_ranks))
    ]
    choices = list(itertools.product(*guests))
    holders = np.zeros((len(choices), num_experts), dtype=np.int64)  # bit r: held by rank r
    holders[:] = 1 << home
    for row, choice in zip(holders, choices, strict=True):
        for r, experts in enumerate(choice):
            row[list(experts)] |= 1 << r
    largest = np.zeros(len(choices), dtype=np.int64)
    for chosen in range(1, 1 << num_ranks):
        confined = np.where(holders | chosen == chosen, total, 0).sum(axis=1)
        largest = np.maximum(largest, -(-confined // chosen.bit_count()))
    return int(largest.min())


def guests_per_rank(placement: Placement) -> Counter[int]:
    return Counter(rank for _, rank in pairs(placement))
