"""Megatron's process-wide state, which exists in scripts of ``megatron.training`` only."""

from __future__ import annotations

import sys
from typing import Any


def replica_of_rank() -> int:
    """Return this rank's number among the ranks with the same experts (expert data parallelism)."""
    from megatron.core import parallel_state

    return parallel_state.get_expert_data_parallel_rank()


def running_iteration() -> int | None:
    """Read the number of the running iteration in Megatron's log."""
    begun = getattr(training_arguments(), "curr_iteration", None)
    if begun is None:
        return None
    return begun + 1


def training_arguments() -> Any | None:
    """Return the arguments of Megatron's training script; ``None`` without one."""
    return getattr(sys.modules.get("megatron.training.global_vars"), "_GLOBAL_ARGS", None)
