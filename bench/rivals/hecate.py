"""Ours: replicas from the forecast, balanced quotas, and on request late replicas."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from megatron_hecate.plan import CopyCost, Placement, add_late_replicas, plan_replicas
from megatron_hecate.step.forecast import LoadHistory
from rivals.planner import Planner, Setting

# Least gain of a late replica for `hecate-late`, in mean rank loads. It is below the cost of a
# fetch, so that the figures show the limit of late replicas.
LATE_GAIN: float = 0.005


class Hecate(Planner):
    """The package's default: replicas that pay by the cost model, and balanced quotas.

    Replicas are fetched before the gate. The first step has no forecast and no replicas.
    """

    name = "hecate"
    when = "history"

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        self._observed = LoadHistory()
        self._steps = 0
        self._last: Placement | None = None

    @property
    def cost(self) -> CopyCost:
        """Price of replicas for `plan_replicas`."""
        return self.setting.cost

    def place(self, history: Sequence[np.ndarray]) -> Placement:
        # The forecast needs every step once.
        for load in history[self._steps :]:
            self._observed.append(load.sum(axis=0, keepdims=True))
        self._steps = len(history)
        forecast = self._observed.forecast()
        if forecast is None:
            forecast = self.first()
        # The history has loads of one microbatch; a copy serves all microbatches of an iteration,
        # at one price.
        self._last = plan_replicas(
            forecast[0] * self.setting.shape.microbatches,
            self.setting.homes,
            self.setting.world,
            cost=self.cost,
            previous=self._last,
        )
        return self._last

    def first(self) -> np.ndarray:
        """Return the forecast of the first step, [1, E]."""
        return np.zeros((1, self.setting.num_experts))


class HecateUnpriced(Hecate):
    """Hecate with free copies: all slots are filled, even in the first step."""

    name = "hecate-unpriced"

    @property
    def cost(self) -> CopyCost:
        return CopyCost()

    def first(self) -> np.ndarray:
        # Equal loads, with a tie-break that copies from every home.
        return 1 + 1e-3 * (np.arange(self.setting.num_experts) % self.setting.homes_per_rank)[None]


class HecateLate(HecateUnpriced):
    """Hecate with free copies, and late replicas inside the node that correct forecast errors.

    Late replicas are added down to small gains.
    """

    name = "hecate-late"
    when = "history, gate"

    def correct(self, load: np.ndarray, placement: Placement) -> Placement:
        cost = CopyCost(near=LATE_GAIN * load.sum() / self.setting.num_ranks)
        world = self.setting.world
        most = self.setting.num_ranks
        return add_late_replicas(
            load.sum(axis=0), placement, world, cost=cost, max_copies=most, across_nodes=False
        )


class HecateLatePriced(Hecate):
    """Hecate with late replicas and measured speeds, also across nodes.

    The gain of each late replica must exceed the cost of its fetch.
    """

    name = "hecate-late-priced"
    when = "history, gate"

    def correct(self, load: np.ndarray, placement: Placement) -> Placement:
        cost = dataclasses.replace(self.setting.shape, microbatches=1).copy_cost(self.setting.world)
        world = self.setting.world
        most = self.setting.num_ranks
        return add_late_replicas(
            load.sum(axis=0), placement, world, cost=cost, max_copies=most, across_nodes=True
        )
