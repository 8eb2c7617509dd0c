"""slime's and miles' routing replay is the forecast: of all microbatches of a step where one plan serves them.

The loop follows slime 624b824a: ``slime/utils/routing_replay.py`` (a router's list of routes, one entry per forward of
a rollout), ``fill_routing_replay`` and ``train_actor`` in ``slime/backends/megatron_utils/actor.py``, and
``forward_step`` in ``model.py`` there; miles, a fork of slime, has the same loop and a stage of its own (31f1ca961:
``miles/utils/replay_base.py``). Both are stood in for.

Oracle: stock Megatron in the same loop; loads counted token by token in Python.
"""

from __future__ import annotations

import os
import sys
import types
from collections.abc import Iterable
from typing import Any
from unittest import mock

import numpy as np
import pytest
import replayed_routes
import tiny_gpt
import torch
import torch.distributed as dist
from layouts import FULL
from ranks import ranks

from megatron_hecate.record.metrics import layer_metrics

EXPERTS, LAYERS = 8, 2
ROLLOUTS, STEPS, MICROBATCHES = 2, 2, 3  # steps of a rollout, microbatches of a step


class RoutingReplay:
    """A router's routes of a rollout, by forward, and positions of the next forward and recomputation."""

    def __init__(self) -> None:
        self.clear()

    def record(self, top_indices: Any) -> None:
        self.top_indices_list.append(top_indices)

    def pop(self, stage: str) -> torch.Tensor:
        position = {"replay_forward": "forward_index", "replay_backward": "backward_index"}[stage]
        routes = self.top_indices_list[getattr(self, position)]
        setattr(self, position, getattr(self, position) + 1)
        return routes.materialize_for_routing_replay(stage) if isinstance(routes, Lazy) else routes

    def clear(self) -> None:
        self.forward_index = self.backward_index = 0
        self.top_indices_list: list[Any] = []

    def clear_forward(self) -> None:
        self.forward_index = 0


class Lazy:
    """Entry of slime's list that makes its tensor when the router asks for it."""

    def __init__(self, routes: torch.Tensor) -> None:
        self._routes = routes

    def materialize_for_routing_replay(self, stage: str) -> torch.Tensor:
        return self._routes


class Slime:
    """slime's stage is in the environment."""

    pads = False

    def __init__(self) -> None:
        os.environ["ENABLE_ROUTING_REPLAY"] = "1"

    def attach(self, router: Any) -> None:
        """Have the router replay what is recorded in its list."""
        router.routing_replay = replay = RoutingReplay()

        def get_replay_topk(scores: torch.Tensor, *_: Any) -> tuple:
            routes = self.as_routed(replay.pop(self.stage), scores.shape[1])
            return scores.gather(1, routes), routes

        router.router_replay = types.SimpleNamespace(get_replay_topk=get_replay_topk)

    def as_routed(self, routes: torch.Tensor, num_experts: int) -> torch.Tensor:
        return routes

    @property
    def stage(self) -> str:
        return os.environ.get("ROUTING_REPLAY_STAGE", "")

    @stage.setter
    def stage(self, stage: str) -> None:
        os.environ["ROUTING_REPLAY_STAGE"] = stage


class Miles(Slime):
    """miles' stage is in an object beside the list's class; padding, marked by -1, goes to the first experts."""

    pads = True
    stage = ""

    def __init__(self) -> None:
        self.enabled = True
        sys.modules[RoutingReplay.__module__].routing_replay_manager = self

    def as_routed(self, routes: torch.Tensor, num_experts: int) -> torch.Tensor:
        first = torch.arange(2, dtype=routes.dtype)
        return torch.where((routes == -1).all(dim=-1, keepdim=True), first, routes)


def routes_of(forward: int, layer: int, rank: int, pads: bool = False) -> torch.Tensor:
    """[T, 2] experts of each token in a forward, counted over all rollouts; the last ones may be padding."""
    routes = replayed_routes.routes_of(*divmod(forward, MICROBATCHES), layer, rank).int()
    if pads:
        routes[-5:] = -1
    return routes


def count(forwards: Iterable[int], layer: int, pads: bool) -> np.ndarray:
    """[E] tokens of both ranks, one by one; padding goes to experts 0 and 1."""
    load = np.zeros(EXPERTS, dtype=np.int64)
    for forward in forwards:
        for rank in range(2):
            for token in routes_of(forward, layer, rank, pads).tolist():
                for expert in (0, 1) if token == [-1, -1] else token:
                    load[expert] += 1
    return load


def train(case: Any, framework: Any, *, has_lazy_rank: bool = False, **settings: Any) -> Any:
    """Replay the routes of each rollout, in a pass for log-probabilities and in the steps.

    Rank 1 may have a tensor of the first microbatch of a step only.
    """

    hook = tiny_gpt.fssdp_hook(**settings) if settings else None
    run = tiny_gpt.train(case, steps=0, hook=hook)
    routers = [layer.router for layer in tiny_gpt.moe_layers(run.chunks)]
    for router in routers:
        framework.attach(router)
    rank = tiny_gpt.parallel_state.get_data_parallel_rank()
    for rollout in range(ROLLOUTS):
        forwards = range(rollout * STEPS * case.accumulate, (rollout + 1) * STEPS * case.accumulate)
        for forward in forwards:
            for index, router in enumerate(routers):
                routes = routes_of(forward, index, rank, framework.pads)
                is_lazy = has_lazy_rank and rank and forward % case.accumulate
                router.routing_replay.record(Lazy(routes) if is_lazy else routes)
        framework.stage = "replay_forward"
        run.evaluate(0, case.accumulate)
        for router in routers:
            router.routing_replay.clear_forward()
        framework.stage = "replay_backward"
        for step in range(STEPS):
            run.step(STEPS * rollout + step)
        for router in routers:
            router.routing_replay.clear()
    run.read_params()
    return run


def set_stage_in_forward(framework: Any) -> None:
    """Have training forwards replay forwards; around them the stage is that of recomputation."""
    original = tiny_gpt.forward_step

    def forward_step(*args: Any, **settings: Any) -> Any:
        stage, framework.stage = framework.stage, "replay_forward"
        result = original(*args, **settings)
        framework.stage = stage
        return result

    tiny_gpt.forward_step = forward_step


def _compare(
    framework: Slime, model: dict[str, Any], **settings: Any
) -> tuple[Any, list[np.ndarray]]:
    """Train with stock and with FSSDP, which must be alike; FSSDP's run and forecasts."""
    case, forecasts = tiny_gpt.initialized(accumulate=MICROBATCHES, settings=model), []
    set_stage_in_forward(framework)
    stock = train(case, framework)
    replayed_routes.note_forecasts(forecasts)
    ours = train(case, framework, slots=2, **settings)
    tiny_gpt.assert_trained_alike(stock, ours)
    return ours, forecasts


@pytest.mark.newest
@pytest.mark.parametrize(
    ("kind", "lifetime", "megatron"),
    [(Slime, "iteration", {}), pytest.param(Miles, "layer", FULL, marks=pytest.mark.slow)],
    ids=["slime-iteration", "miles-layer-recompute"],
)
@ranks(2)
def test_plans_are_made_for_the_replayed_routes(
    kind: type[Slime], lifetime: str, megatron: dict
) -> None:
    """From the first step on, and with lifetime ``iteration`` for the sum of all microbatches of the step."""
    framework = kind()
    ours, forecasts = _compare(framework, megatron, lifetime=lifetime, late_replicas=2)
    planned = MICROBATCHES if lifetime == "iteration" else 1
    starts = range(0, ROLLOUTS * STEPS * MICROBATCHES, planned)
    true = [
        count(range(start, start + planned), layer, framework.pads)
        for start in starts
        for layer in range(LAYERS)
    ]
    replayed_routes.assert_forecasts(forecasts, true)
    assert [m.late for m in layer_metrics(ours.chunks)] == [0, 0]


@pytest.mark.newest
@pytest.mark.slow
@ranks(2)
def test_ranks_that_know_different_numbers_of_microbatches_plan_alike() -> None:
    """Rank 0 knows three microbatches of the first step and rank 1 one: of 3 microbatches 2 are known on average."""
    _, forecasts = _compare(Slime(), {}, has_lazy_rank=True)
    planned: list[Any] = [None, None]
    dist.all_gather_object(planned, [forecast.tolist() for forecast in forecasts])
    assert planned[0] == planned[1]
    for layer in range(LAYERS):
        known = np.zeros(EXPERTS)
        for forward, rank in [(0, 0), (1, 0), (2, 0), (0, 1)]:
            known += np.bincount(routes_of(forward, layer, rank).flatten(), minlength=EXPERTS)
        np.testing.assert_allclose(forecasts[layer], known * MICROBATCHES / 2, rtol=1e-12)


@pytest.mark.fast
def test_what_is_read_off_the_list() -> None:
    """Literal entries: the next ones, up to the number asked for, the end, or one that is no tensor yet."""
    from megatron_hecate.routes.router_replay import next_routes, replays

    replay = RoutingReplay()
    layer = types.SimpleNamespace(
        router=types.SimpleNamespace(routing_replay=replay),
        config=types.SimpleNamespace(moe_router_fusion=False),
    )
    for number in range(4):
        replay.record(torch.full((1, 2), number).int())
    replay.forward_index = 1

    def numbers(most: int) -> list[int]:
        return [int(routes[0, 0]) for routes in next_routes(layer, most)]

    on = dict(ENABLE_ROUTING_REPLAY="1", ROUTING_REPLAY_STAGE="replay_forward")
    with mock.patch.dict(os.environ, on):
        assert replays(layer)
        assert numbers(2) == [1, 2] and numbers(9) == [1, 2, 3]
        replay.top_indices_list[2] = Lazy(replay.top_indices_list[2])
        assert numbers(2) == [1]
        replay.forward_index = 4
        assert numbers(2) == []
        layer.config.moe_router_fusion = True
        assert not replays(layer), "a fused router does not replay"
        layer.config.moe_router_fusion = False
    for off in ({"ENABLE_ROUTING_REPLAY": "0"}, {"ROUTING_REPLAY_STAGE": "record"}):
        with mock.patch.dict(os.environ, on | off):
            assert not replays(layer)
    del replay.top_indices_list
    with mock.patch.dict(os.environ, on):
        assert not replays(layer)
