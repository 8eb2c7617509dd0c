"""Timer of a rank's experts: seconds and tokens, from which `rank_speed` finds slow ranks.

On a GPU two CUDA events surround the experts' forward, and are read in a later iteration, so that
nothing waits. CPU ranks use the CPU time of the thread, which waiting for other ranks does not
increase. In each iteration every eighth layer is timed, in turn, equally on all ranks. Experts
inside CUDA graphs are not timed. Letter in shapes: N ranks.
"""

from __future__ import annotations

import functools
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import Module

from megatron_hecate.megatron.training_state import captures_graph
from megatron_hecate.step.clock import Clock

# Layers per timed layer and iteration.
EVERY: int = 8
# Forwards on a GPU whose events may wait to be read; further ones are not timed.
MOST_PENDING: int = 4096


class ExpertTimer:
    """Timer of the training forwards of one rank's experts.

    Args:
        clock: clock of the model.
        shape: number of layers, and N, size of the group of the experts.
        rank: this rank in the group.
        on_gpu: whether the experts compute on a GPU.
    """

    def __init__(self, clock: Clock, shape: tuple[int, int], rank: int, on_gpu: bool) -> None:
        num_layers, ranks = shape
        self._clock = clock
        self._rank = rank
        self._on_gpu = on_gpu
        # Nanoseconds and tokens by rank; other ranks' columns stay 0.
        self._sums = np.zeros((2, ranks), dtype=np.int64)
        self._period = min(EVERY, num_layers)
        # Tokens, and the events around the forward.
        self._pending: deque[tuple[int, torch.cuda.Event, torch.cuda.Event]] = deque()

    def attributes(self, layer: int, experts: Module) -> dict[str, Any]:
        """Return the attributes that the expert module of ``layer`` needs to be timed."""
        kind = _timed(type(experts))
        return {"expert_timer": self, "timed_as": layer, "__class__": kind}

    @property
    def length(self) -> int:
        """Length of the result of `take`."""
        return self._sums.size

    def times(self, layer: int) -> bool:
        """Return whether the running forward of ``layer`` is timed."""
        if (layer + self._clock.iteration) % self._period:
            return False
        if captures_graph() or len(self._pending) >= MOST_PENDING:
            return False
        return not (self._on_gpu and torch.cuda.is_current_stream_capturing())

    def run(self, tokens: int, forward: Callable[[], Any]) -> Any:
        """Call ``forward`` and time it.

        Args:
            tokens: rows of the experts' input.
            forward: the experts' forward.
        """
        if not self._on_gpu:
            begin = time.thread_time_ns()
            output = forward()
            self._add(time.thread_time_ns() - begin, tokens)
            return output
        begun = torch.cuda.Event(enable_timing=True)
        ended = torch.cuda.Event(enable_timing=True)
        begun.record()
        output = forward()
        ended.record()
        self._pending.append((tokens, begun, ended))
        return output

    def _add(self, nanoseconds: int, tokens: int) -> None:
        self._sums[:, self._rank] += (nanoseconds, tokens)

    def take(self) -> np.ndarray:
        """Return the measurements since the last call, to be summed over ranks.

        On a GPU, forwards that have not finished are part of a later result.

        Returns:
            [2 * N] int64.
        """
        # Forwards finish in order.
        while self._pending and self._pending[0][2].query():
            tokens, begun, ended = self._pending.popleft()
            self._add(round(1e6 * begun.elapsed_time(ended)), tokens)
        sums = self._sums.flatten()
        self._sums[:] = 0
        return sums

    def split(self, total: np.ndarray) -> dict[str, np.ndarray]:
        """Return a sum of results of `take` as columns of `run_folder.RunRecord`.

        Args:
            total: sum over the group, [2 * N].
        """
        nanoseconds, tokens = total.reshape(self._sums.shape)
        return {"timed_ns": nanoseconds, "timed_tokens": tokens}


@functools.cache
def _timed(experts: type) -> type:
    """Make a subclass of an expert module's class whose training forwards are timed.

    The subclass has the same name, because other code recognizes modules by the name.
    """

    def forward(self: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        timer = self.expert_timer
        if not (self.training and timer.times(self.timed_as)):
            return experts.forward(self, hidden_states, *args, **kwargs)
        run = functools.partial(experts.forward, self, hidden_states, *args, **kwargs)
        return timer.run(hidden_states.shape[0], run)

    return type(experts.__name__, (experts,), {"forward": forward})
