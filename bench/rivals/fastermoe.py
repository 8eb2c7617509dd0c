"""FasterMoE's dynamic shadowing (He et al., PPoPP 2022)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megatron_hecate.plan import Placement
from rivals.planner import Planner, from_holders
from rivals.split import Quotas, even_split


class FasterMoE(Planner):
    """Planner that broadcasts hot experts to all ranks after the gate, by a performance model.

    The model is the paper's, as its public policy uses it: hottest expert first, ``3 x compute +
    4 x features + shadows``, where a shadow costs one transfer of the parameters; stop at the first
    expert that does not pay. Every rank then computes its own tokens of a shadowed expert. Decided
    here: the paper assumes one expert per worker; with several, the most loaded rank counts;
    constants are the world's and the layer's.

    The planner ignores the slots: a shadowed expert is on every rank.
    """

    name = "fastermoe"
    when = "gate"

    def place(self, history: Sequence[np.ndarray]) -> Placement:
        return self.setting.homes

    def correct(self, load: np.ndarray, placement: Placement) -> Placement:
        world = self.setting.world
        shape = self.setting.shape
        link = world.speeds.inter if world.num_nodes > 1 else world.speeds.intra
        compute = shape.token_flops / world.speeds.flops
        feature = shape.token_bytes / link.bandwidth
        total = load.sum(axis=0)
        home = placement.home
        native = np.bincount(home, weights=total, minlength=len(load))
        local = np.zeros(len(load))
        holders = placement.holders.copy()
        # Backward computes twice the forward; dispatch and combine are sent in both directions.
        best = (3 * compute + 4 * feature) * native.max()
        shadows = 0.0
        for e in np.argsort(-total, kind="stable"):
            # All ranks compute their own tokens of a shadowed expert.
            native[home[e]] -= total[e]
            local += load[:, e]
            shadows += shape.expert_bytes / link.bandwidth
            seconds = 3 * compute * (native + local).max() + 4 * feature * native.max() + shadows
            if seconds >= best:
                break
            best = seconds
            holders[e] = True
        return placement if holders.sum() == len(home) else from_holders(holders, home)

    def split(self, load: np.ndarray, placement: Placement) -> Quotas:
        return even_split(load, placement, self.setting.world, nearest="rank")
