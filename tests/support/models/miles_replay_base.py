"""Stand-in for miles' module of routing replay, after ``miles/utils/replay_base.py`` of miles 31f1ca961.

A router's `Replay` is slime's list of routes. Its stage is an attribute of one object for all routers, which also
knows the running router by a hook, and gives padding, of which all experts are -1, the first experts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import slime_routing_replay
import torch


class Replay(slime_routing_replay.RoutingReplay):
    pass


class Manager:
    def __init__(self) -> None:
        self.replays: list[Replay] = []
        self.current: Replay | None = None
        self.enabled = False
        self.stage = "fallthrough"

    def register_to_module(self, module: torch.nn.Module, name: str) -> None:
        replay = Replay()
        self.replays.append(replay)
        setattr(module, name, replay)
        module.register_forward_pre_hook(lambda *_: setattr(self, "current", replay))

    def get_topk_fn(self, old_topk: Callable, return_probs: bool) -> Callable:
        def topk_fn(scores: torch.Tensor, topk: int, *args: Any) -> tuple:
            if not self.enabled or self.stage == "fallthrough":
                return old_topk(scores, topk, *args)
            pop = {"replay_forward": "pop_forward", "replay_backward": "pop_backward"}[self.stage]
            routes = getattr(self.current, pop)()
            first = torch.arange(topk, dtype=routes.dtype) % scores.shape[1]
            routes = torch.where((routes == -1).all(dim=-1, keepdim=True), first, routes)
            return scores.gather(1, routes), routes

        return topk_fn


routing_replay_manager = Manager()
