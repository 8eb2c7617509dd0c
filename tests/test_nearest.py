"""The whole split against one linear program per question: how many tokens must be where, at the least.

Oracle: scipy's linear program over x[n, e, holder], which knows nodes, ranks and loads and nothing of slots, groups or
potentials. Its largest rank load is asked for first; then the fewest tokens across nodes that a split with this load
can have; then the fewest across ranks with both. All three are flow problems with integer data, so the best integers
are the best reals (for the largest load: rounded up).

If a split sent tokens to another node, or another rank, where a chain of exchanges over other ranks and experts could
bring them back, or if it balanced less than it could, the counts differ.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy.optimize import linprog
from scipy.sparse import csr_matrix, vstack

from megatron_hecate.plan import Placement, World, plan_guests, split_quotas
from megatron_hecate.plan.route import largest_load


def _least(load: np.ndarray, holders: np.ndarray, node: np.ndarray, source: np.ndarray) -> tuple[int, int, int]:
    """Largest rank load, tokens across nodes and tokens across ranks of the best split."""
    n, e, r = np.nonzero((load[:, :, None] > 0) & holders[None])
    if not len(n):
        return 0, 0, 0
    num_experts = load.shape[1]
    num_ranks, columns = holders.shape[1], np.arange(len(n))
    ones = np.ones(len(n))
    served = csr_matrix((ones, (r, columns)), shape=(num_ranks, len(n)))
    sums = csr_matrix((ones, (n * num_experts + e, columns)), shape=(load.size, len(n)))
    crosses = (node[source[n]] != node[r]).astype(float)
    leaves = (source[n] != r).astype(float)

    def solve(cost: np.ndarray, cap: np.ndarray, *limits: tuple[np.ndarray, int]) -> float:
        limited = vstack([served, *(csr_matrix(row) for row, _ in limits)])
        most = np.concatenate([cap, [limit for _, limit in limits]])
        result = linprog(cost, A_ub=limited, b_ub=most, A_eq=sums, b_eq=load.ravel(), method="highs")
        assert result.status == 0, result.message
        return result.fun

    top = np.append(np.zeros(len(n)), 1.0)  # one more variable: the largest load
    below = np.hstack([served.toarray(), -np.ones((num_ranks, 1))])
    all_sums = np.hstack([sums.toarray(), np.zeros((load.size, 1))])
    best = linprog(top, A_ub=below, b_ub=np.zeros(num_ranks), A_eq=all_sums, b_eq=load.ravel(), method="highs")
    assert best.status == 0, best.message
    largest = math.ceil(best.fun - 1e-6)
    cap = np.full(num_ranks, float(largest))
    across = round(solve(crosses, cap))
    return largest, across, round(solve(leaves, cap, (crosses, across)))


def _counted(
    tokens: np.ndarray, expert: np.ndarray, rank: np.ndarray, node: np.ndarray, source: np.ndarray
) -> tuple[int, int, int]:
    crosses = node[source][:, None] != node[rank][None]
    leaves = source[:, None] != rank[None]
    served = np.bincount(rank, weights=tokens.sum(axis=0), minlength=len(node))
    return int(served.max()), int(tokens[crosses].sum()), int(tokens[leaves].sum())


def _random(seed: int) -> tuple[np.ndarray, Placement, World, np.ndarray]:
    """Any homes, guests, nodes of any size and order; several, one or no sources on a rank; many zeros."""
    rng = np.random.default_rng(seed)
    num_ranks, num_experts = int(rng.integers(1, 9)), int(rng.integers(1, 11))
    density = rng.uniform(0.1, 0.7)
    home = rng.integers(0, num_ranks, num_experts)
    holders = rng.random((num_experts, num_ranks)) < density
    holders[np.arange(num_experts), home] = True
    held = [rng.permutation(np.flatnonzero(holders[:, r])) for r in range(num_ranks)]
    table = np.full((num_ranks, max(map(len, held))), -1)
    for r, experts in enumerate(held):
        table[r, : len(experts)] = experts
    node = tuple(rng.integers(0, rng.integers(1, 5), num_ranks).tolist())
    num_sources = num_ranks if rng.random() < 0.5 else int(rng.integers(1, 12))
    source = np.arange(num_ranks) if num_sources == num_ranks else rng.integers(0, num_ranks, num_sources)
    most = int(rng.choice([2, 10, 1000]))
    load = rng.integers(0, most, (num_sources, num_experts)) * (rng.random(num_experts) < 0.8)
    load = load * rng.choice([0, 1, 20], num_experts) * (rng.random(load.shape) < 0.8)
    return load, Placement(home=home, table=table), World(node=node), source


@pytest.mark.parametrize("block", range(8))
def test_no_split_is_nearer_at_the_smallest_largest_load(block: int) -> None:
    for seed in range(block * 40, block * 40 + 40):
        load, placement, world, source = _random(seed)
        quotas = split_quotas(load, placement, world, source_rank=source.tolist())
        node = np.array(world.node)
        counted = _counted(quotas.tokens, quotas.expert, quotas.rank, node, source)
        assert counted == _least(load, placement.holders, node, source), f"seed {seed}"
        assert counted[0] == largest_load(load.sum(axis=0), placement, world), f"seed {seed}"


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("slots", [1, 2])
@pytest.mark.parametrize("spread", [0.05, 2.0])  # sources alike, so that tokens move for nothing; and unlike
def test_planned_guests_on_four_nodes(seed: int, slots: int, spread: float) -> None:
    rng = np.random.default_rng(seed)
    num_ranks, num_experts = 12, 24
    share = rng.lognormal(0, 1, num_experts)
    load = rng.poisson(30 * share * rng.lognormal(0, spread, (num_ranks, num_experts)))
    world = World((0, 0, 0, 0, 0, 1, 1, 1, 2, 2, 3, 2))
    placement = plan_guests(share, Placement.initial(num_experts, num_ranks, num_slots=slots), world)
    assert placement.num_guests
    quotas = split_quotas(load, placement, world)
    node, source = np.array(world.node), np.arange(num_ranks)
    counted = _counted(quotas.tokens, quotas.expert, quotas.rank, node, source)
    assert counted == _least(load, placement.holders, node, source)


@pytest.mark.parametrize("seed", range(40))
def test_one_row_is_that_row_of_the_whole(seed: int) -> None:
    load, placement, world, source = _random(seed)
    whole = split_quotas(load, placement, world, source_rank=source.tolist())
    for n in range(len(source)):
        row = split_quotas(load, placement, world, source_rank=source.tolist(), only=n)
        assert row.tokens.tolist() == whole.tokens[n : n + 1].tolist()
