"""Takes what the layers of a pipeline stage did, an iteration at a time, to the run's folder and to the loggers.

Loggers are on the job's last rank, whose stage has some of the layers, or none. Other stages of its pipeline send it
their metrics as small messages through the job's store, from a thread. No collective does it: a stage comes to an
iteration sooner or later than others, or never, and for a collective all must keep one order.
"""

from __future__ import annotations

import atexit
import dataclasses
import datetime
import functools
import importlib.metadata
import json
import math
import sys
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from megatron_hecate.job.attempt import Attempt
from megatron_hecate.job.store_thread import StoreThread
from megatron_hecate.megatron import training_globals
from megatron_hecate.plan import LayerShape, Speeds
from megatron_hecate.record import loggers
from megatron_hecate.record.run_folder import RunInfo
from megatron_hecate.record.run_writer import RunWriter

PACKAGES = ("megatron-hecate", "megatron-core", "torch", "transformer-engine")
PATIENCE: float = 5.0  # seconds for what is under way when training ends
PAUSE: float = 0.25  # seconds between two looks for metrics to send, or to log
Values = Mapping[str, np.ndarray]  # [L] each


class JobMetrics(StoreThread):
    """Brings the metrics of a pipeline's stages to the job's last rank, which logs them, iteration by iteration, when
    every stage has sent them. Every rank makes one for each model, with the names of its MoE ``layers``, if any."""

    newest: JobMetrics | None = None  # of the last model

    def __init__(self, layers: Sequence[str]) -> None:
        self._rank, self._stages, store = (
            dist.get_rank(),
            training_globals.logging_pipeline(),
            _get_default_store(),
        )
        super().__init__("metrics", store.clone() if self._stages else store)
        self.interval: int | None = (
            None  # iterations from one that is logged to the next, where Megatron tells none
        )
        self.log: Callable[..., None] = loggers.log_step
        attempt = Attempt.current()
        model = attempt.count("model")  # that was converted, or is observed: as many on every rank
        self._prefix, self._layers = f"megatron_hecate/metrics/{model}", tuple(layers)
        self._logs = self._stages[-1:] == [self._rank]
        self._sent, self._read = (
            0,
            dict.fromkeys(self._stages, 0),
        )  # messages of this rank, and of each
        self._heads: dict[
            int, Any
        ] = {}  # by rank: a message that was read, and waits for those of others
        # what the training thread took; a rank without layers has one message, to say so
        self._taken: deque[tuple[float, Callable[[], Values]]] = deque(
            [] if layers else [(0, dict)]
        )
        self._told = False  # of an error
        JobMetrics.newest = self
        if self._stages:
            atexit.register(self.stop, PATIENCE)
            self.start()
        attempt.at_end(self.abandon)

    def abandon(self) -> None:
        """The attempt of the job is over: send and log no more. What was taken would keep its model alive."""
        super().abandon()
        self._taken.clear()
        if JobMetrics.newest is self:
            JobMetrics.newest = None

    def put(self, iteration: float, values: Callable[[], Values]) -> None:
        """Metrics of an iteration, which the thread computes if they are to be logged; after the last one, infinity."""
        every = self.interval or training_globals.log_interval()
        wanted = bool(self._stages) and not self._is_abandoned
        if wanted and (iteration == math.inf or (every and iteration % every == 0)):
            self._taken.append((iteration, values))

    def run(self) -> None:
        over = False  # whether nothing comes from this rank, or on the one that logs, from any
        while not over and not self._is_abandoned and not self._store_is_closed():
            self._stopping.wait(PAUSE)
            try:
                while self._taken:
                    over = self._send(*self._taken.popleft()) and not self._logs
                if self._logs:
                    over = self._log_complete()
            except dist.DistError:  # the store has gone, and with it the job
                return
            except Exception as error:  # training goes on, whatever it is
                if not self._told:
                    print(
                        f"FSSDP: some metrics are not logged: {error}", file=sys.stderr, flush=True
                    )
                self._told = True
            time.sleep(0.01)

    def _send(self, iteration: float, values: Callable[[], Values]) -> bool:
        """Returns whether it is the last message."""
        metrics = {name: of.tolist() for name, of in values().items()}
        self._store.set(
            f"{self._prefix}/{self._rank}/{self._sent}",
            json.dumps((iteration, self._layers, metrics)),
        )
        self._sent += 1
        return iteration in (0, math.inf)

    def _log_complete(self) -> bool:
        """Log the iterations that all stages have sent; returns whether they have sent their last messages."""
        while True:
            keys = {
                r: f"{self._prefix}/{r}/{self._read[r]}"
                for r in self._stages
                if r not in self._heads
            }
            if not self._store.check(list(keys.values())):
                return False
            for rank, key in keys.items():
                self._heads[rank] = json.loads(self._store.get(key))
                self._store.delete_key(key)
                self._read[rank] += 1
            self._stages = [rank for rank in self._stages if self._heads[rank][1]]
            newest = max(self._heads[rank][0] for rank in self._stages)
            self._heads = {
                rank: self._heads[rank] for rank in self._stages if self._heads[rank][0] == newest
            }
            if len(self._heads) == len(self._stages):  # else others skip what a rank has not sent
                found, self._heads = list(self._heads.values()), {}
                if newest == math.inf:
                    return True
                names = [name for name in found[0][2] if all(name in of for *_, of in found)]
                values = {name: np.concatenate([of[name] for *_, of in found]) for name in names}
                layers = [layer for _, of_stage, _ in found for layer in of_stage]
                self.log(newest, layers, values, ended=self._stopping.is_set())


class StageRecorder:
    """Of the layers of one stage, as one group of ranks sees them; the same on every rank of the group.

    Args:
        info: what does not change.
        folder: where the run is recorded, by one rank of the stage; ``None``: nowhere.
        group: the ranks that share the layers' experts.
        collect: has `take` called for all that is here, and says whether nothing else will come.
    """

    def __init__(
        self,
        info: RunInfo,
        folder: str | None,
        *,
        group: dist.ProcessGroup,
        collect: Callable[[], bool],
    ) -> None:
        self.info, self._collect, self._metrics = info, collect, JobMetrics(info.layers)
        weakref.finalize(
            self, self._metrics.put, math.inf, dict
        )  # when the model has gone, before another one comes
        self.running = 0  # the iteration, where a loop says it, else counted here
        self._writer: RunWriter | None = None
        self.refused = ""  # why nothing is recorded
        stage, records = training_globals.place_of_rank(group)
        if folder is not None and records:
            try:
                self._writer = RunWriter(folder, info, stage=stage)
                weakref.finalize(self, self._writer.stop)
            except Exception as error:  # training goes on, whatever it is
                self.refused = f"stage {stage}: {error}"
                print(
                    f"FSSDP: this run is not recorded: {self.refused}", file=sys.stderr, flush=True
                )
        self._at_exit = functools.partial(_close, weakref.ref(self))
        atexit.register(self._at_exit)
        weakref.finalize(self, atexit.unregister, self._at_exit).atexit = False
        Attempt.current().at_end(self.abandon)

    def begin(self) -> int:
        """An iteration trains that was not seen before; returns its number."""
        self.running = training_globals.running_iteration() or self.running + 1
        return self.running

    def take(
        self, iteration: int, arrays: dict[str, np.ndarray | float], values: Callable[[], Values]
    ) -> None:
        """An iteration is complete.

        Args:
            iteration: its number.
            arrays: what is recorded; see `RunRecord`.
            values: its metrics, computed if they are logged.
        """
        if self._writer is not None:
            self._writer.append(iteration, **arrays)
        self._metrics.put(iteration, values)

    def abandon(self) -> None:
        """The attempt of the job is over: write what is here. Sums under way belong to groups that have gone."""
        atexit.unregister(self._at_exit)
        if self._writer is not None:
            self._writer.close()

    def close(self) -> None:
        """Training has ended: take the last iterations, if they come soon, and write all."""
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
    """`RunInfo` of a run that starts now; ``fields`` are the others of it."""
    return RunInfo(
        mode=mode,
        layers=tuple(layers),
        shape=dataclasses.asdict(shape),
        speeds=dataclasses.asdict(speeds),
        versions={
            name: d.version
            for name in PACKAGES
            for d in importlib.metadata.distributions(name=name)
        },
        started=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        **fields,
    )
