"""Load monitor: how many tokens each expert of each layer got, summed over the FSSDP group.

Counting costs one add per forward. When the iteration ends, one asynchronous all-reduce sums the counts of all layers
while the optimizer steps; the result is read when the next iteration begins. The forecast of that one is made of the
loads of the iterations before (`forecast`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_hecate.comm.overlap import MEASURED, OverlapMeter
from megatron_hecate.device.lasting import lasting_tensors
from megatron_hecate.job.collectives import wait_collective
from megatron_hecate.megatron.forward_pass import ForwardPass
from megatron_hecate.runtime.forecast import LoadHistory

# in host memory until a sum of counts arrives there
NOT_HERE: int = -1


class GroupSum:
    """A sum over a group on its way to the host. Every rank must make it at the same point.

    Args:
        counts: int64, this rank's; the sum is written into them.
        group: whose ranks take part.
        timeout: seconds to wait for them.
        stream: where results are copied on a GPU, so that reading waits for this sum alone.
    """

    def __init__(
        self,
        counts: Tensor,
        group: dist.ProcessGroup,
        *,
        timeout: float,
        stream: torch.cuda.Stream | None,
    ) -> None:
        work = dist.all_reduce(counts, group=group, async_op=True)
        self._is_copied = stream is not None
        if stream is None:
            self._host, self._ready = counts, work.is_completed
            names = dict(what="sum of the loads", label="load history")
            self._wait: Callable[[], Any] = partial(
                wait_collective, work, counts, group, **names, timeout=timeout
            )
            return
        self._host = torch.full(counts.shape, NOT_HERE, dtype=counts.dtype, pin_memory=True)
        with torch.cuda.stream(stream):
            work.wait()
            self._host.copy_(counts, non_blocking=True)
            counts.record_stream(stream)
            copied = torch.cuda.Event()
            copied.record()
        self._ready, self._wait = copied.query, copied.synchronize

    @property
    def ready(self) -> bool:
        """Whether `read` would not wait."""
        return self._ready()

    def read(self) -> np.ndarray:
        """The sum, once it is here."""
        self._wait()
        return self._host.numpy()

    def peek(self) -> np.ndarray | None:
        """A copy of the sum if it seems to be here, for any thread: no CUDA call is made to be sure."""
        if not (self._is_copied or self._ready()):
            return None
        seen = self._host.numpy().copy()
        return None if self._is_copied and (seen == NOT_HERE).any() else seen


class LoadMonitor:
    """Counts the tokens of this rank and sums them over the group.

    Args:
        shape: (L, E): layers on this rank, and experts, the most of any layer.
        group: the ranks whose tokens the layers' experts share.
        timeout: seconds to wait for them.
        meter: whose measurements travel along.
    """

    def __init__(
        self,
        shape: tuple[int, int],
        group: dist.ProcessGroup,
        *,
        timeout: float,
        meter: OverlapMeter | None = None,
    ) -> None:
        self._shape, self._group, self._timeout = shape, group, timeout
        self._meter, self._size = meter or OverlapMeter(), shape[0] * shape[1]
        # [L * E] and what was measured, int64, made on the device of the first loads; rows [E] of it
        self._sums: Tensor | None = None
        self._counts: Sequence[Tensor]
        self._reduced: GroupSum | None = None
        self._stream: torch.cuda.Stream | None = None
        self.history = LoadHistory()
        self.recorder: Any = (
            None  # `record.layer_recorder.LayerRecorder`: its measurements travel along
        )

    def count(self, layer: int, loads: Tensor) -> None:
        """Add one microbatch: ``loads`` [E] are this rank's tokens per expert."""
        if self._sums is None:
            more = MEASURED if self.recorder is None else MEASURED + self.recorder.begin()
            with lasting_tensors():
                self._sums = torch.zeros(self._size + more, dtype=torch.int64, device=loads.device)
                self._counts = self._sums[: self._size].view(self._shape).unbind()
        self._counts[layer][: loads.shape[0]].add_(loads)  # += copies, too

    @property
    def measures(self) -> bool:
        """Whether anybody asks for what `computed` notes."""
        return self.recorder is not None and self.recorder.measures

    def computed(self, layer: int, forward: ForwardPass, sent: Sequence[int] | None) -> None:
        """Note a microbatch's ``forward`` of ``layer``, whose experts have computed.

        Args:
            layer: index of the layer.
            forward: with the rows of the experts' input.
            sent: tokens that this rank sent to each rank, where the dispatcher knows it.
        """
        if self.recorder is not None:
            self.recorder.computed(layer, forward, sent)

    def start_reduce(self) -> bool:
        """Start summing this iteration's counts over the group. Every rank must call it at the same point.

        Returns:
            Whether there are any whose sum has not been started.
        """
        if self._sums is None or self._reduced is not None:
            return False
        sums, self._sums = self._sums, None
        more = self._meter.measured() + ([] if self.recorder is None else self.recorder.measured())
        sums[self._size :].copy_(torch.tensor(more, pin_memory=sums.is_cuda), non_blocking=True)
        if sums.is_cuda:
            self._stream = self._stream or torch.cuda.Stream()
        self._reduced = GroupSum(sums, self._group, timeout=self._timeout, stream=self._stream)
        return True

    def peek(self) -> Callable[[], tuple[np.ndarray, list[int]] | None]:
        """A function for any thread: the loads [L, E] and what was measured, of the sum that has been started, or
        ``None`` as long as they are under way."""
        assert self._reduced is not None, "no sum has been started"
        started, size, shape = self._reduced, self._size, self._shape

        def look() -> tuple[np.ndarray, list[int]] | None:
            sums = started.peek()
            return (
                None
                if sums is None
                else (sums[:size].reshape(shape), sums[size:][:MEASURED].tolist())
            )

        return look

    def finish_reduce(self) -> None:
        """Sum what was counted, wait and add it to the history; does nothing when no forward was counted."""
        self.start_reduce()
        self.collect()

    def collect(self) -> None:
        """Add a sum that was started to the history. Communicates nothing itself: any rank may call it at any time."""
        if self._reduced is not None:
            sums, self._reduced = self._reduced.read(), None
            load = sums[: self._size].reshape(self._shape)
            self.history.append(load)
            self._meter.agree(sums[self._size :][:MEASURED].tolist())
            if self.recorder is not None:
                self.recorder.take(load, sums[self._size + MEASURED :])

    def collect_ready(self) -> bool:
        """As `collect`, without waiting; returns whether no sum is under way."""
        if self._reduced is not None and self._reduced.ready:
            self.collect()
        return self._reduced is None
