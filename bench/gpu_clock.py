"""How long work takes on a GPU, without the time in which Python launches it. All benchmarks of GPUs measure by this.

Before each sample the stream sleeps (``torch.cuda._sleep``) until the host has launched everything; then comes the
event *begin*, then the work, then *end*. So between the events lies nothing but the work. That the stream was still
asleep when the last launch was made is checked; where it was not, the sleep becomes longer, and a sample for which that
does not help is marked as bound by the host. Buffers rotate: a sample finds none of its data in the L2 cache, unless
the benchmark means it to.

On a CPU, where work is done when the call returns, the same code measures calls.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

CYCLES_PER_SECOND: float = (
    2e9  # of `torch.cuda._sleep`, about; more than GPUs do makes sleeps longer, not wrong
)
LONGEST_SLEEP: float = 0.2  # seconds
TRIES: int = 4  # of a sample, each with a sleep twice as long
WARM: int = 2  # runs before the first sample: modules are loaded, memory is there
L2_BYTES: int = 50 << 20  # where the device does not say it

Run = Callable[[], object]


@dataclasses.dataclass(frozen=True)
class Time:
    """Samples of one piece of work.

    Args:
        seconds: the median.
        low, high: the tenth and the ninetieth percentile.
        host_bound: whether the device waited for launches in some sample, so that they are part of the time.
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
        return self.seconds * 1e6


class Clock:
    """Measures on one device.

    Args:
        device: which.
        calls: samples of each measurement.
    """

    def __init__(self, device: torch.device, *, calls: int = 20) -> None:
        self.device, self.calls = device, calls
        self._sleep = 0.0  # seconds that were enough for the last work

    def time(self, *runs: Run, before: Run | None = None, after: Run | None = None) -> Time:
        """Time one of ``runs`` after another, in turn: those of one benchmark differ by their buffers alone.

        Args:
            runs: each launches the same work.
            before: launched while the stream sleeps and not measured, such as work of another stream.
            after: likewise, behind the work.
        """
        for number in range(max(WARM, len(runs))):
            for run in (before, runs[number % len(runs)], after):
                if run is not None:
                    run()
        if self.device.type != "cuda":
            return Time.of(
                [_host_seconds(runs[number % len(runs)]) for number in range(self.calls)]
            )
        torch.cuda.synchronize()
        launched = [run for run in (before, runs[0], after) if run is not None]
        self._sleep = max(5e-5, 3 * _host_seconds(lambda: [run() for run in launched]))
        samples, bound = [], False
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
        """Seconds of ``run``, and whether the stream was asleep until all was launched."""
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
        """Time one of ``repeats`` runs in one CUDA graph, which has no launches of the host between them."""
        if self.device.type != "cuda":
            return self.time(run)

        def all_of_them() -> None:
            for _ in range(repeats):
                run()

        replay, _ = captured(all_of_them)
        found = self.time(replay)
        return Time(
            found.seconds / repeats, found.low / repeats, found.high / repeats, found.host_bound
        )

    def host(self, run: Run, *, repeats: int = 20) -> Time:
        """Time of the host alone in ``run``: ``repeats`` of them without waiting for the device, several times.

        They must fit into the queue of launches, about a thousand, or the host waits for the device after all.
        """
        samples = []
        for _ in range(WARM + 5):
            if self.device.type == "cuda":
                torch.cuda.synchronize()
            began = time.perf_counter()
            for _ in range(repeats):
                run()
            samples.append((time.perf_counter() - began) / repeats)
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return Time.of(samples[WARM:])


def captured(run: Callable[[], Any]) -> tuple[Run, Any]:
    """A replay of ``run`` as a CUDA graph, and what it returned in the capture."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run()  # allocates and compiles what a capture must not
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        returned = run()
    return graph.replay, returned


def sets_beyond_cache(size: int, device: torch.device) -> int:
    """How many sets of buffers of ``size`` bytes hold more than twice what the L2 cache does; 1 on a CPU."""
    if device.type != "cuda":
        return 1
    cache = getattr(torch.cuda.get_device_properties(device), "L2_cache_size", 0) or L2_BYTES
    return 1 + 2 * cache // max(1, size)


def name_of(device: torch.device) -> str:
    """What a table says of where its numbers are from."""
    return (
        torch.cuda.get_device_name(device)
        if device.type == "cuda"
        else "a CPU: the numbers mean nothing"
    )


def _host_seconds(run: Run) -> float:
    began = time.perf_counter()
    run()
    return time.perf_counter() - began
