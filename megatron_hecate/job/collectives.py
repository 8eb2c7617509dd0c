"""Collectives of whole groups that name the layer and the ranks when they fail."""

from __future__ import annotations

import time
from datetime import timedelta

import torch.distributed as dist
from torch import Tensor

from megatron_hecate.job import under_way


class TransferError(RuntimeError):
    """A chunk did not arrive: a peer died, or did not take part in time.

    On GPUs the host does not wait for messages of NCCL, and raises nothing: the straggler watchdog prints layer, ranks
    and what was expected of them (`under_way`), before torch's watchdog ends the process.
    """


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

    On a GPU the stream waits and the process group's own timeout holds; the host must run ahead, and nothing is raised
    here (see `TransferError`).

    Args:
        what: name of the collective, for errors.
        label: name of the layer, for errors.
        timeout: seconds.

    Raises:
        TransferError: naming ``label`` and the ranks of the group, when one dies or does not take part in time.
    """
    start = time.monotonic()
    try:
        if tensor.is_cuda:
            expected = _expected_ranks(group)
            under_way.note(
                [work], f"{label}: {what} on rank {group.rank()} of {group.size()}, {expected}"
            )
            work.wait()
        else:
            work.wait(timeout=timedelta(seconds=timeout))
    except RuntimeError as error:
        raise TransferError(
            f"{label}: {what} failed on rank {group.rank()} of {group.size()} after {time.monotonic() - start:.1f} s "
            f"(timeout {timeout:g} s): {_expected_ranks(group)}, one died, hangs, or did not take part. Cause: {error}"
        ) from error


def _expected_ranks(group: dist.ProcessGroup) -> str:
    """Name the ranks of ``group``, which may have been destroyed while its last works were under way."""
    try:
        return f"expected all of ranks {dist.get_process_group_ranks(group)} (in the job)"
    except KeyError:
        return f"expected all of {group.size()} ranks of a group that has been destroyed"
