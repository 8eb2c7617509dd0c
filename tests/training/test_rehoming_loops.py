"""Homes move while experts are frozen, while the model evaluates between steps, after steps that were skipped, and
where optimizers are sharded over a part of the ranks that share gradients.

Oracle: unconverted Megatron on the same ranks, bit for bit where the model has no replicas.
"""

from __future__ import annotations

import contextlib
import functools
from typing import Any
from unittest import mock

import pytest
import rehoming_hooks
import tiny_gpt
import torch
import training_with_moves
from ranks import ranks

pytestmark = pytest.mark.newest


@pytest.mark.slow
@ranks(2)
def test_frozen_experts() -> None:
    def freeze(chunks: list) -> list:
        for layer in tiny_gpt.moe_layers(chunks):
            layer.experts.requires_grad_(False)
        return chunks

    case = tiny_gpt.initialized(distributed_optimizer=True)
    training_with_moves.compare(case, prepare=freeze)


@ranks(2)
def test_an_optimizer_that_is_not_of_torch_is_refused() -> None:
    """Nothing tells when it steps, as here, nor what it keeps."""
    from megatron_hecate.step import detect

    detect.listen_to_steps = lambda detector: None
    case = tiny_gpt.initialized()
    trained = tiny_gpt.train(case, steps=3, hook=rehoming_hooks.rehoming_hook(slots=0))
    with pytest.raises(ValueError, match=r"no torch\.optim optimizer stepped all parameters"):
        trained.step(3)


@ranks(2)
def test_evaluation_between_steps() -> None:
    """It computes with homes where they are, before, between and after moves; also right after they were restored."""
    case = tiny_gpt.initialized(accumulate=2, optimizer=dict(clip_grad=0.0))

    def losses(trained: Any) -> list[float]:
        found = []
        for step in range(8):
            found.append(trained.step(step))
            if step == 5 and hasattr(tiny_gpt.moe_layers(trained.chunks)[0], "fssdp"):
                training_with_moves.restore(trained)
            found.append(trained.evaluate(step))
        return found

    stock = losses(tiny_gpt.train(case, steps=0))
    bare = tiny_gpt.train(case, steps=0, hook=rehoming_hooks.rehoming_hook(slots=0))
    assert losses(bare) == stock
    assert tiny_gpt.moe_layers(bare.chunks)[0].prefetcher.rehoming.homes.are_moved
    ours = tiny_gpt.train(case, steps=0, hook=rehoming_hooks.rehoming_hook())
    assert losses(ours) == pytest.approx(stock, rel=1e-5)


@ranks(2)
def test_no_plan_of_moved_homes_is_repeated_after_they_are_restored() -> None:
    """An iteration without an optimizer step is repeated with its plans, unless the homes are restored in between (a
    checkpoint before the step). Oracle: stock's losses and gradients."""
    case = tiny_gpt.initialized(accumulate=2, skew=4, optimizer=dict(clip_grad=0.0))

    def repeated(trained: Any) -> tuple[list[float], list[torch.Tensor]]:
        losses = [trained.step(step) for step in range(6)]
        is_converted = hasattr(tiny_gpt.moe_layers(trained.chunks)[0], "fssdp")
        for turn in range(2):
            trained.zero()
            losses.append(trained.call(6, 2))
            if is_converted and not turn:
                assert rehoming_hooks.homes_of(trained).are_moved
                training_with_moves.restore(trained)
        return losses, [p.main_grad.clone() for p in trained.chunks[0].parameters()]

    stock, grads = repeated(tiny_gpt.train(case, steps=0))
    hook = rehoming_hooks.rehoming_hook(speeds=tiny_gpt.FREE)
    ours, our_grads = repeated(tiny_gpt.train(case, steps=0, hook=hook))
    assert ours == pytest.approx(stock, rel=1e-5)
    for grad, own in zip(grads, our_grads, strict=True):
        assert torch.allclose(grad, own, rtol=1e-4, atol=1e-6)


@ranks(2)
def test_looks_wait_for_the_first_step_in_fp16() -> None:
    """The loss's scale is too large for the first steps, so that there is no state yet when it is time to look."""
    case = tiny_gpt.initialized(
        fp16=True,
        optimizer=(("clip_grad", 0.0), ("initial_loss_scale", 2.0**40), ("hysteresis", 1)),
    )

    def losses(trained: Any) -> tuple[list[float], int]:
        trained.read_params()
        before, skipped = trained.params, 0
        for step in range(32):
            with contextlib.suppress(AssertionError):  # not updated
                trained.step(step)
            trained.read_params()
            skipped += all(torch.equal(before[name], trained.params[name]) for name in before)
        return trained.losses, skipped

    stock, skipped = losses(tiny_gpt.train(case, steps=0))
    assert skipped > 6 and len(stock) > 6, (skipped, len(stock))
    ours = tiny_gpt.train(case, steps=0, hook=rehoming_hooks.rehoming_hook(slots=0))
    assert losses(ours) == (stock, skipped)
    assert tiny_gpt.moe_layers(ours.chunks)[0].prefetcher.rehoming.homes.are_moved


@ranks(4)
def test_optimizers_sharded_over_a_part_of_the_ranks() -> None:
    """``num_distributed_optimizer_instances``: several ranks keep the same elements, and all of them change."""
    torch.cuda.stream = contextlib.nullcontext  # Megatron enters one twice
    instances = dict(num_distributed_optimizer_instances=2)
    case = tiny_gpt.Case(distributed_optimizer=True, overlap=True, ddp=instances)
    state = tiny_gpt.parallel_state
    initialize = functools.partial(state.initialize_model_parallel, **instances)
    with mock.patch.object(state, "initialize_model_parallel", initialize):
        tiny_gpt.initialize(case)
    training_with_moves.compare(case)


@ranks(2)
def test_a_loop_of_its_own() -> None:
    """It makes its optimizer anew, while the old one is still there, and runs the schedule twice before a step: no home
    moves under gradients of a step to come."""
    case = tiny_gpt.initialized(distributed_optimizer=True, optimizer=dict(clip_grad=0.0))

    def train(hook: Any) -> tuple[Any, list[float]]:
        trained, losses = tiny_gpt.train(case, steps=2, hook=hook), []
        (chunk,), config = trained.chunks, trained.chunks[0].module.config
        (wrapped,), optimizer = tiny_gpt.wrap(case, [chunk.module], config)
        for step in range(2, 8):
            wrapped.zero_grad_buffer()
            optimizer.zero_grad()
            for half in (0, 100):
                losses.append(tiny_gpt.run(case, [wrapped], step + half, num_microbatches=1))
            assert optimizer.step()[0]
        return trained, losses

    stock, expected = train(None)
    moved, found = train(rehoming_hooks.rehoming_hook(slots=0))
    assert found == expected
    training_with_moves.restore(moved)
    moved.grads = stock.grads
    stock.read_params()
    assert tiny_gpt.difference(stock, moved) == tiny_gpt.SAME
