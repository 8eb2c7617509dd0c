"""Spans of planning, transfers, waits, dispatch and experts, for profilers.

Under ``torch.profiler`` (or ``emit_nvtx``, which Megatron's ``--profile`` starts) every span is a
``record_function`` with a stable name, ``fssdp/<what> <layer>``; on CUDA the transfers themselves
appear as NCCL kernels on a stream of their own. For transfers that the profiler does not see
(gloo), a `SpanRecorder` keeps its own list, in which each transfer is a span from its start until
the first check that finds it complete:

    with trace.SpanRecorder() as recorder:
        train_step()
    recorder.seconds()

| span | content |
|---|---|
| ``plan`` | choice of replicas for an iteration |
| ``spAG``, ``spRS`` | a transfer in flight (recorder only) |
| ``spAG start``, ``spRS start`` | posting of a transfer |
| ``spAG wait``, ``spRS wait`` | the part of a transfer that was not hidden |
| ``loads``, ``quotas``, ``late`` | routing: exchange of loads, quotas, late replicas |
| ``dispatch``, ``experts``, ``combine`` | Megatron's own work |
| ``experts backward``, ``attention backward`` | the same, of layers with replicas (recorder only) |

Without a profiler or a recorder, a span costs a comparison. All times are host times: on GPUs they
show when work was posted and waited for, not when it ran.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator

from torch.autograd import profiler

PREFIX = "fssdp/"


class SpanRecorder:
    """Recorder of one rank's spans: (what, layer, begin, end) in seconds of ``time.perf_counter``.

    `seconds` sums the spans.
    """

    def __init__(self) -> None:
        self.spans: list[tuple[str, str, float, float]] = []
        self._open: list[tuple[str, str, float, Callable[[], bool]]] = []

    def __enter__(self) -> SpanRecorder:
        global _recorder
        if _recorder is not None:
            raise ValueError("a recorder runs already in this process; use that one")
        _recorder = self
        return self

    def __exit__(self, *_: object) -> None:
        global _recorder
        _recorder = None
        self.look()

    def add(self, what: str, layer: str, begin: float, end: float) -> None:
        self.spans.append((what, layer, begin, end))

    def follow(self, what: str, layer: str, end: Callable[[], bool]) -> None:
        """Record a transfer from now until a check finds that ``over()`` is true."""
        self._open.append((what, layer, time.perf_counter(), end))

    def look(self) -> None:
        """Record the transfers that have ended since the last check."""
        moment = time.perf_counter()
        running = []
        for what, layer, begin, ended in self._open:
            if ended():
                self.add(what, layer, begin, moment)
            else:
                running.append((what, layer, begin, ended))
        self._open = running

    def seconds(self) -> dict[str, float]:
        """Sum the seconds of the spans of each kind."""
        total: defaultdict[str, float] = defaultdict(float)
        for what, _, begin, end in self.spans:
            total[what] += end - begin
        return dict(total)


_recorder: SpanRecorder | None = None
# Autograd runs backwards in threads of its own.
_lock = threading.Lock()


def follows_transfers() -> bool:
    """Return whether transfers in flight are recorded now."""
    return _recorder is not None


@contextlib.contextmanager
def _span(what: str, layer: str) -> Iterator[None]:
    # Read once: a recorder may end within the block.
    recorder = _recorder
    begin = time.perf_counter()
    with profiler.record_function(f"{PREFIX}{what} {layer}"):
        yield
    if recorder is not None:
        with _lock:
            recorder.add(what, layer, begin, time.perf_counter())
            recorder.look()


# One object for all spans that are not recorded, so that a span allocates nothing.
_NOTHING = contextlib.nullcontext()


def is_on() -> bool:
    """Return whether a recorder or ``torch.profiler`` records spans now."""
    # The flag of the whole process: under a profiler of all threads
    # `torch.autograd._profiler_enabled` returns False.
    return _recorder is not None or profiler._is_profiler_enabled


def span(what: str, layer: str) -> contextlib.AbstractContextManager[None]:
    """Record the block as ``what`` of ``layer``, a span of the table above."""
    return _span(what, layer) if is_on() else _NOTHING


def add(what: str, layer: str, begin: float) -> None:
    """Record a span from ``begin`` (``time.perf_counter``) until now (recorder only).

    For spans that are not a block of code.
    """
    recorder = _recorder
    if recorder is not None:
        with _lock:
            recorder.add(what, layer, begin, time.perf_counter())


def follow(what: str, layer: str, end: Callable[[], bool]) -> None:
    """Record a transfer from now until a check finds that ``over()`` is true (recorder only)."""
    recorder = _recorder
    if recorder is not None:
        with _lock:
            recorder.follow(what, layer, end)
