"""Writer of one pipeline stage's record (`run_folder`), with a background thread.

Every file is written under a temporary name, synchronized, and renamed, so that a reader never
reads a partial file. The newest segment is written again as it grows. When segments exceed a bound
on bytes, older segments are thinned: two of the segments are merged into one with every second
iteration. Iterations are selected by number, so that all stages keep the same ones.
"""

from __future__ import annotations

import atexit
import dataclasses
import io
import json
import os
import socket
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import numpy as np

from megatron_hecate.job.background import BackgroundThread
from megatron_hecate.record.run_folder import (
    VERSION,
    Arrays,
    RunInfo,
    in_order,
    load_segment,
    read_infos,
    segments_of,
)

# Bytes of all segments of a stage, at most.
BOUND: int = 256 << 20
# Bytes of a segment's arrays before compression, and its iterations, at most.
SEGMENT_BYTES: int = 4 << 20
SEGMENT_ITERATIONS: int = 256
# Seconds between two writes of a growing segment.
SECONDS: float = 5.0


class _Segment(NamedTuple):
    """Finished segment on disk.

    Args:
        size: bytes of its file.
        every: 1 if all iterations were kept, n if every n-th.
    """

    size: int
    every: int


class RunWriter:
    """Writer of one stage of a run. A full disk costs iterations of the record, never the training.

    Args:
        folder: folder of the run, created if missing; a run that restarts there is continued.
        info: header of the stage.
        stage: number of the stage.
        bound: bytes of all segments, at most.
        seconds: seconds between two writes.

    Raises:
        ValueError: when the folder holds another run.
        OSError: when the folder cannot be written.
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
        self._header = self._folder / f"run-{stage:03d}.json"
        self._writer = f"{socket.gethostname()} {os.getpid()} {time.time()}"
        # Iterations that no finished segment contains.
        self._rows: list[tuple[int, Arrays]] = []
        # Number of rows in the file of the growing segment.
        self._written = 0
        # One lock for the rows, which training must get at once, and one for files.
        self._lock = threading.Lock()
        self._writes = threading.Lock()
        self._wake = threading.Event()
        self._closed = False
        self._complained = False
        self._folder.mkdir(parents=True, exist_ok=True)
        self._refuse_another_run(info)
        # By number, ascending.
        self._finished: dict[int, _Segment] = {}
        for number, path in segments_of(self._folder, stage).items():
            every = int(load_segment(path)["every"].max(initial=1))
            self._finished[number] = _Segment(path.stat().st_size, every)
        self._next = max(self._finished, default=-1) + 1
        header = {"version": VERSION, **dataclasses.asdict(info), "writer": self._writer}
        _replace(self._header, json.dumps(header, indent=1).encode())
        atexit.register(self.close)
        # The exit of the interpreter ends it by `close`, before it ends other threads.
        self._thread = BackgroundThread("record", self._run)
        self._thread.start()

    def _refuse_another_run(self, info: RunInfo) -> None:
        """Raise a ValueError if the folder holds a run that cannot be continued with ``info``."""
        for path, held in read_infos(self._folder).items():
            if path == self._header:
                same_run = held.form == info.form
            else:
                # Other stages have other layers of the same run.
                same_run = held.mode == info.mode and not {*held.layers} & {*info.layers}
            if not same_run:
                raise ValueError(
                    f"{self._folder} holds another run, started "
                    f"{held.started or 'at an unknown time'} (mode {held.mode}, "
                    f"{len(held.layers)} layers, {held.num_experts} experts, {held.ranks} ranks, "
                    f"{held.slots} slots); name another folder, or remove that one"
                )

    def append(self, iteration: int, **arrays: np.ndarray | float) -> None:
        """Add one iteration. Takes microseconds.

        Args:
            iteration: number of the iteration.
            arrays: arrays of `RunRecord` without the first axis, which must not be modified later;
                ``time`` defaults to now.
        """
        row = {name: np.asarray(value) for name, value in {"time": time.time(), **arrays}.items()}
        with self._lock:
            self._rows.append((iteration, row))
            _, finished = self._first_segment()
            if finished:
                self._wake.set()

    def flush(self) -> None:
        """Write all added iterations; print the first error only."""
        with self._writes:
            try:
                while self._write_first_segment():
                    self._thin()
            # Recording must never stop training.
            except Exception as error:
                if not self._complained:
                    self._complained = True
                    cause = f"{type(error).__name__}: {error}"
                    print(
                        f"FSSDP: {self._folder} cannot be written ({cause}); training continues, "
                        "iterations without room on the disk are missing in the record",
                        file=sys.stderr,
                        flush=True,
                    )

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
        rollbacks = [at for at in range(1, len(iterations)) if iterations[at] <= iterations[at - 1]]
        length = min([full, len(iterations), *rollbacks])
        return length, length == full or bool(rollbacks)

    def _write_first_segment(self) -> bool:
        """Write the first segment if it has grown; return True if it is finished."""
        with self._lock:
            length, finished = self._first_segment()
            rows = self._rows[:length]
            number = self._next
            if length == self._written and not finished:
                return False
            # Dropped before the write: with a full disk the rows would pile up in memory.
            if finished:
                del self._rows[:length]
                self._next += 1
            self._written = 0 if finished else length
        arrays = {name: np.stack([row[name] for _, row in rows]) for name in rows[0][1]}
        arrays["iteration"] = np.array([iteration for iteration, _ in rows], dtype=np.int64)
        self._write(number, arrays, every=1 if finished else 0)
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
        owner = json.loads(self._header.read_text()).get("writer")
        if owner != self._writer:
            raise RuntimeError(f"another job writes there: {owner}")
        data = io.BytesIO()
        # A growing segment is written again and again, so it is not compressed.
        save = np.savez_compressed if every else np.savez
        arrays["every"] = np.full(len(arrays["iteration"]), max(every, 1))
        save(data, **{name: _compact(array) for name, array in arrays.items()})
        _replace(self._folder / f"loads-{self._stage:03d}-{number:05d}.npz", data.getbuffer())
        if every:
            self._finished[number] = _Segment(data.tell(), every)

    def _thin(self) -> None:
        """Merge segments until their sizes are within the bound.

        Each step merges the two oldest segments of the most frequent density. The newest segment is
        never merged.
        """
        while sum(segment.size for segment in self._finished.values()) > self._bound:
            older = {number: segment.every for number, segment in list(self._finished.items())[:-1]}
            count = Counter(older.values())
            every = min(count, key=lambda every: (-count[every], every), default=0)
            pair = [number for number in older if older[number] == every][:2]
            if len(pair) < 2:
                return
            first, second = pair
            paths = segments_of(self._folder, self._stage)
            arrays = in_order([load_segment(paths[number]) for number in pair])
            kept = arrays["iteration"] % (2 * every) == 0
            merged = {name: array[kept] for name, array in arrays.items()}
            self._write(second, merged, every=2 * every)
            del self._finished[first]
            paths[first].unlink()


def _compact(array: np.ndarray) -> np.ndarray:
    """Return the integers of ``array`` in the smallest dtype that holds all; floats unchanged."""
    if array.dtype.kind not in "iu" or not array.size:
        return array
    return array.astype(
        np.result_type(np.min_scalar_type(array.min()), np.min_scalar_type(array.max()))
    )


def _replace(path: Path, data: bytes | memoryview) -> None:
    """Replace the content of ``path`` by ``data`` atomically."""
    temporary = path.with_suffix(".tmp")
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
