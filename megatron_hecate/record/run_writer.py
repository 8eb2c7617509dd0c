"""Writer of one pipeline stage's record (`run_folder`), with a background thread.

Every file is written under a temporary name, synchronized, and renamed, so that a reader never
reads a partial file. The newest segment is written again as it grows. When segments exceed a bound
on bytes, older segments are thinned: two of the segments are merged into one with every second
iteration. Iterations are selected by number, so that all stages keep the same ones.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import errno
import io
import json
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import numpy as np

from megatron_hecate import files
from megatron_hecate.faults.background import BackgroundThread
from megatron_hecate.files import describe
from megatron_hecate.record.run_folder import (
    NAMES,
    RunInfo,
    in_order,
    list_headers,
    load_segment,
    read_info,
    read_infos,
    segments_of,
)
from megatron_hecate.record.run_schema import SEGMENT, VERSION, Arrays
from megatron_hecate.record.stage_lock import StageLock

# Bytes of all segments of a stage, at most.
BOUND: int = 256 << 20
# Bytes of a segment's arrays before compression, and its iterations, at most.
SEGMENT_BYTES: int = 4 << 20
SEGMENT_ITERATIONS: int = 256
# Seconds between two writes of a growing segment.
SECONDS: float = 5.0
# Errors of a write for which there may be room later.
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class _Segment(NamedTuple):
    """Finished segment on disk.

    Args:
        size: bytes of its file.
        every: 1 if all iterations were kept, n if every n-th.
        iterations: its iterations, ascending.
    """

    size: int
    every: int
    iterations: np.ndarray


class RunWriter:
    """Writer of one stage of a run. A full disk costs iterations of the record, never the training.

    A job that restarts from a checkpoint continues the record in its folder. The record whose
    iterations a job would all replace moves to a subfolder, see `files.earlier_folder`: the first
    stage to do so moves all stages.

    Args:
        folder: folder of the run, created if missing.
        info: header of the stage.
        stage: number of the stage.
        bound: bytes of all segments, at most.
        seconds: seconds between two writes.

    Raises:
        ValueError: when the folder holds a run of another form or of a running job, or is broken.
        OSError: when the folder cannot be written for other reasons than a full disk.
    """

    def __init__(
        self,
        folder: str | Path,
        info: RunInfo,
        *,
        stage: int = 0,
        bound: int = BOUND,
        seconds: float = SECONDS,
    ) -> None:
        self._folder = Path(folder)
        self._stage = stage
        self._bound = bound
        self._seconds = seconds
        self._header = self._folder / NAMES["run"].format(stage)
        # ``None`` while the disk is too full for it.
        self._lock: StageLock | None = None
        # Iterations that no finished segment contains.
        self._rows: list[tuple[int, Arrays]] = []
        # Number of rows in the file of the growing segment.
        self._written = 0
        # One lock for the rows, which training must get at once, and one for files.
        self._of_rows = threading.Lock()
        self._writes = threading.Lock()
        self._wake = threading.Event()
        self._closed = False
        # Kinds of errors that were printed.
        self._complaints: set[type[Exception]] = set()
        self._info = info
        # Header of the record that the folder holds, preferably of this stage.
        self._held: RunInfo | None = None
        # By number, ascending.
        self._finished: dict[int, _Segment] = {}
        self._next = 0
        # Number of the segment whose overlap with earlier ones was handled.
        self._placed = -1
        try:
            self._begin()
        except OSError as error:
            if error.errno not in FULL:
                raise
            self._complain(error)
        atexit.register(self.close)
        # The exit of the interpreter ends it by `close`, before it ends other threads.
        self._thread = BackgroundThread("record", self._run)
        self._thread.start()

    def _refuse_another_run(self) -> RunInfo | None:
        """Return the header of the record in the folder, preferably of this stage.

        Raises:
            ValueError: if the folder holds a run that cannot be continued.
        """
        info = self._info
        infos = read_infos(self._folder)
        for path, run in infos.items():
            # Other stages have other layers of the same run.
            same_run = run.is_beside(info)
            if path == self._header:
                same_run = run.form == info.form
            if not same_run:
                raise ValueError(
                    f"{self._folder} holds another run, started "
                    f"{run.started or 'at an unknown time'} (mode {run.mode}, "
                    f"{len(run.layers)} layers, {run.num_experts} experts, {run.ranks} ranks, "
                    f"{run.slots} slots, top {run.top_k}); name another folder, or move that one"
                )
        return infos.get(self._header) or next(iter(infos.values()), None)

    def _begin(self) -> None:
        """Lock the record of the stage until this process ends, and read what the folder holds.

        Raises:
            ValueError: if another job records there, or the folder holds another run.
            OSError: if the folder cannot be written.
        """
        self._folder.mkdir(parents=True, exist_ok=True)
        lock = StageLock(self._folder / NAMES["lock"].format(self._stage))
        try:
            self._held = self._refuse_another_run()
            for number, path in segments_of(self._folder, self._stage).items():
                arrays = load_segment(path, self._info)
                interval = int(arrays.get("every", np.ones(1)).max(initial=1))
                self._finished[number] = _Segment(
                    path.stat().st_size, interval, arrays["iteration"]
                )
            self._next = max(self._finished, default=-1) + 1
            # A process that was killed may have left some.
            for leftover in self._folder.glob(f".*-{self._stage:03d}[-.]*.tmp"):
                leftover.unlink(missing_ok=True)
            # The header of another record stays until this one has an iteration.
            if not self._finished:
                self._write_header(self._info)
        except BaseException:
            lock.close()
            raise
        self._lock = lock

    def _write_header(self, info: RunInfo) -> None:
        content = {"version": VERSION, **dataclasses.asdict(info)}
        files.replace(self._header, json.dumps(content, indent=1))

    def append(self, iteration: int, **arrays: np.ndarray | float) -> None:
        """Add one iteration. Takes microseconds.

        Args:
            iteration: number of the iteration.
            arrays: arrays of `RunRecord` without the first axis, which must not be modified later;
                ``time`` defaults to now.
        """
        row = {name: np.asarray(value) for name, value in {"time": time.time(), **arrays}.items()}
        row["time"] = row["time"].astype(np.float64)
        with self._of_rows:
            self._rows.append((iteration, row))
            _, finished = self._first_segment()
            if finished:
                self._wake.set()

    def flush(self) -> None:
        """Write all added iterations; print the first error of a kind only."""
        with self._writes:
            try:
                while self._write_first_segment():
                    self._thin()
            # Recording must never stop training.
            except Exception as error:
                self._complain(error)

    def _complain(self, error: Exception) -> None:
        """Print the first error of a kind, and what is lost."""
        if type(error) in self._complaints:
            return
        self._complaints.add(type(error))
        lost = "iterations that cannot be written are missing in the record"
        if isinstance(error, OSError) and error.errno in FULL:
            lost = "iterations are missing in the record until there is room on the disk again"
        _say(f"{self._folder} cannot be written ({describe(error)}); training continues, {lost}")

    def stop(self) -> None:
        """Signal the thread to write all and exit, without waiting."""
        self._closed = True
        self._wake.set()

    def close(self) -> None:
        """Write all, and wait for the thread's exit."""
        self.stop()
        self._thread.join()
        atexit.unregister(self.close)

    def _run(self) -> None:
        while not self._closed:
            self._wake.wait(self._seconds)
            self._wake.clear()
            self.flush()
        self.flush()
        if self._lock is not None:
            self._lock.close()

    def _first_segment(self) -> tuple[int, bool]:
        """Return the number of rows of the first segment, and whether the segment is finished.

        A segment is finished if it is full, or if the run resumed from an earlier iteration after
        it.
        """
        if not self._rows:
            return 0, False
        row_bytes = sum(array.nbytes for array in self._rows[0][1].values())
        rows_in_bound = max(1, min(SEGMENT_BYTES, self._bound // 16) // row_bytes)
        full = min(SEGMENT_ITERATIONS, rows_in_bound)
        iterations = [iteration for iteration, _ in self._rows[: full + 1]]
        rollbacks = [
            index
            for index in range(1, len(iterations))
            if iterations[index] <= iterations[index - 1]
        ]
        length = min([full, len(iterations), *rollbacks])
        return length, length == full or bool(rollbacks)

    def _write_first_segment(self) -> bool:
        """Write the first segment if it has grown; return True if it is finished."""
        # There was no room for it at the start.
        if self._lock is None and self._rows:
            self._begin()
        with self._of_rows:
            length, finished = self._first_segment()
            rows = self._rows[:length]
            number = self._next
            if length == self._written and not finished:
                return False
            # Dropped before the write: with a full disk the rows would pile up in memory.
            if finished:
                del self._rows[:length]
                self._next += 1
            self._written = 0
        arrays = {name: np.stack([row[name] for _, row in rows]) for name in rows[0][1]}
        arrays["iteration"] = np.array([iteration for iteration, _ in rows], dtype=np.int64)
        self._write(number, arrays, every=1 if finished else 0)
        if not finished:
            self._written = length
        return finished

    def _write(self, number: int, arrays: Arrays, *, every: int) -> None:
        """Write one segment.

        Args:
            number: number of the segment.
            arrays: arrays of the segment, iterations first.
            every: interval of the kept iterations; 0 for a growing segment.

        Raises:
            RuntimeError: when another job has taken over the folder.
        """
        assert self._lock is not None
        self._lock.check()
        if number not in (self._placed, *self._finished) and len(arrays["iteration"]):
            self._make_place(int(arrays["iteration"][0]))
            self._placed = number
        data = io.BytesIO()
        # A growing segment is written again and again, so it is not compressed.
        save = np.savez_compressed if every else np.savez
        compact = {name: _compact(array) for name, array in arrays.items()}
        compact["every"] = np.full(len(arrays["iteration"]), max(every, 1))
        # Listed, so that the absence of one is damage.
        if optional := [name for name in arrays if not SEGMENT[name].modes]:
            compact["arrays"] = np.array(" ".join(optional).encode())
        save(data, **compact)
        name = NAMES["loads"].format(self._stage, number)
        # A copy: CPython 3.12.1 crashes when it collects a view of BytesIO with a traceback.
        files.replace(self._folder / name, data.getvalue())
        if every:
            self._finished[number] = _Segment(data.tell(), every, arrays["iteration"])

    def _make_place(self, first: int) -> None:
        """Say which recorded iterations a new segment replaces; move a record that it begins again.

        Args:
            first: first iteration of the segment.
        """
        recorded = [one.iterations for one in self._finished.values() if len(one.iterations)]
        begin = min((one[0] for one in recorded), default=first)
        last = recorded[-1][-1] if recorded else -1
        info, held = self._info, self._held
        if self._placed < 0:
            if held is not None and held.first >= 0:
                begin = held.first
            run = info.run
            if held is not None and first > begin:
                run = held.run
            elif held is not None and recorded:
                # A restart in the process may have the same time.
                run += " again" if run == held.run else ""
                self._move_aside(held, first, last)
                begin, last = first, -1
            self._write_header(dataclasses.replace(info, run=run, first=int(min(begin, first))))
        if last >= first:
            _say(
                f"the record in {self._folder} goes on at iteration {first}: iterations "
                f"{first} to {last} of before are replaced"
            )

    def _move_aside(self, info: RunInfo, first: int, last: int) -> None:
        """Move all stages of an earlier record to a folder of its own."""
        folder = files.earlier_folder(self._folder, info.run)
        for path in list_headers(self._folder):
            with contextlib.suppress(FileNotFoundError):
                if read_info(path).run == info.run:
                    stage = int(path.stem.removeprefix("run-"))
                    for file in (*segments_of(self._folder, stage).values(), path):
                        files.move(file, folder)
        self._finished.clear()
        _say(
            f"this run begins at iteration {first}: the record of iterations up to {last} that "
            f"{self._folder} held is in {folder} now"
        )

    def _thin(self) -> None:
        """Merge segments until their sizes are within the bound.

        Each step merges the two oldest segments of the most frequent density. The newest segment is
        never merged.
        """
        while sum(segment.size for segment in self._finished.values()) > self._bound:
            older = {number: segment.every for number, segment in list(self._finished.items())[:-1]}
            count = Counter(older.values())
            interval = min(count, key=lambda interval: (-count[interval], interval), default=0)
            pair = [number for number in older if older[number] == interval][:2]
            if len(pair) < 2:
                return
            first, second = pair
            paths = segments_of(self._folder, self._stage)
            arrays = in_order([load_segment(paths[number], self._info) for number in pair])
            is_kept = arrays["iteration"] % (2 * interval) == 0
            merged = {name: array[is_kept] for name, array in arrays.items() if name != "every"}
            self._write(second, merged, every=2 * interval)
            del self._finished[first]
            paths[first].unlink()


def _compact(array: np.ndarray) -> np.ndarray:
    """Return the integers of ``array`` in the smallest dtype that holds all; floats unchanged."""
    if array.dtype.kind not in "iu" or not array.size:
        return array
    return array.astype(
        np.result_type(np.min_scalar_type(array.min()), np.min_scalar_type(array.max()))
    )


def _say(text: str) -> None:
    print(f"FSSDP: {text}", file=sys.stderr, flush=True)
