"""Per-iteration results of a pipeline stage: passed to the run's folder and to the loggers.

Loggers are on the job's last rank, whose stage has some of the layers, or none. Other stages of its
pipeline send their metrics to it as small messages through the job's store, from a background
thread. A collective would not do: stages reach an iteration at different times, or never, and a
collective needs one order on all ranks.
"""

from __future__ import annotations

import atexit
import dataclasses
import functools
import json
import math
import sys
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from megatron_hecate.faults.attempt import Attempt
from megatron_hecate.faults.background import BackgroundThread
from megatron_hecate.megatron import training_globals
from megatron_hecate.plan import LayerShape, Speeds
from megatron_hecate.record import loggers
from megatron_hecate.record.rank_speed import SpeedHistory
from megatron_hecate.record.run_folder import RunInfo
from megatron_hecate.record.run_writer import RunWriter

# Seconds to wait for sums and messages in flight when training ends.
PATIENCE: float = 5.0
# Seconds between two polls for metrics to send, or to log.
PAUSE: float = 0.25
Values = Mapping[str, np.ndarray]  # [L] each


class _Message(NamedTuple):
    """Metrics of one stage and iteration, as JSON in the store.

    Args:
        iteration: number of the iteration; infinity in the last message of a stage.
        layers: names of the stage's layers, [L]; empty for a stage without MoE layers.
        metrics: values by name, [L] each.
    """

    iteration: float
    layers: list[str]
    metrics: dict[str, list[float]]


class JobMetrics(BackgroundThread):
    """Thread that sends a stage's metrics to the job's last rank, and logs all stages' there.

    An iteration is logged once every stage has sent its metrics. Every rank creates one
    `JobMetrics` for each model.

    Args:
        layers: names of the rank's MoE layers, if any.
    """

    newest: JobMetrics | None = None  # of the last model

    def __init__(self, layers: Sequence[str]) -> None:
        self._rank = dist.get_rank()
        self._stages = training_globals.logging_pipeline()
        super().__init__("metrics", patience=PATIENCE)
        self._store: Any = _get_default_store()
        # A connection of its own: a wait of training blocks the job's.
        if self._stages:
            self._store = self._store.clone()
        # True once pending iterations must be dropped.
        self._is_abandoned = False
        # Iterations between two logged ones, where Megatron's arguments have none (`bridge`).
        self.interval: int | None = None
        self.log: Callable[..., None] = loggers.log_step
        attempt = Attempt.current()
        # Converted and observed models are counted equally on every rank.
        model = attempt.count("model")
        self._prefix = f"megatron_hecate/metrics/{model}"
        self._layers = tuple(layers)
        self._logs = self._stages[-1:] == [self._rank]
        # Messages sent by this rank, and messages read from each rank.
        self._sent = 0
        self._read = dict.fromkeys(self._stages, 0)
        # By rank: a message that was read and waits for the messages of other ranks.
        self._heads: dict[int, _Message] = {}
        # Iterations that the training thread has added, to be sent.
        self._taken: deque[tuple[float, Callable[[], Values]]] = deque()
        if not layers:
            # One message without layers, so that the logging rank does not wait for this stage.
            self._taken.append((0, dict))
        # True once an error was printed.
        self._reported = False
        JobMetrics.newest = self
        if self._stages:
            self.start()
        attempt.at_end(self.abandon)

    def abandon(self) -> None:
        """Stop sending and logging at the end of the attempt.

        Pending iterations are dropped: their functions would keep the attempt's model alive.
        """
        self._is_abandoned = True
        self.stop(1.0)
        self._taken.clear()
        if JobMetrics.newest is self:
            JobMetrics.newest = None

    def put(self, iteration: float, values: Callable[[], Values]) -> None:
        """Add an iteration, if it is to be logged.

        Args:
            iteration: number of the iteration; infinity after the last one.
            values: computes the metrics; called by the `JobMetrics` thread.
        """
        if self._stages and not self._is_abandoned and self._is_wanted(iteration):
            self._taken.append((iteration, values))

    def _is_wanted(self, iteration: float) -> bool:
        """Return whether an iteration is logged."""
        if iteration in (0, math.inf):
            return True
        interval = self.interval or training_globals.log_interval()
        return bool(interval) and iteration % interval == 0

    def run(self) -> None:
        # True once this rank has sent its last message; on the logging rank, once all ranks have.
        is_over = False
        while not is_over and not self._is_abandoned:
            self.stopping.wait(PAUSE)
            try:
                while self._taken:
                    is_over = self._send(*self._taken.popleft()) and not self._logs
                if self._logs:
                    is_over = self._log_complete()
            # The store and the job end together.
            except dist.DistError:
                return
            # Logging must never stop training.
            except Exception as error:
                if not self._reported:
                    print(
                        f"FSSDP: some metrics are not logged: {error}", file=sys.stderr, flush=True
                    )
                self._reported = True
            # No pause above once `stop` was called.
            time.sleep(0.01)

    def _send(self, iteration: float, values: Callable[[], Values]) -> bool:
        """Send one message; return True if it is the last one."""
        metrics = {name: layer_values.tolist() for name, layer_values in values().items()}
        self._store.set(
            f"{self._prefix}/{self._rank}/{self._sent}",
            json.dumps((iteration, self._layers, metrics)),
        )
        self._sent += 1
        return iteration in (0, math.inf)

    def _log_complete(self) -> bool:
        """Log the iterations that all stages have sent; return True after their last messages."""
        while self._read_heads():
            # Stages without MoE layers send nothing further.
            self._stages = [rank for rank in self._stages if self._heads[rank].layers]
            newest = max(self._heads[rank].iteration for rank in self._stages)
            # An older iteration was skipped by some stage, so no rank can complete it.
            self._heads = {
                rank: self._heads[rank]
                for rank in self._stages
                if self._heads[rank].iteration == newest
            }
            if len(self._heads) < len(self._stages):
                continue
            messages = list(self._heads.values())
            self._heads = {}
            if newest == math.inf:
                return True
            self._log(messages)
        return False

    def _read_heads(self) -> bool:
        """Read the next message of each rank without one; return False if one is missing."""
        keys = {
            rank: f"{self._prefix}/{rank}/{self._read[rank]}"
            for rank in self._stages
            if rank not in self._heads
        }
        if not self._store.check(list(keys.values())):
            return False
        for rank, key in keys.items():
            self._heads[rank] = _Message(*json.loads(self._store.get(key)))
            self._store.delete_key(key)
            self._read[rank] += 1
        return True

    def _log(self, messages: Sequence[_Message]) -> None:
        """Log one iteration.

        Args:
            messages: messages of all stages, in the order of stages.
        """
        layers: list[str] = []
        for message in messages:
            layers += message.layers
        values: dict[str, np.ndarray] = {}
        for name in messages[0].metrics:
            # Stages may have different metrics.
            if all(name in message.metrics for message in messages):
                values[name] = np.concatenate([message.metrics[name] for message in messages])
        iteration = int(messages[0].iteration)
        self.log(iteration, layers, values, ended=self.stopping.is_set())


class StageRecorder:
    """Recorder of the layers of one stage, equal on every rank of the layers' group.

    Args:
        info: header of the stage.
        folder: folder of the run, written by one rank of the stage; ``None`` to record nothing.
        group: ranks that share the layers' experts.
        collect: calls `take` for all finished sums; returns True if no sum is in flight.
    """

    def __init__(
        self,
        info: RunInfo,
        folder: str | None,
        *,
        group: dist.ProcessGroup,
        collect: Callable[[], bool],
    ) -> None:
        self.info = info
        self._collect = collect
        self._metrics = JobMetrics(info.layers)
        # The last message must be sent when the model is freed, before another model is built.
        weakref.finalize(self, self._metrics.put, math.inf, dict)
        self._speeds = SpeedHistory()
        # Number of the running iteration, from Megatron's loop or else counted here.
        self.running = 0
        self._writer: RunWriter | None = None
        # Reason why nothing is recorded, if so.
        self.refused = ""
        stage, records = training_globals.place_of_rank(group)
        if folder is not None and records:
            try:
                self._writer = RunWriter(folder, info, stage=stage)
                weakref.finalize(self, self._writer.stopping.set)
            # Recording must never stop training.
            except Exception as error:
                self.refused = f"stage {stage}: {error}"
                print(
                    f"FSSDP: this run is not recorded: {self.refused}", file=sys.stderr, flush=True
                )
        # A weak reference, because atexit would keep the model alive.
        self._at_exit = functools.partial(_close, weakref.ref(self))
        atexit.register(self._at_exit)
        weakref.finalize(self, atexit.unregister, self._at_exit).atexit = False
        Attempt.current().at_end(self.abandon)

    def begin(self) -> int:
        """Begin an iteration that was not trained before; return its number."""
        self.running = training_globals.running_iteration() or self.running + 1
        return self.running

    def take(
        self,
        iteration: int,
        arrays: dict[str, np.ndarray | float],
        values: Callable[[], Values],
        *,
        loads: np.ndarray | None = None,
    ) -> None:
        """Record a complete iteration.

        Args:
            iteration: number of the iteration.
            arrays: recorded arrays, see `RunRecord`.
            values: computes the metrics, called if they are logged.
            loads: tokens computed by each rank, [L, N], where the experts were timed.
        """
        if self._writer is not None:
            self._writer.append(iteration, **arrays)
        if loads is not None:
            times = arrays["timed_ns"], arrays["timed_tokens"]
            self._speeds.add(iteration, *times, loads.sum(axis=0))
            values = functools.partial(self._with_speed, values)
        self.log(iteration, values)

    def log(self, iteration: int, values: Callable[[], Values]) -> None:
        """Log the metrics of a complete iteration, arguments as for `take`."""
        self._metrics.put(iteration, values)

    def _with_speed(self, values: Callable[[], Values]) -> Values:
        """Add the pace of the slowest rank to the metrics of an iteration."""
        slowest = np.full(len(self.info.layers), self._speeds.slowest())
        return {**values(), "slowest_rank": slowest}

    def abandon(self) -> None:
        """Write pending iterations at the end of the attempt.

        Sums in flight are not collected: their process groups are destroyed.
        """
        atexit.unregister(self._at_exit)
        if self._writer is not None:
            self._writer.close()

    def close(self) -> None:
        """Wait up to `PATIENCE` for the last iterations at the end of training, and write all."""
        deadline = time.monotonic() + PATIENCE
        while not self._collect() and time.monotonic() < deadline:
            time.sleep(1e-3)
        self._metrics.put(math.inf, dict)
        if self._writer is not None:
            self._writer.close()


def _close(recorder: weakref.ref[StageRecorder]) -> None:
    if (alive := recorder()) is not None:
        alive.close()


def describe_run(
    mode: str, layers: Sequence[str], *, shape: LayerShape, speeds: Speeds, **fields: object
) -> RunInfo:
    """Build the header of a run that starts now.

    Args:
        mode: see `RunInfo`.
        layers: names of the layers.
        shape: sizes of a layer.
        speeds: speeds of the cost model.
        fields: further fields of `RunInfo`.
    """
    return RunInfo(
        mode=mode,
        layers=tuple(layers),
        shape=dataclasses.asdict(shape),
        speeds=dataclasses.asdict(speeds),
        started=Attempt.current().started,
        **fields,
    )
