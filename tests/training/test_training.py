"""FSSDP inside a training run: evaluation, skipped steps, loops of other shape, what is planned and fetched when.

Oracle: the unconverted model on the same ranks and data.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from layouts import FULL
from ranks import ranks


@ranks(2)
def test_skipped_steps_and_replanning() -> None:
    """A step that is skipped (gradient overflow) calls no optimizer: replicas must still be planned and stay right."""
    import tiny_gpt

    case = tiny_gpt.initialized(accumulate=2)

    def train(hook: Callable | None) -> tuple[list[float], list]:
        run, seen = tiny_gpt.train(case, steps=0, hook=hook), []
        for step in range(6):
            if step in (2, 3):  # forward and backward, but no optimizer step
                for chunk in run.chunks:
                    chunk.zero_grad_buffer()
                run.losses.append(tiny_gpt.run(case, run.chunks, step, num_microbatches=2))
            else:
                run.step(step)
            if hook is not None:
                seen.append([layer.fssdp.replicas for layer in tiny_gpt.moe_layers(run.chunks)])
        return run.losses, seen

    stock, _ = train(None)
    losses, seen = train(tiny_gpt.fssdp_hook())
    assert losses == pytest.approx(stock, rel=1e-5)
    for before, after in pairwise(seen[1:]):
        for a, b in zip(before, after, strict=True):
            assert a is None or a is not b, "replicas of one iteration were used in the next"
    assert any(replicas is not None for step in seen for replicas in step)
    assert torch.isfinite(torch.tensor(losses)).all()


@ranks(2)
def test_replicas_come_and_go_and_are_fetched_once_per_iteration() -> None:
    """With and without replicas in turn. A layer with replicas fetches once and returns gradients once per iteration,
    in fp32."""
    import tiny_gpt

    from megatron_hecate.replicas.layer_replicas import Replicas
    from megatron_hecate.step.early_plans import EarlyPlans

    case = tiny_gpt.initialized(accumulate=3, bf16=True)
    stock = tiny_gpt.train(case, steps=6)
    plan, in_turn, calls = EarlyPlans.plan, [False], []
    EarlyPlans.plan = lambda early, index, inputs: (
        plan(early, index, inputs) if in_turn[0] else inputs.homes
    )

    def note(what: str, plan: object, slots: list, label: str) -> None:
        calls.append(f"{what} {label}")
        assert {chunk.dtype for chunk in slots} == {
            torch.bfloat16 if what == "fetch" else torch.float32
        }

    hook = tiny_gpt.fssdp_hook()
    run = tiny_gpt.train(
        case, steps=0, hook=lambda chunks: tiny_gpt.before_transfers(hook(chunks), note)
    )
    for step in range(6):
        in_turn[0] = step % 2 == 1
        calls.clear()
        run.step(step)
        expected = (
            ["fetch layer 1", "fetch layer 2", "return layer 2", "return layer 1"]
            if in_turn[0]
            else []
        )
        assert calls == expected, step
        gc.collect()
        alive = sum(isinstance(o, Replicas) for o in gc.get_objects())
        assert alive == len(expected) // 2, "replicas of earlier iterations live on"
    assert run.losses == pytest.approx(stock.losses, rel=tiny_gpt.BF16_TOLERANCE)
    assert run.grad_norms == pytest.approx(stock.grad_norms, rel=tiny_gpt.BF16_TOLERANCE)


@ranks(2)
def test_every_layer_replicates_its_own_hottest_expert() -> None:
    """Layer l's hottest expert is 5 (l - 1) mod 8 by construction: it gets the replica, from that layer's own loads."""
    import tiny_gpt

    case = tiny_gpt.initialized(accumulate=4, skew=4.0, settings=(("num_layers", 3),))
    run = tiny_gpt.train(case, hook=tiny_gpt.fssdp_hook(slots=1))
    replicated = [
        sorted(layer.fssdp.placement.table[layer.fssdp.placement.is_replica].tolist())
        for layer in tiny_gpt.moe_layers(run.chunks)
    ]
    assert replicated == [[0], [5], [2]], replicated
    none = tiny_gpt.train(case, hook=tiny_gpt.fssdp_hook(slots=1, overlap_degree=0))
    assert none.replicas == 0


@ranks(2)
def test_only_training_forwards_make_the_forecast() -> None:
    """Neither recomputed nor evaluated tokens count: an iteration's loads sum to its tokens times top-k."""
    import tiny_gpt

    case = tiny_gpt.initialized(accumulate=2, settings=FULL)
    run = tiny_gpt.train(case, steps=0, hook=tiny_gpt.fssdp_hook())
    monitor = tiny_gpt.moe_layers(run.chunks)[0].prefetcher.monitor
    tokens = 2 * 2 * case.micro_batch * case.seq  # ranks, microbatches
    for step in range(3):
        run.step(step)
        with tiny_gpt.evaluating(run.chunks):
            tiny_gpt.run(case, run.chunks, 100 + step, num_microbatches=2, forward_only=True)
        monitor.finish_reduce()
        assert monitor.history.last.sum(axis=1).tolist() == [2 * tokens] * 2


@pytest.mark.slow
@ranks(2)
def test_parameters_replaced_after_the_hook() -> None:
    """Initialization on the meta device replaces parameters after pre-wrap hooks ran: replicas must follow."""
    import tiny_gpt

    case = tiny_gpt.initialized()

    def replace(chunks: list) -> list:
        for layer in tiny_gpt.moe_layers(chunks):
            for expert in layer.experts.local_experts:
                for linear in (expert.linear_fc1, expert.linear_fc2):
                    fresh = torch.nn.Parameter(linear.weight.detach().clone())
                    fresh.__dict__.update(linear.weight.__dict__)
                    linear.weight = fresh
        return chunks

    hook = tiny_gpt.fssdp_hook()
    stock = tiny_gpt.train(case, hook=replace, steps=4)
    tiny_gpt.assert_trained_alike(
        stock, tiny_gpt.train(case, hook=lambda c: replace(hook(c)), steps=4)
    )
