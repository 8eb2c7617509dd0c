"""Worlds, placements and loads that are hard to plan for, drawn from a seed; and how tokens can be split, by a
library."""

from __future__ import annotations

import numpy as np

from megatron_hecate.plan import EMPTY, Link, Placement, Speeds, World

# with which costs can be worked out by hand
ROUND_SPEEDS = Speeds(
    intra=Link(100.0, 1.0),
    inter=Link(10.0, 2.0),
    flops=6.0,
    routing=0.5,
    contention=0.25,
    memory=300.0,
    launch=3.0,
)


def some_homes(
    rng: np.random.Generator, *, most_ranks: int = 12, most_experts: int = 30, most_slots: int = 3
) -> Placement:
    """Uneven homes in any slots, ranks without a home among them, and up to ``most_slots`` free slots and more."""
    num_ranks = int(rng.integers(1, most_ranks + 1))
    num_experts = int(rng.integers(1, most_experts + 1))
    home = rng.integers(0, num_ranks, num_experts)
    count = np.bincount(home, minlength=num_ranks)
    table = np.full((num_ranks, int(count.max()) + int(rng.integers(0, most_slots + 1))), EMPTY)
    for rank in range(num_ranks):
        table[rank, rng.permutation(table.shape[1])[: count[rank]]] = np.flatnonzero(home == rank)
    return Placement(home=home, table=table)


def some_replicas(rng: np.random.Generator, homes: Placement, share: float = 0.7) -> Placement:
    """Replicas of random experts in about ``share`` of the free slots."""
    table = homes.table.copy()
    for rank, slot in np.argwhere(table == EMPTY):
        elsewhere = np.setdiff1d(np.arange(homes.num_experts), table[rank])
        if len(elsewhere) and rng.random() < share:
            table[rank, slot] = rng.choice(elsewhere)
    return Placement(home=homes.home.copy(), table=table)


def check_placement(placement: Placement, *, num_slots: int | None = None) -> None:
    """Each home holds its expert, no rank holds an expert twice, and none has more than ``num_slots`` replicas."""
    for rank, slots in enumerate(placement.table.tolist()):
        experts = [expert for expert in slots if expert != EMPTY]
        homes = np.flatnonzero(placement.home == rank).tolist()
        assert len(set(experts)) == len(experts) and set(homes) <= set(experts), (rank, slots)
        assert min(experts, default=0) >= 0, (rank, slots)
        assert num_slots is None or len(experts) <= len(homes) + num_slots, (rank, slots)


def some_world(rng: np.random.Generator, num_ranks: int) -> World:
    """Nodes of uneven sizes whose ranks are interleaved."""
    return World(tuple(rng.integers(0, 4, num_ranks).tolist()))


def some_load(rng: np.random.Generator, num_experts: int, *, tokens: int = 100_000) -> np.ndarray:
    """[E] int: flat, steep, all on one expert, or mostly none."""
    kind = rng.integers(4)
    if kind == 0:
        return rng.integers(0, 1 + 2 * tokens // num_experts, num_experts)
    if kind == 1:
        return (rng.dirichlet(np.full(num_experts, 0.3)) * tokens).astype(np.int64)
    load = np.zeros(num_experts, np.int64)
    load[rng.integers(num_experts)] = tokens
    if kind == 2:
        return load
    few = rng.random(num_experts) < 0.2
    return np.where(few, rng.integers(0, tokens, num_experts), load // 7)


def chain(num_ranks: int) -> Placement:
    """A home on every rank and one replica of each expert on the next: tokens run long ways."""
    homes = Placement.initial(num_ranks, num_ranks, num_slots=1)
    return homes.with_replicas([(e, e + 1) for e in range(num_ranks - 1)])


def fits(load: np.ndarray, placement: Placement, cap: int) -> bool:
    """Whether no rank needs more than ``cap`` tokens: scipy's maximum flow from experts through holders to ranks."""
    # here, because machines of `make gpu` have no scipy
    from scipy.sparse import csr_array
    from scipy.sparse.csgraph import maximum_flow

    num_experts, num_ranks, total = placement.num_experts, placement.num_ranks, int(load.sum())
    expert, rank = np.nonzero(placement.holders)
    source, sink = num_experts + num_ranks, num_experts + num_ranks + 1
    head = np.concatenate(
        [np.full(num_experts, source), expert, num_experts + np.arange(num_ranks)]
    )
    tail = np.concatenate([np.arange(num_experts), num_experts + rank, np.full(num_ranks, sink)])
    capacity = np.concatenate([load, load[expert], np.full(num_ranks, cap)]).astype(np.int32)
    graph = csr_array((capacity, (head, tail)), shape=(sink + 1, sink + 1))
    return maximum_flow(graph, source, sink).flow_value == total


def least_largest(load: np.ndarray, placement: Placement) -> int:
    """The smallest largest rank load, by bisection."""
    total = int(load.sum())
    low, high = -(-total // placement.num_ranks), total
    while low < high:
        cap = (low + high) // 2
        if fits(load, placement, cap):
            high = cap
        else:
            low = cap + 1
    return low
