"""Measure the remaining imbalance on groups of more than 64 ranks: `bench/balance.py --large`.

Each load is planned from itself, as in an iteration with known routes, so the planner alone causes
the remaining imbalance. The layer is DeepSeek-V3's: experts of 7168 x 2048, top-8, 16 microbatches
of 4,096 tokens per rank, H100 nodes of 8 ranks, 2 slots per rank, and no copy hidden behind
compute.

| column | meaning |
|---|---|
| homes | experts per rank: 2, 1, or 1/2 (one on every other rank) |
| copies | *free*: all slots filled; priced: *nvlink* (receivers share), *p2p* (home sends all) |
| EP | mean imbalance over all loads without replicas: the baseline |
| planned | mean / worst imbalance with the plan, after quotas as GPUs compute them |
| ratio | planned / EP, of the means |
| cost | modelled cost of the plan over EP's, with copies and tokens that cross nodes |
| ms | time to plan one layer on one core: best of 3 calls; median and maximum over loads |
| 1.03 / 1.20 | whether mean and worst imbalance meet the target |
"""

from __future__ import annotations

import dataclasses
import itertools
import time

import numpy as np
from loads import DATA, Trace
from rivals.split import Quotas
from shapes import swiglu

from megatron_hecate.plan import CopyCost, LayerShape, Placement, World, plan_replicas
from megatron_hecate.plan.replicas import problem_of
from megatron_hecate.plan.search import plan_cost
from megatron_hecate.routing.quotas import quotas_of_all
from megatron_hecate.routing.tables import GroupShape

SIZES: tuple[int, ...] = (128, 192, 256)
# (token, expert) pairs of a rank and microbatch
PAIRS: int = 32768
SHAPE: LayerShape = swiglu(7168, 2048, microbatches=16)
SLOTS: int = 2
TARGET: tuple[float, float] = (1.03, 1.20)
SKEWS: tuple[str, ...] = (
    "lognormal 0.5",
    "lognormal 0.8",
    "lognormal 1",
    "zipf 0.5",
    "one of 5 %",
    "eight of 5 %",
    "pysrc_e64k6_aux0",
    "pysrc_e64k6_aux1e-2",
)


@dataclasses.dataclass(frozen=True)
class Figures:
    """Figures of one plan.

    Args:
        before, after: imbalance without and with the plan.
        cost: modelled cost over EP's.
        milliseconds: time to plan.
    """

    before: float
    after: float
    cost: float
    milliseconds: float


def shares(skew: str, num_experts: int, rng: np.random.Generator) -> np.ndarray:
    """Draw the share of each expert in all tokens, [E].

    A recording's four layers of 64 experts are concatenated, at random steps, to ``num_experts``.

    Args:
        skew: kind of distribution and its parameter, or the name of a recording.
        num_experts: number of experts, E.
        rng: random generator.
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
    """Return the cost of replicas; ``copies``: as in the table."""
    if copies == "free":
        return CopyCost(most=SLOTS)
    return dataclasses.replace(SHAPE.copy_cost(world), scatters=copies == "nvlink", most=SLOTS)


def measure(skew: str, num_experts: int, num_ranks: int, copies: str, *, seed: int) -> Figures:
    """Plan one load from itself and compute its quotas.

    Args:
        skew: distribution of the load.
        num_experts: number of experts, E.
        num_ranks: number of ranks, R.
        copies: price of copies, as in the table.
        seed: seed of the load.
    """
    rng = np.random.default_rng([seed, num_experts, num_ranks])
    world = World(tuple(rank // 8 for rank in range(num_ranks)))
    homes = homes_of(num_experts, num_ranks)
    cost = price(copies, world)
    counts = rng.poisson(shares(skew, num_experts, rng) * PAIRS, (num_ranks, num_experts))
    forecast = counts.sum(axis=0) * float(SHAPE.microbatches)
    seconds = []
    # Interruptions only add time, so the fastest of three calls counts.
    for _ in range(3):
        start = time.perf_counter()
        plan = plan_replicas(forecast, homes, world, cost=cost)
        seconds.append(time.perf_counter() - start)
    plan.check(num_slots=SLOTS)
    tokens, order = quotas_of_all(counts, plan, GroupShape.of(world, plan))
    load = Quotas(order.expert, order.rank, tokens).rank_load(num_ranks)
    before = np.bincount(homes.home, weights=forecast, minlength=num_ranks)
    # Free copies are planned without a price, but compared by the price of nvlink.
    charged = "nvlink" if copies == "free" else copies
    problem = problem_of(homes.homes_only, world, price(charged, world))
    costs = [plan_cost(forecast, problem, table, np.inf)[0] for table in (plan.table, problem.bare)]
    return Figures(
        before=float(before.max() / before.mean()),
        after=float(load.max() / load.mean()),
        cost=costs[0] / costs[1],
        milliseconds=min(seconds) * 1e3,
    )


def report() -> None:
    """Measure all sizes, homes and prices on two draws of every load; print row by row."""
    columns = "| ranks | homes | copies | EP | planned | ratio | cost | ms | 1.03 / 1.20 |"
    print(f"`python bench/balance.py --large`: {', '.join(SKEWS)}; the baseline is EP\n")
    print(columns, "|---|---|---|---|---|---|---|---|---|", sep="\n", flush=True)
    # The first call compiles the planner.
    measure(SKEWS[0], 16, 16, "nvlink", seed=0)
    draws = list(itertools.product(SKEWS, range(2)))
    for num_ranks in SIZES:
        for homes, num_experts in (("2", 2 * num_ranks), ("1", num_ranks), ("1/2", num_ranks // 2)):
            for copies in ("free", "nvlink", "p2p"):
                results = [
                    measure(skew, num_experts, num_ranks, copies, seed=seed) for skew, seed in draws
                ]
                cells = " | ".join(_cells(results))
                print(f"| {num_ranks} | {homes} | {copies} | {cells} |", flush=True)


def _cells(results: list[Figures]) -> list[str]:
    """Format the last columns of a row."""
    after = np.array([figures.after for figures in results])
    before = np.mean([figures.before for figures in results])
    cost = np.mean([figures.cost for figures in results])
    times = np.array([figures.milliseconds for figures in results])
    meets = after.mean() <= TARGET[0] and after.max() <= TARGET[1]
    return [
        f"{before:.2f}",
        f"{after.mean():.3f} / {after.max():.3f}",
        f"{after.mean() / before:.2f}",
        f"{cost:.2f}",
        f"{np.median(times):.1f}, {times.max():.1f}",
        "yes" if meets else "**missed**",
    ]
