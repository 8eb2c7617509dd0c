"""Replayed routes (Megatron's own router replay) are the forecast. They jump with every step and microbatch.

Oracle: stock Megatron that replays the same routes, for losses, gradients and parameters; loads counted token by token
in Python from the routes of all ranks.
"""

from __future__ import annotations

import weakref
from typing import Any

import numpy as np
import pytest
import tiny_gpt
import torch
from layouts import COMBINED, FULL, INTERLEAVED, SHARDED
from quick import quick
from ranks import ranks
from replayed_routes import (
    REPLAY,
    TOKENS,
    assert_counted,
    assert_forecasts,
    count,
    note_forecasts,
    replay,
    train_steps,
)

from megatron_hecate.record.metrics import layer_metrics
from megatron_hecate.routes.known_routes import count_tokens

pytestmark = pytest.mark.newest

CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "recompute-overlap": (dict(SHARDED, accumulate=2), FULL),
    "ep-comm-overlap": (dict(accumulate=2), COMBINED),
    # each chunk's layers are planned for its own microbatch
    "pipeline-recompute": (dict(INTERLEAVED, **SHARDED), FULL),
}


@pytest.mark.parametrize("name", quick(CASES, ["recompute-overlap"]))
@ranks(lambda name: 4 if "pp" in CASES[name][0] else 2)
def test_plans_are_made_for_the_replayed_routes(name: str) -> None:
    """From the first step on, every plan is made for the loads that come; no replica comes after the gate, though it
    might."""
    fields, model = CASES[name]
    case = tiny_gpt.initialized(**fields, settings=dict([REPLAY], **model))
    replay(case.accumulate, then_backward=model is FULL)
    stock = train_steps(case, 3)
    found: list[np.ndarray] = []
    note_forecasts(found)
    ours = train_steps(case, 3, lifetime="layer", slots=2, late_replicas=2)
    tiny_gpt.assert_trained_alike(stock, ours)
    own = [layer.layer_number - 1 for layer in tiny_gpt.moe_layers(ours.chunks)]
    true = [
        count(step, range(microbatch, microbatch + 1), layer, 2)
        for step in range(3)
        for microbatch in range(case.accumulate)
        for layer in own
    ]
    if case.pp > 1:  # chunks take turns
        found, true = sorted(found, key=list), sorted(true, key=list)
    assert_forecasts(found, true)
    assert not any(m.late for m in layer_metrics(ours.chunks))


@ranks(2)
def test_of_an_iteration_the_first_microbatch_is_known_and_the_rest_expected() -> None:
    """Where nobody tells: the first microbatch's loads, plus those of each further one, which are taken to be alike in
    the first step, and later half of those of the last step with two microbatches (with two steps the forecast is the
    last step's loads, see `LoadHistory`)."""
    case = tiny_gpt.initialized(accumulate=2, settings=(REPLAY,))
    replay(case.accumulate)
    found: list[np.ndarray] = []
    note_forecasts(found)
    train_steps(case, 2, slots=2)
    first = [count(step, range(1), layer, 2) for step in range(2) for layer in range(2)]
    before = [count(0, range(2), layer, 2) for layer in range(2)]
    expected = [2 * first[0], 2 * first[1], first[2] + before[0] / 2, first[3] + before[1] / 2]
    for forecast, load in zip(found, expected, strict=True):
        np.testing.assert_allclose(forecast, load, rtol=1e-12)


def _compare_with_stock() -> list[np.ndarray]:
    """Train two steps with stock and with FSSDP, which must be alike; returns FSSDP's forecasts."""
    case = tiny_gpt.initialized(settings=(REPLAY,))
    replay(case.accumulate, then_backward=False)
    stock = train_steps(case, 2)
    found: list[np.ndarray] = []
    note_forecasts(found)
    ours = train_steps(case, 2, lifetime="layer", slots=2)
    tiny_gpt.assert_trained_alike(stock, ours)
    return found


@ranks(2)
def test_tokens_that_their_router_chooses_itself_are_not_counted() -> None:
    """verl's `RouterReplay` (verl/utils/megatron/router_replay_patch.py, 1dda039b) masks tokens without a route, whose
    rows of the routes are zeros. Oracle: loads of the other tokens, one by one; stock with the same routers."""
    from megatron.core.transformer.moe.router_replay import RouterReplay

    replay_routes, set_routes = RouterReplay.get_replay_topk, RouterReplay.set_target_indices
    masked = torch.arange(TOKENS) % 4 == 3

    def set_masked(router: RouterReplay, routes: torch.Tensor) -> None:
        set_routes(router, routes.masked_fill(masked.unsqueeze(1), 0))
        router.target_replay_mask = ~masked

    def chosen(router: RouterReplay, scores: torch.Tensor, topk: int, *args: Any) -> tuple:
        own = args[-1](scores, topk)[1]
        replayed = replay_routes(router, scores, topk, *args)[1]
        routes = torch.where(router.target_replay_mask.unsqueeze(1), replayed, own)
        return scores.gather(1, routes), routes

    RouterReplay.set_target_indices, RouterReplay.get_replay_topk = set_masked, chosen
    found = _compare_with_stock()
    assert_counted(found, ~masked)


@ranks(2)
def test_a_token_that_names_an_expert_twice_is_routed_to_it_once() -> None:
    """verl (the same file) and ms-swift (3602360a) pad routes with zeros, and patch the dispatcher, which takes the
    number of routed tokens from the routing map."""
    from megatron.core.transformer.moe.router_replay import RouterReplay
    from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher

    preprocess, set_routes = MoEAlltoAllTokenDispatcher.preprocess, RouterReplay.set_target_indices
    padded = torch.arange(TOKENS) % 4 == 3

    def patched_preprocess(self: MoEAlltoAllTokenDispatcher, routing_map: torch.Tensor) -> Any:
        result = preprocess(self, routing_map)
        self.num_out_tokens = int(routing_map.sum().item())
        return result

    def set_padded(router: RouterReplay, routes: torch.Tensor) -> None:
        set_routes(router, routes.masked_fill(padded.unsqueeze(1), 0))

    patched_preprocess.__module__ = "verl.utils.megatron.router_replay_patch"
    MoEAlltoAllTokenDispatcher.preprocess = patched_preprocess
    RouterReplay.set_target_indices = set_padded
    found = _compare_with_stock()
    assert_counted(found, ~padded, padded=padded)


@pytest.mark.newest
@ranks(2)
def test_when_a_layer_has_been_planned_only_the_router_holds_its_routes() -> None:
    """The router is made to forget them while the plan of its layer is made."""
    import tiny_gpt

    from megatron_hecate.step.layer_planner import EarlyPlans

    case = tiny_gpt.initialized(accumulate=2, settings=(REPLAY,))
    replay(case.accumulate)
    run = tiny_gpt.train(case, steps=0, hook=tiny_gpt.fssdp_hook(lifetime="layer", slots=2))
    # a local variable of the loop holds the routes of the last layer
    router = tiny_gpt.moe_layers(run.chunks)[0].router.router_replay
    plan, alive = EarlyPlans.plan, []

    def planned(early: EarlyPlans, index: int, inputs: Any) -> Any:
        result = plan(early, index, inputs)
        if index == 0:
            routes, earlier = router.target_topk_idx, router.replay_backward_list[:-1]
            copied, seen = routes.clone(), weakref.ref(routes)
            router.clear_indices()
            del routes
            alive.append(seen())
            router.replay_backward_list = earlier
            router.set_target_indices(copied)
        return result

    EarlyPlans.plan = planned
    run.step(0)
    assert alive == [None] * case.accumulate


@pytest.mark.fast
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int32, torch.int64])
def test_tokens_are_counted_as_megatron_routes_them(dtype: torch.dtype) -> None:
    """An expert named twice counts once; unknown experts (-1), and those that do not exist, are not counted."""
    known, unknown = [[0, 1], [1, 1], [3, 0]], [[-1, -1], [2, -1], [4, 9]]
    routes = torch.tensor(known, dtype=dtype)
    assert count_tokens(routes, 4).tolist() == [2, 2, 0, 1]
    assert routes.tolist() == known
    assert count_tokens(routes[:0], 4).tolist() == [0, 0, 0, 0]
    if dtype.is_signed:
        routes = torch.tensor([*known, *unknown], dtype=dtype)
        assert count_tokens(routes, 4).tolist() == [2, 2, 1, 1]
