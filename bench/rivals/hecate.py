"""Ours: replicas from the forecast, balanced quotas, and on request late replicas."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from megatron_hecate.plan import CopyCost, Placement, add_late_replicas, plan_replicas
from megatron_hecate.runtime.forecast import LoadHistory
from rivals.planner import Planner, Setting

# What a late replica must win for `hecate-late`, in mean rank loads: less than its fetch costs, to show what is left.
LATE_GAIN: float = 0.005


class Hecate(Planner):
    """What users run: as many replicas as pay by the cost model, fetched before the gate, and balanced quotas after it.

    Before the first step nothing is known and nothing is copied.
    """

    name, when = "hecate", "history"

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        self._observed, self._steps = LoadHistory(), 0
        self._last: Placement | None = None

    @property
    def cost(self) -> CopyCost:
        return self.setting.cost

    def place(self, history: Sequence[np.ndarray]) -> Placement:
        for load in history[self._steps :]:
            self._observed.append(load.sum(axis=0, keepdims=True))
        self._steps = len(history)
        forecast = self._observed.forecast()
        if forecast is None:
            forecast = self.first()
        # loads are of one microbatch; copies serve all of an iteration, and cost as much
        self._last = plan_replicas(
            forecast[0] * self.setting.shape.microbatches,
            self.setting.homes,
            self.setting.world,
            cost=self.cost,
            previous=self._last,
        )
        return self._last

    def first(self) -> np.ndarray:
        """[1, E] the forecast of the first step."""
        return np.zeros((1, self.setting.num_experts))


class HecateUnpriced(Hecate):
    """As if copies were hidden: all slots are filled, as in every planner here, even before the first step."""

    name = "hecate-unpriced"

    @property
    def cost(self) -> CopyCost:
        return CopyCost()

    def first(self) -> np.ndarray:
        # all alike, but for a tie-break that copies from every home
        return 1 + 1e-3 * (np.arange(self.setting.num_experts) % self.setting.homes_per_rank)[None]


class HecateLate(HecateUnpriced):
    """What the forecast missed is corrected after the gate, inside the node, down to small gains."""

    name, when = "hecate-late", "history, gate"

    def correct(self, load: np.ndarray, placement: Placement) -> Placement:
        cost = CopyCost(near=LATE_GAIN * load.sum() / self.setting.num_ranks)
        world, most = self.setting.world, self.setting.num_ranks
        return add_late_replicas(
            load.sum(axis=0), placement, world, cost=cost, most=most, across_nodes=False
        )


class HecateLatePriced(Hecate):
    """What users run with late replicas and measured speeds: each must win what its fetch costs, across nodes too."""

    name, when = "hecate-late-priced", "history, gate"

    def correct(self, load: np.ndarray, placement: Placement) -> Placement:
        cost = dataclasses.replace(self.setting.shape, microbatches=1).copy_cost(self.setting.world)
        world, most = self.setting.world, self.setting.num_ranks
        return add_late_replicas(
            load.sum(axis=0), placement, world, cost=cost, most=most, across_nodes=True
        )
