"""Quotas as every device computes them.

Oracles: exact largest loads (`largest_load`, itself tested against a library), the fewest tokens that can cross nodes
by a linear program (HiGHS), and the rules themselves: tokens are conserved, non-negative and only sent to holders.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.optimize import linprog
from scipy.sparse import lil_array

from megatron_hecate.plan import (
    CopyCost,
    Placement,
    PlacementTables,
    QuotaSolver,
    World,
    largest_load,
    plan_replicas,
)
from plan.cases import chain, some_homes, some_load, some_replicas, some_world

pytestmark = pytest.mark.fast


def loads_of(rng: np.random.Generator, num_sources: int, num_experts: int, tokens: int = 20_000) -> np.ndarray:
    """[N, E] of sources with tastes of their own, some of them without a token."""
    return np.array([some_load(rng, num_experts, tokens=tokens) * (rng.random() < 0.9) for _ in range(num_sources)])


def solve(loads: np.ndarray, placement: Placement, world: World) -> tuple[np.ndarray, PlacementTables]:
    solver = QuotaSolver(world, "cpu")
    tables = solver.prepare(placement)
    return solver.table(torch.from_numpy(loads), tables).numpy(), tables


def dense(tokens: np.ndarray, tables: PlacementTables, placement: Placement) -> np.ndarray:
    """[N, E, R]"""
    table = np.zeros((len(tokens), placement.num_experts, placement.num_ranks), np.int64)
    table[:, tables.expert.numpy(), tables.rank.numpy()] = tokens
    return table


@pytest.mark.parametrize("seed", range(80))
def test_every_token_goes_to_one_holder_and_rows_are_the_tables(seed: int) -> None:
    rng = np.random.default_rng(seed)
    placement = some_replicas(rng, some_homes(rng))
    num_sources = placement.num_ranks * int(rng.integers(1, 3))
    source_rank = rng.permutation(np.arange(num_sources) % placement.num_ranks)
    loads = loads_of(rng, num_sources, placement.num_experts)
    solver = QuotaSolver(some_world(rng, placement.num_ranks), "cpu", source_rank=source_rank)
    tables = solver.prepare(placement)
    tokens = solver.table(torch.from_numpy(loads), tables)
    assert tokens.dtype == torch.int64 and tokens.min() >= 0
    assert (placement.table.flat[tables.physical.numpy()] == tables.expert.numpy()).all()
    assert (tables.physical.numpy() // placement.slots_per_rank == tables.rank.numpy()).all()
    assert (np.diff(tables.expert.numpy() * placement.num_ranks + tables.rank.numpy()) > 0).all()
    assert (dense(tokens.numpy(), tables, placement).sum(axis=2) == loads).all()
    for own in range(num_sources):
        assert torch.equal(solver.row(torch.from_numpy(loads), tables, own), tokens[own])


@pytest.mark.parametrize("seed", range(60))
def test_ranks_are_balanced_as_far_as_holders_allow(seed: int) -> None:
    """Two per cent and a token per expert: what random holders, ranks without tokens and jumps leave at worst."""
    rng = np.random.default_rng(1000 + seed)
    placement = some_replicas(rng, some_homes(rng, most_experts=24), share=1.0)
    loads = loads_of(rng, placement.num_ranks, placement.num_experts)
    tokens, tables = solve(loads, placement, some_world(rng, placement.num_ranks))
    largest = np.bincount(tables.rank.numpy(), weights=tokens.sum(axis=0), minlength=placement.num_ranks).max()
    assert largest <= 1.02 * largest_load(loads.sum(axis=0), placement) + placement.num_experts


def test_a_chain_of_ranks_is_balanced() -> None:
    loads = np.tile(np.where(np.arange(16) < 8, 1200, 400), (16, 1))
    tokens, tables = solve(loads, chain(16), World((0,) * 16))
    largest = np.bincount(tables.rank.numpy(), weights=tokens.sum(axis=0)).max()
    assert largest <= 1.03 * largest_load(loads.sum(axis=0), chain(16))


def fewest_crossing(loads: np.ndarray, placement: Placement, node: np.ndarray) -> float:
    """Share of tokens that must cross nodes where the largest load is at most 0.1 % above the smallest possible."""
    expert, rank = np.nonzero(placement.holders)
    num_nodes, size = node.max() + 1, len(expert)
    by_node = np.zeros((num_nodes, placement.num_experts))
    np.add.at(by_node, node, loads)
    supply = lil_array((by_node.size, num_nodes * size))
    served = lil_array((placement.num_ranks, num_nodes * size))
    for k in range(num_nodes):
        supply[k * placement.num_experts + expert, k * size + np.arange(size)] = 1
        served[rank, k * size + np.arange(size)] = 1
    cap = 1.001 * largest_load(loads.sum(axis=0), placement)
    found = linprog(
        (node[rank][None, :] != np.arange(num_nodes)[:, None]).ravel().astype(float),
        A_ub=served.tocsr(), b_ub=np.full(placement.num_ranks, cap), A_eq=supply.tocsr(), b_eq=by_node.ravel(),
    )  # fmt: skip
    return found.fun / loads.sum()


@pytest.mark.parametrize("seed", range(5))
def test_few_tokens_cross_nodes(seed: int) -> None:
    """Planned replicas in two slots of 16 ranks on two nodes: within 0.04 of all tokens of what a linear program
    finds."""
    rng = np.random.default_rng(seed)
    node = np.repeat([0, 1], 8)
    world, share = World(tuple(node.tolist())), rng.dirichlet(np.full(32, 0.8))
    placement = plan_replicas(share, Placement.initial(32, 16, num_slots=2), world, cost=CopyCost())
    loads = rng.multinomial(3000, share, size=16)
    tokens, tables = solve(loads, placement, world)
    crossing = (tokens * (node[:, None] != node[tables.rank.numpy()])).sum() / loads.sum()
    assert crossing <= fewest_crossing(loads, placement, node) + 0.04


def test_tokens_stay_on_their_rank_and_then_their_node() -> None:
    """Balanced as they are: expert 0 is held everywhere, so nothing has to move."""
    placement = Placement.initial(4, 4, num_slots=1).with_replicas([(0, 1), (0, 2), (0, 3)])
    loads = np.zeros((4, 4), np.int64)
    loads[:, 0] = 1000
    tokens, tables = solve(loads, placement, World((0, 0, 1, 1)))
    assert (dense(tokens, tables, placement)[:, 0] == np.diag([1000] * 4)).all()


@pytest.mark.parametrize("tokens", [0, 1, 2**31, 2**40])
def test_extreme_counts_are_conserved(tokens: int) -> None:
    placement = Placement.initial(8, 4, num_slots=2).with_replicas([(0, 1), (0, 2), (0, 3), (2, 0), (3, 0)])
    loads = np.zeros((4, 8), np.int64)
    loads[1, 0] = tokens
    quotas, tables = solve(loads, placement, World((0, 0, 1, 1)))
    assert (dense(quotas, tables, placement).sum(axis=2) == loads).all() and quotas.min() >= 0
    assert quotas.sum(axis=0).max() <= -(-tokens // 4) * 1.001 + 1


def test_one_rank_and_no_replicas() -> None:
    alone = Placement.initial(3, 1, num_slots=0)
    tokens, _ = solve(np.array([[4, 0, 6]]), alone, World((5,)))
    assert tokens.tolist() == [[4, 0, 6]]
    tokens, _ = solve(np.array([[1, 2], [3, 4]]), Placement.initial(2, 2, num_slots=1), World((0, 1)))
    assert tokens.tolist() == [[1, 2], [3, 4]]


def test_tokens_are_conserved_where_the_solver_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """All shares NaN, as after a factorization that broke down."""
    bad = lambda matrix, check_errors: torch.return_types.linalg_cholesky_ex((matrix * float("nan"), torch.zeros(())))  # noqa: E731
    monkeypatch.setattr(torch.linalg, "cholesky_ex", lambda matrix, check_errors: bad(matrix, check_errors))
    placement = Placement.initial(4, 4, num_slots=1).with_replicas([(0, 1), (0, 2), (1, 3)])
    loads = np.random.default_rng(0).integers(0, 99, (4, 4))
    tokens, tables = solve(loads, placement, World((0, 0, 1, 1)))
    assert (dense(tokens, tables, placement).sum(axis=2) == loads).all() and tokens.min() >= 0


def test_a_thousand_ranks() -> None:
    rng = np.random.default_rng(0)
    homes = Placement.initial(1024, 1024, num_slots=1)
    placement = homes.with_replicas([(int((r * 7 + 1) % 1024), r) for r in range(1024)])
    loads = rng.poisson(rng.pareto(3, 1024) + 0.5, (1024, 1024))
    solver = QuotaSolver(World(tuple(r // 8 for r in range(1024))), "cpu")
    tables = solver.prepare(placement)
    row = solver.row(torch.from_numpy(loads), tables, 77).numpy()
    assert (np.bincount(tables.expert.numpy(), weights=row) == loads[77]).all() and row.min() >= 0


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ValueError, match=r"source_rank must name ranks 0 to 1, got \[0, 2\]"):
        QuotaSolver(World((0, 0)), "cpu", source_rank=[0, 2])
    with pytest.raises(ValueError, match="world has 2 ranks, the placement 4"):
        QuotaSolver(World((0, 0)), "cpu").prepare(Placement.initial(4, 4, num_slots=0))
