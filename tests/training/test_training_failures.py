"""Training runs that go wrong: bad gradients, overflow, ranks that die or sleep, loops that break off.

Oracle: what stock Megatron does in the same place, or literal messages.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import tiny_gpt
import torch
import torch.distributed as dist
from ranks import ranks

from megatron_hecate.comm.collectives import TransferError


@ranks(2)
def test_gradients_that_nobody_reduced_are_an_error() -> None:
    case = tiny_gpt.initialized(accumulate=2)
    run = tiny_gpt.train(case, steps=2, hook=tiny_gpt.fssdp_hook())
    config = run.chunks[0].config
    config.finalize_model_grads_func, config.no_sync_func = None, contextlib.nullcontext
    run.zero()
    with run.chunks[0].no_sync():
        run.call(2, 2)
        # at the end of ``no_sync`` they return
        message = r"FusedAdam steps while gradients .* finish_grad_sync"
        with pytest.raises(RuntimeError, match=message):
            run.optimizer.step()


def _spoil_gradients(chunks: list, value: float, *, times: int) -> list[int]:
    """Plant ``value`` in the gradient of a replica when it is about to return, so often; returns how often it was."""
    planted = [0]

    def plant(what: str, plan: object, slots: list, label: str) -> None:
        if what == "return" and plan.slots and planted[0] < times:
            planted[0] += 1
            slots[plan.slots[0]].view(-1)[0] = value

    tiny_gpt.before_transfers(chunks, plant)
    return planted


@ranks(2)
def test_bad_gradients_of_a_replica_reach_megatrons_own_check() -> None:
    """Stock Megatron stops on a NaN gradient (check_for_nan_in_grad); a replica's must arrive there, at its home."""
    case = tiny_gpt.initialized()
    run = tiny_gpt.train(case, steps=2, hook=tiny_gpt.fssdp_hook())
    planted = _spoil_gradients(run.chunks, float("nan"), times=100)
    try:
        run.step(2)
        stopped = False
    except (AssertionError, RuntimeError) as error:
        stopped = True
        plans = [layer.fssdp.current.transfers for layer in tiny_gpt.moe_layers(run.chunks)]
        if any(plan is not None and plan.replicated for plan in plans):
            assert any(word in str(error) for word in ("NaN", "nan", "Unexpected")), error
    assert stopped, (
        f"rank {dist.get_rank()} went on with a bad gradient at home, {planted} were planted here"
    )
    os._exit(0)  # the other rank may be left in Megatron's all-reduce, as in stock


@ranks(2)
def test_overflow_in_a_replica_skips_the_step_as_in_stock() -> None:
    """fp16 with loss scaling: an infinity in a replica's gradient makes Megatron skip the step on all ranks."""
    case = tiny_gpt.initialized(fp16=True, accumulate=2)
    run = tiny_gpt.train(case, steps=2, hook=tiny_gpt.fssdp_hook())
    before = {name: p.detach().clone() for name, p in run.chunks[0].named_parameters()}
    scale = float(run.optimizer.get_loss_scale())
    planted = _spoil_gradients(run.chunks, float("inf"), times=1)
    run.zero()
    run.call(2, 2)
    updated, _, _ = run.optimizer.step()
    count = torch.tensor(float(planted[0]))
    torch.distributed.all_reduce(count)
    assert count > 0 and not updated
    assert all(torch.equal(p, before[name]) for name, p in run.chunks[0].named_parameters())
    assert float(run.optimizer.get_loss_scale()) <= scale
    planted[0] = 1  # no more
    assert torch.isfinite(torch.tensor(run.step(3))), "and training goes on"


@pytest.mark.parametrize(
    ("when", "message"),
    [
        (
            "before its fetch",
            r"layer 1: gathering the loads failed on rank 0 of 2 .* ranks \[0, 1\]",
        ),
        ("before its experts, without a fetch", r"layer 1: spAG failed on rank 0 of 2 .* rank 1"),
    ],
)
@ranks(2, killed=frozenset({1}))
def test_a_peer_that_dies_in_training_is_named(when: str, message: str) -> None:
    """Fetches run in the background, so whatever a layer waits for first names the dead peer's layer and ranks."""

    case = tiny_gpt.initialized()
    run = tiny_gpt.train(case, steps=2, hook=tiny_gpt.fssdp_hook(timeout=10))
    assert run.replicas > 0
    layer = tiny_gpt.moe_layers(run.chunks)[0]

    def die(*_: object) -> None:
        time.sleep(0.5)  # what was sent arrives
        os.kill(os.getpid(), signal.SIGKILL)

    if dist.get_rank() == 1 and when == "before its fetch":
        tiny_gpt.before_transfers(run.chunks, die)
    elif dist.get_rank() == 1:
        layer.fssdp.transport.fetch = lambda *_, **__: SimpleNamespace(wait=lambda: None)
        layer.experts.register_forward_pre_hook(die)
    start = time.monotonic()
    with pytest.raises(TransferError, match=message):
        run.step(2)
    assert time.monotonic() - start < 20


@ranks(2)
def test_a_peer_that_sleeps_in_training_is_named() -> None:
    """In the exchange of loads, which is a collective of the group: the layer and the ranks are named."""
    case = tiny_gpt.initialized()
    run = tiny_gpt.train(case, steps=2, hook=tiny_gpt.fssdp_hook(timeout=2))
    assert run.replicas > 0
    if dist.get_rank() == 1:
        tiny_gpt.moe_layers(run.chunks)[0].router.register_forward_hook(lambda *_: time.sleep(5))
    start = time.monotonic()
    with pytest.raises((TransferError, RuntimeError)) as error:
        run.step(2)
    if dist.get_rank() == 0:
        assert time.monotonic() - start < 5
        assert "layer 1: gathering the loads failed on rank 0 of 2" in str(error.value)
        assert "(timeout 2 s): expected all of ranks [0, 1]" in str(error.value)


@ranks(2)
def test_checkpointing_that_hides_forwards_is_an_error() -> None:
    """A checkpoint of one's own, whose first pass nothing tells from evaluation."""

    class OwnCheckpoint(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, function: Callable, x: torch.Tensor) -> torch.Tensor:
            ctx.function, ctx.x = function, x
            return function(x)[0].clone()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> tuple[None, torch.Tensor]:
            x = ctx.x.detach().requires_grad_()
            with torch.enable_grad():
                ctx.function(x)[0].backward(grad)
            return None, x.grad

    case = tiny_gpt.initialized()
    hook = tiny_gpt.fssdp_hook()

    def checkpointed(chunks: list) -> list:
        for layer in tiny_gpt.moe_layers(chunks):
            forward = layer.forward
            layer.forward = lambda x, *_, forward=forward, **__: (
                OwnCheckpoint.apply(forward, x),
                None,
            )
        return chunks

    message = r"layer \d is recomputed in the backward, .* torch's or Trans"
    with pytest.raises(NotImplementedError, match=message):
        tiny_gpt.train(case, hook=lambda chunks: checkpointed(hook(chunks)))
