"""Plain expert parallelism."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megatron_hecate.plan import Placement
from rivals.planner import Planner, Setting


class ExpertParallel(Planner):
    """Every expert on one rank, for good: what Megatron does."""

    name, when = "ep", "never"

    @classmethod
    def memory(cls, setting: Setting) -> dict[str, int]:
        return {}

    def place(self, history: Sequence[np.ndarray]) -> Placement:
        return self.setting.homes
