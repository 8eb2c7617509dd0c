"""The overlap degree. Oracle: literal measurements and the definition t = window x copies / seconds of the copies."""

from __future__ import annotations

import time

import numpy as np
import pytest
import torch
from ranks import ranks

from megatron_hecate.overlap import AGAIN, SETTLE, TIMED, OverlapMeter
from megatron_hecate.plan import Placement, World, plan_guests
from megatron_hecate.transfer import Transfer

MS = 1_000_000  # nanoseconds


def test_degree_is_the_window_over_the_time_of_a_copy() -> None:
    meter = OverlapMeter()
    assert meter.degree(1e-3) == 0, "nothing is known to hide before the first iteration"
    meter.agree([10 * MS, 2, 0, 0])  # two layers of 5 ms
    assert meter.degree(2e-3) == 2, "until copies are timed, what they are taken to last"
    meter.agree([10 * MS, 2, 8 * MS, 8])  # copies of 1 ms
    assert meter.degree(2e-3) == 5
    meter.agree([0, 0, 0, 0])  # an iteration in which nothing was complete
    assert meter.degree(2e-3) == 5


def test_copies_are_timed_early_again_and_after_a_drift() -> None:
    meter = OverlapMeter()

    def iteration(window_ms: int) -> bool:
        meter.fetched()
        timed = meter.times_copies
        meter.agree([window_ms * MS, 1, MS * timed, int(timed)])
        return timed

    first = [iteration(5) for _ in range(SETTLE + TIMED + 5)]
    assert first == [SETTLE <= i + 1 < SETTLE + TIMED for i in range(len(first))]
    assert sum(iteration(5) for _ in range(AGAIN)) >= 1, "now and then"
    while iteration(5):
        pass
    assert not iteration(50) and iteration(50), "the window is ten times as long"


def test_measurements_are_kept_until_they_are_complete() -> None:
    meter, cpu = OverlapMeter(), torch.device("cpu")
    meter.attention(0, cpu)
    meter.attention(1, cpu)
    time.sleep(0.01)
    meter.routed(0)
    meter.routed(0)  # a second microbatch
    meter.routed(7)  # never began
    nanoseconds, windows, *copies = meter.measured()
    assert windows == 1 and 10 * MS <= nanoseconds < 1000 * MS and copies == [0, 0]
    meter.routed(1)
    assert meter.measured()[1] == 1 and meter.measured()[1] == 0

    gate = []

    def steps():
        while not gate:
            time.sleep(0.001)
        yield

    transfer = Transfer(steps(), cpu, what="spAG", label="layer 1", timed=True)
    meter.follow(transfer, 3)
    assert meter.measured()[2:] == [0, 0]
    gate.append(1)
    transfer.wait()
    nanoseconds, copies = meter.measured()[2:]
    assert copies == 3 and nanoseconds > 0


def test_what_a_timed_transfer_raises_is_raised_where_it_is_waited_for() -> None:
    def steps():
        raise ValueError("lost")
        yield

    transfer = Transfer(steps(), torch.device("cpu"), what="spRS", label="layer 1", timed=True)
    with pytest.raises(ValueError, match="lost"):
        transfer.wait()
    with pytest.raises(RuntimeError, match="layer 1: this spRS failed before"):
        transfer.wait()
    assert transfer.seconds is None


def test_hidden_copies_cost_what_they_take_from_the_compute() -> None:
    """One hot expert per rank 0; gains are known, so which price lets guests in is known, too."""
    homes, world = Placement.initial(8, 4, num_slots=1), World((0, 0, 0, 0))
    forecast = np.array([400.0, 100, 100, 100, 100, 100, 50, 50])  # ranks 500, 200, 200, 100; mean 250

    def guests(**prices: float) -> int:
        return plan_guests(forecast, homes, world, **prices).num_guests

    assert guests(copy_tokens=1.0) > 0
    assert guests(copy_tokens=1000.0) == 0
    assert guests(copy_tokens=1000.0, hidden=3) > 0, "up to three copies leave the hot rank for nothing"
    assert guests(copy_tokens=1000.0, hidden=3, contention=1.0) == 0, "hidden in name only"
    assert guests(copy_tokens=1000.0, hidden=3, contention=0.01) > 0
    with pytest.raises(ValueError, match=r"contention=2 between 0 and 1"):
        guests(contention=2)
    with pytest.raises(ValueError, match=r"hidden=-1 must be 0 or more"):
        guests(hidden=-1)


@ranks(2)
def test_all_ranks_agree_on_a_degree_in_training() -> None:
    import tiny_gpt
    import torch.distributed as dist

    from megatron_hecate import HecateConfig, fssdp

    case = tiny_gpt.Case(accumulate=2)
    tiny_gpt.initialize(case)
    if dist.get_rank() == 0:
        time.sleep(0.2)  # ranks do not measure the same
    run = tiny_gpt.train(case, steps=SETTLE + TIMED + 2, hook=fssdp(HecateConfig(costs=tiny_gpt.FREE, timeout=60)))
    meter = tiny_gpt.moe_layers(run.chunks)[0].fssdp.model.meter
    assert run.guests > 0 and meter.window > 0 and meter.copy > 0
    seen = [None, None]
    dist.all_gather_object(seen, (meter.window, meter.copy, meter.degree(1.0)))
    assert seen[0] == seen[1]
