"""Forced balance: the ideal that published throughput tables use."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megatron_hecate.plan import Placement
from rivals.planner import Planner, Setting


class ForcedBalance(Planner):
    """Plain expert parallelism under a router that sends every expert equally many tokens of every source.

    It changes what the model computes, so it is a yardstick and no rival. (Megatron's
    ``--moe-router-force-load-balancing`` draws at random and keeps the noise; here there is none.)
    """

    name, when = "forced", "ideal"

    @classmethod
    def memory(cls, setting: Setting) -> dict[str, int]:
        return {}

    def gate(self, load: np.ndarray) -> np.ndarray:
        num_ranks, num_experts = load.shape
        share, rest = np.divmod(load.sum(axis=1, keepdims=True), num_experts)
        # what does not divide starts at another rank's experts for every source, so that no rank collects it
        start = np.arange(num_ranks)[:, None] * self.setting.homes_per_rank
        return share + ((np.arange(num_experts) - start) % num_experts < rest)

    def place(self, history: Sequence[np.ndarray]) -> Placement:
        return self.setting.homes
