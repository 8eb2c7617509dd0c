"""Measure GPU time without kernel launches from Python. All GPU benchmarks use this clock.

Before each sample the stream sleeps (``torch.cuda._sleep``) until the host has launched everything:
event *begin*, the work, event *end*. So only the work lies between the events. The clock checks
that the stream was still asleep at the last launch; otherwise it retries with a longer sleep, and
marks a sample for which that does not help as bound by the host. Buffers rotate: a sample finds
none of its data in the L2 cache, unless the benchmark intends a hit.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

# approximate clock of `torch.cuda._sleep`; above a GPU's own clock, sleeps are longer, not wrong
CYCLES_PER_SECOND: float = 2e9
# seconds
LONGEST_SLEEP: float = 0.2
# attempts per sample; each doubles the sleep
TRIES: int = 4
# runs before the first sample, which load modules and allocate memory
WARM: int = 2
# size of the L2 cache where the device does not report it
L2_BYTES: int = 50 << 20

Run = Callable[[], object]


@dataclasses.dataclass(frozen=True)
class Time:
    """Samples of one piece of work.

    Args:
        seconds: median.
        low, high: tenth and ninetieth percentile.
        host_bound: whether the device waited for launches in some sample, which then includes
            launch time.
    """

    seconds: float
    low: float
    high: float
    host_bound: bool = False

    @classmethod
    def of(cls, samples: Sequence[float], *, host_bound: bool = False) -> Time:
        """Summarize ``samples``, in seconds."""
        ordered = sorted(samples)
        at = [ordered[round(share * (len(ordered) - 1))] for share in (0.1, 0.9)]
        return cls(statistics.median(ordered), at[0], at[1], host_bound)

    @property
    def us(self) -> float:
        """Median in microseconds."""
        return self.seconds * 1e6


class Clock:
    """Clock of one device.

    Args:
        device: device to measure.
        calls: samples per measurement.
    """

    def __init__(self, device: torch.device, *, calls: int = 20) -> None:
        self.device = device
        self.calls = calls
        # seconds of sleep that were enough for the last work
        self._sleep = 0.0

    def time(self, *runs: Run, before: Run | None = None, after: Run | None = None) -> Time:
        """Time ``runs`` in rotation.

        Args:
            runs: functions that launch the same work on different buffers.
            before: work launched during the sleep and not measured, such as work of another
                stream.
            after: work launched after the measured work and not measured.
        """
        for number in range(max(WARM, len(runs))):
            for run in (before, runs[number % len(runs)], after):
                if run is not None:
                    run()
        torch.cuda.synchronize()
        launched = [run for run in (before, runs[0], after) if run is not None]
        self._sleep = max(5e-5, 3 * _host_seconds(lambda: [run() for run in launched]))
        samples = []
        bound = False
        for number in range(self.calls):
            for _ in range(TRIES):
                seconds, asleep = self._sample(runs[number % len(runs)], before, after)
                if asleep or self._sleep >= LONGEST_SLEEP:
                    break
                self._sleep *= 2
            samples.append(seconds)
            bound |= not asleep
        return Time.of(samples, host_bound=bound)

    def _sample(self, run: Run, before: Run | None, after: Run | None) -> tuple[float, bool]:
        """Measure ``run`` once.

        Returns:
            Seconds, and whether the stream was asleep until everything was launched.
        """
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        torch.cuda._sleep(int(min(self._sleep, LONGEST_SLEEP) * CYCLES_PER_SECOND))
        if before is not None:
            before()
        begin.record()
        run()
        end.record()
        if after is not None:
            after()
        asleep = not begin.query()
        torch.cuda.synchronize()
        return begin.elapsed_time(end) / 1e3, asleep

    def in_a_row(self, run: Run, *, repeats: int = 20) -> Time:
        """Time one of ``repeats`` runs in one CUDA graph, without host launches in between."""

        def all_of_them() -> None:
            for _ in range(repeats):
                run()

        replay, _ = captured(all_of_them)
        found = self.time(replay)
        return Time(
            found.seconds / repeats, found.low / repeats, found.high / repeats, found.host_bound
        )


def captured(run: Callable[[], Any]) -> tuple[Run, Any]:
    """Capture ``run`` as a CUDA graph; returns its replay and the result of ``run``."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    # Allocations and compilations are not allowed during the capture.
    with torch.cuda.stream(side):
        run()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        returned = run()
    return graph.replay, returned


def sets_beyond_cache(size: int, device: torch.device) -> int:
    """Count the sets of ``size`` bytes that together exceed twice the L2 cache."""
    cache = getattr(torch.cuda.get_device_properties(device), "L2_cache_size", 0) or L2_BYTES
    return 1 + 2 * cache // max(1, size)


def name_of(device: torch.device) -> str:
    """Return the device's name for the title of a table."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return "a CPU: the numbers mean nothing"


def _host_seconds(run: Run) -> float:
    began = time.perf_counter()
    run()
    return time.perf_counter() - began
