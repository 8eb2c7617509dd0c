"""How many replicas pay in the next iteration, and which: of plans with many and with few of them, the cheapest.

A plan is compared before the gate, from a forecast alone, by tokens of the busiest rank:

    largest rank load + tokens that cross nodes, of the busiest node + copies that do not hide + routing to replicas
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from megatron_hecate.plan.cost import CopyCost
from megatron_hecate.plan.late import overwrite
from megatron_hecate.plan.placement import EMPTY, Placement
from megatron_hecate.plan.search import (
    SLACK,
    Problem,
    cost_beside_load,
    fill,
    most_leaving,
    plan_cost,
)
from megatron_hecate.plan.world import World

# A layer starts to have replicas when they win so much of their cost beyond it, and stops when they lose as much.
HYSTERESIS: float = 0.2
REPLACED: int = 256  # replicas that the local search replaces, at most, times ranks
STEPS: tuple[float, ...] = (
    1.41,
    1.19,
)  # factors between the limits that the search for the cheapest plan tries
BALANCED: float = 1.05  # times the mean: up to this largest rank load nothing is copied


def plan_replicas(
    forecast: np.ndarray,
    homes: Placement,
    world: World,
    *,
    cost: CopyCost,
    previous: Placement | None = None,
) -> Placement:
    """Choose the replicas of the next iteration.

    Args:
        forecast: [E] tokens expected, summed over the group's ranks; 0 or more.
        homes: the homes; replicas, if it has some, are ignored.
        world: node of every rank.
        cost: what replicas cost. Free ones fill the slots.
        previous: the plan of the last iteration, if there is one: it says whether the layer has replicas to give up,
            and it is returned itself where the new plan is the same.

    Returns:
        ``homes`` with this plan's replicas; without any when they do not pay.

    Raises:
        ValueError: for a forecast of the wrong length, with NaN, infinite or negative values, or a world of other
            ranks.
    """
    forecast = np.ascontiguousarray(forecast, dtype=np.float64)
    if forecast.shape != homes.home.shape:
        raise ValueError(f"forecast has shape {forecast.shape}, expected [{homes.num_experts}]")
    if world.num_ranks != homes.num_ranks:
        raise ValueError(f"world has {world.num_ranks} ranks, the placement {homes.num_ranks}")
    if not (np.isfinite(forecast).all() and forecast.min() >= 0):
        raise ValueError(f"forecast must be finite and 0 or more, got {forecast.tolist()}")
    bare = homes.homes_only
    most = int((bare.table == EMPTY).sum(axis=1).max())
    most = most if cost.most is None else min(cost.most, most)
    if not most or not forecast.any():
        return bare
    problem = problem_of(bare, world, cost)
    table = _best_plan(forecast, problem, most, previous)
    for same in (bare, previous):
        if (
            same is not None
            and np.array_equal(table, same.table)
            and np.array_equal(bare.home, same.home)
        ):
            return same
    return Placement.trusted(bare.home, table)


def problem_of(bare: Placement, world: World, cost: CopyCost) -> Problem:
    """What `search` plans for: the homes alone, the nodes of their ranks, and what copies cost."""
    node, far = world.node_index, cost.far
    if (
        world.num_nodes == 1 and not cost.scatters
    ):  # tokens that change rank travel as slowly as copies
        node, far = np.arange(world.num_ranks), cost.near
    members, begin = (
        np.argsort(node, kind="stable"),
        np.concatenate([[0], np.cumsum(np.bincount(node))]),
    )
    hidden = cost.hidden * (
        cost.contention < 1
    )  # is measured; where it wins nothing it must not tell plans apart
    costs = (cost.near, far, cost.out, hidden, cost.contention, cost.routing, cost.crossing)
    # arrays that may be written to, as those of other callers: numba compiles for each kind
    return Problem(
        bare.home.copy(), node, members, begin, bare.table.copy(), cost.scatters, *map(float, costs)
    )


class _Plan(NamedTuple):
    """A table [R, P] of experts, what it costs in all, and what copies and routing cost of that, in tokens."""

    table: np.ndarray
    cost: float
    overhead: float


def _best_plan(
    forecast: np.ndarray, problem: Problem, most: int, previous: Placement | None
) -> np.ndarray:
    """[R, P] the cheapest plan with up to ``most`` replicas per rank, after a local search, also from the last plan."""
    num_ranks = len(problem.node)
    number, leaving = most, most * num_ranks

    def cheaper(plan: _Plan | None, table: np.ndarray) -> _Plan:
        if plan is not None and np.array_equal(table, plan.table):
            return plan
        bound = np.inf if plan is None else plan.cost
        other = _Plan(table, *plan_cost(forecast, problem, table, bound))
        return other if plan is None or other.cost < plan.cost else plan

    loads = np.bincount(problem.home, weights=forecast, minlength=num_ranks)
    if is_free := max(problem.near, problem.far) * most + problem.routing < 1:  # not a token
        best = cheaper(None, fill(forecast, problem, number, leaving))
    elif loads.max() <= BALANCED * loads.mean():
        return problem.bare
    else:
        best, number, leaving = _cheapest_fill(forecast, problem, most)
    if problem.scatters:  # a home sends once, however many receive
        leaving = best.table.size
    whole, even = np.rint(forecast).astype(np.int64), loads.mean() * (1 + 1 / SLACK)
    until = (-(-REPLACED // num_ranks), number, leaving, even - loads.mean())
    best = cheaper(
        best, overwrite(whole, problem.home, best.table, problem.node, np.zeros(3), until)
    )
    goes_on = False
    if previous is not None and previous.num_replicas > 0:
        goes_on = np.array_equal(previous.home, problem.home)
        if goes_on and previous.is_replica.sum(axis=1).max() == number:
            start = previous.table.copy()
            # even ranks may make it cheaper
            if even + sum(cost_beside_load(forecast, problem, start)) < best.cost:
                best = cheaper(
                    best, overwrite(whole, problem.home, start, problem.node, np.zeros(3), until)
                )
    margin = -HYSTERESIS * best.overhead if goes_on else HYSTERESIS * best.overhead
    bare = plan_cost(forecast, problem, problem.bare, np.inf)[0]
    return problem.bare if not is_free and best.cost + margin >= bare else best.table


def _cheapest_fill(forecast: np.ndarray, problem: Problem, most: int) -> tuple[_Plan, int, int]:
    """Search for the cheapest greedy plan by two limits: replicas that a rank holds, and copies that leave a home.

    The more copies leave a hot home, the more even the ranks, and the longer the home sends. The best is in between; a
    descent looks for it, for each number of replicas.

    Args:
        forecast: [E] tokens.
        problem: homes, nodes and costs.
        most: replicas that a rank may hold.

    Returns:
        The plan, and the two limits.
    """
    num_ranks = len(problem.node)
    loads = np.bincount(problem.home, weights=forecast, minlength=num_ranks)
    # a home that sends as many copies has a mean load itself
    evens = math.ceil(loads.max() / loads.mean()) - 1
    plans: dict[tuple[int, int], _Plan] = {}
    lowest = np.inf

    def cost(number: int, leaving: int) -> float:
        nonlocal lowest
        if (number, leaving) not in plans:
            table = fill(forecast, problem, number, leaving)
            plans[number, leaving] = _Plan(table, *plan_cost(forecast, problem, table, lowest))
            lowest = min(lowest, plans[number, leaving].cost)
        return plans[number, leaving].cost

    best = most, most
    for number in range(most, 0, -1):
        of_number = functools.partial(cost, number)
        unlimited = most_leaving(forecast, problem, number)
        starts = (evens, 2 * number, number, unlimited)
        leaving = min((max(number, min(start, unlimited)) for start in starts), key=of_number)
        if number == most or of_number(leaving) < cost(*best):
            best = number, _descend(of_number, leaving, number, unlimited)
    return plans[best], *best


def _descend(cost: Callable[[int], float], start: int, least: int, most: int) -> int:
    """Find a minimum of ``cost`` near ``start``, from ``least`` to ``most``, by ever smaller steps."""
    at = start
    for factor in STEPS:
        nearer: int | None = at
        while nearer is not None:
            at = nearer
            lower = max(least, min(at - 1, round(at / factor)))
            upper = min(most, max(at + 1, round(at * factor)))
            nearer = next((limit for limit in (lower, upper) if cost(limit) < cost(at)), None)
    return at
