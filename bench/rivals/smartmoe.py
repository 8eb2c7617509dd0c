"""SmartMoE's dynamic expert placement (Zhai et al., ATC 2023)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megatron_hecate.plan import Placement
from rivals.planner import INTERVAL, Resident, from_holders


class SmartMoE(Resident):
    """Planner without copies: every 25 steps it swaps experts with their optimizer state.

    It assigns experts greedily, hottest first, to the least loaded rank with room, by the mean load
    since the last placement. Decided here: a new placement is used only if it lowers the largest
    rank load of that mean.
    """

    name = "smartmoe"
    when = f"every {INTERVAL}"

    def replan(self, history: Sequence[np.ndarray], now: Placement) -> Placement:
        if not history or len(history) % INTERVAL:
            return now
        load = np.mean([step.sum(axis=0) for step in history[-INTERVAL:]], axis=0)
        num_ranks = self.setting.num_ranks
        rank_load = np.zeros(num_ranks)
        room = np.full(num_ranks, self.setting.homes_per_rank)
        home = np.empty(len(load), dtype=np.int64)
        for e in np.argsort(-load, kind="stable"):
            home[e] = np.where(room > 0, rank_load, np.inf).argmin()
            rank_load[home[e]] += load[e]
            room[home[e]] -= 1
        # A move costs time, so the homes change only for a lower largest rank load.
        if rank_load.max() >= np.bincount(now.home, weights=load, minlength=num_ranks).max():
            return now
        return from_holders(home[:, None] == np.arange(num_ranks), home)
