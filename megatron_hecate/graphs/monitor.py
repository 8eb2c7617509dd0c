"""Load monitor whose counts, sum and copy to the host are part of a CUDA graph."""

from __future__ import annotations

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_hecate.device.autograd import lasting_tensors
from megatron_hecate.step.load_monitor import NOT_HERE, GroupSum, LoadMonitor


class GraphedSum(GroupSum):
    """Sum that a CUDA graph, or eager work on the current stream, copies to ``host``."""

    def __init__(self, host: Tensor) -> None:
        self._host = host
        self._is_copied = True

    @property
    def ready(self) -> bool:
        return not (self._host.numpy() == NOT_HERE).any()

    def read(self) -> np.ndarray:
        if not self.ready and self._host.is_pinned():
            torch.cuda.current_stream().synchronize()
        return self._host.numpy().copy()


class GraphedMonitor(LoadMonitor):
    """Load monitor of iterations that one CUDA graph holds. Args as `LoadMonitor`.

    Counts, sum and host memory stay where they are. The graph sums, copies and resets them.
    """

    _host: Tensor | None = None
    # True if the sum of the running iteration has been started.
    _is_started = False

    def start_reduce(self) -> bool:
        if not self._counts or self._is_started:
            return False
        if self._has_sum():
            return False
        # A replay measures nothing on the host.
        device = self._counts[0].device
        included = torch.zeros(len(self._measured()), dtype=torch.int64, device=device)
        sums = self._take_counts(included)
        torch._foreach_zero_(list(self._counts))
        if self._host is None:
            with lasting_tensors():
                self._host = torch.full(
                    sums.shape, NOT_HERE, dtype=sums.dtype, pin_memory=sums.is_cuda
                )
        dist.all_reduce(sums, group=self._group)
        self._host.copy_(sums, non_blocking=True)
        self._is_started = True
        self._reduced = GraphedSum(self._host)
        return True

    def _has_sum(self) -> bool:
        """Wait for a replay; return whether it has summed the counts, which it does without Python.

        Before a replay there is no sum yet.
        """
        if self._reduced is not None:
            self._reduced.read()
            self._is_started = self._reduced.ready
        return self._is_started

    def collect(self) -> None:
        # Metrics may be read before a replay, and before the iteration that follows it begins.
        if self._has_sum():
            super().collect()

    def prepare(self, *, replays: bool) -> None:
        """Expect the sum of another iteration, outside of any capture. The last one was read.

        Args:
            replays: whether a graph may sum the counts, without Python.
        """
        self._is_started = False
        if self._host is None:
            return
        self._host.fill_(NOT_HERE)
        if replays:
            # A recorder notes the plans of the iteration.
            self._measured()
            self._reduced = GraphedSum(self._host)
