"""Forced balance: the ideal of published throughput tables."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megatron_hecate.plan import Placement
from rivals.planner import Planner


class ForcedBalance(Planner):
    """Plain expert parallelism under a router that balances every source's tokens over all experts.

    Forced balance changes the model's results, so it is a baseline and not a rival. (Megatron's
    ``--moe-router-force-load-balancing`` draws at random, with noise; this planner has no noise.)
    """

    name = "forced"
    when = "ideal"

    def gate(self, load: np.ndarray) -> np.ndarray:
        num_ranks, num_experts = load.shape
        share, rest = np.divmod(load.sum(axis=1, keepdims=True), num_experts)
        # Each source's remainder starts at another rank's experts, so that no rank accumulates it.
        start = np.arange(num_ranks)[:, None] * self.setting.homes_per_rank
        return share + ((np.arange(num_experts) - start) % num_experts < rest)

    def place(self, history: Sequence[np.ndarray]) -> Placement:
        return self.setting.homes
