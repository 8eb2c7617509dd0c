"""Writes what a run records into its folder (`run_folder`), from a thread of its own: one writer per pipeline stage.

Every file is written beside its place, synchronized, and renamed, so a reader never sees half of one. The newest
segment is written again as it grows. Past a bound on bytes older segments are thinned: two of them become one that
keeps every second iteration. Iterations are chosen by their number, so that all stages keep the same ones.
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

import numpy as np

from megatron_hecate.record.run_folder import (
    VERSION,
    Arrays,
    RunInfo,
    in_order,
    load_segment,
    read_infos,
    segments_of,
)

BOUND: int = 256 << 20  # bytes of all segments of a stage
SEGMENT_BYTES: int = 4 << 20  # of a segment's arrays, before compression
SEGMENT_ITERATIONS: int = 256
SECONDS: float = 5.0  # between two writes of a segment that grows


class RunWriter:
    """Writes one stage of a run. A disk that is full costs the record, never the training.

    Args:
        folder: made where it is missing. A run that goes on in the same folder is continued.
        info: of this stage.
        stage: its number.
        bound: bytes that the segments may take together.
        seconds: between two writes.

    Raises:
        ValueError: when the folder holds another run.
        OSError: when it cannot be written.
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
        self._folder, self._stage, self._bound, self._seconds = Path(folder), stage, bound, seconds
        self._header = self._folder / f"run-{stage:03d}.json"
        self._writer = f"{socket.gethostname()} {os.getpid()} {time.time()}"
        self._rows: list[tuple[int, Arrays]] = []  # not yet in a finished segment
        self._written = 0  # of these, in the file of the growing one
        self._lock, self._writes, self._wake = threading.Lock(), threading.Lock(), threading.Event()
        self._closed = self._complained = False
        self._folder.mkdir(parents=True, exist_ok=True)
        for path, held in read_infos(self._folder).items():
            own = path == self._header
            alike = (
                held.form == info.form
                if own
                else held.mode == info.mode and not {*held.layers} & {*info.layers}
            )
            if not alike:
                raise ValueError(
                    f"{folder} holds another run, started {held.started or 'at an unknown time'} (mode {held.mode}, "
                    f"{len(held.layers)} layers, {held.num_experts} experts, {held.ranks} ranks, {held.slots} slots); "
                    "name another folder, or remove that one"
                )
        # of finished segments, ascending: bytes, and every how manyth iteration was kept
        self._finished: dict[int, tuple[int, int]] = {}
        for number, path in segments_of(self._folder, stage).items():
            self._finished[number] = (
                path.stat().st_size,
                int(load_segment(path)["every"].max(initial=1)),
            )
        self._next = max(self._finished, default=-1) + 1
        text = json.dumps(
            {"version": VERSION, **dataclasses.asdict(info), "writer": self._writer}, indent=1
        )
        _replace(self._header, text.encode())
        atexit.register(self.close)
        self._thread = threading.Thread(target=self._run, name="FSSDP record", daemon=True)
        self._thread.start()

    def append(self, iteration: int, **arrays: np.ndarray | float) -> None:
        """Add one iteration; takes microseconds. ``arrays`` are those of `RunRecord`, without their first axis, and
        belong to the writer from now on. ``time`` is now, where it is not given."""
        row = {name: np.asarray(value) for name, value in {"time": time.time(), **arrays}.items()}
        with self._lock:
            self._rows.append((iteration, row))
            if self._first_segment()[1]:
                self._wake.set()

    def flush(self) -> None:
        """Write all that was added; what cannot be written is said once."""
        with self._writes:
            try:
                while self._write_first_segment():
                    self._thin()
            except Exception as error:  # training goes on, whatever it is
                if not self._complained:
                    self._complained = True
                    text = (
                        f"FSSDP: {self._folder} cannot be written ({type(error).__name__}: {error}); training goes on, "
                        "iterations that find no room are missing in the record"
                    )
                    print(text, file=sys.stderr, flush=True)

    def stop(self) -> None:
        """Have the thread write all and end; does not wait for it."""
        self._closed = True
        self._wake.set()

    def close(self) -> None:
        """Write all, and stop."""
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
        """How many rows belong to it, and whether it is finished: it is full, or the run went back after it."""
        if not self._rows:
            return 0, False
        row_bytes = sum(array.nbytes for array in self._rows[0][1].values())
        full = min(SEGMENT_ITERATIONS, max(1, min(SEGMENT_BYTES, self._bound // 16) // row_bytes))
        iterations = [iteration for iteration, _ in self._rows[: full + 1]]
        back = [at for at in range(1, len(iterations)) if iterations[at] <= iterations[at - 1]]
        length = min([full, len(iterations), *back])
        return length, length == full or bool(back)

    def _write_first_segment(self) -> bool:
        """Returns whether it is finished."""
        with self._lock:
            length, finished = self._first_segment()
            rows, number = self._rows[:length], self._next
            if length == self._written and not finished:
                return False
            if finished:  # gone, whether it can be written or not
                del self._rows[:length]
                self._next += 1
            self._written = 0 if finished else length
        arrays = {name: np.stack([row[name] for _, row in rows]) for name in rows[0][1]}
        arrays["iteration"] = np.array([iteration for iteration, _ in rows], dtype=np.int64)
        self._write(number, arrays, every=1 if finished else 0)
        return finished

    def _write(self, number: int, arrays: Arrays, *, every: int) -> None:
        """Write a segment with each ``every``-th iteration, 0 for one that grows, unless another job took the folder
        over."""
        if (owner := json.loads(self._header.read_text()).get("writer")) != self._writer:
            raise RuntimeError(f"another job writes there: {owner}")
        data = io.BytesIO()
        save = np.savez_compressed if every else np.savez
        arrays["every"] = np.full(len(arrays["iteration"]), max(every, 1))
        save(data, **{name: _compact(array) for name, array in arrays.items()})
        _replace(self._folder / f"loads-{self._stage:03d}-{number:05d}.npz", data.getbuffer())
        if every:
            self._finished[number] = data.tell(), every

    def _thin(self) -> None:
        """Keep to the bound: of the most frequent density the two oldest segments become one, but never the newest."""
        while sum(size for size, _ in self._finished.values()) > self._bound:
            older = {number: every for number, (_, every) in list(self._finished.items())[:-1]}
            count = Counter(older.values())
            every = min(count, key=lambda every: (-count[every], every), default=0)
            pair = [number for number in older if older[number] == every][:2]
            if len(pair) < 2:
                return
            paths = segments_of(self._folder, self._stage)
            arrays = in_order([load_segment(paths[number]) for number in pair])
            kept = arrays["iteration"] % (2 * every) == 0
            self._write(
                pair[1], {name: array[kept] for name, array in arrays.items()}, every=2 * every
            )
            del self._finished[pair[0]]
            paths[pair[0]].unlink()


def _compact(array: np.ndarray) -> np.ndarray:
    """The same whole numbers in the fewest bytes."""
    if array.dtype.kind not in "iu" or not array.size:
        return array
    return array.astype(
        np.result_type(np.min_scalar_type(array.min()), np.min_scalar_type(array.max()))
    )


def _replace(path: Path, data: bytes | memoryview) -> None:
    """Write ``path`` at once: it holds what it held, or ``data``."""
    beside = path.with_suffix(".tmp")
    try:
        with beside.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise
