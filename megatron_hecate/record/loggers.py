"""Metrics for the loggers of ``megatron.training``: TensorBoard, and Weights & Biases."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from megatron_hecate.megatron.training_globals import logs_each_layer
from megatron_hecate.record.metrics import summarize

# Names of the metrics with our x-axis, by W&B run: a process may have several runs.
_drawn: weakref.WeakKeyDictionary[Any, set[str]] = weakref.WeakKeyDictionary()


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
    wandb = global_vars.get_wandb_writer()
    scalars = summarize(layers, values, per_layer=logs_each_layer())
    log_scalars(scalars, iteration, board=board, wandb=wandb)
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
