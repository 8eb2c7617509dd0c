"""Algorithm 1 of the Hecate paper (arXiv 2502.02581), as printed, with the paper's even split."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from megatron_hecate.plan import Placement, World
from rivals.planner import Planner, mean_load
from rivals.split import Quotas, even_split


class Algorithm1(Planner):
    """Materialization from the 5-step mean.

    Tokens stay on their rank, else on their node, evenly split among candidates. The slots are
    shared among the most loaded experts in proportion to their load. The paper leaves some cases
    open. Decided here: a copy must *pay*, so an expert whose home is not above the mean is no
    candidate; slots left over by rounding are given to the candidate with the highest load per
    copy; a rank never hosts a replica of its own expert; within a node the rank with the least
    forecast load is preferred; the lowest index wins ties; the overlap degree is not limited, as
    the slots limit the copies anyway (on our loads every limit leaves more imbalance).
    """

    name = "algorithm1"
    when = "history"

    def place(self, history: Sequence[np.ndarray]) -> Placement:
        homes = self.setting.homes
        if not history or not self.setting.slots:
            return homes
        forecast = mean_load(history)
        # [R]
        load = np.bincount(homes.home, weights=forecast, minlength=homes.num_ranks)
        pays = (load[homes.home] > load.mean()) & (forecast > 0)
        candidates = [int(e) for e in np.lexsort((np.arange(len(forecast)), -forecast)) if pays[e]]
        if not candidates:
            return homes
        free = np.full(homes.num_ranks, self.setting.slots)
        copies = _share_slots(forecast, candidates, total=int(free.sum()), most=homes.num_ranks - 1)
        world = self.setting.world
        replicas = _spread(forecast, copies, placement=homes, world=world, free=free, load=load)
        return homes.with_replicas(replicas)

    def split(self, load: np.ndarray, placement: Placement) -> Quotas:
        return even_split(load, placement, self.setting.world, nearest="rank")


def _share_slots(
    forecast: np.ndarray, candidates: list[int], *, total: int, most: int
) -> dict[int, int]:
    """Split ``total`` slots over the candidates in proportion to load.

    Left-over slots are given to the highest load per copy, where the home counts as a copy.

    Args:
        forecast: tokens of each expert, [E].
        candidates: experts, hottest first.
        total: number of slots.
        most: most replicas of an expert.

    Returns:
        Number of replicas by expert.
    """
    weight = forecast[candidates] / forecast[candidates].sum()
    copies = {
        e: min(most, int(total * w)) for e, w in zip(candidates, weight.tolist(), strict=True)
    }
    for _ in range(total - sum(copies.values())):
        open_ = [e for e in candidates if copies[e] < most]
        if not open_:
            break
        # max() keeps the first of equals, and candidates are ordered by load, then index.
        copies[max(open_, key=lambda e: forecast[e] / (1 + copies[e]))] += 1
    return copies


def _spread(
    forecast: np.ndarray,
    copies: dict[int, int],
    *,
    placement: Placement,
    world: World,
    free: np.ndarray,
    load: np.ndarray,
) -> list[tuple[int, int]]:
    """Choose a rank for each replica, hottest expert first.

    The order of preference: fewest copies of the expert on the node, most free slots, least load.

    Args:
        forecast: tokens of each expert, [E].
        copies: number of replicas by expert.
        placement: placement without replicas.
        world: node of every rank.
        free: free slots per rank, [R].
        load: forecast load of each rank, [R].

    Returns:
        Expert and rank of each replica.
    """
    free = free.copy()
    load = load.copy()
    replicas: list[tuple[int, int]] = []
    for expert, wanted in copies.items():
        holds = placement.holders[expert].copy()
        for copy in range(wanted):
            eligible = [r for r in range(placement.num_ranks) if free[r] > 0 and not holds[r]]
            if not eligible:
                break
            holders_of_node = Counter(world.node[r] for r in np.flatnonzero(holds))
            on_node = {r: holders_of_node[world.node[r]] for r in eligible}
            rank = min(eligible, key=lambda r: (on_node[r], -free[r], load[r], r))
            replicas.append((expert, rank))
            holds[rank] = True
            free[rank] -= 1
            # One more holder shares the expert's load: update the forecast of all its holders.
            share = forecast[expert] / (copy + 2)
            before = forecast[expert] / (copy + 1)
            load[holds] += share - before
            load[rank] += before
    return replicas
