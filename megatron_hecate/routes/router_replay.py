"""Routes that the next training forward of a router replays.

Post-training replays the routes of the rollout: before a forward, the training loop gives every
router the experts of all tokens. Two interfaces are recognized by their attributes, which are in
`frameworks.REPLAY_ASSUMPTIONS`: ``router_replay``, of Megatron and of patches with the same names
(verl), and ``routing_replay``, of slime and of its fork miles. Where routes are only read by the
forward itself, the layer keeps its forecast.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from megatron_hecate.megatron.frameworks import REPLAY_ASSUMPTIONS


def replays(layer: Module) -> bool:
    """Return whether the layer's next forward replays routes."""
    return _listed(layer) is not None or _single(layer) is not None


def may_replay(routers: Iterable[Module]) -> bool:
    """Return whether some router may replay routes next; takes little time where none does."""
    return any(
        getattr(router, "router_replay", None) is not None or "routing_replay" in vars(router)
        for router in routers
    )


def next_routes(layer: Module, limit: int) -> list[Tensor]:
    """List the routes of the next forwards of a layer; empty where the next one does not replay.

    Megatron's router holds the routes of one forward, slime's and miles' those of a whole rollout.

    Args:
        layer: MoE layer.
        limit: upper bound on forwards.

    Returns:
        For each forward, in order: experts of each token, [T, k], below 0 where the router chooses.
    """
    if (replay := _listed(layer)) is not None:
        next_indices = replay.top_indices_list[replay.forward_index : replay.forward_index + limit]
        # An entry may also be an object that makes its tensor when the router asks for it.
        listed = takewhile(lambda routes: isinstance(routes, Tensor), next_indices)
        if _manager(replay) is None:
            return list(listed)
        return [_with_padding(routes, layer.config.num_moe_experts) for routes in listed]
    replay = _single(layer)
    if replay is None or replay.target_topk_idx is None:
        return []
    routes = replay.target_topk_idx
    # verl's mask [T] is False where the router chooses.
    is_replayed = getattr(replay, "target_replay_mask", None)
    if is_replayed is not None:
        is_chosen = ~is_replayed.to(routes.device, torch.bool)
        routes = routes.long().masked_fill(is_chosen.unsqueeze(1), -1)
    return [routes]


def _with_padding(routes: Tensor, experts: int) -> Tensor:
    """Return miles' routes, [T, k], with padding, marked by -1, routed to the first k experts."""
    first = torch.arange(routes.shape[1], dtype=routes.dtype, device=routes.device) % experts
    return torch.where((routes == -1).all(dim=1, keepdim=True), first, routes)


def _single(layer: Module) -> Any:
    """Return Megatron's or verl's object if the next forward replays its routes, else ``None``."""
    replay = _replay(layer, "router_replay")
    action = getattr(replay, "router_replay_action", None)
    return replay if getattr(action, "value", None) == "replay_forward" else None


def _listed(layer: Module) -> Any:
    """Return slime's or miles' object if the next forward replays its list, else ``None``."""
    replay = _replay(layer, "routing_replay")
    if replay is None:
        return None
    manager = _manager(replay)
    if manager is None:
        is_on = os.environ.get("ENABLE_ROUTING_REPLAY") == "1"
        stage = os.environ.get("ROUTING_REPLAY_STAGE")
    else:
        is_on, stage = manager.enabled, manager.stage
    return replay if is_on and stage == "replay_forward" else None


def _manager(replay: Any) -> Any:
    """Return miles' object with the stage of all routers; ``None`` in slime."""
    module = sys.modules.get(type(replay).__module__)
    return getattr(module, "routing_replay_manager", None)


def _replay(layer: Module, name: str) -> Any:
    """Return the object that replays routes, which a fused router ignores, or ``None``."""
    replay = getattr(layer.router, name, None)
    if replay is None or layer.config.moe_router_fusion:
        return None
    is_known = all(hasattr(replay, attribute) for attribute in REPLAY_ASSUMPTIONS[name])
    return replay if is_known else None
