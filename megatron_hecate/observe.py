"""Load history and forecast: how many tokens each expert of each layer got, summed over the FSSDP group.

Counting costs one add per forward. Once all layers have seen the last microbatch, one asynchronous all-reduce sums the
counts of all of them while the backward runs; the result is read when the next iteration begins.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_hecate.collectives import finish

WINDOW: int = 5  # iterations; the paper's sliding window


class LoadHistory:
    """The last iterations' loads of every layer; their mean is the forecast.

    Args:
        window: iterations that count.
    """

    def __init__(self, window: int = WINDOW) -> None:
        self._loads: deque[np.ndarray] = deque(maxlen=window)

    def append(self, load: np.ndarray) -> None:
        """Add one iteration: ``load`` is [L, E] tokens per layer and expert, over the whole group."""
        self._loads.append(load.astype(np.float64))

    def forecast(self) -> np.ndarray | None:
        """[L, E] expected tokens, or ``None`` before the first iteration."""
        return np.mean(self._loads, axis=0) if self._loads else None


class LoadMonitor:
    """Counts the tokens of this rank and sums them over the group.

    Args:
        num_layers: layers on this rank, L.
        num_experts: E, the largest of any layer.
        group: the ranks whose tokens the layers' experts share.
        timeout: seconds to wait for them.
    """

    def __init__(self, num_layers: int, num_experts: int, group: dist.ProcessGroup, *, timeout: float) -> None:
        self._shape, self._group, self._timeout = (num_layers, num_experts), group, timeout
        self._counts: Tensor | None = None  # [L, E] int64, made on the device of the first routing map
        self._reduced: tuple[Tensor, Callable[[], Any]] | None = None  # counts on the host, and how to wait for them
        self._stream: torch.cuda.Stream | None = None
        self.history = LoadHistory()

    def count(self, layer: int, routing_map: Tensor) -> None:
        """Add one microbatch: ``routing_map`` is [T, E] bool, the experts of each token."""
        if self._counts is None:
            self._counts = torch.zeros(self._shape, dtype=torch.int64, device=routing_map.device)
        self._counts[layer, : routing_map.shape[1]] += routing_map.sum(dim=0)

    def start_reduce(self) -> None:
        """Start summing this iteration's counts over the group. Every rank must call it at the same point."""
        if self._counts is None or self._reduced is not None:
            return
        counts, self._counts = self._counts, None
        work = dist.all_reduce(counts, group=self._group, async_op=True)
        if not counts.is_cuda:
            what = dict(what="sum of the loads", label="load history", timeout=self._timeout)
            self._reduced = (counts, partial(finish, work, counts, self._group, **what))
            return
        self._stream = self._stream or torch.cuda.Stream()  # its own, so that reading waits for this sum alone
        host = torch.empty(self._shape, dtype=torch.int64, pin_memory=True)
        with torch.cuda.stream(self._stream):
            work.wait()
            host.copy_(counts, non_blocking=True)
            counts.record_stream(self._stream)
            copied = torch.cuda.Event()
            copied.record()
        self._reduced = (host, copied.synchronize)

    def finish_reduce(self) -> None:
        """Wait for the sum and add it to the history; does nothing when no forward was counted."""
        self.start_reduce()
        if self._reduced is not None:
            counts, wait = self._reduced
            self._reduced = None
            wait()
            self.history.append(counts.numpy())
