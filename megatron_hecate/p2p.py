"""The ``p2p`` transport: spAG and spRS by plain ``torch.distributed`` point-to-point, on any backend.

A transfer is a generator of steps: up to its first ``yield`` it posts what can run in the background, the rest waits
and sums. `transfer.Transfer` runs them, with CUDA on a stream of their own.
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import ClassVar

import torch
import torch.distributed as dist
from torch import Tensor


class TransferError(RuntimeError):
    """A chunk did not arrive: a peer died, or did not take part in time."""


def gather(
    homes: Sequence[Tensor],
    parts: int,
    sends: Sequence[tuple[int, int]],
    recvs: Sequence[tuple[int, int]],
    guests: Sequence[Tensor],
    *,
    batches: Batches,
) -> Iterator[None]:
    """The steps of spAG: everything posted, everything there."""
    p2p = batches.next("sparse_all_gather")
    sizes = [t.numel() for t in homes[:parts]]
    for home, rank in sends:
        for tensor in homes[home * parts : (home + 1) * parts]:
            p2p.send(tensor.contiguous().view(-1), rank)
    for guest, rank in recvs:
        for part in guests[guest].split(sizes):
            p2p.recv(part, rank)
    p2p.start()
    yield
    p2p.finish()


def reduce(
    grads: Sequence[Tensor],
    sends: Sequence[tuple[int, int]],
    recvs: Sequence[tuple[int, int]],
    turns: Sequence[int],
    staging: Sequence[Tensor],
    add: Callable[[int, Tensor], None],
    *,
    batches: Batches,
) -> Iterator[None]:
    """The steps of spRS, in rounds of as many chunks as fit into the staging memory of a home.

    Both ends of a transfer know its round (``turns``), so that each round is complete in itself: with NCCL a batch
    ends when all of it has been matched.
    """
    *rows, total = staging
    wide = torch.promote_types(total.dtype, torch.float32)
    if total.dtype != wide:
        total = torch.empty_like(total, dtype=wide)
    at_once = max(1, len(rows))
    rounds = 1 + max([(len(sends) - 1) // at_once, *(turn // at_once for turn in turns)])
    for index in range(rounds):
        p2p = batches.next("sparse_reduce_scatter")
        for (guest, rank), turn in zip(recvs, turns, strict=True):
            if turn // at_once == index:
                p2p.send(grads[guest].contiguous(), rank)
        arriving = sends[index * at_once : (index + 1) * at_once]
        for row, (_, rank) in zip(rows, arriving, strict=False):
            p2p.recv(row, rank)
        p2p.start()
        if index == 0:
            yield
        p2p.finish()
        for at, (row, (home, _)) in enumerate(zip(rows, arriving, strict=False), index * at_once):  # a fixed order
            if at == 0 or sends[at - 1][0] != home:
                total.copy_(row)
            else:
                total += row
            if at + 1 == len(sends) or sends[at + 1][0] != home:
                add(home, total)


class Batches:
    """The batches of one transfer.

    Every transfer of a group has a number, the same on all ranks, since they all start the same ones in the same order.
    Backends that know tags (gloo) tell transfers apart by it, so that one may go on while another has begun.

    Args:
        group: whose ranks exchange chunks.
        label: what is moved, in errors.
        timeout: seconds to wait for a peer.
    """

    _count: ClassVar[Counter[str]] = Counter()

    def __init__(self, group: dist.ProcessGroup, *, label: str, timeout: float) -> None:
        self.group, self.label, self.timeout = group, label, timeout
        self._count[group.group_name] += 1
        self.tag = self._count[group.group_name] % (1 << 30)

    def next(self, name: str) -> _Batch:
        return _Batch(self, name)


class _Batch:
    """Sends and receives that are posted together, each with its peer, so that a failed wait can say whose it was."""

    def __init__(self, of: Batches, name: str) -> None:
        self.group, self.label, self.timeout, self.tag, self._name = of.group, of.label, of.timeout, of.tag, name
        self.ops: list[dist.P2POp] = []
        self.peers: list[tuple[str, int, int]] = []  # ("send" or "receive", rank in the group, bytes)

    def send(self, tensor: Tensor, rank: int) -> None:
        self._add(dist.isend, "send to", tensor, rank)

    def recv(self, tensor: Tensor, rank: int) -> None:
        self._add(dist.irecv, "receive from", tensor, rank)

    def _add(self, op: Callable[..., dist.Work], what: str, tensor: Tensor, rank: int) -> None:
        peer = dist.get_global_rank(self.group, rank)
        self.ops.append(dist.P2POp(op, tensor, peer, self.group, self.tag))
        self.peers.append((what, rank, tensor.numel() * tensor.element_size()))

    def start(self) -> None:
        """Post the batch."""
        self._started = time.monotonic()
        self._works: list[dist.Work] = []
        if self.ops:
            with self._named(lambda: 0):
                self._works = dist.batch_isend_irecv(self.ops)

    def finish(self) -> None:
        """Wait for all of it."""
        done = 0
        with self._named(lambda: done):
            for work in self._works:
                _wait(work, self.ops[0].tensor, self.timeout)
                done += 1

    @contextlib.contextmanager
    def _named(self, done: Callable[[], int]) -> Iterator[None]:
        """An error says whose transfer failed."""
        try:
            yield
        except RuntimeError as error:
            what, peer, size = self.peers[min(done(), len(self.peers) - 1)]
            raise TransferError(
                f"{self.label}: {self._name} failed on rank {self.group.rank()} of {self.group.size()} after "
                f"{time.monotonic() - self._started:.1f} s (timeout {self.timeout:g} s), waiting to {what} rank {peer} "
                f"({size} bytes): expected {len(self.peers)} transfers, {done()} were seen. Rank {peer} died, hangs, "
                f"or did not take part. Cause: {error}"
            ) from error


def _wait(work: dist.Work, tensor: Tensor, timeout: float) -> None:
    """On a GPU the stream waits and the process group's own timeout holds; the host must run ahead."""
    if tensor.is_cuda:
        work.wait()
    else:
        work.wait(timeout=timedelta(seconds=timeout))


def finish(work: dist.Work, tensor: Tensor, group: dist.ProcessGroup, *, what: str, label: str, timeout: float) -> None:
    """Wait for a collective of the whole ``group`` over ``tensor``.

    Raises:
        TransferError: naming ``label`` and the ranks of the group, when one dies or does not take part in time.
    """
    start = time.monotonic()
    try:
        _wait(work, tensor, timeout)
    except RuntimeError as error:
        raise TransferError(
            f"{label}: {what} failed on rank {group.rank()} of {group.size()} after {time.monotonic() - start:.1f} s "
            f"(timeout {timeout:g} s): expected all of ranks {dist.get_process_group_ranks(group)} (in the job), one "
            f"died, hangs, or did not take part. Cause: {error}"
        ) from error
