"""Creation of process groups by their own ranks only, without the rest of the job."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.distributed_c10d import _world

from megatron_hecate.comm.collectives import wait_collective
from megatron_hecate.comm.nccl import NcclSettings, keep_timeout
from megatron_hecate.faults.rendezvous import Question, Verdict

# Least number for the name of a group of ours: far above the number of groups that a rank is in, so
# that other code never creates a group of the same name.
FIRST_NUMBER: int = 10_000
# Largest number by which torch has named a group of ours, by default process group.
_largest_numbers: weakref.WeakKeyDictionary[dist.ProcessGroup, int] = weakref.WeakKeyDictionary()


def next_number() -> int:
    """Return the least number for the name of this rank's next group, see `new_group`.

    The number of groups that this rank is in is not enough: where other code has destroyed groups,
    torch would name a group like an earlier one.
    """
    job = dist.group.WORLD
    assert job is not None
    return 1 + _largest_numbers.get(job, FIRST_NUMBER - 1)


def new_group(
    ranks: Sequence[int],
    number: int,
    *,
    description: str,
    timeout: float,
    nccl: NcclSettings | None = None,
) -> dist.ProcessGroup:
    """Create a process group and connect its ranks. Collective over ``ranks`` only.

    NCCL connects a group at its first use, in which all of its ranks must take part. A copy of an
    expert involves a few ranks only, so a collective connects all ranks here. torch derives the
    name of a new group from the ranks and from the number of process groups that the calling rank
    is in; ``number`` replaces the latter, because ranks may be in different numbers of groups.

    slime replaces ``torch.distributed.new_group`` by a function whose groups it destroys for each
    rollout and creates again afterwards. A group of ours would then be created again under a name
    that the store knows already, and no collective would connect its ranks. Therefore this function
    calls torch's own, and its groups stay alive during a rollout.

    Args:
        ranks: ranks of the job, ascending.
        number: number for the name of the group, the same on all ``ranks``, instead of the number
            of process groups that a rank is in; at least each rank's `next_number`.
        description: text for torch's logs.
        timeout: timeout of the group, seconds; with NCCL the job's timeout if that is longer.
        nccl: NCCL settings; ``None`` on CPU ranks.

    Raises:
        RuntimeError: when a rank does not take part in time; names the ranks of the group.
    """
    settings: dict[str, Any] = dict(
        timeout=timedelta(seconds=max(timeout, 1.0)),
        use_local_synchronization=True,
        group_desc=description,
    )
    with _no_bound_device(), _numbered(number):
        if nccl is not None:
            settings["pg_options"] = options = nccl.options()
            options._timeout = settings["timeout"]
        try:
            group = distributed_c10d.new_group(list(ranks), **settings)
        # torch's error names the missing ranks in some cases only.
        except RuntimeError as error:
            raise RuntimeError(
                f"FSSDP: rank {dist.get_rank()} could not create the process group of ranks "
                f"{list(ranks)} ({description}) within {timeout:g} s: a rank died, hangs or failed."
                f" Cause: {error}"
            ) from error
    connect_ranks(group, nccl, label=description, timeout=timeout)
    if nccl is not None:
        keep_timeout(group, timeout)
    return group


def connected_group(
    groups: Sequence[Sequence[int]], *, timeout: float, on_gpus: bool
) -> dist.ProcessGroup | None:
    """Create the process group of all ranks that overlapping ``groups`` connect. Collective.

    Args:
        groups: groups of ranks that this rank is in; two groups are connected if they share a rank.
        timeout: seconds.
        on_gpus: use NCCL.

    Returns:
        The process group of the connected component; ``None`` on a rank without groups.

    Raises:
        TimeoutError: when a rank is missing; names the missing ranks.
        RuntimeError: see `new_group`.
    """
    # Rank 0 sends each component under the first rank of a group: all ranks of the group compute
    # the same name.
    names = [str(groups[0][0])] if groups else []
    verdict = Question.next(timeout=timeout).ask(
        [next_number(), list(map(list, groups))], _join_groups, groups=names
    )
    if not groups:
        return None
    ranks, number = verdict.groups[names[0]]
    nccl = NcclSettings() if on_gpus else None
    return new_group(ranks, number, description="fssdp homes", timeout=timeout, nccl=nccl)


def _join_groups(gathered: list[tuple[int, list[list[int]]]]) -> Verdict:
    """Find the connected components of all groups of ranks.

    Args:
        gathered: `next_number`, and groups of ranks, by rank of the job.

    Returns:
        Under the first rank of each rank's first group: the ranks of its component, and the largest
        `next_number` of any rank of the component.
    """
    lowest = _lowest_connected([groups for _, groups in gathered])
    members: dict[int, list[int]] = {}
    for rank, low in enumerate(lowest):
        members.setdefault(low, []).append(rank)
    # Once per component: a large job has thousands of ranks in one.
    numbers = {low: max(gathered[rank][0] for rank in ranks) for low, ranks in members.items()}
    components: dict[str, Any] = {}
    for low, (_, groups) in zip(lowest, gathered, strict=True):
        if groups:
            components[str(groups[0][0])] = [members[low], numbers[low]]
    return Verdict(None, components)


def _lowest_connected(groups_of_ranks: Sequence[Sequence[Sequence[int]]]) -> list[int]:
    """Return the lowest rank that each rank is connected with, by union-find.

    Args:
        groups_of_ranks: groups of ranks, by rank of the job.
    """
    # Parent of each rank in a forest whose roots are their own parents.
    parents = list(range(len(groups_of_ranks)))

    def find_root(rank: int) -> int:
        while parents[rank] != rank:
            parents[rank] = parents[parents[rank]]
            rank = parents[rank]
        return rank

    for groups in groups_of_ranks:
        for first, *ranks in groups:
            for member in ranks:
                low, high = sorted((find_root(first), find_root(member)))
                parents[high] = low
    return [find_root(rank) for rank in range(len(parents))]


def connect_ranks(
    group: dist.ProcessGroup, nccl: NcclSettings | None, *, label: str, timeout: float
) -> None:
    """Connect the ranks of ``group`` by one collective.

    Args:
        group: the process group.
        nccl: NCCL settings, ``None`` on CPU ranks; with `NcclSettings.pairs` every ordered pair of
            ranks is connected.
        label: name of the group, for errors.
        timeout: seconds.
    """
    device = "cpu" if nccl is None else "cuda"
    if nccl is not None and nccl.pairs:
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
    """Let torch count ``number`` process groups of this rank inside the block."""
    job = dist.group.WORLD
    assert job is not None
    names: dict[Any, Any] = _world.pg_names
    assert len(names) <= number, f"{len(names)} process groups, expected at most {number}"
    stand_ins = [object() for _ in range(len(names), number)]
    names.update(dict.fromkeys(stand_ins, ""))
    _largest_numbers[job] = number
    try:
        yield
    finally:
        for stand_in in stand_ins:
            del names[stand_in]


@contextlib.contextmanager
def _no_bound_device() -> Iterator[None]:
    """Unbind the job's process group from its device while a group is created.

    With a bound device torch creates groups by splitting the job's NCCL communicator, and the split
    waits for all ranks of the job.
    """
    job = dist.group.WORLD
    assert job is not None
    bound = job.bound_device_id
    if bound is not None:
        job.bound_device_id = None
    try:
        yield
    finally:
        if bound is not None:
            job.bound_device_id = bound
