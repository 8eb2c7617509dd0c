"""Ours: guests from history, exact quotas, and on request late guests."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np

from megatron_hecate.observe import LoadHistory
from megatron_hecate.plan import Placement, calibrate, plan_guests
from rivals.planner import Planner, Setting

# Late guests of a layer on all ranks together, per rank: the most `hecate-late` may add.
MOST_LATE: float = 1.0
# What a late guest must win for `hecate-late`, in mean rank loads: less than its fetch costs, to show what is left.
PRICE: float = 0.005


class Hecate(Planner):
    """Tier 1: guests from the forecast, fetched before the gate; exact quotas after it.

    Its copies are taken to be hidden, so all slots are filled, as in every planner here. Before the first step nothing
    is known, and all experts count alike.
    """

    name, when, capped = "hecate", "history", True

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        self._observed, self._steps = LoadHistory(), 0
        self._last: Placement | None = None

    def place(self, history: Sequence[np.ndarray]) -> Placement:
        for load in history[self._steps :]:
            self._observed.append(load.sum(axis=0, keepdims=True))
        self._steps = len(history)
        forecast = self._observed.forecast()
        if forecast is None:  # all alike, but for a tie-break that copies from every home
            forecast = 1 + 1e-3 * (np.arange(self.setting.num_experts) % self.setting.homes_per_rank)[None]
        self._last = plan_guests(
            forecast[0],
            self.setting.homes,
            self.setting.world,
            scenarios=partial(self._observed.scenarios, 0, self.setting.num_experts),
            previous=self._last,
            copies=self.setting.copies,
        )
        return self._last


class HecateLate(Hecate):
    """Both tiers: what the forecast missed is corrected after the gate, inside the node, down to small gains."""

    name, when, capped = "hecate-late", "history, gate", False

    def correct(self, load: np.ndarray, placement: Placement) -> Placement:
        near, far = self.prices(load)
        return calibrate(
            load.sum(axis=0),
            placement,
            self.setting.world,
            copy_tokens=near,
            across_tokens=far,
            most_late=int(MOST_LATE * self.setting.num_ranks),
        )

    def prices(self, load: np.ndarray) -> tuple[float, float | None]:
        """Counts of the load that a late guest must win, in its node and from another one; ``None`` is never."""
        return PRICE * load.sum() / self.setting.num_ranks, None


class HecatePriced(HecateLate):
    """Tier 1 as `Hecate`; a late guest must win what its fetch costs, across nodes too: the plugin, speeds measured."""

    name = "hecate-late-priced"

    def prices(self, load: np.ndarray) -> tuple[float, float | None]:
        world, shape = self.setting.world, self.setting.shape
        near, far = (shape.copy_tokens(world, link) for link in (world.speeds.intra, world.speeds.inter))
        return near / self.setting.tokens_per_count, far / self.setting.tokens_per_count
