"""Algorithm 1 of the Hecate paper (arXiv 2502.02581), as printed, with the paper's even split."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megatron_hecate.plan import Placement, Quotas, algorithm1
from rivals.planner import Planner, mean_load
from rivals.split import even_split


class Algorithm1(Planner):
    """Materialization from the 5-step mean; tokens stay on their rank, else on their node, evenly among candidates.

    What the paper leaves open is decided in `megatron_hecate.plan.algorithm1`. Decided here: the overlap degree is not
    limited, as the slots limit the copies anyway; on our loads every limit leaves it more imbalance.
    """

    name, when = "algorithm1", "history"

    def place(self, history: Sequence[np.ndarray]) -> Placement:
        if not history:
            return self.setting.homes
        return algorithm1(mean_load(history), self.setting.homes, self.setting.world)

    def split(self, load: np.ndarray, placement: Placement) -> Quotas:
        return even_split(load, placement, self.setting.world, nearest="rank")
