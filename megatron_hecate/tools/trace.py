"""What happened when: spans of planning, transfers, waits, dispatch and experts, for Perfetto or chrome://tracing.

Under ``torch.profiler`` every span is a ``record_function`` with a stable name, ``fssdp/<what> <layer>``; with CUDA the
transfers themselves show as NCCL kernels on a stream of their own. Where transfers run behind the profiler's back
(gloo), a `Recorder` keeps its own list, in which each transfer is a span from its start until it was seen to be over:

    with trace.Recorder() as recorder:
        train_step()
    recorder.save(f"trace-{rank}.json", rank=rank)

| span | where |
|---|---|
| ``plan`` | replicas chosen for an iteration |
| ``spAG``, ``spRS`` | a transfer in flight (recorder only) |
| ``spAG start``, ``spRS start`` | posting it |
| ``spAG wait``, ``spRS wait`` | what of it was not hidden |
| ``loads``, ``quotas``, ``late`` | routing: loads exchanged, quotas computed, late replicas |
| ``dispatch``, ``experts``, ``combine`` | Megatron's own work |
| ``experts backward``, ``attention backward`` | likewise, of layers with replicas (recorder only) |

When neither runs, a span costs a comparison.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch.autograd.profiler import record_function

PREFIX = "fssdp/"
IN_FLIGHT = ("spAG", "spRS")


class Recorder:
    """Spans of one rank: (what, layer, begin, end) in seconds of ``time.perf_counter``.

    What a recorder saw is read with `seconds`, or saved for a viewer with `save`.
    """

    def __init__(self) -> None:
        self.spans: list[tuple[str, str, float, float]] = []
        self._open: list[tuple[str, str, float, Callable[[], bool]]] = []

    def __enter__(self) -> Recorder:
        global _recorder
        if _recorder is not None:
            raise ValueError("a recorder runs already in this process; use that one")
        _recorder = self
        return self

    def __exit__(self, *_: object) -> None:
        global _recorder
        _recorder = None
        self.look()

    @staticmethod
    def is_running() -> bool:
        """Whether this process records."""
        return _recorder is not None

    def add(self, what: str, layer: str, begin: float, end: float) -> None:
        self.spans.append((what, layer, begin, end))

    def follow(self, what: str, layer: str, over: Callable[[], bool]) -> None:
        """A transfer began; ``over()`` says whether it has ended."""
        self._open.append((what, layer, time.perf_counter(), over))

    def look(self) -> None:
        """Note the transfers that have ended since the last look."""
        now = time.perf_counter()
        still = []
        for what, layer, begin, over in self._open:
            if over():
                self.add(what, layer, begin, now)
            else:
                still.append((what, layer, begin, over))
        self._open = still

    def seconds(self) -> dict[str, float]:
        """Sum of the spans of each kind."""
        total: defaultdict[str, float] = defaultdict(float)
        for what, _, begin, end in self.spans:
            total[what] += end - begin
        return dict(total)

    def save(self, path: str | Path, *, rank: int) -> None:
        """Write Chrome's trace format: work and transfers on tracks of their own.

        Args:
            path: of this rank's file.
            rank: its number in the viewer, which can show several files together.
        """
        tracks = {"work": 0, "spAG": 1, "spRS": 2}
        events: list[dict] = [
            {"ph": "M", "pid": rank, "name": "process_name", "args": {"name": f"rank {rank}"}},
            *(
                {"ph": "M", "pid": rank, "tid": tid, "name": "thread_name", "args": {"name": name}}
                for name, tid in tracks.items()
            ),
        ]
        for what, layer, begin, end in sorted(self.spans, key=lambda span: span[2]):
            name, tid = f"{PREFIX}{what} {layer}", tracks[what] if what in IN_FLIGHT else tracks["work"]
            event = {"name": name, "cat": "fssdp", "pid": rank, "tid": tid, "ts": begin * 1e6}
            if what in IN_FLIGHT:  # they overlap each other, which only asynchronous events may
                number = len(events)
                events.append({**event, "ph": "b", "id": number})
                events.append({**event, "ph": "e", "id": number, "ts": end * 1e6})
            else:
                events.append({**event, "ph": "X", "dur": (end - begin) * 1e6})
        Path(path).write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}) + os.linesep)


_recorder: Recorder | None = None
_lock = threading.Lock()  # autograd runs backwards in threads of its own


@contextlib.contextmanager
def _span(what: str, layer: str) -> Iterator[None]:
    recorder, begin = _recorder, time.perf_counter()
    with record_function(f"{PREFIX}{what} {layer}"):
        yield
    if recorder is not None:
        with _lock:
            recorder.add(what, layer, begin, time.perf_counter())
            recorder.look()


_NOTHING = contextlib.nullcontext()


def span(what: str, layer: str) -> contextlib.AbstractContextManager[None]:
    """The block is ``what`` (see the table) of ``layer``."""
    if _recorder is None and not torch.autograd._profiler_enabled():
        return _NOTHING
    return _span(what, layer)


def add(what: str, layer: str, begin: float) -> None:
    """A span from ``begin`` (``time.perf_counter``) until now, of what is no block of code (recorder only)."""
    if _recorder is not None:
        with _lock:
            _recorder.add(what, layer, begin, time.perf_counter())


def follow(what: str, layer: str, over: Callable[[], bool]) -> None:
    """A transfer began; ``over()`` says whether it has ended."""
    if _recorder is not None:
        with _lock:
            _recorder.follow(what, layer, over)
