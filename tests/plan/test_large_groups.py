"""Plans of groups above 128 ranks for known loads: even ranks, at known prices.

Oracles: a library's maximum flow says how even a plan can be; the package's own checker, whether it is valid; the
kernels of the quotas, whether tokens get there; and a sum of two terms, how many copies of one hot expert pay.
"""

from __future__ import annotations

import numpy as np
import pytest
from large_groups import PAIRS, SHAPE, SKEWS, SLOTS, TARGET, homes_of, measure, price, shares
from plan_cases import fits

from megatron_hecate.plan import CopyCost, World, largest_load, plan_replicas

pytestmark = pytest.mark.fast


def nodes(num_ranks: int) -> World:
    return World(tuple(rank // 8 for rank in range(num_ranks)))


@pytest.mark.parametrize("copies", ["free", "nvlink", "p2p"])
@pytest.mark.parametrize(
    ("num_experts", "num_ranks"),
    [(129, 129), (320, 160), (80, 160), (224, 224), (512, 256), (256, 256), (128, 256)],
)
def test_known_loads_leave_ranks_even(num_experts: int, num_ranks: int, copies: str) -> None:
    world, homes, found = nodes(num_ranks), homes_of(num_experts, num_ranks), []
    cost = price(copies, world)
    for seed, skew in enumerate(SKEWS):
        rng = np.random.default_rng([seed, num_ranks])
        tokens = PAIRS * SHAPE.microbatches * num_ranks
        load = rng.poisson(shares(skew, num_experts, rng) * tokens)
        plan = plan_replicas(load, homes, world, cost=cost)
        plan.check(num_slots=SLOTS)
        found.append(largest_load(load, plan) / load.sum() * num_ranks)
    assert np.mean(found) <= TARGET[0], found
    assert max(found) <= TARGET[1], found
    assert fits(
        load // 64, plan, int(np.ceil(TARGET[1] * (load // 64).sum() / num_ranks))
    )  # of the last load


@pytest.mark.parametrize("copies", ["nvlink", "p2p"])
def test_tokens_reach_the_replicas(copies: str) -> None:
    """As the benchmark measures it, by the quotas that training computes."""
    figures = measure("lognormal 1", 192, 192, copies, seed=0)
    assert figures.before > 3 and figures.after < 1.1 and figures.cost < 0.5


@pytest.mark.parametrize("num_ranks", [128, 136, 192, 256])
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
