"""SparseAllGather and SparseReduceScatter: expert weights out to guests, guest gradients back home.

| op | before | after |
|---|---|---|
| ``hecate::sparse_all_gather`` | every expert's chunk on its home | and on every rank that hosts a guest of it |
| ``hecate::sparse_reduce_scatter`` | a gradient chunk on every guest | their sum on the home |

Both are ``torch.library`` ops, each registered as the other's adjoint, so autograd pairs them. A *chunk* is one
expert's parameters laid end to end. The `Route` of a rank says what it sends and receives; every transport runs the
same route. Guests' gradients are summed in fp32 and in order of rank, so the sum is bitwise the same in every run.
The implementation here is the ``p2p`` transport: plain ``torch.distributed`` point-to-point on any backend.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _resolve_process_group

from megatron_hecate.plan.placement import Placement


class TransferError(RuntimeError):
    """A chunk did not arrive: a peer died, or did not take part in time."""


@dataclasses.dataclass(frozen=True)
class Route:
    """One rank's part of a spAG; a spRS runs it backwards.

    Args:
        sends: (home index, destination rank) of every chunk this rank lends, by expert, then destination. A home
            index counts the rank's own experts from 0.
        recvs: (guest index, source rank) of every chunk it hosts, in the same order. A guest index counts its guests.
        experts: the expert of every guest index.
    """

    sends: tuple[tuple[int, int], ...]
    recvs: tuple[tuple[int, int], ...]
    experts: tuple[int, ...]

    @classmethod
    def of(cls, placement: Placement, rank: int, *, beyond: Placement | None = None) -> Route:
        """The route of ``rank``; all ranks derive theirs from the same placement, so sends and receives pair up.

        With ``beyond``, only of those guests that this placement does not have.
        """
        homes = [int(e) for e in placement.table[rank] if e >= 0 and placement.home[e] == rank]
        guests = placement.guests
        if beyond is not None:
            guests = tuple(g for g in guests if not beyond.holders[g[0], g[1]])
        mine = sorted((slot, expert) for expert, host, slot in guests if host == rank)
        experts = tuple(expert for _, expert in mine)
        return cls(
            sends=tuple((homes.index(e), host) for e, host, _ in guests if placement.home[e] == rank),
            recvs=tuple((experts.index(e), int(placement.home[e])) for e, host, _ in guests if host == rank),
            experts=experts,
        )

    @property
    def lent(self) -> tuple[int, ...]:
        """Home indices with at least one guest elsewhere, ascending."""
        return tuple(sorted({index for index, _ in self.sends}))

    def flat(self) -> tuple[list[int], list[int]]:
        """``sends`` and ``recvs`` as the op's integer lists."""
        return [x for pair in self.sends for x in pair], [x for pair in self.recvs for x in pair]


def sparse_all_gather(
    homes: Sequence[Sequence[Tensor]], route: Route, group: dist.ProcessGroup, *, label: str, timeout: float
) -> Tensor:
    """Fetch this rank's guests.

    Args:
        homes: the parameters of each of this rank's own experts; every expert has the same tensors in the same order.
        route: this rank's part; every rank of the group must call with its part of the same placement.
        group: the FSSDP group.
        label: what is fetched, for error messages ("layer 3").
        timeout: seconds to wait for any one chunk. With NCCL the group's own timeout holds: waiting on the host for
            less would stop the stream from running ahead.

    Returns:
        [guests, chunk] the fetched chunks, in the order of ``route.experts``. Differentiable: the backward is
        `sparse_reduce_scatter`, whose sum is the gradient of ``homes``.

    Raises:
        TransferError: when a peer dies or does not answer in time.
    """
    sends, recvs = route.flat()
    tensors = [t for expert in homes for t in expert]
    return torch.ops.hecate.sparse_all_gather(
        tensors, len(homes[0]), sends, recvs, group.group_name, label, float(timeout)
    )


def sparse_reduce_scatter(
    grads: Tensor, route: Route, group: dist.ProcessGroup, *, label: str, timeout: float
) -> Tensor:
    """Send this rank's guest gradients home and sum those that come in.

    Args:
        grads: [guests, chunk] gradients, in the order of ``route.experts``. Any floating dtype; it is the wire dtype.
        route: this rank's part, as in `sparse_all_gather`.
        group: the FSSDP group.
        label: what is reduced, for error messages.
        timeout: seconds, as in `sparse_all_gather`.

    Returns:
        [len(route.lent), chunk] fp32 (fp64 for fp64 input): for each lent home, its guests' sum in order of rank.

    Raises:
        TransferError: when a peer dies or does not answer in time.
    """
    sends, recvs = route.flat()
    return torch.ops.hecate.sparse_reduce_scatter(grads, sends, recvs, group.group_name, label, float(timeout))


_TRANSFER = "int[] sends, int[] recvs, str group, str label, float timeout"
_library = torch.library.Library("hecate", "DEF")
_library.define(f"sparse_all_gather(Tensor[] homes, int parts, {_TRANSFER}) -> Tensor")
_library.define(f"sparse_reduce_scatter(Tensor grads, {_TRANSFER}) -> Tensor")


def _pairs(flat: Sequence[int]) -> list[tuple[int, int]]:
    return list(zip(flat[::2], flat[1::2], strict=True))


@torch.library.impl(_library, "sparse_all_gather", "CompositeExplicitAutograd")
def _sparse_all_gather_p2p(
    homes: list[Tensor], parts: int, sends: list[int], recvs: list[int], group: str, label: str, timeout: float
) -> Tensor:
    p2p = _PointToPoint(group, label=label, timeout=timeout)
    sizes = [t.numel() for t in homes[:parts]]
    received = _pairs(recvs)
    guests = homes[0].new_empty(len(received), sum(sizes))
    for home, rank in _pairs(sends):
        for tensor in homes[home * parts : (home + 1) * parts]:
            p2p.send(tensor.detach().contiguous().view(-1), rank)
    for guest, rank in received:
        for part in guests[guest].split(sizes):
            p2p.recv(part, rank)
    p2p.run("sparse_all_gather")
    return guests


@torch.library.impl(_library, "sparse_reduce_scatter", "CompositeExplicitAutograd")
def _sparse_reduce_scatter_p2p(
    grads: Tensor, sends: list[int], recvs: list[int], group: str, label: str, timeout: float
) -> Tensor:
    p2p = _PointToPoint(group, label=label, timeout=timeout)
    for guest, rank in _pairs(recvs):
        p2p.send(grads[guest].contiguous(), rank)
    lenders = _pairs(sends)
    staged = grads.new_empty(len(lenders), grads.shape[1])
    for row, (_, rank) in zip(staged, lenders, strict=True):
        p2p.recv(row, rank)
    p2p.run("sparse_reduce_scatter")
    lent = sorted({home for home, _ in lenders})
    total = grads.new_zeros(len(lent), grads.shape[1], dtype=torch.promote_types(grads.dtype, torch.float32))
    for row, (home, _) in zip(staged, lenders, strict=True):  # by expert, then rank: a fixed order
        total[lent.index(home)] += row
    return total


class _PointToPoint:
    """One batch of sends and receives, each with its peer, so that a failed wait can say whose it was."""

    def __init__(self, group: str, *, label: str, timeout: float) -> None:
        self.group = _resolve_process_group(group)
        self.label, self.timeout = label, timeout
        self.ops: list[dist.P2POp] = []
        self.peers: list[tuple[str, int, int]] = []  # ("send" or "receive", rank in the group, bytes)

    def send(self, tensor: Tensor, rank: int) -> None:
        self._add(dist.isend, "send to", tensor, rank)

    def recv(self, tensor: Tensor, rank: int) -> None:
        self._add(dist.irecv, "receive from", tensor, rank)

    def _add(self, op: Callable[..., dist.Work], what: str, tensor: Tensor, rank: int) -> None:
        self.ops.append(dist.P2POp(op, tensor, dist.get_global_rank(self.group, rank), self.group))
        self.peers.append((what, rank, tensor.numel() * tensor.element_size()))

    def run(self, name: str) -> None:
        if not self.ops:
            return
        start, done = time.monotonic(), 0
        try:
            works = dist.batch_isend_irecv(self.ops)
            for work in works:
                _wait(work, self.ops[0].tensor, self.timeout)
                done += 1
        except RuntimeError as error:
            what, peer, size = self.peers[min(done, len(self.peers) - 1)]
            raise TransferError(
                f"{self.label}: {name} failed on rank {self.group.rank()} of {self.group.size()} after "
                f"{time.monotonic() - start:.1f} s (timeout {self.timeout:g} s), waiting to {what} rank {peer} "
                f"({size} bytes): expected {len(self.peers)} transfers, {done} were seen. Rank {peer} died, hangs, or "
                f"did not take part. Cause: {error}"
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


def _save_gather(ctx: Any, inputs: tuple, output: Tensor) -> None:
    homes, ctx.parts, *ctx.transfer = inputs
    ctx.shapes = [t.shape for t in homes]


def _gather_backward(ctx: Any, grad: Tensor) -> tuple:
    sends = ctx.transfer[0]
    total = torch.ops.hecate.sparse_reduce_scatter(grad.contiguous(), *ctx.transfer).to(grad.dtype)
    grads = [total.new_zeros(shape) for shape in ctx.shapes]
    sizes = [shape.numel() for shape in ctx.shapes[: ctx.parts]]
    for row, home in zip(total, sorted(set(sends[::2])), strict=True):
        for part, value in enumerate(row.split(sizes)):
            at = home * ctx.parts + part
            grads[at] = value.view(ctx.shapes[at])
    return grads, None, *_no_gradient(ctx.transfer)


def _save_scatter(ctx: Any, inputs: tuple, output: Tensor) -> None:
    grads, *ctx.transfer = inputs
    ctx.dtype = grads.dtype


def _scatter_backward(ctx: Any, grad: Tensor) -> tuple:
    sends, *rest = ctx.transfer
    lent = sorted(set(sends[::2]))
    homes = list(grad.to(ctx.dtype).unbind()) or [grad.new_empty(grad.shape[1], dtype=ctx.dtype)]
    at = [x for home, rank in _pairs(sends) for x in (lent.index(home), rank)]
    return torch.ops.hecate.sparse_all_gather(homes, 1, at, *rest), *_no_gradient(ctx.transfer)


def _no_gradient(inputs: Sequence) -> list:
    """What a backward returns for inputs without gradient: torch takes an empty list for a list of tensors."""
    return [[] if value == [] else None for value in inputs]


torch.library.register_autograd("hecate::sparse_all_gather", _gather_backward, setup_context=_save_gather)
torch.library.register_autograd("hecate::sparse_reduce_scatter", _scatter_backward, setup_context=_save_scatter)
