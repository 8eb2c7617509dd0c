"""Heuristic that fills every slot."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megatron_hecate.plan import Placement
from rivals.planner import Planner, mean_load


class Fill(Planner):
    """Planner that fills every slot: most loaded expert per holder onto the least loaded rank.

    Loads are forecast by the 5-step mean; an expert's load is shared evenly among its holders.
    Quotas are ours. This is no published system, but a baseline for balanced quotas in twenty
    lines.
    """

    name = "fill"
    when = "history"

    def place(self, history: Sequence[np.ndarray]) -> Placement:
        homes = self.setting.homes
        if not history:
            return homes
        forecast = mean_load(history)
        holds = homes.holders.copy()
        free = np.full(self.setting.num_ranks, self.setting.slots)
        per_holder = forecast.copy()
        load = per_holder @ holds
        replicas: list[tuple[int, int]] = []
        while free.any():
            possible = ~holds & (free > 0)
            open_ = possible.any(axis=1)
            if not open_.any():
                break
            e = int(np.where(open_, per_holder, -1).argmax())
            r = int(np.where(possible[e], load, np.inf).argmin())
            # One more holder changes the expected load of all the expert's holders.
            load -= holds[e] * per_holder[e]
            holds[e, r] = True
            per_holder[e] = forecast[e] / holds[e].sum()
            load += holds[e] * per_holder[e]
            free[r] -= 1
            replicas.append((e, r))
        return homes.with_replicas(replicas)
