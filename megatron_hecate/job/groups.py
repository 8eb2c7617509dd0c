"""Process groups that only their own ranks make."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _world

from megatron_hecate.job.collectives import wait_collective
from megatron_hecate.job.nccl import NcclSettings, keep_timeout
from megatron_hecate.job.rendezvous import Question, Verdict


def new_group(
    ranks: Sequence[int],
    made: int,
    *,
    description: str,
    timeout: float,
    nccl: NcclSettings | None = None,
) -> dist.ProcessGroup:
    """A process group that only its ``ranks`` make, and that has connected them: NCCL does so when a group is first
    used, by all of them, and copies are by some.

    torch names it by its ranks and by how many process groups a rank is in, so that all of them must be in as many.

    Args:
        ranks: of the job, ascending.
        made: the most process groups that one of them is in; a rank in fewer makes some of its own first.
        description: for torch's logs.
        timeout: seconds, of the group; with NCCL the job's timeout if that is longer.
        nccl: settings of NCCL; ``None`` on CPU ranks.

    Raises:
        RuntimeError: naming the ranks, when one of them does not come.
    """
    settings: dict[str, Any] = dict(
        timeout=timedelta(seconds=max(timeout, 1.0)),
        use_local_synchronization=True,
        group_desc=description,
    )
    with _no_bound_device():
        while len(_world.pg_names) < made:
            dist.new_group([dist.get_rank()], backend="gloo", **settings)
        if nccl is not None:
            settings["pg_options"] = options = nccl.options()
            options._timeout = settings["timeout"]
        try:
            group = dist.new_group(list(ranks), **settings)
        except RuntimeError as error:  # torch's own says who does not come in some cases only
            raise RuntimeError(
                f"FSSDP: rank {dist.get_rank()} could not make the process group of ranks {list(ranks)} "
                f"({description}) within {timeout:g} s: one of them died, hangs, or failed. Cause: {error}"
            ) from error
    connect_ranks(group, nccl, label=description, timeout=timeout)
    if nccl is not None:
        keep_timeout(group, timeout)
    return group


def connected_group(
    groups: Sequence[Sequence[int]], *, timeout: float, on_gpus: bool
) -> dist.ProcessGroup | None:
    """A process group of all ranks that are connected by ``groups``: those this rank is in, any ranks of the job that
    share one. All ranks of the job call it; without groups a rank gets none.

    Raises:
        TimeoutError: naming the ranks that did not come in time.
        RuntimeError: as `new_group`.
    """

    def judge(told: list[tuple[int, list[list[int]]]]) -> Verdict:
        above = list(
            range(len(told))
        )  # of each rank, a lower one that it is connected with, or itself

        def lowest(rank: int) -> int:
            while above[rank] != rank:
                above[rank] = rank = above[above[rank]]
            return rank

        for first, *others in (ranks for _, of_rank in told for ranks in of_rank):
            for other in others:
                low, high = sorted((lowest(first), lowest(other)))
                above[high] = low
        members: dict[int, list[int]] = {}
        for rank in range(len(told)):
            members.setdefault(lowest(rank), []).append(rank)
        made = {low: max(told[rank][0] for rank in ranks) for low, ranks in members.items()}
        named = {
            str(of_rank[0][0]): lowest(rank) for rank, (_, of_rank) in enumerate(told) if of_rank
        }
        return Verdict(None, {name: [members[low], made[low]] for name, low in named.items()})

    names = [str(groups[0][0])] if groups else []  # the same for all ranks of that group
    heard = Question.next(timeout=timeout).ask(
        [len(_world.pg_names), list(map(list, groups))], judge, groups=names
    )
    if not groups:
        return None
    ranks, most = heard.groups[names[0]]
    nccl = NcclSettings() if on_gpus else None
    return new_group(ranks, most, description="fssdp homes", timeout=timeout, nccl=nccl)


def connect_ranks(
    group: dist.ProcessGroup, nccl: NcclSettings | None, *, label: str, timeout: float
) -> None:
    """Connect the ranks of ``group`` by one collective; with `NcclSettings.pairs` each with each other."""
    device = "cpu" if nccl is None else "cuda"
    if nccl is not None and nccl.pairs:
        sent = torch.zeros(group.size(), device=device)
        work = dist.all_to_all_single(torch.empty_like(sent), sent, group=group, async_op=True)
    else:
        sent = torch.zeros(1, device=device)
        work = dist.all_reduce(sent, group=group, async_op=True)
    wait_collective(work, sent, group, what="connecting the ranks", label=label, timeout=timeout)


@contextlib.contextmanager
def _no_bound_device() -> Iterator[None]:
    """Where the job's process group is bound to a device, torch would have NCCL split the job's communicator, for which
    NCCL waits for all ranks of the job."""
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
