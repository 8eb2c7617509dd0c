"""When layers are planned, and by what, in training.

Oracle: the calls that real layers make, written down in the order they come. Were a layer planned twice, late, or in
another iteration, or left half prepared, it would fetch wrong replicas or wait for gradients that never come.
"""

from __future__ import annotations

import itertools
from typing import Any

import loops
import pytest
import tiny_gpt
import torch
from ranks import ranks

from megatron_hecate.comm.p2p import P2P
from megatron_hecate.nvlink.transport import NVLink


@ranks(2)
def test_a_plan_knows_the_one_before_it() -> None:
    """Late replicas do not count: they say nothing about what the forecast was worth."""
    from megatron_hecate.step.layer_planner import EarlyPlans, PlanInputs

    plan, done = EarlyPlans.plan, []

    def noted(early: EarlyPlans, index: int, inputs: PlanInputs) -> Any:
        done.append((inputs.previous, plan(early, index, inputs)))
        return done[-1][1]

    EarlyPlans.plan = noted
    case = tiny_gpt.initialized()
    tiny_gpt.train(case, steps=5, hook=tiny_gpt.fssdp_hook(slots=1, late_replicas=2))
    for layer in range(2):
        plans = done[layer::2]  # from the second iteration on
        assert len(plans) == 4
        assert all(previous is made for (_, made), (previous, _) in itertools.pairwise(plans))


# Fetches by layer, from 1 on, before the embedding and before the attention of each layer.
FIRST_FORWARD = [[1], [2, 3], [4, 5], [6, 7], [8], [], [], [], []]
# With lifetime ``layer``, see `tests/training/test_training.py`.
ORDERS = {
    # Replicas of the iteration serve all microbatches of a schedule.
    "schedule": [FIRST_FORWARD, [[]] * 9],
    # Outside of a schedule weights may change between microbatches, so every forward fetches.
    "loop": [FIRST_FORWARD, FIRST_FORWARD],
    # Unless the loop says where they do.
    "loop that says": [FIRST_FORWARD, [[]] * 9],
}


@pytest.mark.parametrize("loop_kind", ORDERS)
@ranks(2)
def test_layers_are_fetched_at_a_distance(loop_kind: str) -> None:
    """Up to four attentions before its own. Oracle: the order that docs/memory.md describes, by hand."""
    from megatron.core.distributed import finalize_model_grads
    from megatron.core.utils import get_attr_wrapped_model

    import megatron_hecate

    case = tiny_gpt.initialized(accumulate=2, skew=4, settings=(("num_layers", 8),))
    loop = loops.Loop(case, tiny_gpt.fssdp_hook(slots=1, lifetime="iteration"))
    forwards: list[list[list[int]]] = []

    def fetched(what: str, _plan: Any, _slots: Any, label: str) -> None:
        if what == "fetch":
            forwards[-1][-1].append(int(label.removeprefix("layer ")))

    tiny_gpt.before_transfers(loop.chunks, fetched)
    model = get_attr_wrapped_model(loop.chunks[0], "decoder", return_model_obj=True)
    # Called before FSSDP's own hooks.
    model.register_forward_pre_hook(lambda *_: forwards.append([[]]), prepend=True)
    for layer in model.decoder.layers:
        layer.self_attention.register_forward_pre_hook(
            lambda *_: forwards[-1].append([]), prepend=True
        )
    for step in range(3):
        forwards.clear()
        if loop_kind == "loop that says":
            megatron_hecate.iteration_begins(loop.chunks)
        loop.zero()
        if loop_kind == "schedule":
            loop.call(step, 2)
        else:
            for microbatch in range(2):
                loop.forward(step, microbatch).backward()
            finalize_model_grads(loop.chunks, None)
        loop.update()
    layers = tiny_gpt.moe_layers(loop.chunks)
    replicated = {layer.layer_number for layer in layers if layer.fssdp.placement.num_replicas}
    assert {1, 2, 3, 5, 6, 7} <= replicated
    wanted = [
        [[layer for layer in at_once if layer in replicated] for at_once in forward]
        for forward in ORDERS[loop_kind]
    ]
    assert forwards == wanted


@ranks(2)
def test_a_plan_that_fails_leaves_no_layer_half_prepared() -> None:
    """The loop catches the error and goes on; layers planned before must not wait for gradients of the broken step."""
    from megatron_hecate.step.layer_planner import EarlyPlans

    case = tiny_gpt.initialized(accumulate=3, settings=(("num_layers", 4),))
    run = tiny_gpt.train(case, hook=tiny_gpt.fssdp_hook(slots=1))
    plan, calls = EarlyPlans.plan, itertools.count()

    def fails_at_the_third_layer(*args: Any) -> Any:
        if next(calls) == 2:
            raise ValueError("no plan")
        return plan(*args)

    EarlyPlans.plan = fails_at_the_third_layer
    with pytest.raises(ValueError, match="no plan"):
        run.step(3)
    for step in (4, 5):
        run.step(step)
    assert any(layer.fssdp.placement.num_replicas for layer in tiny_gpt.moe_layers(run.chunks))


@pytest.mark.parametrize("transport", ["nvlink", "p2p"])
@pytest.mark.parametrize("overlap", [False, True])
@ranks(2)
def test_when_buffers_are_allocated(transport: str, overlap: bool) -> None:
    """Once, and before any activation of the first iteration, which has no replicas. With ``overlap`` parameters are
    still being gathered then."""
    case = tiny_gpt.initialized(
        accumulate=2, bf16=True, overlap=overlap, distributed_optimizer=overlap
    )
    done: list[str] = []

    def note(kind: type) -> None:
        allocate = kind.allocate

        def noted(transport: Any, size: int, layers: Any, device: Any) -> Any:
            assert all(layer.dtype is torch.bfloat16 for layer in layers)
            done.append("allocate")
            return allocate(transport, size, layers, device)

        kind.allocate = noted

    def hook(chunks: list) -> list:
        chunks = tiny_gpt.fssdp_hook(transport=transport)(chunks)
        note({"nvlink": NVLink, "p2p": P2P}[transport])  # after the self-test
        chunks[0].embedding.register_forward_pre_hook(lambda *_: done.append("forward"))
        return tiny_gpt.before_transfers(chunks, lambda what, *_: done.append(what))

    tiny_gpt.train(case, steps=3, hook=hook)
    at = done.index("allocate")
    assert done.count("allocate") == 1 and at < done.index("forward") < done.index("fetch")
