"""Metrics of all pipeline stages, for the loggers of the job's last rank.

The last rank's stage has some of the layers, or none. Other stages of its pipeline send their
metrics to it as small messages through the job's store, from a background thread. A collective
would not do: stages reach an iteration at different times, or never, and a collective needs one
order on all ranks. Megatron's own tracker of MoE metrics holds its own names alone (0.19.2).
"""

from __future__ import annotations

import json
import math
import sys
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from megatron_hecate.faults.attempt import Attempt
from megatron_hecate.faults.background import BackgroundThread
from megatron_hecate.megatron.training_globals import training_arguments
from megatron_hecate.record.metrics import summarize

# Seconds to wait for messages when training ends.
PATIENCE: float = 5.0
# Seconds between two polls for metrics to send, or to log.
PAUSE: float = 0.25
Values = Mapping[str, np.ndarray]  # [L] each
# Names of the metrics with our x-axis, by W&B run: a process may have several runs.
_drawn: weakref.WeakKeyDictionary[Any, set[str]] = weakref.WeakKeyDictionary()


class _Message(NamedTuple):
    """Metrics of one stage and iteration, as JSON in the store.

    Args:
        iteration: number of the iteration; infinity in the last message of a stage, which is the
            only one of a stage without MoE layers.
        layers: names of the stage's layers, [L].
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
        super().__init__("metrics", patience=PATIENCE)
        attempt = Attempt.current()
        self._rank = dist.get_rank()
        self._stages = logging_pipeline()
        self._logs = self._stages[-1:] == [self._rank]
        # Iterations between two logged ones, where Megatron's arguments have none (`bridge`).
        self.interval: int | None = None
        self.log: Callable[..., None] = log_step
        # Converted and observed models are counted equally on every rank.
        self._prefix = f"megatron_hecate/metrics/{attempt.count('model')}"
        self._layers = layers
        # Iterations that the training thread has added, to be sent.
        self._added: deque[tuple[float, Callable[[], Values]]] = deque()
        if not layers:
            self._added.append((math.inf, dict))
        # Messages sent by this rank, and messages read from each rank.
        self._num_sent = 0
        self._num_read = dict.fromkeys(self._stages, 0)
        # Messages of each stage that wait for those of other stages, in order.
        self._waiting: list[deque[_Message]] = [deque() for _ in self._stages]
        self._is_abandoned = False
        # True once an error was printed.
        self._has_failed = False
        JobMetrics.newest = self
        if self._stages:
            # A connection of its own: a wait of training blocks the job's.
            self._store: Any = _get_default_store().clone()
            self.start()
        attempt.at_end(self.abandon)

    def abandon(self) -> None:
        """Stop sending and logging at the end of the attempt.

        Pending iterations are dropped: their functions would keep the attempt's model alive.
        """
        self._is_abandoned = True
        self.stop(1.0)
        self._added.clear()
        if JobMetrics.newest is self:
            JobMetrics.newest = None

    def put(self, iteration: float, values: Callable[[], Values]) -> None:
        """Add an iteration, if it is to be logged.

        Args:
            iteration: number of the iteration; infinity after the last one.
            values: computes the metrics; called by the `JobMetrics` thread.
        """
        interval = self.interval or log_interval()
        is_logged = iteration == math.inf or bool(interval and iteration % interval == 0)
        if self._stages and not self._is_abandoned and is_logged:
            self._added.append((iteration, values))

    def run(self) -> None:
        # True once this rank has sent its last message; on the logging rank, once all ranks have.
        is_over = False
        while not is_over and not self._is_abandoned:
            self.stopping.wait(PAUSE)
            try:
                while self._added:
                    is_over = self._send(*self._added.popleft()) and not self._logs
                if self._logs:
                    self._receive()
                    is_over = self._log_complete()
            # The store and the job end together.
            except dist.DistError:
                return
            # Logging must never stop training.
            except Exception as error:
                if not self._has_failed:
                    text = f"FSSDP: some metrics are not logged: {error}"
                    print(text, file=sys.stderr, flush=True)
                self._has_failed = True
            # No pause above once `stop` was called.
            time.sleep(0.01)

    def _send(self, iteration: float, values: Callable[[], Values]) -> bool:
        """Send one message; return True if it is the last one."""
        metrics = {name: layer_values.tolist() for name, layer_values in values().items()}
        key = f"{self._prefix}/{self._rank}/{self._num_sent}"
        self._store.set(key, json.dumps((iteration, self._layers, metrics)))
        self._num_sent += 1
        return iteration == math.inf

    def _receive(self) -> None:
        """Take the messages that have arrived out of the store."""
        for rank, waiting in zip(self._stages, self._waiting, strict=True):
            while self._store.check([key := f"{self._prefix}/{rank}/{self._num_read[rank]}"]):
                waiting.append(_Message(*json.loads(self._store.get(key))))
                self._store.delete_key(key)
                self._num_read[rank] += 1

    def _log_complete(self) -> bool:
        """Log the iterations that all stages have sent; return True after their last messages."""
        while all(self._waiting):
            stages = [waiting for waiting in self._waiting if waiting[0].layers]
            newest = max((waiting[0].iteration for waiting in stages), default=math.inf)
            # Stages send in order, so the stage with the newest message has skipped older ones.
            behind = [waiting for waiting in stages if waiting[0].iteration < newest]
            for waiting in behind:
                waiting.popleft()
            if behind:
                continue
            if newest == math.inf:
                return True
            self._log(int(newest), [waiting.popleft() for waiting in stages])
        return False

    def _log(self, iteration: int, messages: Sequence[_Message]) -> None:
        """Log one iteration by the messages of all stages, in their order."""
        layers = list(chain.from_iterable(message.layers for message in messages))
        values: dict[str, np.ndarray] = {}
        for name in messages[0].metrics:
            # Stages may have different metrics.
            if all(name in message.metrics for message in messages):
                values[name] = np.concatenate([message.metrics[name] for message in messages])
        self.log(iteration, layers, values, ended=self.stopping.is_set())


def logging_pipeline() -> list[int]:
    """List the ranks, by stage, of the pipeline with the job's last rank, which has the loggers.

    Empty on ranks of other pipelines.
    """
    from megatron.core import parallel_state

    ranks = dist.get_process_group_ranks(parallel_state.get_pipeline_model_parallel_group())
    has_loggers = dist.get_world_size() - 1 in ranks
    return ranks if has_loggers else []


def log_interval() -> int | None:
    """Read the number of iterations between two log entries; ``None`` without loggers."""
    args = training_arguments()
    logs = getattr(args, "tensorboard_dir", None) or getattr(args, "wandb_project", None)
    return args.tensorboard_log_interval if logs else None


def log_step(
    iteration: int, layers: Sequence[str], values: Mapping[str, np.ndarray], *, ended: bool
) -> None:
    """Log the metrics of one iteration to Megatron's TensorBoard and Weights & Biases, if any.

    Args:
        iteration: number of the iteration.
        layers: names of the layers, [L].
        values: metrics by name, [L] each.
        ended: True once training has ended.
    """
    global_vars = sys.modules.get("megatron.training.global_vars")
    if global_vars is None:
        return
    board = global_vars.get_tensorboard_writer()
    per_layer = getattr(training_arguments(), "moe_per_layer_logging", False)
    scalars = summarize(layers, values, per_layer=per_layer)
    log_scalars(scalars, iteration, board=board, wandb=global_vars.get_wandb_writer())
    # Once training has ended, Megatron does not flush the writer any more.
    if ended and board:
        board.flush()


def log_scalars(scalars: Mapping[str, float], iteration: int, *, board: Any, wandb: Any) -> None:
    """Log numbers of a finished iteration.

    W&B drops values of a step before its current one. There the numbers are logged at W&B's current
    step, with their own iteration as x-axis of their charts.

    Args:
        scalars: numbers by name.
        iteration: number of the finished iteration.
        board: TensorBoard writer, or None.
        wandb: the module wandb, or None.
    """
    if board:
        for name, value in scalars.items():
            board.add_scalar(name, value, iteration)
    # A script may have finished the run.
    if wandb and (run := wandb.run):
        drawn_names = _drawn.setdefault(run, set())
        for name in scalars.keys() - drawn_names:
            run.define_metric(name, step_metric="fssdp/iteration")
        drawn_names.update(scalars)
        run.log({**scalars, "fssdp/iteration": iteration}, commit=False)
