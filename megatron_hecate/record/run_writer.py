"""Writer of one pipeline stage's record (`run_folder`), in a background thread."""

from __future__ import annotations

import itertools
import os
import queue
import sys
import time
import zlib
from pathlib import Path

import numpy as np

from megatron_hecate.faults.background import BackgroundThread
from megatron_hecate.files import describe
from megatron_hecate.record.run_folder import RunInfo, header_line, row_type

# Seconds between two writes.
PAUSE: float = 0.25
# Seconds to wait for the last write when training ends.
PATIENCE: float = 10.0


class RunWriter(BackgroundThread):
    """Thread that appends iterations to the file of one stage; `stop` writes all of them.

    An error, such as of a full disk, costs iterations of the record, never the training.

    Args:
        folder: folder of the run; the job's subfolder is created.
        info: properties of the stage.
        stage: number of the stage.

    Raises:
        OSError: when the file cannot be created.
    """

    def __init__(self, folder: str | Path, info: RunInfo, *, stage: int = 0) -> None:
        super().__init__("record", patience=PATIENCE)
        self._info = info
        name = info.started.replace(":", "")
        self._path = Path(folder, name, f"stage-{stage:03d}.rows")
        # Process groups that are created again over the same store have the same start.
        for number in itertools.count(2):
            if not self._path.exists():
                break
            self._path = Path(folder, f"{name}-{number:03d}", self._path.name)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self._path.open("xb", buffering=0)
        self._rows: queue.SimpleQueue[dict[str, np.ndarray]] = queue.SimpleQueue()
        # Type of the rows, which the first one decides.
        self._type: np.dtype | None = None
        # Bytes that have been written as a whole.
        self._size = 0
        # True once an error was printed.
        self._has_failed = False
        self.start()

    def append(self, iteration: int, **arrays: np.ndarray | float) -> None:
        """Add one iteration. Takes microseconds.

        Args:
            iteration: number of the iteration.
            arrays: arrays of `RunRecord` without the first axis, which must not be modified later;
                ``time`` defaults to now.
        """
        row = {"iteration": iteration, "time": time.time(), **arrays}
        self._rows.put({name: np.asarray(array) for name, array in row.items()})

    def run(self) -> None:
        is_last = False
        while not is_last:
            is_last = self.stopping.wait(PAUSE)
            while not self._rows.empty():
                arrays = self._rows.get()
                try:
                    self._write(arrays)
                # Recording must never stop training.
                except Exception as error:
                    self._report(error)
        self._file.close()

    def _report(self, error: Exception) -> None:
        """Print the first error."""
        if not self._has_failed:
            self._has_failed = True
            print(
                f"FSSDP: {self._path} cannot be written ({describe(error)}); training continues, "
                "iterations are missing in the record",
                file=sys.stderr,
                flush=True,
            )

    def _write(self, arrays: dict[str, np.ndarray]) -> None:
        """Write one iteration, after the first line if it is the first one."""
        data = b""
        if self._type is None or not self._size:
            columns = {name: array.shape for name, array in arrays.items()}
            self._type = row_type(columns)
            data = header_line(self._info, columns)
        row = np.zeros((), self._type)
        for name, array in arrays.items():
            row[name] = array
        row["crc"] = zlib.crc32(row.tobytes()[:-4])
        data += row.tobytes()
        # The place of a partial row, such as on a full disk, is written again by the next one.
        if os.pwrite(self._file.fileno(), data, self._size) < len(data):
            raise OSError(28, "No space left on device")
        self._size += len(data)
