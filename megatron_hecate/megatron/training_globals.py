"""Megatron's process-wide state: pipeline stages, running iteration and loggers.

Iteration and loggers exist in scripts of ``megatron.training`` only.
"""

from __future__ import annotations

import sys
from typing import Any

import torch.distributed as dist


def place_of_rank(group: dist.ProcessGroup) -> tuple[int, bool]:
    """Return the pipeline stage of this rank, and whether this rank records the stage.

    The recording rank is the first rank of the stage's first expert-parallel group.

    Args:
        group: expert-parallel group of this rank.
    """
    from megatron.core import parallel_state

    first = parallel_state.get_expert_data_parallel_rank() == 0 and group.rank() == 0
    return parallel_state.get_pipeline_model_parallel_rank(), first


def running_iteration() -> int | None:
    """Read the number of the running iteration in Megatron's log."""
    begun = getattr(training_arguments(), "curr_iteration", None)
    if begun is None:
        return None
    return begun + 1


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


def logs_each_layer() -> bool:
    """Whether Megatron logs metrics per MoE layer."""
    return getattr(training_arguments(), "moe_per_layer_logging", False)


def training_arguments() -> Any | None:
    """Return the arguments of Megatron's training script; ``None`` without one."""
    return getattr(sys.modules.get("megatron.training.global_vars"), "_GLOBAL_ARGS", None)
