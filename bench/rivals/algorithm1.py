"""Algorithm 1 of the Hecate paper (arXiv 2502.02581), as printed, with the paper's even split."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megatron_hecate.plan import Placement, World
from rivals.planner import Planner, mean_load
from rivals.split import Quotas, even_split


class Algorithm1(Planner):
    """Materialization from the 5-step mean; tokens stay on their rank, else on their node, evenly among candidates.

    The slots are shared among the most loaded experts in proportion to their load. The paper leaves some cases open.
    Decided here: a copy must *pay*, so an expert whose home is not above the mean is no candidate; slots left over by
    rounding go to the candidate with the highest load per copy; a rank never hosts a replica of its own expert; within
    a node the rank with the least forecast load is preferred; ties go to the lowest index; the overlap degree is not
    limited, as the slots limit the copies anyway (on our loads every limit leaves more imbalance).
    """

    name, when = "algorithm1", "history"

    def place(self, history: Sequence[np.ndarray]) -> Placement:
        homes = self.setting.homes
        if not history or not self.setting.slots:
            return homes
        forecast = mean_load(history)
        load = np.bincount(homes.home, weights=forecast, minlength=homes.num_ranks)  # [R]
        pays = (load[homes.home] > load.mean()) & (forecast > 0)
        candidates = [int(e) for e in np.lexsort((np.arange(len(forecast)), -forecast)) if pays[e]]
        if not candidates:
            return homes
        free = np.full(homes.num_ranks, self.setting.slots)
        copies = _share_slots(forecast, candidates, total=int(free.sum()), most=homes.num_ranks - 1)
        return homes.with_replicas(
            _spread(
                forecast, copies, placement=homes, world=self.setting.world, free=free, load=load
            )
        )

    def split(self, load: np.ndarray, placement: Placement) -> Quotas:
        return even_split(load, placement, self.setting.world, nearest="rank")


def _share_slots(
    forecast: np.ndarray, candidates: list[int], *, total: int, most: int
) -> dict[int, int]:
    """Split ``total`` slots over the candidates by load; leftovers to the highest load per copy (home included)."""
    weight = forecast[candidates] / forecast[candidates].sum()
    copies = {
        e: min(most, int(total * w)) for e, w in zip(candidates, weight.tolist(), strict=True)
    }
    for _ in range(total - sum(copies.values())):
        open_ = [e for e in candidates if copies[e] < most]
        if not open_:
            break
        # max() keeps the first of equals, and candidates are ordered by load, then index
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
    """Choose ranks, hottest expert first: nodes with fewest copies of it, then most free slots, then least load."""
    free, load = free.copy(), load.copy()
    replicas: list[tuple[int, int]] = []
    for expert, wanted in copies.items():
        holds = placement.holders[expert].copy()
        for copy in range(wanted):
            eligible = [r for r in range(placement.num_ranks) if free[r] > 0 and not holds[r]]
            if not eligible:
                break
            on_node = {
                r: sum(holds[q] for q in range(len(holds)) if world.node[q] == world.node[r])
                for r in eligible
            }
            rank = min(eligible, key=lambda r: (on_node[r], -free[r], load[r], r))
            replicas.append((expert, rank))
            holds[rank] = True
            free[rank] -= 1
            # the expert's load is now shared by one more holder: move that share in the forecast
            share = forecast[expert] / (copy + 2)
            before = forecast[expert] / (copy + 1)
            load[holds] += share - before
            load[rank] += before
    return replicas
