"""What Megatron keeps for a whole process: its place among stages; and, in scripts of ``megatron.training`` alone, the
iteration and the loggers."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch.distributed as dist

from megatron_hecate.tools.metrics import summarize

# metrics drawn over iterations, by run of W&B: a process may have several
_drawn: weakref.WeakKeyDictionary[Any, set[str]] = weakref.WeakKeyDictionary()


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


def logging_pipeline() -> list[int]:
    """The ranks, by stage, of the pipeline with the job's last rank, which has the loggers; none on other ranks."""
    from megatron.core import parallel_state

    ranks = dist.get_process_group_ranks(parallel_state.get_pipeline_model_parallel_group())
    return ranks if dist.get_world_size() - 1 in ranks else []


def log_interval() -> int | None:
    """Iterations from one that is logged to the next; ``None`` where Megatron has no loggers."""
    args = _arguments()
    logs = getattr(args, "tensorboard_dir", None) or getattr(args, "wandb_project", None)
    return args.tensorboard_log_interval if logs else None


def log_step(iteration: int, layers: Sequence[str], values: Mapping[str, np.ndarray], *, ended: bool) -> None:
    """Log the metrics ``values`` [L] of ``layers`` to Megatron's TensorBoard and Weights & Biases. Once training has
    ``ended``, nobody else writes the former to disk."""
    names = sys.modules["megatron.training.global_vars"]
    board, wandb = names.get_tensorboard_writer(), names.get_wandb_writer()
    found = summarize(layers, values, per_layer=getattr(_arguments(), "moe_per_layer_logging", False))
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


def _arguments() -> Any | None:
    return getattr(sys.modules.get("megatron.training.global_vars"), "_GLOBAL_ARGS", None)
