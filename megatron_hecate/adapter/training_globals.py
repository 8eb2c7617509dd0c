"""What Megatron keeps for a whole process: its place among stages; and, in scripts of ``megatron.training`` alone, the
iteration and the loggers."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch.distributed as dist

from megatron_hecate.tools.metrics import summarize


def place_of_rank(group: dist.ProcessGroup) -> tuple[int, bool]:
    """The pipeline stage of this rank, and whether it is the one that records it: the first rank of the stage's first
    expert-parallel ``group``."""
    from megatron.core import parallel_state

    first = parallel_state.get_expert_data_parallel_rank() == 0 and group.rank() == 0
    return parallel_state.get_pipeline_model_parallel_rank(), first


def running_iteration() -> int | None:
    """The iteration that trains now, as Megatron's log will number it."""
    begun = getattr(_arguments(), "curr_iteration", None)
    return None if begun is None else begun + 1


def log_step(
    iteration: int, layers: Sequence[str], values: Callable[[], Mapping[str, np.ndarray]], *, ended: bool
) -> None:
    """Log the metrics ``values()`` of ``layers`` to Megatron's TensorBoard and Weights & Biases, on the rank that has
    them, when it is time. Once training has ``ended``, a run of the latter is closed."""
    args = _arguments()
    if args is None or iteration % getattr(args, "tensorboard_log_interval", 1):
        return
    names = sys.modules["megatron.training.global_vars"]
    board, wandb = names.get_tensorboard_writer(), None if ended else names.get_wandb_writer()
    if board is None and wandb is None:
        return
    found = summarize(layers, values(), per_layer=bool(getattr(args, "moe_per_layer_logging", False)))
    if board is not None:
        for name, value in found.items():
            board.add_scalar(name, value, iteration)
        if ended:
            board.flush()
    if wandb is not None:
        wandb.log(found, iteration)


def _arguments() -> Any | None:
    return getattr(sys.modules.get("megatron.training.global_vars"), "_GLOBAL_ARGS", None)
