"""Creation of process groups by their own ranks only, without the rest of the job."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.distributed_c10d import _world

from megatron_hecate.comm.collectives import wait_collective
from megatron_hecate.comm.device import device_of_rank
from megatron_hecate.faults.attempt import Attempt
from megatron_hecate.faults.rendezvous import job_timeout

# Least number for the name of a group of ours: far above the number of groups that a rank is in, so
# that other code never creates a group of the same name.
FIRST_NUMBER: int = 10_000


def new_group(
    ranks: Sequence[int],
    *,
    description: str,
    timeout: float,
    nccl_ctas: int = 0,
    nccl_pairs: bool = False,
) -> dist.ProcessGroup:
    """Create a process group and connect its ranks. Collective over ``ranks`` only.

    NCCL connects a group at its first use, in which all of its ranks must take part. A copy of an
    expert involves a few ranks only, so a collective connects all ranks here. torch derives the
    name of a new group from the ranks and from the number of process groups that the calling rank
    is in, which may differ between ranks and decrease again. Here the number of our groups of the
    same ranks replaces it: the ranks create their groups in the same order.

    slime replaces ``torch.distributed.new_group`` by a function whose groups it destroys for each
    rollout and creates again afterwards. A group of ours would then be created again under a name
    that the store knows already, and no collective would connect its ranks. Therefore this function
    calls torch's own, and its groups stay alive during a rollout.

    Args:
        ranks: ranks of the job, ascending.
        description: text for torch's logs.
        timeout: timeout of the group, seconds; with NCCL the job's timeout if that is longer.
        nccl_ctas: upper bound on the thread blocks of NCCL's kernels, each of which occupies a
            multiprocessor; 0 leaves the choice to NCCL.
        nccl_pairs: with NCCL, connect all ordered pairs of ranks. Otherwise NCCL connects a pair on
            the host at its first message, and a new plan with new pairs would stall training.

    Raises:
        RuntimeError: when a rank does not take part in time; names the ranks of the group.
    """
    settings: dict[str, Any] = dict(
        timeout=timedelta(seconds=max(timeout, 1.0)),
        use_local_synchronization=True,
        group_desc=description,
    )
    if device_of_rank().type == "cuda":
        job = job_timeout()
        if math.isfinite(job):
            settings["timeout"] = timedelta(seconds=max(timeout, job))
        # Transfers run on the group's own stream, and peers are blocked until their kernels start.
        options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
        if nccl_ctas:
            options.config.max_ctas = nccl_ctas
        options._timeout = settings["timeout"]
        settings["pg_options"] = options
    with _numbered(FIRST_NUMBER + Attempt.current().count(f"group {tuple(ranks)}")):
        try:
            group = distributed_c10d.new_group(list(ranks), **settings)
        # torch's error names the missing ranks in some cases only.
        except RuntimeError as error:
            raise RuntimeError(
                f"FSSDP: rank {dist.get_rank()} could not create the process group of ranks "
                f"{list(ranks)} ({description}) within {timeout:g} s: a rank died, hangs or failed."
                f" Cause: {error}"
            ) from error
    _connect(group, pairs=nccl_pairs, label=description, timeout=timeout)
    return group


def _connect(group: dist.ProcessGroup, *, pairs: bool, label: str, timeout: float) -> None:
    """Connect the ranks of ``group`` by one collective."""
    device = device_of_rank()
    if pairs and device.type == "cuda":
        message = torch.zeros(group.size(), device=device)
        work = dist.all_to_all_single(
            torch.empty_like(message), message, group=group, async_op=True
        )
    else:
        message = torch.zeros(1, device=device)
        work = dist.all_reduce(message, group=group, async_op=True)
    wait_collective(work, message, group, what="connecting the ranks", label=label, timeout=timeout)


@contextlib.contextmanager
def _numbered(number: int) -> Iterator[None]:
    """Let torch count ``number`` process groups of this rank, and no bound device, in the block.

    With a bound device torch creates groups by splitting the job's NCCL communicator, and the split
    waits for all ranks of the job.
    """
    job = dist.group.WORLD
    assert job is not None
    names: dict[Any, Any] = _world.pg_names
    assert len(names) <= number, f"{len(names)} process groups, expected at most {number}"
    stand_ins = [object() for _ in range(len(names), number)]
    names.update(dict.fromkeys(stand_ins, ""))
    device = job.bound_device_id
    if device is not None:
        job.bound_device_id = None
    try:
        yield
    finally:
        if device is not None:
            job.bound_device_id = device
        for stand_in in stand_ins:
            del names[stand_in]
