"""Announced routes are the forecast of an iteration, in whatever form a loop has them, and are not held.

Oracle: stock Megatron that replays the same routes; loads counted token by token in Python from the routes of all ranks.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ranks import ranks
from replayed_routes import EXPERTS, REPLAY, count, note_forecasts, replay, routes_of, train_steps


def own_routes(case: Any, step: int, microbatches: Iterable[int]) -> torch.Tensor:
    """[T, L, 2] experts of this rank's tokens."""
    from megatron.core import parallel_state

    rank = parallel_state.get_data_parallel_rank()
    layers = range(case.layers)
    return torch.cat(
        [torch.stack([routes_of(step, m, n, rank) for n in layers], dim=1) for m in microbatches]
    )


def announce(case: Any, chunks: list, step: int) -> None:
    """Give the routes of a step in three forms, by its number: by layer, in a file, and by microbatch."""
    from megatron_hecate import expect_routes

    routes = own_routes(case, step, range(case.accumulate))
    if step == 0:
        by_layer = list(routes.unbind(dim=1))
        seen = [weakref.ref(of_layer) for of_layer in by_layer]
        expect_routes(chunks, by_layer)
        del by_layer
        assert [ref() for ref in seen] == [None] * case.layers, "something holds the routes"
    elif step == 1:
        file = Path(os.environ["TEST_FOLDER"]) / f"routes{torch.distributed.get_rank()}.npy"
        np.save(file, routes.to(torch.int16).numpy())
        expect_routes(chunks, np.load(file, mmap_mode="r"))
    else:
        expect_routes(chunks, own_routes(case, 0, [0]))  # replaced by the next call
        expect_routes(chunks, own_routes(case, step, [0]).byte())
        expect_routes(chunks, own_routes(case, step, [1]).int(), add=True)


@pytest.mark.newest
@ranks(2)
def test_an_iteration_of_several_microbatches_is_planned_for_the_sum_of_announced_routes() -> None:
    import tiny_gpt
    from host_memory import peak_growth

    from megatron_hecate import expect_routes

    case = tiny_gpt.initialized(accumulate=2, settings=(REPLAY,))
    replay(case.accumulate)
    stock = train_steps(case, 3)
    found: list[np.ndarray] = []
    note_forecasts(found)
    ours = train_steps(case, 3, before=partial(announce, case), slots=2, late_replicas=2)
    tiny_gpt.assert_trained_alike(stock, ours)
    true = [count(step, range(2), layer, 2) for step in range(3) for layer in range(2)]
    assert len(found) == len(true)
    assert all(
        np.array_equal(forecast, load) for forecast, load in zip(found, true, strict=True)
    ), (found, true)
    layers = [torch.zeros(1, 2, dtype=torch.int32)] * 2
    for wrong, message in [
        (layers[:1], "routes of 1 layers, but this rank has 2 MoE layers"),
        (torch.zeros(4, 3, 2).int(), "routes of 3 layers, but this rank has 2 MoE layers"),
        (torch.zeros(4, 2).int(), r"routes of shape \(4, 2\); give \[tokens, layers, k\]"),
        ([layers[0], layers[0] + 8], "1 announced routes of .* name no expert from 0 to 7"),
        ([layers[0], torch.zeros(1, 2)], "routes are torch.float32; give the numbers"),
    ]:
        with pytest.raises(ValueError, match=message):
            expect_routes(ours.chunks, wrong)
    large = torch.randint(0, EXPERTS, (1 << 18, 4, 8), dtype=torch.int16)  # 16 MiB
    assert peak_growth(lambda: expect_routes(ours.chunks, large[:, ::2])) < 12 << 20


@pytest.mark.newest
@ranks(2)
def test_when_a_layer_has_been_planned_only_the_router_holds_its_routes() -> None:
    """The router is made to forget them while the plan of its layer is made."""
    import tiny_gpt

    from megatron_hecate.step.early_plans import EarlyPlans

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
