"""What our process groups ask of NCCL: few multiprocessors, connections at switch-on, and the job's timeout."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import weakref
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _set_pg_timeout

DEFAULT_CTAS: int = 8  # of an H100's 132 multiprocessors; alone NCCL may take 32 for a large send


@dataclasses.dataclass(frozen=True)
class NcclSettings:
    """How a process group uses NCCL.

    Args:
        max_ctas: thread blocks of a kernel at most, each of which takes a multiprocessor; 0: NCCL's choice.
        pairs: whether all ordered pairs of ranks are connected when the group is made. NCCL connects a pair for its
            first message else, on the host: new plans would stop training, as they bring new pairs.
    """

    max_ctas: int = 0
    pairs: bool = False

    def options(self) -> dist.ProcessGroupNCCL.Options:
        # The kernels run on the group's own stream; peers wait for them.
        options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
        if self.max_ctas:
            options.config.max_ctas = self.max_ctas
        return options


# Of each process group of ours that uses NCCL: the least timeout that was asked for, and the one it has, in seconds.
_timeouts: weakref.WeakKeyDictionary[dist.ProcessGroup, tuple[float, float]] = (
    weakref.WeakKeyDictionary()
)


def job_timeout() -> float:
    """Seconds after which torch's watchdog ends a job whose collectives make no progress; infinite without a job.

    Megatron may change it after the first iteration (``distributed_timeout_seconds_after_init``).
    """
    with contextlib.suppress(RuntimeError, ValueError, AttributeError):
        job: Any = dist.group.WORLD
        on_gpus = "nccl" in str(dist.get_backend_config())
        backend = job._get_backend(torch.device("cuda" if on_gpus else "cpu"))
        return backend.options._timeout.total_seconds()
    return math.inf


def keep_timeout(group: dist.ProcessGroup, least: float) -> None:
    """Give ``group`` the job's timeout, at least so many seconds, now and whenever `follow_job_timeout` is called."""
    _timeouts[group] = (least, 0.0)
    follow_job_timeout()


def follow_job_timeout() -> None:
    """Give our groups the job's timeout where it has changed: torch's watchdog must not end our transfers earlier."""
    job = job_timeout()
    for group, (least, current) in list(_timeouts.items()):
        wanted = max(least, job) if math.isfinite(job) else least
        if wanted != current:
            _set_pg_timeout(timedelta(seconds=wanted), group)
            _timeouts[group] = (least, wanted)
