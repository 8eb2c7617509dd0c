"""A hundred thousand random layers through all three planning steps: guests, correction, quotas.

Every plan is checked by counting: homes stay, a rank holds no expert twice, slots, overlap degree, copies and late
copies are limits, quotas are integers >= 0 that only name holders (every one of them, by expert, then rank) and sum to
each source's loads, and corrections and guests never raise the largest rank load. Layers have 1 to 8 ranks, 1 to 16
experts, any homes (also none on a rank), free slots from none to more than there are experts, up to 3 nodes, steep,
flat, zero and sparse loads, true loads near and far from the forecast. To be fast enough, plans of one size are checked
together by array arithmetic; every 50th, and any that fails, goes through `assert_valid`, which names what is wrong.

Oracle: those counts, made here from the tables and tokens, and `assert_valid`. Shrinkable cases of the same rules are
in the tests of each planner.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from random_plans import homes_only

from megatron_hecate.plan import Placement, Quotas, World, assert_valid, calibrate, plan_guests, split_quotas

SEEDS: int = 20
SIZES: int = 50  # layers' sizes per seed, with two homes each
PLANS: int = 50  # per homes
assert SEEDS * SIZES * 2 * PLANS == 100_000


@dataclasses.dataclass(frozen=True, eq=False)
class Plan:
    """One layer's loads [R, E], limits and what became of them."""

    load: np.ndarray
    overlap_degree: int
    copies: int
    most_late: int
    guests: Placement  # tier 1
    final: Placement  # tier 2
    quotas: Quotas


def _forecast(rng: np.random.Generator, num_experts: int) -> np.ndarray:
    kind = rng.integers(6)
    if kind == 0:
        return np.zeros(num_experts)
    if kind == 1:
        return rng.integers(0, 5, num_experts).astype(float)
    if kind == 2:
        return rng.pareto(0.6, num_experts) * 1000
    return rng.random(num_experts) ** (4 * kind) * 1000


def _plan(rng: np.random.Generator, homes: Placement, world: World) -> Plan:
    num_ranks, num_experts = homes.num_ranks, homes.num_experts
    forecast = _forecast(rng, num_experts)
    overlap_degree, copies = int(rng.integers(0, 6)), int(rng.integers(0, 2 * num_ranks + 2))
    price, most_late = float(rng.choice([0.0, 3.0, 100.0])), int(rng.integers(0, 5))
    limits = dict(overlap_degree=overlap_degree, copies=copies, copy_tokens=price * (copies % 2))
    guests = plan_guests(forecast, homes, world, **limits)
    if rng.random() < 0.5:  # the next iteration's, which knows this one's
        forecast = forecast * rng.lognormal(0, 0.3, num_experts)
        scenarios = forecast * rng.lognormal(0, 0.3, (int(rng.integers(4)), num_experts))
        guests = plan_guests(forecast, homes, world, scenarios=lambda: scenarios, previous=guests, **limits)
    expected = forecast if rng.random() < 0.5 else _forecast(rng, num_experts)
    load = rng.poisson(np.minimum(expected, 1e6), (num_ranks, num_experts)).astype(np.int64)
    across = [None, price, 2 * price][rng.integers(3)]
    final = calibrate(
        load.sum(axis=0), guests, world, copy_tokens=price, most_late=most_late, across_tokens=across
    )  # fmt: skip
    return Plan(load, overlap_degree, copies, most_late, guests, final, split_quotas(load, final, world))


def _holders(homes: Placement, plans: list[Placement]) -> np.ndarray:
    """[B, E, R] int, how often each rank holds each expert, from the tables."""
    tables = np.stack([plan.table for plan in plans])
    assert tables.shape[1:] == homes.table.shape
    assert tables.min() >= -1
    assert tables.max() < homes.num_experts
    batch, rank, slot = np.nonzero(tables >= 0)
    count = np.zeros((len(plans), homes.num_experts, homes.num_ranks), dtype=np.int64)
    np.add.at(count, (batch, tables[batch, rank, slot], rank), 1)
    at_home = count[:, np.arange(homes.num_experts), homes.home]
    assert (np.stack([plan.home for plan in plans]) == homes.home).all(), "homes differ"
    assert (at_home == 1).all(), "an expert is not held by its home"
    assert (count <= 1).all(), "a rank holds an expert twice"
    own = np.where(homes.table >= 0, homes.table, tables)
    assert (tables == own).all(), "a home's slot was used"
    return count


def _largest(holders: np.ndarray, plans: list[Plan]) -> np.ndarray:
    """[B] largest rank load of the quotas, whose columns, sums and signs are checked on the way."""
    num_ranks, num_experts = plans[0].load.shape
    pair = np.concatenate([p.quotas.expert * num_ranks + p.quotas.rank for p in plans])
    batch = np.repeat(np.arange(len(plans)), [len(p.quotas.expert) for p in plans])
    tokens = np.concatenate([p.quotas.tokens for p in plans], axis=1)  # [N, all columns]
    assert tokens.dtype == np.int64
    assert tokens.min(initial=0) >= 0, "negative quotas"
    assert (batch * num_experts * num_ranks + pair == np.flatnonzero(holders)).all(), "columns are not the holders"
    table = np.zeros((len(plans), num_experts * num_ranks, num_ranks), dtype=np.int64)
    table[batch, pair] = tokens.T
    table = table.reshape(len(plans), num_experts, num_ranks, num_ranks)  # [B, E, holder, source]
    loads = np.stack([p.load.T for p in plans])  # [B, E, source]
    assert (table.sum(axis=2) == loads).all(), "quotas do not sum to the loads"
    return table.sum(axis=(1, 3)).max(axis=1)


def _check(homes: Placement, plans: list[Plan]) -> None:
    first, final = (_holders(homes, [getattr(p, name) for p in plans]) for name in ("guests", "final"))
    guests = first.sum(axis=1) - np.bincount(homes.home, minlength=homes.num_ranks)  # [B, R]
    assert (guests <= np.array([p.overlap_degree for p in plans])[:, None]).all(), "overlap degree"
    assert (guests.sum(axis=1) <= np.array([p.copies for p in plans])).all(), "copies"
    late = (final > first).sum(axis=(1, 2))
    assert (late <= np.array([p.most_late for p in plans])).all(), "late copies"
    assert all((p.final is p.guests) == (n == 0) for p, n in zip(plans, late.tolist(), strict=True)), "same object"
    total = np.stack([p.load.sum(axis=0) for p in plans])  # [B, E]
    alone = (total[:, :, None] * (homes.home[:, None] == np.arange(homes.num_ranks))).sum(axis=1).max(axis=1)
    largest = _largest(final, plans)
    assert (largest <= alone).all(), "guests made it worse"
    assert (largest >= -(-total.sum(axis=1) // homes.num_ranks)).all()


@pytest.mark.parametrize("seed", range(SEEDS))
def test_random_plans(seed: int) -> None:
    rng = np.random.default_rng(seed)
    for _ in range(SIZES):
        num_ranks, num_experts, room = int(rng.integers(1, 9)), int(rng.integers(1, 17)), int(rng.integers(0, 5))
        for _ in range(2):
            homes = homes_only(rng.integers(0, num_ranks, num_experts).tolist(), num_ranks, room=room)
            world = World(tuple(rng.integers(0, 3, num_ranks).tolist()))
            plans = [_plan(rng, homes, world) for _ in range(PLANS)]
            try:
                _check(homes, plans)
            except AssertionError:
                for plan in plans:  # one of these may say more
                    assert_valid(plan.guests)
                    assert_valid(plan.final, plan.quotas, load=plan.load)
                raise
            assert_valid(plans[0].guests, num_slots=plans[0].overlap_degree)
            assert_valid(plans[0].final, plans[0].quotas, load=plans[0].load)
