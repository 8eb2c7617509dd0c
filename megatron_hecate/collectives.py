"""SparseAllGather and SparseReduceScatter: expert weights out to guests, guest gradients back home.

| op | before | after |
|---|---|---|
| ``hecate::sparse_all_gather`` | every expert's chunk on its home | and on every rank that hosts a guest of it |
| ``hecate::sparse_reduce_scatter`` | a gradient chunk on every guest | their sum on the home |

Both are ``torch.library`` ops, each registered as the other's adjoint, so autograd pairs them. A *chunk* is one
expert's parameters laid end to end. The `Route` of a rank says what it sends and receives; every transport runs the
same route (here: `p2p`). Guests' gradients are summed in fp32 and in order of rank, so the sum is bitwise the same in
every run.

The ops wait for their result. Training does not: `start_gather` and `start_reduce` work in memory given to them and
return a `Transfer`, which is waited for where its result is used.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _resolve_process_group

from megatron_hecate import p2p
from megatron_hecate.p2p import Batches
from megatron_hecate.plan.placement import Placement
from megatron_hecate.schedule import Loan
from megatron_hecate.sm import Sm
from megatron_hecate.transfer import Transfer


@dataclasses.dataclass(frozen=True)
class Route:
    """One rank's part of a spAG; a spRS runs it backwards.

    Args:
        sends: (home index, destination rank) of every chunk this rank lends, by expert, then destination. A home
            index counts the rank's own experts from 0.
        recvs: (guest index, source rank) of every chunk it hosts, in the same order. A guest index counts its guests.
        experts: the expert of every guest index.
        turns: for every one of ``recvs``, how many chunks its home lends before this one.
    """

    sends: tuple[tuple[int, int], ...]
    recvs: tuple[tuple[int, int], ...]
    experts: tuple[int, ...]
    turns: tuple[int, ...]

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
        lent: Counter[int] = Counter()
        turns = []
        for expert, host, _ in guests:
            home = int(placement.home[expert])
            if host == rank:
                turns.append(lent[home])
            lent[home] += 1
        return cls(
            sends=tuple((homes.index(e), host) for e, host, _ in guests if placement.home[e] == rank),
            recvs=tuple((experts.index(e), int(placement.home[e])) for e, host, _ in guests if host == rank),
            experts=experts,
            turns=tuple(turns),
        )

    @property
    def lent(self) -> tuple[int, ...]:
        """Home indices with at least one guest elsewhere, ascending."""
        return tuple(sorted({index for index, _ in self.sends}))

    def flat(self) -> tuple[list[int], list[int], list[int]]:
        """``sends``, ``recvs`` and ``turns`` as the ops' integer lists."""
        return [x for pair in self.sends for x in pair], [x for pair in self.recvs for x in pair], list(self.turns)


@dataclasses.dataclass(frozen=True, eq=False)
class Fused:
    """What the ``sm`` transport needs to know of one transfer beside the route: all ranks' part in it.

    Args:
        sm: the transport.
        loans: all guests that are moved, of all ranks.
        rows: the layer's frame, row by row: of weights or of gradients.
        outbox: memory for the chunks that this rank lends.
        relays: memory for stripes that this rank holds for others, of the dtype of ``rows``; with several domains.
    """

    sm: Sm
    loans: Sequence[Loan]
    rows: Sequence[Tensor]
    outbox: Sequence[Tensor]
    relays: Sequence[Tensor] = ()


def start_gather(
    homes: Sequence[Sequence[Tensor]],
    route: Route,
    guests: Sequence[Tensor],
    group: dist.ProcessGroup,
    *,
    fused: Fused | None = None,
    label: str,
    timeout: float,
    timed: bool = False,
) -> Transfer:
    """Begin to fetch this rank's guests. Args as `sparse_all_gather`, and:

    Args:
        guests: memory for each guest in the order of ``route.experts``, [chunk], contiguous; nothing else may write
            it, nor write the homes, until the transfer is over.
        fused: for the ``sm`` transport; ``None`` moves by `p2p`.
        timed: whether the transfer will be asked how long it took.
    """
    if fused is not None:
        steps = fused.sm.gather(
            homes, fused.loans, fused.outbox, fused.rows, fused.relays, label=label, timeout=timeout
        )
        device = homes[0][0].device
        return Transfer(steps, device, what="spAG", label=label, timed=timed, queue=fused.sm.queue)
    tensors = [t.detach() for expert in homes for t in expert]
    batches = Batches(group, label=label, timeout=timeout)
    steps = p2p.gather(tensors, len(homes[0]), route.sends, route.recvs, guests, batches=batches)
    return Transfer(steps, tensors[0].device, what="spAG", label=label, timed=timed)


def start_reduce(
    grads: Sequence[Tensor],
    route: Route,
    staging: Sequence[Tensor],
    add: Callable[[int, Tensor], None],
    group: dist.ProcessGroup,
    *,
    fused: Fused | None = None,
    totals: Callable[[int], Sequence[Tensor] | None] = lambda home: None,
    label: str,
    timeout: float,
) -> Transfer:
    """Begin to send this rank's guest gradients home, and to sum those that come in.

    Args:
        grads: gradients [chunk] in the order of ``route.experts``; they must stay as they are until it is over.
        route, group, label, timeout: as `sparse_reduce_scatter`.
        staging: n >= 2 chunks of memory, of the dtype of ``grads``: chunks arrive n - 1 at a time and are summed in
            the last one. All ranks must give the same n.
        add: called with each lent home's index and sum [chunk], ascending, while the transfer runs or is waited for.
        fused: for the ``sm`` transport, which needs no staging; ``None`` moves by `p2p`.
        totals: for ``sm``: looks up fp32 memory to which a lent home's sum is added, instead of calling ``add``.
    """
    if fused is not None:
        steps = fused.sm.reduce(fused.rows, fused.loans, totals, add, fused.relays, label=label, timeout=timeout)
        return Transfer(steps, fused.rows[0].device, what="spRS", label=label, queue=fused.sm.queue)
    batches = Batches(group, label=label, timeout=timeout)
    steps = p2p.reduce(grads, route.sends, route.recvs, route.turns, staging, add, batches=batches)
    return Transfer(steps, staging[0].device, what="spRS", label=label)


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
    sends, recvs, _ = route.flat()
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
    sends, recvs, _ = route.flat()
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
    guests = homes[0].new_empty(len(recvs) // 2, sum(t.numel() for t in homes[:parts]))
    batches = Batches(_resolve_process_group(group), label=label, timeout=timeout)
    for _ in p2p.gather([t.detach() for t in homes], parts, _pairs(sends), _pairs(recvs), guests, batches=batches):
        pass
    return guests


@torch.library.impl(_library, "sparse_reduce_scatter", "CompositeExplicitAutograd")
def _sparse_reduce_scatter_p2p(
    grads: Tensor, sends: list[int], recvs: list[int], group: str, label: str, timeout: float
) -> Tensor:
    lent = sorted(set(sends[::2]))
    total = grads.new_zeros(len(lent), grads.shape[1], dtype=torch.promote_types(grads.dtype, torch.float32))
    staging = total.new_empty(len(sends) // 2 + 1, grads.shape[1], dtype=grads.dtype)  # all at once: no turns

    def add(home: int, chunk: Tensor) -> None:
        total[lent.index(home)] = chunk

    turns = [0] * (len(recvs) // 2)
    batches = Batches(_resolve_process_group(group), label=label, timeout=timeout)
    for _ in p2p.reduce(grads, _pairs(sends), _pairs(recvs), turns, staging, add, batches=batches):
        pass
    return total


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
