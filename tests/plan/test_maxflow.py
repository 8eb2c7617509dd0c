"""The smallest largest rank load, exactly. Oracle: scipy's maximum flow, and chains worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest
from plan_cases import chain, least_largest, some_homes, some_load, some_replicas
from seeds import seeds

from megatron_hecate.plan import EMPTY, Placement, largest_load
from megatron_hecate.plan.maxflow import balance, rebalance

pytestmark = pytest.mark.fast


@seeds(60)
def test_as_a_library_finds_it(seed: int) -> None:
    rng = np.random.default_rng(seed)
    placement = some_replicas(rng, some_homes(rng))
    load = some_load(rng, placement.num_experts)
    assert largest_load(load, placement) == least_largest(load, placement)


@seeds(40)
def test_a_replica_that_comes_changes_what_a_library_finds(seed: int) -> None:
    """In an empty slot, or over another replica: as when everything is balanced anew, and tokens stay whole."""
    rng = np.random.default_rng(seed)
    placement = some_replicas(rng, some_homes(rng), share=0.6)
    load, table = some_load(rng, placement.num_experts), placement.table.copy()
    split = balance(load, table, 0, True)
    for rank, slot in rng.permutation(np.argwhere(placement.is_replica | (table == EMPTY)))[:4]:
        absent = np.setdiff1d(np.arange(placement.num_experts), table[rank])
        if not len(absent):
            continue
        expert, old = int(rng.choice(absent)), int(table[rank, slot])
        table[rank, slot] = expert
        split = rebalance(split, expert, int(rank), old)
        now = Placement(home=placement.home.copy(), table=table.copy())
        assert max(split.load) == least_largest(load, now)
        anew = balance(load, table, 0, True)
        assert (split.begin == anew.begin).all() and (split.rank == anew.rank).all()
        mean = -(-load.sum() // placement.num_ranks)
        assert np.maximum(split.load - mean, 0).sum() == np.maximum(anew.load - mean, 0).sum()
        assert split.share.min() >= 0
        assert (np.add.reduceat(split.share, split.begin[:-1]) == load).all()
        assert (
            np.bincount(split.rank, weights=split.share, minlength=len(table)) == split.load
        ).all()


@pytest.mark.parametrize("num_ranks", [2, 10, 300])
def test_tokens_run_down_a_chain(num_ranks: int) -> None:
    load = np.zeros(num_ranks, np.int64)
    load[:-1] = 10
    load[0] += (
        num_ranks - 1
    )  # all ranks but the last have 10, the first some more: everything moves by one rank
    total = int(load.sum())
    assert largest_load(load, chain(num_ranks)) == max(
        -(-total // num_ranks), -(-int(load[0]) // 2)
    )


def test_counts_beyond_32_bits_are_exact() -> None:
    placement = Placement.initial(3, 3, num_slots=1).with_replicas([(0, 1), (0, 2)])
    assert largest_load(np.array([3 * 2**45, 1, 0]), placement) == 2**45 + 1
