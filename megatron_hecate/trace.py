"""What happened when: spans of planning, transfers, waits, dispatch and experts, for Perfetto or chrome://tracing.

Under ``torch.profiler`` every span is a ``record_function`` with a stable name, ``fssdp/<what> <layer>``; with CUDA the
transfers themselves show as NCCL kernels on a stream of their own. Where transfers run behind the profiler's back
(gloo), a `Recorder` keeps its own list, in which each transfer is a span from its start until it was seen to be over:

    with trace.Recorder() as recorder:
        train_step()
    recorder.save(f"trace-{rank}.json", rank=rank)

| span | where |
|---|---|
| ``iteration`` | from the first layer's forward to that of the next iteration (`Iterations` only) |
| ``plan`` | replicas chosen for an iteration |
| ``spAG``, ``spRS`` | a transfer in flight (recorder only) |
| ``spAG start``, ``spRS start`` | posting it |
| ``spAG wait``, ``spRS wait`` | what of it was not hidden |
| ``loads``, ``quotas``, ``late`` | routing: loads exchanged, quotas computed, late replicas |
| ``dispatch``, ``experts``, ``combine`` | Megatron's own work |
| ``experts backward``, ``attention backward`` | likewise, of layers with replicas (recorder only) |

When neither runs, a span costs a comparison. A run records chosen iterations by itself with ``--moe-fssdp-trace A-B``
(`Iterations`), on every rank; `merge` puts what ranks recorded on one timeline. The times are the host's: on GPUs they
show when work was posted and waited for, not when it ran.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch.autograd.profiler import record_function

PREFIX = "fssdp/"


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

    def save(self, path: str | Path, *, rank: int, shift: float = 0.0, job: str = "") -> None:
        """Write Chrome's trace format: iterations, work and transfers on tracks of their own. Perfetto drops spans of a
        track that overlap without being nested, so such a span goes to another track of the same name; and it takes
        thread 0 for the idle one, so numbers of tracks start above, and differ between ranks.

        Args:
            path: of this rank's file.
            rank: its number in the viewer, which can show several files together.
            shift: seconds that are added to all times.
            job: which one this is; `merge` keeps the files of one job apart from others'.
        """
        first = 10_000 * (rank + 1)
        lanes: dict[str, list[list[int]]] = {
            "iteration": [],
            "work": [],
            "spAG": [],
            "spRS": [],
        }  # ends of open spans
        events: list[dict] = [
            {"ph": "M", "pid": rank, "name": "process_name", "args": {"name": f"rank {rank}"}},
            {"ph": "M", "pid": rank, "name": "process_sort_index", "args": {"sort_index": rank}},
        ]
        # whole microseconds, so that rounding keeps what is nested so
        whole = [
            (w, layer, *(round((t + shift) * 1e6) for t in (a, b))) for w, layer, a, b in self.spans
        ]
        for what, layer, begin, end in sorted(whole, key=lambda span: (span[2], -span[3])):
            kind = what if what in lanes else "work"
            tracks = lanes[kind]
            for track in tracks:
                while track and track[-1] <= begin:
                    track.pop()
            fits = [not track or (kind == "work" and track[-1] >= end) for track in tracks]
            at = fits.index(True) if any(fits) else len(tracks)
            tid = first + 1000 * [*lanes].index(kind) + at
            if at == len(tracks):
                tracks.append([])
                events.append(
                    {
                        "ph": "M",
                        "pid": rank,
                        "tid": tid,
                        "name": "thread_name",
                        "args": {"name": kind},
                    }
                )
            tracks[at].append(end)
            event = {
                "name": f"{PREFIX}{what} {layer}",
                "cat": "fssdp",
                "ph": "X",
                "pid": rank,
                "tid": tid,
            }
            events.append({**event, "ts": begin, "dur": end - begin})
        beside = Path(path).with_suffix(".tmp")  # half a file would break `merge`
        found = {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"job": job}}
        beside.write_text(json.dumps(found) + os.linesep)
        beside.replace(path)


class Iterations:
    """Records chosen iterations of a run into ``FOLDER/trace-{rank}.json``. What cannot be written is said, and
    training goes on.

    Args:
        chosen: the first and the last one.
        folder: of the run; made where it is missing.
        rank: this one.
        shift: seconds to add to this rank's clock, so that ranks agree.
        job: when it started, the same on all ranks.
    """

    def __init__(
        self, chosen: tuple[int, int], folder: str | Path, *, rank: int, shift: float, job: str = ""
    ) -> None:
        self.first, self.last = chosen
        self._folder, self._rank, self._shift, self._job = Path(folder), rank, shift, job
        self._recorder: Recorder | None = None
        self._begun = 0
        self._running: tuple[int, float] | None = None  # the iteration, and when it began

    def begin(self, number: int | None) -> None:
        """Iteration ``number`` begins, and the one before it has ended; ``None`` counts them here, from 1."""
        self._begun += 1
        number = self._begun if number is None else number
        if self.first <= number <= self.last:
            if self._recorder is None and not Recorder.is_running():  # the user may record, too
                self._recorder = Recorder().__enter__()
                atexit.register(self.close)  # the run may end here
            self._end()
            self._running = (number, time.perf_counter())
        else:
            self.close()

    def _end(self) -> None:
        if self._recorder is not None and self._running is not None:
            number, began = self._running
            with _lock:
                self._recorder.add("iteration", str(number), began, time.perf_counter())

    def close(self) -> None:
        """Write what was recorded."""
        if self._recorder is None:
            return
        self._end()
        recorder, self._recorder, self._running = self._recorder, None, None
        recorder.__exit__()
        atexit.unregister(self.close)
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            path = self._folder / f"trace-{self._rank}.json"
            recorder.save(path, rank=self._rank, shift=self._shift, job=self._job)
        except OSError as error:
            print(
                f"FSSDP: rank {self._rank} cannot write its trace: {error}",
                file=sys.stderr,
                flush=True,
            )


def _read(path: Path) -> dict:
    try:
        trace = json.loads(path.read_text())
        return {**trace, "traceEvents": list(trace["traceEvents"])}
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is no trace that FSSDP wrote ({error!r}); remove it") from error


def merge(folder: str | Path) -> Path | None:
    """Write what all ranks recorded into ``FOLDER/trace.json``, for ui.perfetto.dev; ``None`` where no rank did. What a
    former job left there is left out, and said. Raises ValueError for a file that is no trace."""
    held = [(path, _read(path)) for path in sorted(Path(folder).glob("trace-*.json"))]
    if not held:
        return None
    jobs = [trace.get("otherData", {}).get("job", "") for _, trace in held]
    if older := [path.name for (path, _), job in zip(held, jobs, strict=True) if job < max(jobs)]:
        text = f"{folder}: left out of the trace, since a job before that of {max(jobs)} wrote them: {', '.join(older)}"
        print(text, file=sys.stderr, flush=True)
    events = [
        e
        for (_, trace), job in zip(held, jobs, strict=True)
        if job == max(jobs)
        for e in trace["traceEvents"]
    ]
    merged = Path(folder) / "trace.json"
    merged.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}) + os.linesep)
    return merged


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


def is_on() -> bool:
    """Whether somebody records spans now."""
    return _recorder is not None or torch.autograd._profiler_enabled()


def span(what: str, layer: str) -> contextlib.AbstractContextManager[None]:
    """The block is ``what`` (see the table) of ``layer``."""
    return _span(what, layer) if is_on() else _NOTHING


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
