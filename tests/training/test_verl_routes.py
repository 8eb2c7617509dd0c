"""Routes as verl and ms-swift replay them: rows that are to be ignored, and rows that name an expert twice.

Oracle: stock Megatron with the same patches; loads counted token by token in Python.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from ranks import ranks
from replayed_routes import (
    REPLAY,
    TOKENS,
    assert_counted,
    note_forecasts,
    replay,
    train_steps,
)


def compare_with_stock() -> list[np.ndarray]:
    """Train two steps with stock and with FSSDP, which must be alike; returns FSSDP's forecasts."""
    import tiny_gpt

    case = tiny_gpt.Case(settings=(REPLAY,))
    tiny_gpt.initialize(case)
    replay(case.accumulate, then_backward=False)
    stock = train_steps(case, 2)
    found: list[np.ndarray] = []
    note_forecasts(found)
    ours = train_steps(case, 2, lifetime="layer", slots=2)
    tiny_gpt.assert_trained_alike(stock, ours)
    return found


@pytest.mark.newest
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
    found = compare_with_stock()
    assert_counted(found, ~masked)


@pytest.mark.newest
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
    found = compare_with_stock()
    assert_counted(found, ~padded, padded=padded)
