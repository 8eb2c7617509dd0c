"""Spans of planning, transfers, waits, dispatch and experts, for Perfetto or chrome://tracing.

Under ``torch.profiler`` every span is a ``record_function`` with a stable name, ``fssdp/<what>
<layer>``; on CUDA the transfers themselves appear as NCCL kernels on a stream of their own. For
transfers that the profiler does not see (gloo), a `SpanRecorder` keeps its own list, in which each
transfer is a span from its start until the first check that finds it complete:

    with trace.SpanRecorder() as recorder:
        train_step()
    recorder.save(f"trace-{rank}.json", rank=rank)

| span | content |
|---|---|
| ``iteration`` | from the first layer's forward to that of the next iteration (`Iterations` only) |
| ``plan`` | choice of replicas for an iteration |
| ``spAG``, ``spRS`` | a transfer in flight (recorder only) |
| ``spAG start``, ``spRS start`` | posting of a transfer |
| ``spAG wait``, ``spRS wait`` | the part of a transfer that was not hidden |
| ``loads``, ``quotas``, ``late`` | routing: exchange of loads, quotas, late replicas |
| ``dispatch``, ``experts``, ``combine`` | Megatron's own work |
| ``experts backward``, ``attention backward`` | the same, of layers with replicas (recorder only) |

Without a profiler or a recorder, a span costs a comparison. With ``--moe-fssdp-trace A-B`` every
rank records the chosen iterations (`Iterations`), and `merge` puts the records of all ranks on one
timeline. All times are host times: on GPUs they show when work was posted and waited for, not when
it ran.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path

from torch.autograd import profiler

from megatron_hecate import files

PREFIX = "fssdp/"
# Kinds of tracks in the viewer; spans of any other kind are on tracks of "work".
_KINDS = ("iteration", "work", "spAG", "spRS")
# Spans that `export_to` passes on: plans and transfers.
_TRANSFERS = ("spAG", "spRS")
EXPORTED = {"plan", *(f"{what}{part}" for what in _TRANSFERS for part in ("", " start", " wait"))}


class SpanRecorder:
    """Recorder of one rank's spans: (what, layer, begin, end) in seconds of ``time.perf_counter``.

    `seconds` sums the spans, `save` writes a file for a viewer.
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

    @staticmethod
    def is_running() -> bool:
        """Return whether a recorder runs in this process."""
        return _recorder is not None

    def add(self, what: str, layer: str, begin: float, end: float) -> None:
        self.spans.append((what, layer, begin, end))

    def follow(self, what: str, layer: str, over: Callable[[], bool]) -> None:
        """Record a transfer from now until a check finds that ``over()`` is true."""
        self._open.append((what, layer, time.perf_counter(), over))

    def look(self) -> None:
        """Record the transfers that have ended since the last check."""
        now = time.perf_counter()
        still = []
        for what, layer, begin, over in self._open:
            if over():
                self.add(what, layer, begin, now)
            else:
                still.append((what, layer, begin, over))
        self._open = still

    def seconds(self) -> dict[str, float]:
        """Sum the seconds of the spans of each kind."""
        total: defaultdict[str, float] = defaultdict(float)
        for what, _, begin, end in self.spans:
            total[what] += end - begin
        return dict(total)

    def save(self, path: str | Path, *, rank: int, shift: float = 0.0, job: str = "") -> None:
        """Write Chrome's trace format, with iterations, work and transfers on separate tracks.

        Args:
            path: file of this rank.
            rank: number of the rank in the viewer, which can show several files together.
            shift: seconds added to all times.
            job: start of the job; `merge` uses it to separate the files of different jobs.
        """
        events = [
            {"ph": "M", "pid": rank, "name": "process_name", "args": {"name": f"rank {rank}"}},
            {"ph": "M", "pid": rank, "name": "process_sort_index", "args": {"sort_index": rank}},
            *self._events(rank, shift),
        ]
        content = {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"job": job}}
        files.replace(path, f"{json.dumps(content)}\n")

    def _events(self, rank: int, shift: float) -> Iterator[dict]:
        """Yield the events of all spans, and the name of each track before its first span.

        Perfetto drops spans of a track that overlap without nesting: such a span is moved to
        another track of the same name. Perfetto also treats thread 0 as idle, so track numbers
        start above 0. They differ between ranks.
        """
        first = 10_000 * (rank + 1)
        # For each track of a kind, the ends of its open spans.
        tracks_of: dict[str, list[list[int]]] = {kind: [] for kind in _KINDS}
        for what, layer, begin, end in self._rounded_spans(shift):
            kind = what if what in _KINDS else "work"
            tracks = tracks_of[kind]
            index = _find_track(tracks, begin, end, may_nest=kind == "work")
            tid = first + 1000 * _KINDS.index(kind) + index
            if index == len(tracks):
                tracks.append([])
                name = {"ph": "M", "pid": rank, "tid": tid, "name": "thread_name"}
                yield {**name, "args": {"name": kind}}
            tracks[index].append(end)
            event = {"name": f"{PREFIX}{what} {layer}", "cat": "fssdp", "ph": "X"}
            yield {**event, "pid": rank, "tid": tid, "ts": begin, "dur": end - begin}

    def _rounded_spans(self, shift: float) -> list[tuple[str, str, int, int]]:
        """Return the spans in whole microseconds by start time, the longest first on ties.

        Rounded bounds preserve nesting.
        """
        spans = [
            (what, layer, round((begin + shift) * 1e6), round((end + shift) * 1e6))
            for what, layer, begin, end in self.spans
        ]
        return sorted(spans, key=lambda span: (span[2], -span[3]))


def _find_track(tracks: list[list[int]], begin: int, end: int, *, may_nest: bool) -> int:
    """Return the index of the first track on which a span fits, ``len(tracks)`` if there is none.

    Removes spans that have ended by ``begin`` from all tracks.
    """
    for track in tracks:
        while track and track[-1] <= begin:
            track.pop()
    for index, track in enumerate(tracks):
        if not track or (may_nest and track[-1] >= end):
            return index
    return len(tracks)


class Iterations:
    """Recorder of chosen iterations of a run, into ``FOLDER/trace-{rank}.json``.

    If the file cannot be written, an error is printed and training continues.

    Args:
        chosen: first and last iteration.
        folder: folder of the run, created if missing.
        rank: this rank.
        shift: offset in seconds from this rank's clock to the common clock of all ranks.
        job: start of the job, equal on all ranks.
    """

    def __init__(
        self, chosen: tuple[int, int], folder: str | Path, *, rank: int, shift: float, job: str = ""
    ) -> None:
        self.first, self.last = chosen
        self._folder = Path(folder)
        self._rank = rank
        self._shift = shift
        self._job = job
        self._recorder: SpanRecorder | None = None
        self._begun = 0
        # Number and start time of the running iteration.
        self._running: tuple[int, float] | None = None

    def begin(self, number: int | None) -> None:
        """Begin iteration ``number`` and end the previous one.

        Args:
            number: number of the iteration; ``None``: number of calls so far, from 1.
        """
        self._begun += 1
        if number is None:
            number = self._begun
        if self.first <= number <= self.last:
            # If the user runs a recorder, leave it alone.
            if self._recorder is None and not SpanRecorder.is_running():
                self._recorder = SpanRecorder().__enter__()
                # The run may end within the chosen iterations.
                atexit.register(self.close)
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
        """Write the recorded spans."""
        if self._recorder is None:
            return
        self._end()
        recorder = self._recorder
        self._recorder = None
        self._running = None
        recorder.__exit__()
        atexit.unregister(self.close)
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            path = self._folder / f"trace-{self._rank}.json"
            if path.exists():
                earlier = files.earlier_folder(self._folder, _read(path)[1])
                files.move(path, earlier)
                # Earlier traces of all ranks are moved.
                if self._rank == 0:
                    print(
                        f"FSSDP: the earlier traces in {self._folder} are in {earlier} now",
                        file=sys.stderr,
                        flush=True,
                    )
            recorder.save(path, rank=self._rank, shift=self._shift, job=self._job)
        except (OSError, ValueError) as error:
            print(
                f"FSSDP: rank {self._rank} cannot write its trace: {error}; the spans of "
                f"iterations {self.first} to {self.last} are missing in {self._folder}",
                file=sys.stderr,
                flush=True,
            )


def _read(path: Path) -> tuple[list[dict], str]:
    """Return the events of a trace, and the start of its job; empty if unknown."""
    try:
        data = files.read_file(path)
    except FileNotFoundError:
        raise ValueError(f"{path} is a link to nothing; remove it") from None
    try:
        trace = files.parse_json(data)
        events, job = trace["traceEvents"], trace.get("otherData", {}).get("job", "")
        if not (isinstance(events, list) and all(isinstance(event, dict) for event in events)):
            raise TypeError("traceEvents must be a list of objects")
        if not isinstance(job, str):
            raise TypeError("otherData.job must be text")
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        reason = f"{path} is no trace that FSSDP wrote ({files.describe(error)}); remove it"
        raise ValueError(reason) from error
    return events, job


def merge(folder: str | Path) -> Path | None:
    """Merge the traces of all ranks into ``FOLDER/trace.json``, for ui.perfetto.dev.

    Files of an earlier job in the folder are left out, and their names are printed.

    Returns:
        The merged file, or ``None`` if no rank has recorded.

    Raises:
        ValueError: if a file is not a trace.
    """
    traces = {
        path: _read(path)
        for path in sorted(Path(folder).glob("trace-*.json"))
        # Other files, such as a profiler's, may have similar names.
        if path.stem.removeprefix("trace-").isdecimal()
    }
    if not traces:
        return None
    latest = max(job for _, job in traces.values())
    events: list[dict] = []
    older = []
    for path, (of_rank, job) in traces.items():
        if job == latest:
            events += of_rank
        else:
            older.append(path.name)
    if older:
        text = (
            f"{folder}: left out of the trace, since a job before that of {latest} wrote them: "
            f"{', '.join(older)}"
        )
        print(text, file=sys.stderr, flush=True)
    merged = Path(folder) / "trace.json"
    content = {"traceEvents": events, "displayTimeUnit": "ms"}
    files.replace(merged, f"{json.dumps(content)}\n")
    return merged


_recorder: SpanRecorder | None = None
# A second recorder, which passes the spans of `EXPORTED` on to a tracing service.
_exporter: SpanRecorder | None = None
# Autograd runs backwards in threads of its own.
_lock = threading.Lock()


def _recorders(what: str) -> list[SpanRecorder]:
    """Return the recorders of spans ``what``."""
    exporter = _exporter if what in EXPORTED else None
    return [recorder for recorder in (_recorder, exporter) if recorder is not None]


def export_to(exporter: SpanRecorder | None) -> None:
    """Pass spans of plans and transfers to ``exporter`` as well; ``None`` ends it."""
    global _exporter
    _exporter = exporter


def follows_transfers() -> bool:
    """Return whether transfers in flight are recorded now."""
    return _recorder is not None or _exporter is not None


@contextlib.contextmanager
def _span(what: str, layer: str) -> Iterator[None]:
    # Read once: a recorder may end within the block.
    recorders = _recorders(what)
    begin = time.perf_counter()
    with profiler.record_function(f"{PREFIX}{what} {layer}"):
        yield
    for recorder in recorders:
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
    if is_on() or (_exporter is not None and what in EXPORTED):
        return _span(what, layer)
    return _NOTHING


def add(what: str, layer: str, begin: float) -> None:
    """Record a span from ``begin`` (``time.perf_counter``) until now (recorder only).

    For spans that are not a block of code.
    """
    if _recorder is None and _exporter is None:
        return
    for recorder in _recorders(what):
        with _lock:
            recorder.add(what, layer, begin, time.perf_counter())


def follow(what: str, layer: str, over: Callable[[], bool]) -> None:
    """Record a transfer from now until a check finds that ``over()`` is true (recorder only)."""
    for recorder in _recorders(what):
        with _lock:
            recorder.follow(what, layer, over)
