"""Routes that the next training forward of a router replays.

Post-training replays the routes of the rollout: before a forward, the training loop gives every
router the experts of all tokens. Two interfaces are recognized by their attributes, which are in
`assumptions.REPLAY_ASSUMPTIONS`: ``router_replay``, of Megatron and of patches with the same names
(verl), and ``routing_replay``, of slime.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.nn import Module

from megatron_hecate.settings.assumptions import REPLAY_ASSUMPTIONS


def has_replay(layer: Module) -> bool:
    """Return whether the router of a MoE layer may replay routes."""
    return any(_replay(layer, name) is not None for name in REPLAY_ASSUMPTIONS)


def replays(layer: Module) -> bool:
    """Return whether the layer's next forward replays routes, which a fused router ignores."""
    replay = _replay(layer, "router_replay")
    action = getattr(replay, "router_replay_action", None)
    return getattr(action, "value", None) == "replay_forward" and not layer.config.moe_router_fusion


def next_routes(layer: Module) -> list[tuple[Tensor, Tensor | None]]:
    """List the routes of the next microbatches of a layer that replays.

    Returns:
        For each microbatch whose routes the router holds, in order: experts of each token, [T, k],
        below 0 where the router chooses; and, if any, a mask [T] that is False there (verl).
    """
    replay = _replay(layer, "router_replay")
    routes = None if replay is None else replay.target_topk_idx
    return [] if routes is None else [(routes, getattr(replay, "target_replay_mask", None))]


def _replay(layer: Module, name: str) -> Any:
    """Return the object that replays routes, or ``None``."""
    replay = getattr(layer.router, name, None)
    is_known = all(hasattr(replay, attribute) for attribute in REPLAY_ASSUMPTIONS[name])
    return replay if is_known else None
