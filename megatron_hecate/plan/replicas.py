"""How many replicas pay in the next iteration, and which: of plans with many and with few of them, the cheapest.

A plan is compared before the gate, from a forecast alone, by tokens of the busiest rank:

    largest rank load + tokens that cross nodes, of the busiest node + copies that do not hide + routing to replicas
"""

from __future__ import annotations

import numpy as np

from megatron_hecate.plan.cost import CopyCost
from megatron_hecate.plan.late import overwrite
from megatron_hecate.plan.placement import EMPTY, Placement
from megatron_hecate.plan.search import SLACK, Problem, fill, plan_cost
from megatron_hecate.plan.world import World

# A layer starts to have replicas when they win so much of their cost beyond it, and stops when they lose as much.
HYSTERESIS: float = 0.2
REPLACED: int = 128  # replicas that the local search replaces, at most, times ranks
BALANCED: float = 1.05  # times the mean: up to this largest rank load nothing is copied


def plan_replicas(
    forecast: np.ndarray, homes: Placement, world: World, *, cost: CopyCost, previous: Placement | None = None
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
        if same is not None and np.array_equal(table, same.table) and np.array_equal(bare.home, same.home):
            return same
    return Placement.trusted(bare.home, table)


def problem_of(bare: Placement, world: World, cost: CopyCost) -> Problem:
    """What `search` plans for: the homes alone, the nodes of their ranks, and what copies cost."""
    node, far = world.node_index, cost.far
    if world.num_nodes == 1 and not cost.scatters:  # tokens that change rank travel as slowly as copies
        node, far = np.arange(world.num_ranks), cost.near
    members, begin = np.argsort(node, kind="stable"), np.concatenate([[0], np.cumsum(np.bincount(node))])
    hidden = cost.hidden * (cost.contention < 1)  # is measured; where it wins nothing it must not tell plans apart
    costs = (cost.near, far, cost.out, hidden, cost.contention, cost.routing, cost.crossing)
    # arrays that may be written to, as those of other callers: numba compiles for each kind
    return Problem(bare.home.copy(), node, members, begin, bare.table.copy(), cost.scatters, *map(float, costs))


def _best_plan(forecast: np.ndarray, problem: Problem, most: int, previous: Placement | None) -> np.ndarray:
    """[R, P] the cheapest plan with up to ``most`` replicas per rank, after a local search, also from the last plan."""

    def cost(table: np.ndarray) -> float:
        return plan_cost(forecast, problem, table)[0]

    num_ranks, number = len(problem.node), most
    steps, loads = REPLACED // num_ranks, np.bincount(problem.home, weights=forecast, minlength=num_ranks)
    if is_free := max(problem.near, problem.far) * most + problem.routing < 1:  # they do not cost a token
        table = fill(forecast, problem, most, most * num_ranks)
    elif loads.max() <= BALANCED * loads.mean():
        return problem.bare
    else:
        # a hot home sends a copy to every rank, unless it is cheaper that it sends about as many as a rank receives
        limits = [
            (n, leaving) for n in range(most, 0, -1) for leaving in (n * num_ranks, 2 * n, n)[0 if steps else 2 :]
        ]
        plans = [(fill(forecast, problem, *limit), limit[0]) for limit in limits]
        table, number = min(plans, key=lambda plan: cost(plan[0]))
    starts = [table]
    goes_on = previous is not None and previous.num_replicas > 0 and np.array_equal(previous.home, problem.home)
    if previous is not None and goes_on and previous.is_replica.sum(axis=1).max() == number:
        starts.append(previous.table.copy())
    whole = np.rint(forecast).astype(np.int64)
    until = (steps, number, whole.sum() / num_ranks / SLACK)
    found = [overwrite(whole, problem.home, start, problem.node, np.zeros(3), until) for start in starts if steps]
    table = min([table, *found], key=cost)
    least, overhead = plan_cost(forecast, problem, table)
    margin = -HYSTERESIS * overhead if goes_on else HYSTERESIS * overhead
    return problem.bare if not is_free and least + margin >= cost(problem.bare) else table
