"""Plans of groups of 8 to 256 ranks for known loads: even ranks, at known prices.

Oracles: a library's maximum flow says how even a plan can be; the package's own checker, whether it is valid; and a sum
of two terms, how many copies of one hot expert pay. `test_quotas` has tokens that get there.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from loads import DATA, Trace
from plan_cases import check_placement, fits
from shapes import swiglu

from megatron_hecate.plan import CopyCost, Placement, World, largest_load, plan_replicas

pytestmark = pytest.mark.fast
# (token, expert) pairs of a rank and microbatch, DeepSeek-V3's layer, and imbalance: mean, worst
PAIRS, SHAPE, SLOTS, TARGET = 32768, swiglu(7168, 2048, microbatches=16), 2, (1.03, 1.20)
SKEWS = (
    "lognormal 0.5",
    "lognormal 0.8",
    "lognormal 1",
    "zipf 0.5",
    "one of 5 %",
    "eight of 5 %",
    "pysrc_e64k6_aux0",
    "pysrc_e64k6_aux1e-2",
)


def shares(skew: str, num_experts: int, rng: np.random.Generator) -> np.ndarray:
    """Draw the share of each expert in all tokens, [E].

    ``skew`` is a distribution and its parameter, or a recording, whose four layers of 64 experts are concatenated, at
    random steps, to ``num_experts``.
    """
    kind, *numbers = skew.split()
    if kind == "lognormal":
        share = np.exp(rng.normal(0, float(numbers[0]), num_experts))
    elif kind == "zipf":
        share = (1 + rng.permutation(num_experts)) ** -float(numbers[0])
    elif kind in ("one", "eight"):
        hot = rng.choice(num_experts, {"one": 1, "eight": 8}[kind], replace=False)
        share = np.full(num_experts, (1 - 0.05 * len(hot)) / num_experts)
        share[hot] = 0.05
    else:
        counts = Trace.read(DATA / f"{skew}.npz").counts.sum(axis=2)
        drawn = counts[rng.integers(len(counts), size=-(-num_experts // counts[0].size))]
        share = drawn.ravel()[:num_experts].astype(float)
    return share / share.sum()


def homes_of(num_experts: int, num_ranks: int) -> Placement:
    """Assign homes in order, evenly; with fewer experts than ranks, one at regular intervals."""
    if num_experts >= num_ranks:
        return Placement.initial(num_experts, num_ranks, num_slots=SLOTS)
    home = np.arange(num_experts) * num_ranks // num_experts
    table = np.full((num_ranks, 1 + SLOTS), -1)
    table[home, 0] = np.arange(num_experts)
    return Placement(home=home, table=table)


def price(copies: str, world: World) -> CopyCost:
    """Price replicas: "free", "nvlink" (receivers share) or "p2p" (the home sends all)."""
    if copies == "free":
        return CopyCost(most=SLOTS)
    return dataclasses.replace(SHAPE.copy_cost(world), scatters=copies == "nvlink", most=SLOTS)


def nodes(num_ranks: int) -> World:
    return World(tuple(rank // 8 for rank in range(num_ranks)))


@pytest.mark.parametrize("copies", ["free", "nvlink", "p2p"])
@pytest.mark.parametrize(
    ("num_experts", "num_ranks"),
    [(64, 8), (1024, 64), (129, 129), (80, 160), (512, 256), (128, 256)],
)
def test_known_loads_leave_ranks_even(num_experts: int, num_ranks: int, copies: str) -> None:
    world, homes, found = nodes(num_ranks), homes_of(num_experts, num_ranks), []
    cost = price(copies, world)
    for seed, skew in enumerate(SKEWS):
        rng = np.random.default_rng([seed, num_ranks])
        tokens = PAIRS * SHAPE.microbatches * num_ranks
        load = rng.poisson(shares(skew, num_experts, rng) * tokens)
        plan = plan_replicas(load, homes, world, cost=cost)
        check_placement(plan, num_slots=SLOTS)
        found.append(largest_load(load, plan) / load.sum() * num_ranks)
    assert np.mean(found) <= TARGET[0], found
    assert max(found) <= TARGET[1], found
    assert fits(
        load // 64, plan, int(np.ceil(TARGET[1] * (load // 64).sum() / num_ranks))
    )  # of the last load


@pytest.mark.parametrize("num_ranks", [128, 192])
@pytest.mark.parametrize("price_of_one", [0.02, 0.2, 0.5])
def test_dear_copies_are_few(num_ranks: int, price_of_one: float) -> None:
    """One expert with an eighth of all tokens, whose home sends its copies one by one: the fewer, the dearer they are.
    Oracle: the least sum of the busiest holder's tokens and the copies, over all numbers of copies."""
    world, homes = nodes(num_ranks), homes_of(num_ranks, num_ranks)
    load = np.random.default_rng(0).poisson(700_000, num_ranks)
    load[0] = 100_000 * num_ranks
    mean = load.sum() / num_ranks
    cost = CopyCost(near=price_of_one * mean, far=price_of_one * mean, scatters=False, most=SLOTS)
    plan = plan_replicas(load, homes, world, cost=cost)
    copies = np.arange(1, num_ranks)
    cheapest = (np.maximum(load[0] / mean / (1 + copies), 1) + copies * price_of_one).min()
    sent = plan.holders.sum(axis=1).max() - 1
    assert largest_load(load, plan) / mean + sent * price_of_one <= 1.25 * cheapest
