"""Plain expert parallelism."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megatron_hecate.plan import Placement
from rivals.planner import Planner


class ExpertParallel(Planner):
    """Stock Megatron: every expert stays on one rank."""

    name = "ep"
    when = "never"

    def place(self, history: Sequence[np.ndarray]) -> Placement:
        return self.setting.homes
