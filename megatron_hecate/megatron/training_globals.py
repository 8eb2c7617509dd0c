"""What Megatron keeps for a whole process: its place among stages; and, in scripts of ``megatron.training`` alone, the
iteration and the loggers."""

from __future__ import annotations

import sys
from typing import Any

import torch.distributed as dist


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


def logs_each_layer() -> bool:
    """Whether Megatron logs metrics of MoE layers one by one."""
    return getattr(_arguments(), "moe_per_layer_logging", False)


def _arguments() -> Any | None:
    return getattr(sys.modules.get("megatron.training.global_vars"), "_GLOBAL_ARGS", None)
