"""Choice of the next iteration's replicas: the cheapest of plans with many and with few replicas.

Plans are compared before the gate, from a forecast alone. The cost of a plan, in tokens of the
busiest rank, is the sum of

    largest rank load, tokens that cross nodes (busiest node), exposed copies, routing to replicas,
    computing of replicas beside their tokens (rank with most replicas)
"""

from __future__ import annotations

import functools
import math
import operator
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
    forecast_load,
    most_leaving,
    plan_cost,
)
from megatron_hecate.plan.world import World

# A layer starts replicating when its replicas win 1.2 times their cost, and stops below 0.8 times.
HYSTERESIS: float = 0.2
# steps of the local search, times ranks: each adds or replaces one replica
REPLACED: int = 256
# factors between successive limits in the search for the cheapest plan, coarse to fine
STEPS: tuple[float, ...] = (1.41, 1.19)
# largest rank load over the mean up to which nothing is copied
BALANCED: float = 1.05
# largest rank load over the mean that counts as chance, also above a limit
EVEN: float = 1.01


def plan_replicas(
    forecast: np.ndarray,
    homes: Placement,
    world: World,
    *,
    cost: CopyCost,
    previous: Placement | None = None,
    limit: float | None = None,
) -> Placement:
    """Choose the replicas of the next iteration.

    Args:
        forecast: [E] expected tokens, summed over the group's ranks; 0 or more.
        homes: placement whose homes are kept; its replicas are ignored.
        world: node of every rank.
        cost: cost of replicas. Free replicas fill the slots.
        previous: plan of the last iteration, if any. Its replicas decide which side of the
            hysteresis applies. Returned itself if the new plan is equal.
        limit: largest rank load over the mean that fits into a rank's buffers. If the plan that
            pays is above it, further copies count as paying, up to free ones.

    Returns:
        ``homes`` with the planned replicas; without replicas if none pay.
    """
    forecast = np.ascontiguousarray(forecast, dtype=np.float64)
    homes_only = homes.homes_only
    num_slots = int((homes_only.table == EMPTY).sum(axis=1).max())
    if cost.most is not None:
        num_slots = min(cost.most, num_slots)
    if not num_slots or not forecast.any():
        return homes_only
    problem = problem_of(homes_only, world, cost)
    table = _Search(forecast, problem, num_slots).best_table(previous)
    if limit is not None:
        table = _fill_to_limit(forecast, problem, (num_slots, limit), table, previous)
    # callers compare placements by identity to skip work for an unchanged plan
    for candidate in (homes_only, previous):
        if candidate is None:
            continue
        if np.array_equal(table, candidate.table) and np.array_equal(
            homes_only.home, candidate.home
        ):
            return candidate
    return Placement(homes_only.home, table)


def _fill_to_limit(
    forecast: np.ndarray,
    problem: Problem,
    bounds: tuple[int, float],
    table: np.ndarray,
    previous: Placement | None,
) -> np.ndarray:
    """Add replicas to the plan that pays until its load is under the limit or no copy helps.

    Args:
        forecast: [E] tokens.
        problem: homes, nodes and costs.
        bounds: replicas that a rank may hold, and limit of `plan_replicas`.
        table: [R, P] experts of the plan that pays.
        previous: placement of the last iteration.

    Returns:
        The cheapest plan under the limit; above it, a plan with full slots: replicas that the
        forecast does not need take tokens where the forecast is wrong.
    """
    num_slots, limit = bounds
    mean = forecast.sum() / len(table)
    if forecast_load(forecast, problem.bare) <= EVEN * mean:
        return table
    even = math.ceil(mean) + mean // SLACK
    limited = problem._replace(limit=limit * mean)
    free = limited._replace(near=0.0, far=0.0, routing=0.0, computing=0.0)
    for attempt in (limited, free):
        is_reachable = attempt is free or limited.limit >= even
        if is_reachable and forecast_load(forecast, table) > limited.limit:
            filled = _Search(forecast, attempt, num_slots).best_table(previous)
            # loads up to `even` are equal
            table = min(filled, table, key=lambda t: max(forecast_load(forecast, t), even))
    return table


def problem_of(homes_only: Placement, world: World, cost: CopyCost) -> Problem:
    """Make the input of `search`: homes, nodes and costs.

    Args:
        homes_only: placement without replicas.
        world: node of every rank.
        cost: cost of replicas.
    """
    node = world.node_index
    far = cost.far
    # On a single node over point-to-point links, tokens that change ranks are as slow as copies, so
    # each rank counts as a node.
    if world.num_nodes == 1 and not cost.scatters:
        node = np.arange(world.num_ranks)
        far = cost.near
    # The hidden window is measured, so it differs from run to run. At full contention hiding saves
    # nothing, and the window must not change the plan.
    hidden = cost.hidden * (cost.contention < 1)
    # Copies, because placements are read-only: numba compiles separately for read-only arrays, and
    # other callers of the same functions pass writable ones.
    return Problem(
        home=homes_only.home.copy(),
        node=node,
        members=np.argsort(node, kind="stable"),
        begin=np.concatenate([[0], np.cumsum(np.bincount(node))]),
        bare=homes_only.table.copy(),
        scatters=cost.scatters,
        near=float(cost.near),
        far=float(far),
        out=float(cost.out),
        hidden=float(hidden),
        contention=float(cost.contention),
        routing=float(cost.routing),
        computing=float(cost.computing),
        crossing=float(cost.crossing),
        limit=math.inf,
    )


class _Candidate(NamedTuple):
    """Candidate table, [R, P] experts, and its cost in tokens.

    Args:
        table: [R, P] experts.
        cost: total cost, in tokens.
        overhead: copies, routing and computing in that cost, in tokens.
    """

    table: np.ndarray
    cost: float
    overhead: float


class _Limits(NamedTuple):
    """Limits of the fill: replicas that a rank holds, and replicas of one rank's home experts."""

    number: int
    leaving: int


class _Search:
    """Search for the cheapest replicas of one layer.

    Args:
        forecast: [E] tokens.
        problem: homes, nodes and costs.
        num_slots: replicas that a rank may hold.
    """

    def __init__(self, forecast: np.ndarray, problem: Problem, num_slots: int) -> None:
        self._forecast = forecast
        self._problem = problem
        self._num_slots = num_slots
        self._num_ranks = len(problem.node)
        self._home_loads = np.bincount(problem.home, weights=forecast, minlength=self._num_ranks)

    def best_table(self, previous: Placement | None) -> np.ndarray:
        """Find the cheapest table, [R, P] experts; the bare homes if replicas do not pay.

        Args:
            previous: placement of the last iteration, a second start of the local search.
        """
        problem = self._problem
        # free: even full slots cost less than one token
        copy_tokens = max(problem.near, problem.far) + problem.computing
        is_free = copy_tokens * self._num_slots + problem.routing < 1
        if is_free:
            limits = _Limits(self._num_slots, self._num_slots * self._num_ranks)
            best = self._candidate(fill(self._forecast, problem, *limits))
        elif self._home_loads.max() <= min(BALANCED * self._home_loads.mean(), problem.limit):
            return problem.bare
        else:
            best, limits = self._cheapest_fill()
        best, continues = self._improve(best, limits, previous)
        if is_free:
            return best.table
        margin = HYSTERESIS * best.overhead
        if continues:
            margin = -margin
        if best.cost + margin >= self._candidate(problem.bare).cost:
            return problem.bare
        return best.table

    def _candidate(self, table: np.ndarray, bound: float = np.inf) -> _Candidate:
        """Compute the cost of ``table`` [R, P]; a lower bound if that is not below ``bound``."""
        return _Candidate(table, *plan_cost(self._forecast, self._problem, table, bound))

    def _improve(
        self, best: _Candidate, limits: _Limits, previous: Placement | None
    ) -> tuple[_Candidate, bool]:
        """Improve a candidate by local search, also starting from the last iteration's placement.

        Returns:
            The cheapest candidate; and whether ``previous`` has replicas and the same homes.
        """
        problem = self._problem
        number, leaving = limits
        mean = self._home_loads.mean()
        even = mean * (1 + 1 / SLACK)
        # with scattered copies a home sends each expert once, however many ranks receive it
        if problem.scatters:
            leaving = best.table.size
        until = (-(-REPLACED // self._num_ranks), number, leaving, even - mean)
        tokens = np.rint(self._forecast).astype(np.int64)

        def improve_from(best: _Candidate, start: np.ndarray) -> _Candidate:
            table = overwrite(tokens, problem.home, start, problem.node, np.zeros(4), until)
            if np.array_equal(table, best.table):
                return best
            return min(best, self._candidate(table, best.cost), key=operator.attrgetter("cost"))

        best = improve_from(best, best.table)
        if previous is None or previous.num_replicas == 0:
            return best, False
        if not np.array_equal(previous.home, problem.home):
            return best, False
        if previous.is_replica.sum(axis=1).max() == number:
            start = previous.table.copy()
            # skip the search if even perfectly balanced ranks would not make this one cheaper
            if even + sum(cost_beside_load(self._forecast, problem, start)) < best.cost:
                best = improve_from(best, start)
        return best, True

    def _cheapest_fill(self) -> tuple[_Candidate, _Limits]:
        """Find the cheapest greedy table over both limits of `fill`.

        With more replicas of a hot rank's home experts, loads get more even and the home sends for
        a longer time. The optimum is in between; for each number of replicas per rank, a descent
        searches the other limit.
        """
        # with this number of copies even the hottest home keeps a mean load
        evens = math.ceil(self._home_loads.max() / self._home_loads.mean()) - 1
        candidates: dict[_Limits, _Candidate] = {}
        lowest = np.inf

        def cost(number: int, leaving: int) -> float:
            nonlocal lowest
            limits = _Limits(number, leaving)
            if limits not in candidates:
                table = fill(self._forecast, self._problem, number, leaving)
                candidates[limits] = self._candidate(table, lowest)
                lowest = min(lowest, candidates[limits].cost)
            return candidates[limits].cost

        best = _Limits(self._num_slots, self._num_slots)
        for number in range(self._num_slots, 0, -1):
            cost_of_number = functools.partial(cost, number)
            unlimited = most_leaving(self._forecast, self._problem, number)
            starts = (evens, 2 * number, number, unlimited)
            limits = (max(number, min(start, unlimited)) for start in starts)
            leaving = min(limits, key=cost_of_number)
            # a descent for fewer replicas is worth its time only from a cheaper start
            if number == self._num_slots or cost_of_number(leaving) < cost(*best):
                best = _Limits(number, _descend(cost_of_number, leaving, number, unlimited))
        return candidates[best], best


def _descend(cost: Callable[[int], float], start: int, min_number: int, max_number: int) -> int:
    """Find a local minimum of ``cost`` from ``start``, within ``min_number`` to ``max_number``."""
    number = start
    for factor in STEPS:
        nearer: int | None = number
        while nearer is not None:
            number = nearer
            lower = max(min_number, min(number - 1, round(number / factor)))
            upper = min(max_number, max(number + 1, round(number * factor)))
            nearer = next((limit for limit in (lower, upper) if cost(limit) < cost(number)), None)
    return number
