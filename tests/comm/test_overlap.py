"""The overlap degree. Oracle: literal measurements and the definition t = window / seconds of a copy."""

from __future__ import annotations

import time

import pytest
import torch

from megatron_hecate.comm.overlap import OverlapMeter

pytestmark = pytest.mark.fast
MS = 1_000_000  # nanoseconds


def test_degree_is_the_window_over_the_time_of_a_copy() -> None:
    meter = OverlapMeter()
    assert meter.degree(1e-3) == 0, "nothing is known to hide before the first iteration"
    meter.agree([10 * MS, 2])  # two layers of 5 ms
    assert meter.degree(2e-3) == pytest.approx(2.5)
    meter.agree([0, 0])  # an iteration in which nothing was complete
    assert meter.degree(2e-3) == pytest.approx(2.5)
    meter.agree([7 * MS, 1])  # half of the old window, half of the new one
    assert meter.degree(2e-3) == pytest.approx(3)


def test_windows_are_kept_until_they_are_complete() -> None:
    meter, cpu = OverlapMeter(), torch.device("cpu")
    meter.attention(0, cpu)
    meter.attention(1, cpu)
    time.sleep(0.01)
    meter.routed(0)
    meter.routed(0)  # a second microbatch
    meter.routed(7)  # never began
    nanoseconds, windows = meter.measured()
    assert windows == 1 and 10 * MS <= nanoseconds < 1000 * MS
    meter.routed(1)
    assert meter.measured()[1] == 1 and meter.measured()[1] == 0
