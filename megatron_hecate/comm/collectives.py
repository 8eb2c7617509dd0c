"""Collectives with errors that name the layer and the ranks."""

from __future__ import annotations

import contextlib
import time
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

import torch.distributed as dist
from torch import Tensor

from megatron_hecate.faults import under_way

T = TypeVar("T")


class TransferError(RuntimeError):
    """A chunk did not arrive: a peer died, or did not take part in time.

    On GPUs the host does not wait for NCCL messages and raises nothing. There the straggler
    watchdog prints the layer, the ranks and their expected transfers (`under_way`) before torch's
    watchdog terminates the process.
    """


def gather_rows(
    row: Tensor, group: dist.ProcessGroup, *, what: str, label: str, timeout: float
) -> Tensor:
    """Gather one tensor of equal size from every rank, and wait as `wait_collective` does.

    Args:
        row: this rank's tensor, [n].
        group: the ranks that take part.
        what: name of the collective, for errors.
        label: name of the layer, for errors.
        timeout: seconds.

    Returns:
        [N, n] tensor with one row per rank.

    Raises:
        TransferError: see `wait_collective`.
    """
    ranks = group.size()
    rows = row.new_empty(ranks * row.shape[0])
    # torch 2.13 has deprecated the older name, which prints a warning.
    all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    work = all_gather(rows, row, group=group, async_op=True)
    wait_collective(work, rows, group, what=what, label=label, timeout=timeout)
    return rows.view(ranks, -1)


def wait_collective(
    work: dist.Work,
    tensor: Tensor,
    group: dist.ProcessGroup,
    *,
    what: str,
    label: str,
    timeout: float,
) -> None:
    """Wait for a collective of the whole ``group`` over ``tensor``.

    On a GPU only the stream waits, because the host must run ahead. The process group's own timeout
    applies, and nothing is raised here (see `TransferError`).

    Args:
        work: handle of the collective.
        tensor: any tensor of the collective; selects between GPU and CPU.
        group: the ranks that take part.
        what: name of the collective, for errors.
        label: name of the layer, for errors.
        timeout: seconds.

    Raises:
        TransferError: when a rank dies or does not take part in time; names ``label`` and the ranks
            of the group.
    """
    start = time.monotonic()
    try:
        if tensor.is_cuda:
            under_way.note([work], partial(_describe, group.rank(), group.size(), what, label))
            work.wait()
        else:
            work.wait(timeout=timedelta(seconds=timeout))
    except RuntimeError as error:
        duration = f"{time.monotonic() - start:.1f} s (timeout {timeout:g} s)"
        raise _failure(group, what=what, label=label, duration=duration, cause=error) from error


def gather_objects(value: T, group: dist.ProcessGroup, *, what: str, label: str) -> list[T]:
    """Gather one picklable object per rank on all ranks of ``group``, by rank. Collective.

    The host waits for all ranks, also on a GPU, so this is not for code of every iteration.

    Args:
        value: object of this rank.
        group: the ranks that take part; its timeout applies.
        what: name of the action, for errors.
        label: name of the layer, for errors.

    Raises:
        TransferError: as `wait_collective`.
    """
    values: list[Any] = [None] * group.size()
    start = time.monotonic()
    try:
        with under_way.blocking(partial(_describe, group.rank(), group.size(), what, label)):
            dist.all_gather_object(values, value, group=group)
    except RuntimeError as error:
        duration = f"{time.monotonic() - start:.1f} s"
        raise _failure(group, what=what, label=label, duration=duration, cause=error) from error
    return values


def _describe(rank: int, size: int, what: str, label: str) -> str:
    """Describe a collective, for the straggler watchdog and errors."""
    return f"{label}: {what} on rank {rank} of {size}"


def _failure(
    group: dist.ProcessGroup, *, what: str, label: str, duration: str, cause: RuntimeError
) -> TransferError:
    """Return the error of a collective that failed.

    Args:
        group: the ranks that take part.
        what: name of the collective.
        label: name of the layer.
        duration: time since the start of the wait.
        cause: error of torch.
    """
    # torch forgets the ranks of a group that was destroyed while its last works were in flight.
    ranks = "of a group that has been destroyed"
    with contextlib.suppress(KeyError):
        ranks = f"{dist.get_process_group_ranks(group)} (in the job)"
    return TransferError(
        f"{label}: {what} failed on rank {group.rank()} of {group.size()} after {duration}: "
        f"expected all of ranks {ranks}, one died, hangs, or did not take part. Cause: {cause}"
    )
