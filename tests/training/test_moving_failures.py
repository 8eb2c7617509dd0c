"""What becomes of a move that breaks off: old homes or new ones, on all ranks, or an error before the next step.

Oracle: hashes of weights and moments before the move, and literal messages.
"""

from __future__ import annotations

import os
import signal
import time
from typing import Any
from unittest import mock

import pytest
import tiny_gpt
import torch.distributed as dist
from checkpoints import save, shared_folder
from ranks import ranks
from rehoming_hooks import hashes, homes_of, rehoming_hook

from megatron_hecate.comm.collectives import TransferError
from megatron_hecate.homes.exchange import Relocation

TIMEOUT = 5
INCONSISTENT = "experts are inconsistent; restart from the last checkpoint"


def about_to_move(**fields: Any) -> Any:
    """A model whose next iteration begins with a move."""
    case = tiny_gpt.initialized(distributed_optimizer=True, **fields)
    run = tiny_gpt.train(case, steps=3, hook=rehoming_hook(timeout=TIMEOUT))
    assert not homes_of(run).are_moved
    return run


@ranks(3, killed=frozenset([1]))
def test_homes_stay_where_a_rank_dies() -> None:
    run = about_to_move(ep=3, experts=9)
    weights = [p.detach().clone() for p in run.chunks[0].parameters()]
    if dist.get_rank() == 1:
        Relocation.exchange = lambda _: os.kill(os.getpid(), signal.SIGKILL)
    begin = time.monotonic()
    expected = r"homes of layer 1: moving experts failed on rank \d of 3"
    with pytest.raises(TransferError, match=expected):
        run.step(3)
    assert time.monotonic() - begin < 3 * TIMEOUT
    assert not homes_of(run).are_moved
    assert all(a.equal(b) for a, b in zip(weights, run.chunks[0].parameters(), strict=True))


@ranks(2)
def test_an_error_before_all_has_come_leaves_the_old_homes() -> None:
    run = about_to_move()
    before, exchange = hashes(run), Relocation.exchange

    def fails(relocation: Relocation) -> None:
        exchange(relocation)
        raise MemoryError("no room")

    if dist.get_rank() == 1:
        Relocation.exchange = fails
    message = r"no room|homes of layer 1: moving experts failed"
    with pytest.raises((MemoryError, TransferError), match=message):
        run.step(3)
    assert not homes_of(run).are_moved
    assert hashes(run) == before


@ranks(2)
def test_a_loop_that_catches_an_error_goes_on() -> None:
    """The first layer has moved, the second finds no room. Oracle: stock, bit for bit."""
    case = tiny_gpt.initialized(distributed_optimizer=True, optimizer=dict(clip_grad=0.0))
    stock = tiny_gpt.train(case, steps=8)
    run = tiny_gpt.train(case, steps=3, hook=rehoming_hook(timeout=TIMEOUT, slots=0))
    exchange, calls = Relocation.exchange, 0

    def fails_once(relocation: Relocation) -> None:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise MemoryError("no room")
        exchange(relocation)

    Relocation.exchange = fails_once
    with pytest.raises(MemoryError):
        run.step(3)
    for step in range(3, 8):
        run.step(step)
    assert run.losses == stock.losses and homes_of(run).are_moved


@ranks(2)
def test_an_error_while_one_rank_writes_stops_all_before_the_next_step() -> None:
    run = about_to_move()
    write = Relocation.write

    def fails(relocation: Relocation) -> None:
        write(relocation)
        raise KeyboardInterrupt

    if dist.get_rank() == 1:
        Relocation.write = fails
        with pytest.raises(KeyboardInterrupt):
            run.step(3)
        with pytest.raises(RuntimeError, match="moved homes"):
            run.chunks[0].state_dict()
        with pytest.raises(RuntimeError, match=INCONSISTENT):
            run.step(3)
    else:
        message = "homes: gathering optimizer states failed on rank 0 of 2"
        with pytest.raises(TransferError, match=message):
            run.step(3)


@pytest.mark.slow
@ranks(2)
def test_a_state_that_cannot_move_on_one_rank_is_an_error_on_all() -> None:
    run = about_to_move()
    states = []
    for optimizer in tiny_gpt.moe_layers(run.chunks)[0].prefetcher.detector.optimizers():
        states += optimizer.state.values()
    moments = [state["exp_avg"] for state in states]
    if dist.get_rank() == 1:
        for state in states:
            state["exp_avg"] = state["exp_avg"].half()
    message = (
        r"^homes: rank 1: cannot move experts: \w+ keeps exp_avg \(\d+,\) \(torch.float16\) "
        r"for a parameter .*; leave --moe-fssdp-rehome out$"
    )
    with pytest.raises(ValueError, match=message):
        run.step(3)
    for state, moment in zip(states, moments, strict=True):
        state["exp_avg"] = moment
        if dist.get_rank() == 1:
            state["extra"] = moment.clone()
    message = (
        r"states of the experts of one layer differ, for parameter 0 .*\('extra', 'torch.float32'\)"
    )
    with pytest.raises(ValueError, match=message):
        run.step(3)
    assert not homes_of(run).are_moved


@pytest.mark.slow
@ranks(2)
def test_homes_that_differ_are_not_saved() -> None:
    """All have moved, but not to the same places: they would send each other the wrong experts."""
    run = about_to_move()
    run.step(3)
    assert homes_of(run).are_moved
    if dist.get_rank() == 1:
        state = tiny_gpt.moe_layers(run.chunks)[0].fssdp
        order = state.homes.table[:, :4].ravel()[[4, 1, 2, 3, 0, 5, 6, 7]]
        state.move_homes(state.homes.with_homes(order))
    with pytest.raises(RuntimeError, match="moved on some ranks only; restart"):
        save(run, shared_folder("checkpoint"))


@pytest.mark.parametrize("back", [False, True], ids=["moving", "moving back"])
@ranks(2)
def test_what_an_interruption_leaves_is_not_saved(back: bool) -> None:
    """Somebody stops all ranks while they write, and their loop catches it and saves, or goes on."""
    run = about_to_move()
    if back:
        run.step(3)
    with (
        mock.patch.object(Relocation, "write", side_effect=KeyboardInterrupt),
        pytest.raises(KeyboardInterrupt),
    ):
        save(run, shared_folder("interrupted")) if back else run.step(3)
    with pytest.raises(RuntimeError, match=INCONSISTENT):
        save(run, shared_folder("checkpoint"))
    with pytest.raises(RuntimeError, match=INCONSISTENT):
        run.step(3)
