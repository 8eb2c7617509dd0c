"""The overlap degree: copies per rank and layer that hide behind compute before it.

    t = (seconds from a layer's attention to its experts) / (seconds that one copy takes)

The first time is measured in every iteration's first microbatch and summed over the group together
with the loads, so that all ranks hold the same t. The second time is that of the cost model's
speeds. Measured times differ from run to run, and plans with them: where runs must repeat bitwise,
set the overlap degree to a constant, or set Megatron's ``deterministic_mode``.
"""

from __future__ import annotations

import time
from typing import Any

import torch

WEIGHT: float = 0.5  # weight of the newest measurement
NANO: float = 1e9
MEASURED: int = 2  # numbers that are summed together with the loads


class Stopwatch:
    """Time from the construction to `stop`, on the current stream of a GPU or on the host."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._begin = self._moment()
        self._end: Any = None

    def _moment(self) -> Any:
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def stop(self) -> None:
        """Stop the time; a repeated call does nothing."""
        if self._end is None:
            self._end = self._moment()

    @property
    def seconds(self) -> float | None:
        """Seconds until `stop`; ``None`` while it has not been reached."""
        if self._end is None:
            return None
        if not self._on_gpu:
            return self._end - self._begin
        return self._begin.elapsed_time(self._end) / 1e3 if self._end.query() else None


class OverlapMeter:
    """Windows measured on this rank, and the window that all ranks agreed on."""

    def __init__(self) -> None:
        self.window: float | None = None  # seconds from attention to experts, agreed
        # True where a CUDA graph holds the iterations, whose events have no times.
        self.is_off = False
        self._watches: dict[int, Stopwatch] = {}  # by layer

    def attention(self, layer: int, device: torch.device) -> None:
        """Start the window of ``layer``: its attention is next, in the first microbatch."""
        if not self.is_off:
            self._watches[layer] = Stopwatch(device)

    def routed(self, layer: int) -> None:
        """End the window of ``layer``: its tokens are dispatched next."""
        if layer in self._watches:
            self._watches[layer].stop()

    def measured(self) -> list[int]:
        """Return the measurements that completed since the last call, [`MEASURED`].

        They are nanoseconds of windows and number of windows. `agree` takes their sums over the
        group.
        """
        seconds = {layer: watch.seconds for layer, watch in self._watches.items()}
        windows = {layer: window for layer, window in seconds.items() if window is not None}
        for layer in windows:
            del self._watches[layer]
        return [sum(round(window * NANO) for window in windows.values()), len(windows)]

    def agree(self, sums: list[int]) -> None:
        """Update the agreed window with the group's sums of `measured`."""
        nanoseconds, count = sums
        if not count:
            return
        window = nanoseconds / count / NANO
        if self.window is not None:
            window = (1 - WEIGHT) * self.window + WEIGHT * window
        self.window = window

    def degree(self, copy_seconds: float) -> float:
        """Return the overlap degree t; 0 before the first iteration.

        Args:
            copy_seconds: seconds of one copy.
        """
        if self.window is None:
            return 0.0
        return self.window / max(copy_seconds, 1 / NANO)
