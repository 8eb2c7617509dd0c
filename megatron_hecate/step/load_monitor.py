"""Load monitor: tokens of each expert of each layer, summed over all ranks that share the experts.

The kernel that counts a forward's tokens adds them to the sums. At the end of the iteration one
asynchronous all-reduce sums the counts of all layers while the optimizer steps; the result is read
at the start of the next iteration. Its forecast uses the loads of previous iterations (`forecast`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_hecate.comm.collectives import wait_collective
from megatron_hecate.comm.overlap import MEASURED, OverlapMeter
from megatron_hecate.device.autograd import lasting_tensors
from megatron_hecate.megatron.forward_pass import ForwardPass
from megatron_hecate.step.forecast import LoadHistory

# Value of host memory until a sum of counts is copied into it.
NOT_HERE: int = -1


class GroupSum:
    """Asynchronous all-reduce over a group, with a copy of the sum to the host.

    Collective: every rank must make it at the same point.

    Args:
        counts: this rank's counts, int64; the sum is written into the tensor.
        group: process group of the all-reduce.
        timeout: seconds to wait for the group's ranks.
    """

    def __init__(self, counts: Tensor, group: dist.ProcessGroup, *, timeout: float) -> None:
        work = dist.all_reduce(counts, group=group, async_op=True)
        self._is_copied = counts.is_cuda
        if not counts.is_cuda:
            self._host = counts
            self._ready = work.is_completed
            self._wait: Callable[[], Any] = functools.partial(
                wait_collective,
                work,
                counts,
                group,
                what="sum of the loads",
                label="begin of an iteration",
                timeout=timeout,
            )
            return
        self._host = torch.full(counts.shape, NOT_HERE, dtype=counts.dtype, pin_memory=True)
        stream = _copy_stream(counts.device)
        with torch.cuda.stream(stream):
            work.wait()
            self._host.copy_(counts, non_blocking=True)
            counts.record_stream(stream)
            copied = torch.cuda.Event()
            copied.record()
        self._ready = copied.query
        self._wait = copied.synchronize

    @property
    def ready(self) -> bool:
        """True if `read` does not block."""
        return self._ready()

    def read(self) -> np.ndarray:
        """Wait for the sum and return it."""
        self._wait()
        return self._host.numpy()

    def peek(self, length: int) -> np.ndarray | None:
        """Return a copy of the sum's first ``length`` numbers, or ``None`` before they arrive.

        Any thread may call it: on a GPU the content of host memory decides, without a CUDA call.
        """
        first = self._host.numpy()[:length]
        if not self._is_copied:
            return first.copy() if self._ready() else None
        copied = first.copy()
        return None if (copied == NOT_HERE).any() else copied


@functools.cache
def _copy_stream(device: torch.device) -> torch.cuda.Stream:
    """Return the stream that copies sums to the host, so that reading one waits for sums alone."""
    return torch.cuda.Stream(device=device)


class MicrobatchCounts(Protocol):
    """Tokens of this rank by microbatch, layer and expert."""

    def next_of(self, layer: int) -> Tensor:
        """Return the counts of a layer's next microbatch, [E], to be added to."""

    def take(self) -> Tensor:
        """Return the counts of the iteration, and reset them: [L, E], then those of a recorder."""


class LoadRecorder(Protocol):
    """Recorder of a model's loads, whose measurements are summed with the loads.

    Attributes:
        counts: counts of single microbatches; ``None`` if sums of an iteration suffice. Without
            them `computed` is not called.
    """

    counts: MicrobatchCounts | None

    def computed(self, layer: int, forward: ForwardPass, sent_tokens: Sequence[int] | None) -> None:
        """Record a microbatch's forward after the experts of ``layer`` have computed.

        Args:
            layer: index of the layer.
            forward: the forward, which has the rows of the experts' input.
            sent_tokens: tokens from this rank to each rank, where the dispatcher knows the numbers.
        """

    def measured(self) -> np.ndarray:
        """Return this rank's measurements, int64."""

    def take(self, load: np.ndarray, measured: np.ndarray) -> None:
        """Record the sums over the group: loads [L, E], and measurements."""


class LoadMonitor:
    """Counter of this rank's tokens per layer and expert, with sums over the group.

    Args:
        shape: number of layers on this rank, and largest number of experts of any layer, (L, E).
        group: ranks whose tokens the layers' experts share.
        timeout: seconds to wait for the group's ranks.
        meter: meter whose measurements the all-reduce includes.
    """

    def __init__(
        self,
        shape: tuple[int, int],
        group: dist.ProcessGroup,
        *,
        timeout: float,
        meter: OverlapMeter | None = None,
    ) -> None:
        self._shape = shape
        self._group = group
        self._timeout = timeout
        self._meter = meter or OverlapMeter()
        self._size = shape[0] * shape[1]
        # Counts of the iteration, [E] int64 per layer, allocated on the device of its first loads.
        self._counts: Sequence[Tensor] = ()
        self._reduced: GroupSum | None = None
        self.history = LoadHistory()
        # Its measurements are summed with the loads.
        self.recorder: LoadRecorder | None = None

    def next_counts(self, layer: int, device: torch.device) -> Tensor:
        """Return the counts to which a microbatch of ``layer`` is added, [E] int64 on ``device``.

        Call it once per microbatch. The largest layer's number of experts is E; other layers have
        fewer.
        """
        if not self._counts:
            with lasting_tensors():
                self._counts = torch.zeros(self._shape, dtype=torch.int64, device=device).unbind()
        if self.recorder is not None and self.recorder.counts is not None:
            return self.recorder.counts.next_of(layer)
        return self._counts[layer]

    def count(self, layer: int, loads: Tensor) -> None:
        """Add one microbatch of ``layer``, with this rank's tokens per expert ``loads`` [E]."""
        # `+=` on an item would also copy the result back.
        self.next_counts(layer, loads.device)[: loads.shape[0]].add_(loads)

    def start_reduce(self) -> bool:
        """Start the all-reduce of this iteration's counts. Collective.

        Returns:
            False if there are no counts, or their all-reduce has been started already.
        """
        if not self._counts or self._reduced is not None:
            return False
        included = torch.from_numpy(self._measured())
        on_device = self._counts[0]
        if on_device.is_cuda:
            included = included.pin_memory().to(on_device.device, non_blocking=True)
        sums = self._take_counts(included)
        self._counts = ()
        self._reduced = GroupSum(sums, self._group, timeout=self._timeout)
        return True

    def _measured(self) -> np.ndarray:
        """Return what the sum includes besides counts: the meter's, and the recorder's numbers."""
        included = np.asarray(self._meter.measured(), dtype=np.int64)
        if self.recorder is not None:
            included = np.concatenate([included, self.recorder.measured()])
        return included

    def _take_counts(self, included: Tensor) -> Tensor:
        """Return the counts [L * E], ``included``, and what a recorder counts."""
        if self.recorder is not None and self.recorder.counts is not None:
            counts = self.recorder.counts.take()
        else:
            counts = torch.cat(list(self._counts))
        # What follows the counts [L * E] are tokens of home ranks, which `LoadRecorder.take` gets.
        return torch.cat([counts[: self._size], included, counts[self._size :]])

    def peek(self) -> Callable[[], tuple[np.ndarray, list[int]] | None]:
        """Return a function that reads the started sum, for use in any thread.

        The function returns the loads [L, E] and the meter's measurements, or ``None`` while the
        sum is in flight.
        """
        assert self._reduced is not None, "no sum has been started"
        started = self._reduced
        size = self._size
        shape = self._shape

        def look() -> tuple[np.ndarray, list[int]] | None:
            sums = started.peek(size + MEASURED)
            if sums is None:
                return None
            return sums[:size].reshape(shape), sums[size:].tolist()

        return look

    def collect(self) -> None:
        """Wait for a started sum, if there is one, and add it to the history.

        Not collective: the all-reduce has been started, so any rank may call it at any time.
        """
        if self._reduced is not None:
            sums = self._reduced.read()
            self._reduced = None
            load = sums[: self._size].reshape(self._shape)
            self.history.append(load)
            measured = sums[self._size :]
            self._meter.agree(measured[:MEASURED].tolist())
            if self.recorder is not None:
                self.recorder.take(load, measured[MEASURED:])

    def collect_ready(self) -> bool:
        """Collect a sum that has arrived, without waiting; return whether none is in flight."""
        if self._reduced is not None and self._reduced.ready:
            self.collect()
        return self._reduced is None
