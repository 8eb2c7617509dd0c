"""Metrics for the loggers of ``megatron.training``: TensorBoard, and Weights & Biases."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from megatron_hecate.megatron.training_globals import logs_each_layer
from megatron_hecate.record.metrics import summarize

# metrics drawn over iterations, by run of W&B: a process may have several
_drawn: weakref.WeakKeyDictionary[Any, set[str]] = weakref.WeakKeyDictionary()


def log_step(
    iteration: int, layers: Sequence[str], values: Mapping[str, np.ndarray], *, ended: bool
) -> None:
    """Log the metrics ``values`` [L] of ``layers`` to Megatron's TensorBoard and Weights & Biases. Once training has
    ``ended``, nobody else writes the former to disk."""
    names = sys.modules["megatron.training.global_vars"]
    board, wandb = names.get_tensorboard_writer(), names.get_wandb_writer()
    found = summarize(layers, values, per_layer=logs_each_layer())
    log_scalars(found, iteration, board=board, wandb=wandb)
    if ended and board:
        board.flush()


def log_scalars(found: Mapping[str, float], iteration: int, *, board: Any, wandb: Any) -> None:
    """Log them as of ``iteration``, which is over. W&B drops what is of a step before its own: there they join its own,
    and their iteration stands beside them, as their charts' x-axis."""
    for name, value in found.items() if board else ():
        board.add_scalar(name, value, iteration)
    if wandb and (run := wandb.run):  # which a script may have finished
        known = _drawn.setdefault(run, set())
        for name in found.keys() - known:
            run.define_metric(name, step_metric="fssdp/iteration")
        known.update(found)
        run.log({**found, "fssdp/iteration": iteration}, commit=False)
