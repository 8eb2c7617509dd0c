"""Imbalance that planning leaves on groups of more than 64 ranks, for known loads: `bench/balance.py --large`.

A load is planned for itself, as in an iteration whose routes are known, so what is left is the planner's alone. The
layer is DeepSeek-V3's: experts of 7168 x 2048, top-8, 16 microbatches of 4,096 tokens per rank, nodes of 8 ranks of an
H100 node, 2 slots per rank, and no copy hidden behind compute.

| column | what |
|---|---|
| homes | experts per rank: 2, 1, or 1/2, which is one on every other rank |
| copies | *free*: all slots are filled; *nvlink*: priced, receivers share; *p2p*: priced, the home sends them all |
| EP | mean imbalance over all loads without replicas: the baseline |
| planned | mean / worst imbalance with the plan, after quotas as GPUs compute them |
| ratio | planned / EP, of the means |
| cost | what the cost model says of the plan over what it says of EP: copies and tokens that cross nodes included |
| ms | time to plan one layer on one core: median over loads of the least of 3 calls, and the largest of these |
| 1.03 / 1.20 | whether mean and worst imbalance meet the target |
"""

from __future__ import annotations

import dataclasses
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
PAIRS: int = 32768  # (token, expert) pairs of a rank and microbatch
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
    """What one plan leaves: imbalance without and with it, cost over that of EP, and milliseconds to plan."""

    before: float
    after: float
    cost: float
    milliseconds: float


def shares(skew: str, num_experts: int, rng: np.random.Generator) -> np.ndarray:
    """[E] share of each expert in all tokens.

    A recording's four layers of 64 experts stand side by side, as often as needed, at a random step.
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
    """Homes in order, as many on each rank, or on every few ranks where there are fewer experts than ranks."""
    if num_experts >= num_ranks:
        return Placement.initial(num_experts, num_ranks, num_slots=SLOTS)
    home = np.arange(num_experts) * num_ranks // num_experts
    table = np.full((num_ranks, 1 + SLOTS), -1)
    table[home, 0] = np.arange(num_experts)
    return Placement(home=home, table=table)


def price(copies: str, world: World) -> CopyCost:
    """Of ``copies`` as in the table."""
    if copies == "free":
        return CopyCost(most=SLOTS)
    return dataclasses.replace(SHAPE.copy_cost(world), scatters=copies == "nvlink", most=SLOTS)


def measure(skew: str, num_experts: int, num_ranks: int, copies: str, *, seed: int) -> Figures:
    """Plan one load for itself and compute its quotas."""
    rng = np.random.default_rng([seed, num_experts, num_ranks])
    world = World(tuple(rank // 8 for rank in range(num_ranks)))
    homes, cost = homes_of(num_experts, num_ranks), price(copies, world)
    counts = rng.poisson(shares(skew, num_experts, rng) * PAIRS, (num_ranks, num_experts))
    forecast = counts.sum(axis=0) * float(SHAPE.microbatches)
    seconds = []
    for _ in range(3):
        start = time.perf_counter()
        plan = plan_replicas(forecast, homes, world, cost=cost)
        seconds.append(time.perf_counter() - start)
    plan.check(num_slots=SLOTS)
    tokens, order = quotas_of_all(counts, plan, GroupShape.of(world, plan))
    load = Quotas(order.expert, order.rank, tokens).rank_load(num_ranks)
    before = np.bincount(homes.home, weights=forecast, minlength=num_ranks)
    problem = problem_of(
        homes.homes_only, world, price("nvlink" if copies == "free" else copies, world)
    )
    costs = [plan_cost(forecast, problem, table, np.inf)[0] for table in (plan.table, problem.bare)]
    return Figures(
        before=float(before.max() / before.mean()),
        after=float(load.max() / load.mean()),
        cost=costs[0] / costs[1],
        milliseconds=min(seconds) * 1e3,
    )


def report() -> None:
    """Measure all sizes, homes and prices, on two draws of every load, and print the table row by row."""
    columns = "| ranks | homes | copies | EP | planned | ratio | cost | ms | 1.03 / 1.20 |"
    print(f"`python bench/balance.py --large`: {', '.join(SKEWS)}; the baseline is EP\n")
    print(columns, "|---|---|---|---|---|---|---|---|---|", sep="\n", flush=True)
    measure(SKEWS[0], 16, 16, "nvlink", seed=0)  # compiles
    for num_ranks in SIZES:
        for homes, num_experts in (("2", 2 * num_ranks), ("1", num_ranks), ("1/2", num_ranks // 2)):
            for copies in ("free", "nvlink", "p2p"):
                its = [
                    measure(skew, num_experts, num_ranks, copies, seed=seed)
                    for skew in SKEWS
                    for seed in range(2)
                ]
                after = np.array([figures.after for figures in its])
                before = np.mean([figures.before for figures in its])
                cost = np.mean([figures.cost for figures in its])
                times = np.array([figures.milliseconds for figures in its])
                meets = after.mean() <= TARGET[0] and after.max() <= TARGET[1]
                print(
                    f"| {num_ranks} | {homes} | {copies} | {before:.2f} | {after.mean():.3f} / {after.max():.3f} | "
                    f"{after.mean() / before:.2f} | {cost:.2f} | {np.median(times):.1f}, {times.max():.1f} | "
                    f"{'yes' if meets else '**missed**'} |",
                    flush=True,
                )
