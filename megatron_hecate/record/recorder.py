"""Iterations of a pipeline stage: passed to the run's folder and to the loggers."""

from __future__ import annotations

import atexit
import functools
import math
import sys
import time
import weakref
from collections.abc import Callable, Sequence

import numpy as np
import torch.distributed as dist

from megatron_hecate.faults.attempt import Attempt
from megatron_hecate.record.job_metrics import PATIENCE, JobMetrics
from megatron_hecate.record.metrics import stage_metrics
from megatron_hecate.record.run_folder import RunInfo
from megatron_hecate.record.run_writer import RunWriter

# Columns of one iteration by name, see `run_folder.RunRecord`.
Columns = dict[str, np.ndarray]


class StageRecorder:
    """Recorder of the layers of one stage, equal on every rank of the layers' group.

    Args:
        info: properties of the stage.
        folder: folder of the run, written by one rank of the stage; ``None`` to record nothing.
        group: ranks that share the layers' experts.
        experts: number of experts of each layer.
        collect: calls `take` for all finished sums; returns True if no sum is in flight.
    """

    def __init__(
        self,
        info: RunInfo,
        folder: str | None,
        *,
        group: dist.ProcessGroup,
        experts: Sequence[int],
        collect: Callable[[], bool],
    ) -> None:
        self.info = info
        self._experts = experts
        self._collect = collect
        self._metrics = JobMetrics(info.layers)
        # The last message must be sent when the model is freed, before another model is built.
        weakref.finalize(self, self._metrics.put, math.inf, dict)
        self._writer: RunWriter | None = None
        # Reason why nothing is recorded, if so.
        self.refused = ""
        stage, records = place_of_rank(group)
        if folder is not None and records:
            try:
                self._writer = RunWriter(folder, info, stage=stage)
                weakref.finalize(self, self._writer.stopping.set)
            # Recording must never stop training.
            except OSError as error:
                self.refused = f"stage {stage}: {error}"
                print(
                    f"FSSDP: this run is not recorded: {self.refused}", file=sys.stderr, flush=True
                )
        # A weak reference, because atexit would keep the model alive.
        self._at_exit = functools.partial(_close, weakref.ref(self))
        atexit.register(self._at_exit)
        weakref.finalize(self, atexit.unregister, self._at_exit).atexit = False
        Attempt.current().at_end(self.abandon)

    def take(self, iteration: int, build: Callable[[], Columns]) -> None:
        """Record a complete iteration.

        Args:
            iteration: number of the iteration.
            build: builds the columns; called here for the record, or in another thread for the
                loggers, or not at all.
        """
        info, experts = self.info, self._experts
        if self._writer is not None:
            columns = build()
            self._writer.append(iteration, **columns)
            self._metrics.put(iteration, lambda: stage_metrics(info, experts, columns))
        else:
            self._metrics.put(iteration, lambda: stage_metrics(info, experts, build()))

    def abandon(self) -> None:
        """Write pending iterations at the end of the attempt.

        Sums in flight are not collected: their process groups are destroyed.
        """
        atexit.unregister(self._at_exit)
        if self._writer is not None:
            self._writer.stop()

    def close(self) -> None:
        """Wait up to `PATIENCE` for the last iterations at the end of training, and write all."""
        deadline = time.monotonic() + PATIENCE
        while not self._collect() and time.monotonic() < deadline:
            time.sleep(1e-3)
        self._metrics.put(math.inf, dict)
        if self._writer is not None:
            self._writer.stop()


def _close(recorder: weakref.ref[StageRecorder]) -> None:
    if (alive := recorder()) is not None:
        alive.close()


def place_of_rank(group: dist.ProcessGroup) -> tuple[int, bool]:
    """Return the pipeline stage of this rank, and whether this rank records the stage.

    The recording rank is the first rank of the stage's first expert-parallel group.

    Args:
        group: expert-parallel group of this rank.
    """
    from megatron.core import parallel_state

    first = parallel_state.get_expert_data_parallel_rank() == 0 and group.rank() == 0
    return parallel_state.get_pipeline_model_parallel_rank(), first
