"""Which rank records a pipeline stage, and when Megatron's training script logs."""

from __future__ import annotations

import torch.distributed as dist

from megatron_hecate.megatron.training_globals import training_arguments


def place_of_rank(group: dist.ProcessGroup) -> tuple[int, bool]:
    """Return the pipeline stage of this rank, and whether this rank records the stage.

    The recording rank is the first rank of the stage's first expert-parallel group.

    Args:
        group: expert-parallel group of this rank.
    """
    from megatron.core import parallel_state

    first = parallel_state.get_expert_data_parallel_rank() == 0 and group.rank() == 0
    return parallel_state.get_pipeline_model_parallel_rank(), first


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
