"""NCCL options of our process groups: thread blocks, connections at switch-on, timeouts."""

from __future__ import annotations

import dataclasses
import math
import weakref
from datetime import timedelta

import torch.distributed as dist
from torch.distributed.distributed_c10d import _set_pg_timeout

from megatron_hecate.faults.rendezvous import job_timeout

# An H100 has 132 multiprocessors. Without a bound NCCL may use 32 thread blocks for a large send.
DEFAULT_CTAS: int = 8


@dataclasses.dataclass(frozen=True)
class NcclSettings:
    """NCCL settings of a process group.

    Args:
        max_ctas: upper bound on the thread blocks of a kernel, each of which occupies a
            multiprocessor; 0 leaves the choice to NCCL.
        pairs: connect all ordered pairs of ranks when the group is created. Otherwise NCCL connects
            a pair on the host at its first message, and a new plan with new pairs would stall
            training.
    """

    max_ctas: int = 0
    pairs: bool = False

    def options(self) -> dist.ProcessGroupNCCL.Options:
        # Transfers run on the group's own stream, and peers are blocked until their kernels start.
        options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
        if self.max_ctas:
            options.config.max_ctas = self.max_ctas
        return options


# By process group of ours that uses NCCL: lower bound on the timeout, and current timeout, seconds.
_timeouts: weakref.WeakKeyDictionary[dist.ProcessGroup, tuple[float, float]] = (
    weakref.WeakKeyDictionary()
)


def keep_timeout(group: dist.ProcessGroup, lower_bound: float) -> None:
    """Set the timeout of ``group`` to the job's, now and at each `follow_job_timeout`.

    Args:
        group: a process group that uses NCCL.
        lower_bound: lower bound on the timeout, seconds.
    """
    _timeouts[group] = (lower_bound, 0.0)
    follow_job_timeout()


def follow_job_timeout() -> None:
    """Update the timeouts of our groups after a change of the job's.

    torch's watchdog must not end our transfers before the job's own collectives.
    """
    if not _timeouts:
        return
    job = job_timeout()
    for group, (lower_bound, current) in list(_timeouts.items()):
        timeout = lower_bound
        if math.isfinite(job):
            timeout = max(lower_bound, job)
        if timeout != current:
            _set_pg_timeout(timedelta(seconds=timeout), group)
            _timeouts[group] = (lower_bound, timeout)
