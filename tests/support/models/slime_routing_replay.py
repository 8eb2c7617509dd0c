"""Stand-in for slime's module of routing replay, after ``slime/utils/routing_replay.py`` of slime 624b824a.

A router's `RoutingReplay` is a list of routes on the host, one entry per forward of a rollout, and the positions of the
next forward and of the next recomputation. The stage in the environment says which of them a call of top k uses.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch

_running: list[Any] = [None]


class RoutingReplay:
    def __init__(self) -> None:
        self.clear()

    def record(self, top_indices: torch.Tensor) -> None:
        self.top_indices_list.append(top_indices)

    def pop_forward(self) -> torch.Tensor:
        self.forward_index += 1
        return self._tensor(self.forward_index - 1, "forward")

    def pop_backward(self) -> torch.Tensor:
        self.backward_index += 1
        return self._tensor(self.backward_index - 1, "backward")

    def _tensor(self, index: int, stage: str) -> torch.Tensor:
        routes = self.top_indices_list[index]
        if hasattr(routes, "materialize_for_routing_replay"):
            return routes.materialize_for_routing_replay(stage)
        return routes

    def clear(self) -> None:
        self.forward_index = self.backward_index = 0
        self.top_indices_list: list[Any] = []

    def clear_forward(self) -> None:
        self.forward_index = 0


def set_routing_replay(replay: RoutingReplay) -> None:
    _running[0] = replay


def get_routing_replay_compute_topk(old_compute_topk: Callable) -> Callable:
    def compute_topk(scores: torch.Tensor, topk: int, *args: Any, **settings: Any) -> tuple:
        stage = os.environ["ROUTING_REPLAY_STAGE"]
        if stage == "fallthrough":
            return old_compute_topk(scores, topk, *args, **settings)
        pop = {"replay_forward": "pop_forward", "replay_backward": "pop_backward"}[stage]
        routes = getattr(_running[0], pop)()
        return scores.gather(1, routes), routes

    return compute_topk
