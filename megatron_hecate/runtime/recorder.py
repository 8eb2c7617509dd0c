"""Takes what the layers of a pipeline stage did, an iteration at a time, to the run's folder and to the loggers."""

from __future__ import annotations

import atexit
import dataclasses
import datetime
import importlib.metadata
import sys
import time
import weakref
from collections.abc import Callable, Sequence

import numpy as np
import torch.distributed as dist

from megatron_hecate.adapter.training_globals import log_step, place_of_rank, running_iteration
from megatron_hecate.plan import LayerShape, Speeds
from megatron_hecate.tools.run_folder import RunInfo
from megatron_hecate.tools.run_writer import RunWriter

PACKAGES = ("megatron-hecate", "megatron-core", "torch", "transformer-engine")
PATIENCE: float = 5.0  # seconds for what is under way when training ends
Values = dict[str, np.ndarray]  # [L] each, and [L, N]


class StageRecorder:
    """Of the layers of one stage, as one group of ranks sees them; the same on every rank of the group.

    Args:
        info: what does not change.
        folder: where the run is recorded, by one rank of the stage; ``None``: nowhere.
        group: the ranks that share the layers' experts.
        collect: has `take` called for all that is here, and says whether nothing else will come.
    """

    def __init__(
        self, info: RunInfo, folder: str | None, *, group: dist.ProcessGroup, collect: Callable[[], bool]
    ) -> None:
        self.info, self._collect = info, collect
        self.running = 0  # the iteration, where a loop says it, else counted here
        self.newest: tuple[int, Callable[[], Values]] | None = None  # the last that was taken, and its metrics
        self._ended = False  # whether training has
        self._writer: RunWriter | None = None
        stage, records = place_of_rank(group)
        if folder is not None and records:
            try:
                self._writer = RunWriter(folder, info, stage=stage)
                weakref.finalize(self, self._writer.stop)  # when the model has gone, before another one comes
            except Exception as error:  # training goes on, whatever it is
                print(f"FSSDP: this run is not recorded: {error}", file=sys.stderr, flush=True)
        alive = weakref.ref(self)
        atexit.register(lambda: recorder.close() if (recorder := alive()) is not None else None)

    def begin(self) -> int:
        """An iteration trains that was not seen before; returns its number."""
        self.running = running_iteration() or self.running + 1
        return self.running

    def take(self, iteration: int, arrays: dict[str, np.ndarray | float], values: Callable[[], Values]) -> None:
        """An iteration is complete.

        Args:
            iteration: its number.
            arrays: what is recorded; see `RunRecord`.
            values: its metrics, computed where they are logged.
        """
        self.newest = iteration, values
        if self._writer is not None:
            self._writer.append(iteration, **arrays)
        log_step(iteration, self.info.layers, values, ended=self._ended)

    def close(self) -> None:
        """Training has ended: take the last iterations, if they come soon, and write all."""
        self._ended, deadline = True, time.monotonic() + PATIENCE
        while not self._collect() and time.monotonic() < deadline:
            time.sleep(1e-3)
        if self._writer is not None:
            self._writer.close()


def describe_run(mode: str, layers: Sequence[str], *, shape: LayerShape, speeds: Speeds, **fields: object) -> RunInfo:
    """`RunInfo` of a run that starts now; ``fields`` are the others of it."""
    return RunInfo(
        mode=mode,
        layers=tuple(layers),
        shape=dataclasses.asdict(shape),
        speeds=dataclasses.asdict(speeds),
        versions={name: d.version for name in PACKAGES for d in importlib.metadata.distributions(name=name)},
        started=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        **fields,
    )
