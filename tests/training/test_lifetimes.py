"""Replicas that live for a layer's forward or backward: what is fetched when, and checkpoints that are not Megatron's.

Models are deep enough for layers to share buffers: with lifetime ``layer`` a layer's replicas are dropped in every
forward and must be fetched again in the backward. Oracles: a literal order; the same model, not converted, on the same
ranks and data. `test_layouts` trains layouts with this lifetime.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from ranks import ranks


@pytest.mark.parametrize(
    ("lifetime", "expected"),
    [
        ("iteration", "f1 f2 f3 f4 | r4 r3 r2 r1"),
        # two buffers: the last two layers' replicas are there when a backward begins, the first two's when it ends
        ("layer", "f1 f2 f3 f4 | r4 f2 r3 f1 r2 r1 f3 f4 | r4 f2 r3 f1 r2 r1"),
    ],
)
@ranks(2)
def test_what_is_fetched_when(lifetime: str, expected: str) -> None:
    """Fetches (f) and gradients that return (r) of two microbatches, layer by layer; | is where a backward begins."""
    import tiny_gpt

    # with 10 experts both hot ones of every layer are at home on one rank, so every layer has replicas
    case = tiny_gpt.initialized(accumulate=2, experts=10, skew=6.0, settings=(("num_layers", 4),))
    run = tiny_gpt.train(case, steps=1, hook=tiny_gpt.fssdp_hook(lifetime=lifetime))
    calls: list[str] = []
    in_backward = [False]

    def note(what: str, plan: object, slots: list, label: str) -> None:
        before, in_backward[0] = in_backward[0], torch._C._current_graph_task_id() != -1
        if in_backward[0] and not before:
            calls.append("|")
        calls.append(what[0] + label.removeprefix("layer "))

    tiny_gpt.before_transfers(run.chunks, note)
    run.step(1)
    assert all(layer.fssdp.placement.num_replicas for layer in tiny_gpt.moe_layers(run.chunks))
    assert " ".join(calls) == expected


@ranks(2)
def test_reentrant_checkpoints_of_torch() -> None:
    from torch.utils.checkpoint import checkpoint

    _compare_checkpointed(lambda forward, x: checkpoint(forward, x, use_reentrant=True))


@pytest.mark.newest
@ranks(2, preload="te")
def test_reentrant_checkpoints_of_transformer_engine() -> None:
    import te_on_cpu

    te_on_cpu.install()
    from transformer_engine.pytorch.distributed import checkpoint

    _compare_checkpointed(checkpoint)


def _compare_checkpointed(checkpoint: Callable[[Callable, Any], Any]) -> None:
    """Around the MoE layer alone, not by Megatron: nothing but the stack tells its forward from evaluation."""
    import tiny_gpt

    case = tiny_gpt.initialized(accumulate=2, settings=(("num_layers", 4),))

    def checkpointed(chunks: list) -> list:
        for layer in tiny_gpt.moe_layers(chunks):
            layer.forward = lambda x, *_, forward=layer.forward, **__: checkpoint(forward, x)
        return chunks

    stock = tiny_gpt.train(case, hook=checkpointed)
    hook = tiny_gpt.fssdp_hook(lifetime="layer")
    ours = tiny_gpt.train(case, hook=lambda chunks: checkpointed(hook(chunks)))
    tiny_gpt.assert_trained_alike(stock, ours)
    with tiny_gpt.evaluating(ours.chunks):
        tiny_gpt.run(case, ours.chunks, 3, num_microbatches=2, forward_only=True)
    assert ours.step(3) == pytest.approx(stock.step(3), rel=1e-5)
