"""FlexMoE's expand, shrink and migrate (Nie et al., SIGMOD 2023)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megatron_hecate.plan import Placement
from rivals.planner import Resident, from_holders
from rivals.split import Quotas, even_split

# max / mean rank load above which the placement is adjusted; the paper tunes it
TRIGGER: float = 1.1
# most operations per step; adjustments run concurrently with training, a few at a time
OPERATIONS: int = 4


class FlexMoE(Resident):
    """Planner that changes the number of an expert's vExperts by a few operations per step.

    It uses the last step's load, split evenly among an expert's vExperts. While max / mean is above
    the trigger, the best of three operations is applied if it lowers the largest rank load:
    *expand* (the expert of highest load per vExpert gets one more), with room from *shrink* if
    necessary (the expert of lowest load per vExpert loses one, but never its last); *migrate* (a
    vExpert of the most loaded rank is swapped with one of the least loaded rank). Decided here: the
    trigger's threshold; the number of operations; migrations are chosen by balance (in the paper by
    the cost of synchronizing replicas); this cost does not count against an expansion.
    """

    name = "flexmoe"
    when = "every step"

    def replan(self, history: Sequence[np.ndarray], now: Placement) -> Placement:
        if not history:
            return now
        load = history[-1].sum(axis=0).astype(float)
        holders = now.holders.copy()
        capacity = self.setting.homes_per_rank + self.setting.slots
        for _ in range(OPERATIONS):
            rank_load = _rank_load(load, holders)
            if rank_load.max() <= TRIGGER * rank_load.mean():
                break
            options = [*_expansions(load, holders, capacity), *_migrations(load, holders)]
            peaks = [_rank_load(load, option).max() for option in options]
            # No operation helps, so none is applied.
            if not peaks or min(peaks) >= rank_load.max():
                break
            holders = options[int(np.argmin(peaks))]
        return now if (holders == now.holders).all() else from_holders(holders, now.home)

    def split(self, load: np.ndarray, placement: Placement) -> Quotas:
        return even_split(load, placement, self.setting.world, nearest="any")


def _rank_load(load: np.ndarray, holders: np.ndarray) -> np.ndarray:
    """Compute the expected load of each rank, [R], with experts shared evenly by their holders."""
    return (load / holders.sum(axis=1)) @ holders


def _expansions(load: np.ndarray, holders: np.ndarray, capacity: int) -> list[np.ndarray]:
    """List placements with one more vExpert of the hottest expert.

    The vExpert is on the least loaded rank with room, or replaces one of the coldest expert.

    Args:
        load: tokens of each expert, [E].
        holders: holders of each expert, [E, R] bool.
        capacity: experts per rank.
    """
    count = holders.sum(axis=1)
    rank_load = _rank_load(load, holders)
    possible = ~holders.all(axis=1)
    if not possible.any():
        return []
    hot = int(np.where(possible, load / count, -1).argmax())
    room = ~holders[hot] & (holders.sum(axis=0) < capacity)
    options = []
    if room.any():
        grown = holders.copy()
        grown[hot, np.where(room, rank_load, np.inf).argmin()] = True
        options.append(grown)
    spare = count > 1
    spare[hot] = False
    if spare.any():
        cold = int(np.where(spare, load / count, np.inf).argmin())
        gives_up = holders[cold] & ~holders[hot]
        if gives_up.any():
            rank = np.where(gives_up, rank_load, np.inf).argmin()
            grown = holders.copy()
            grown[cold, rank] = False
            grown[hot, rank] = True
            options.append(grown)
    return options


def _migrations(load: np.ndarray, holders: np.ndarray) -> list[np.ndarray]:
    """List swaps of the most loaded rank's hottest vExpert with each of the least loaded rank.

    Args:
        load: tokens of each expert, [E].
        holders: holders of each expert, [E, R] bool.
    """
    per_holder = load / holders.sum(axis=1)
    rank_load = _rank_load(load, holders)
    high = int(rank_load.argmax())
    low = int(rank_load.argmin())
    # An expert has at most one vExpert per rank.
    leaves = holders[:, high] & ~holders[:, low]
    if not leaves.any():
        return []
    hot = int(np.where(leaves, per_holder, -1).argmax())
    options = []
    for other in np.flatnonzero(holders[:, low] & ~holders[:, high]):
        swapped = holders.copy()
        swapped[hot, [high, low]] = False, True
        swapped[other, [high, low]] = True, False
        options.append(swapped)
    return options
