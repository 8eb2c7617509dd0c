"""The overlap degree. Oracle: literal measurements and the definition t = window x copies / seconds of the copies."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
import torch

from megatron_hecate.comm.overlap import AGAIN, TIMED, WARM_UP, OverlapMeter
from megatron_hecate.comm.transfer import Stopwatch, Transfer

pytestmark = pytest.mark.fast
MS = 1_000_000  # nanoseconds


def test_degree_is_the_window_over_the_time_of_a_copy() -> None:
    meter = OverlapMeter()
    assert meter.degree(1e-3) == 0, "nothing is known to hide before the first iteration"
    meter.agree([10 * MS, 2, 0, 0])  # two layers of 5 ms
    assert meter.degree(2e-3) == pytest.approx(2.5), (
        "until copies are timed, what they are taken to last"
    )
    meter.agree([10 * MS, 2, 8 * MS, 8])  # copies of 1 ms
    assert meter.degree(2e-3) == pytest.approx(5)
    meter.agree([0, 0, 0, 0])  # an iteration in which nothing was complete
    assert meter.degree(2e-3) == pytest.approx(5)


def test_copies_are_timed_early_and_again() -> None:
    meter = OverlapMeter()

    def iteration(window_ms: int) -> bool:
        meter.fetched()
        timed = meter.times_copies
        meter.agree([window_ms * MS, 1, MS * timed, int(timed)])
        return timed

    first = [iteration(5) for _ in range(WARM_UP + TIMED + 5)]
    assert first == [WARM_UP <= i + 1 < WARM_UP + TIMED for i in range(len(first))]
    assert sum(iteration(5) for _ in range(AGAIN)) >= 1, "now and then"


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

    watch = Stopwatch(cpu)

    def steps() -> Iterator[None]:
        watch.mark("begin")
        while not gate:
            time.sleep(0.001)
        yield

    transfer = Transfer(steps(), cpu, what="spAG", label="layer 1", watch=watch)
    meter.follow(transfer, 3)
    assert meter.measured()[2:] == [0, 0]
    gate.append(1)
    transfer.wait()
    nanoseconds, copies = meter.measured()[2:]
    assert copies == 3 and nanoseconds > 0


def test_what_a_timed_transfer_raises_is_raised_where_it_is_waited_for() -> None:
    cpu = torch.device("cpu")
    transfer = Transfer(
        map({}.__getitem__, ["lost"]), cpu, what="spRS", label="layer 1", watch=Stopwatch(cpu)
    )
    with pytest.raises(KeyError, match="lost"):
        transfer.wait()
    with pytest.raises(RuntimeError, match="layer 1: this spRS failed before"):
        transfer.wait()
    assert transfer.watch.seconds is None
