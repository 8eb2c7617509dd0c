"""FSSDP inside a training run: what is planned and fetched when, for which parameters, and checkpoints that are not
Megatron's.

Oracles: literal orders; the unconverted model on the same ranks and data.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import pytest
import tiny_gpt
import torch
from layouts import FULL
from ranks import ranks
from torch.utils.checkpoint import checkpoint

from megatron_hecate.replicas.layer_replicas import Replicas


@ranks(2)
def test_every_layer_replicates_its_own_hottest_expert() -> None:
    """Layer l's hottest expert is 5 (l - 1) mod 8 by construction: it gets the replica, from that layer's own loads."""
    case = tiny_gpt.initialized(accumulate=4, skew=4.0, settings=dict(num_layers=3))
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
    case = tiny_gpt.initialized(accumulate=2, settings=FULL)
    run = tiny_gpt.train(case, steps=0, hook=tiny_gpt.fssdp_hook())
    monitor = tiny_gpt.moe_layers(run.chunks)[0].prefetcher.monitor
    tokens = 2 * 2 * case.micro_batch * case.seq  # ranks, microbatches
    for step in range(3):
        run.step(step)
        run.evaluate(step)
        monitor.start_reduce()
        monitor.collect()
        assert monitor.history.last.sum(axis=1).tolist() == [2 * tokens] * 2


@pytest.mark.slow
@ranks(2)
def test_parameters_replaced_after_the_hook() -> None:
    """Initialization on the meta device replaces parameters after pre-wrap hooks ran: replicas must follow."""
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
    """Fetches (f) and gradients that return (r), in fp32, of two microbatches, layer by layer; | is where a backward
    begins. With lifetime ``layer`` the two middle layers share buffers, so that replicas are fetched again."""
    # with 10 experts both hot ones of every layer are at home on one rank, so every layer has replicas
    case = tiny_gpt.initialized(
        accumulate=2, experts=10, skew=6.0, bf16=True, settings=dict(num_layers=4)
    )
    hook = tiny_gpt.fssdp_hook(lifetime=lifetime)
    calls: list[str] = []
    in_backward = [False]

    def note(what: str, plan: object, slots: list, label: str) -> None:
        before, in_backward[0] = in_backward[0], torch._C._current_graph_task_id() != -1
        if in_backward[0] and not before:
            calls.append("|")
        calls.append(what[0] + label.removeprefix("layer "))
        assert {chunk.dtype for chunk in slots} == {
            torch.bfloat16 if what == "fetch" else torch.float32
        }

    run = tiny_gpt.train(
        case, steps=1, hook=lambda chunks: tiny_gpt.before_transfers(hook(chunks), note)
    )
    assert not calls, "the first iteration has no replicas"
    for step in (1, 2):
        calls.clear()
        in_backward[0] = False
        run.step(step)
        assert " ".join(calls) == expected
        gc.collect()
        alive = sum(isinstance(o, Replicas) for o in gc.get_objects())
        assert alive <= 4, "replicas of earlier iterations live on"
    assert all(layer.fssdp.placement.num_replicas for layer in tiny_gpt.moe_layers(run.chunks))


@ranks(2)
def test_reentrant_checkpoints_of_torch() -> None:
    _compare_checkpointed(lambda forward, x: checkpoint(forward, x, use_reentrant=True))


@pytest.mark.newest
@ranks(2, preload="te")
def test_reentrant_checkpoints_of_transformer_engine() -> None:
    from transformer_engine.pytorch.distributed import checkpoint

    _compare_checkpointed(checkpoint)


def _compare_checkpointed(checkpoint: Callable[[Callable, Any], Any]) -> None:
    """Around the MoE layer alone, not by Megatron: nothing but the stack tells its forward from evaluation."""
    case = tiny_gpt.initialized(accumulate=2, settings=dict(num_layers=4))

    def checkpointed(chunks: list) -> list:
        for layer in tiny_gpt.moe_layers(chunks):
            layer.forward = lambda x, *_, forward=layer.forward, **__: checkpoint(forward, x)
        return chunks

    stock = tiny_gpt.train(case, hook=checkpointed)
    hook = tiny_gpt.fssdp_hook(lifetime="layer")
    ours = tiny_gpt.train(case, hook=lambda chunks: checkpointed(hook(chunks)))
    tiny_gpt.assert_trained_alike(stock, ours)
    ours.evaluate(3)
    assert ours.step(3) == pytest.approx(stock.step(3), rel=1e-5)


def _train_noting_threads(case: Any, microbatches: Sequence[int]) -> tuple[Any, list[str]]:
    """A run whose hot experts move, with so many microbatches in each step, and the name of the thread of each plan."""
    from megatron_hecate.step import layer_planner

    threads: list[str] = []
    real = layer_planner.plan_replicas

    def named(*args: Any, **kwargs: Any) -> Any:
        threads.append(threading.current_thread().name)
        return real(*args, **kwargs)

    with mock.patch.object(layer_planner, "plan_replicas", named):
        hook = tiny_gpt.fssdp_hook()
        run = tiny_gpt.train(case, steps=0, hook=hook, before_step=tiny_gpt.move_skew_sometimes)
        for step, count in enumerate(microbatches):
            run.step(step, count)
    run.read_params()
    return run, threads


@ranks(2)
def test_plans_of_the_thread_are_those_of_the_layers() -> None:
    """Plans that a thread makes while the optimizer steps. Also where the thread guesses wrong, since the number of
    microbatches changes, and where it fails. Oracle: the same training with all plans made in the main thread."""
    from megatron_hecate.step.layer_planner import EarlyPlans, PlanInputs

    case = tiny_gpt.initialized(accumulate=2, skew=4.0)
    for microbatches in ((2, 2, 2, 2, 2, 2), (2, 2, 1, 3, 2)):
        with mock.patch.object(EarlyPlans, "start", lambda *_: None):
            late, threads = _train_noting_threads(case, microbatches)
        assert set(threads) == {"MainThread"}
        early, threads = _train_noting_threads(case, microbatches)
        assert tiny_gpt.difference(late, early) == tiny_gpt.SAME and early.replicas > 0
        layers = tiny_gpt.moe_layers(early.chunks)
        # the first iteration has no forecast, and the first of the host may come before the thread
        assert threads.count("fssdp plans") >= 2 * len(layers), threads
        # the plans after the last step are made, and not asked for
        is_wrong = len(set(microbatches)) > 1
        assert is_wrong or len(threads) <= len(microbatches) * len(layers), threads

    real = PlanInputs.plan

    def fails_early(inputs: PlanInputs) -> Any:
        if threading.current_thread().name == "fssdp plans":
            raise MemoryError("planted")
        return real(inputs)

    with mock.patch.object(PlanInputs, "plan", fails_early):
        failed, _ = _train_noting_threads(case, microbatches)
    assert tiny_gpt.difference(late, failed) == tiny_gpt.SAME
