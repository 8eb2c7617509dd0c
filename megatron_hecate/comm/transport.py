"""What every transport offers, so that no caller needs to know which one it has.

| call | what travels | before | after |
|---|---|---|---|
| `fetch` (spAG) | weights | every expert on its home | and in every slot that holds a replica of it |
| `return_gradients` (spRS) | gradients | a gradient in every such slot | their sum, added on the home |

Both begin at once and return a `Transfer`, which is waited for where its result is used. All ranks of the group start
the same transfers in the same order.

A `TransferPlan` says who sends which expert to whom. A *chunk* is one expert's parameters laid end to end. A rank's own
experts are counted by `index`, its replica slots by `slot`, both from 0. E = 4 experts on R = 2 ranks; expert 0 has a
replica in the second of rank 1's two slots::

    table = [[0, 1, -1, -1],      copies = (Copy(home=0, index=0, rank=1, slot=1),)
             [2, 3, -1,  0]]
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple, Protocol

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_hecate.comm.transfer import Transfer
from megatron_hecate.plan import EMPTY, Placement

ALIGNMENT: int = 256  # bytes; what copies and GEMMs like best


class Copy(NamedTuple):
    """One replica, as all ranks see it.

    Args:
        home: rank that owns the expert.
        index: of the expert among those that the home owns.
        rank: that holds the replica.
        slot: in which it lies there.
    """

    home: int
    index: int  # type: ignore[assignment]  # hides that of tuples
    rank: int
    slot: int


@dataclasses.dataclass(frozen=True)
class TransferPlan:
    """All copies of one layer that travel together, and which rank's part this is.

    Args:
        rank: this rank.
        copies: of all ranks, by expert, then rank: the order in which every transport moves them.
    """

    rank: int
    copies: tuple[Copy, ...]

    @classmethod
    def from_placement(cls, placement: Placement, rank: int) -> TransferPlan:
        """Fetch all replicas of ``placement``. All ranks derive theirs from the same one, so their parts fit."""
        table, home = placement.table, placement.home
        ranks = np.arange(len(table))[:, None]
        is_home = (table != EMPTY) & (home[table] == ranks)
        index = np.empty(len(home), np.int64)
        index[table[is_home]] = (np.cumsum(is_home, axis=1) - 1)[is_home]
        holder, slot = np.nonzero((table != EMPTY) & ~is_home)
        expert = table[holder, slot]
        order = np.lexsort((holder, expert))
        expert, holder, slot = expert[order], holder[order], slot[order]
        parts = home[expert], index[expert], holder, slot - is_home.sum(axis=1)[holder]
        return cls(
            rank, tuple(map(Copy._make, zip(*(part.tolist() for part in parts), strict=True)))
        )

    def without(self, earlier: TransferPlan) -> TransferPlan:
        """Those copies only that ``earlier`` does not have: what is fetched late."""
        known = set(earlier.copies)
        return TransferPlan(self.rank, tuple(copy for copy in self.copies if copy not in known))

    @cached_property
    def sends(self) -> tuple[tuple[int, int], ...]:
        """(index, destination rank) of every chunk that this rank sends."""
        return tuple((copy.index, copy.rank) for copy in self.copies if copy.home == self.rank)

    @cached_property
    def receives(self) -> tuple[tuple[int, int], ...]:
        """(slot, source rank) of every chunk that this rank receives."""
        return tuple((copy.slot, copy.home) for copy in self.copies if copy.rank == self.rank)

    @cached_property
    def turns(self) -> tuple[int, ...]:
        """For each of `receives`, how many chunks its home sends before it."""
        sent: Counter[int] = Counter()
        turns = []
        for copy in self.copies:
            if copy.rank == self.rank:
                turns.append(sent[copy.home])
            sent[copy.home] += 1
        return tuple(turns)

    @cached_property
    def replicated(self) -> tuple[int, ...]:
        """Indices of this rank's own experts that have a replica elsewhere, ascending."""
        return tuple(sorted({index for index, _ in self.sends}))

    @cached_property
    def slots(self) -> tuple[int, ...]:
        """This rank's slots that get a replica, ascending."""
        return tuple(sorted(slot for slot, _ in self.receives))


@dataclasses.dataclass(frozen=True)
class LayerBuffer:
    """Sizes of one layer's replicas, by which buffers are measured.

    Args:
        slots: replicas that this rank can hold.
        elements: of one chunk.
        dtype: of the weights.
        homes: experts that this rank owns, any of which may be sent.
        stored_bytes: of one chunk's weights where they are quantized, and travel as bytes; else 0.
    """

    slots: int
    elements: int
    dtype: torch.dtype
    homes: int
    stored_bytes: int = 0

    @property
    def weights(self) -> tuple[int, torch.dtype]:
        """Elements of one chunk's weights as they travel, and their type."""
        return (
            (self.stored_bytes, torch.uint8) if self.stored_bytes else (self.elements, self.dtype)
        )

    @property
    def chunk_bytes(self) -> int:
        """Of one replica's weights."""
        elements, dtype = self.weights
        return elements * dtype.itemsize

    @property
    def grad_dtype(self) -> torch.dtype:
        """In which gradients are summed, and travel: fp32 for bf16 weights."""
        return torch.promote_types(self.dtype, torch.float32)

    @property
    def weight_bytes(self) -> int:
        return self.slots * self.aligned(*self.weights)

    @property
    def grad_bytes(self) -> int:
        return self.slots * self.aligned(self.elements, self.grad_dtype)

    @staticmethod
    def aligned(elements: int, dtype: torch.dtype) -> int:
        """Bytes of a chunk, rounded up to where the next one may begin."""
        return -(-elements * dtype.itemsize // ALIGNMENT) * ALIGNMENT


class HomeGradients(Protocol):
    """Where the sums that come home go."""

    def main_grads(self, index: int) -> Sequence[Tensor] | None:
        """The fp32 tensors of own expert ``index`` to which its sum may be added in place, or ``None``."""

    def add(self, index: int, total: Tensor) -> None:
        """Take the sum [elements] for own expert ``index``; called where `main_grads` has no memory, or was not used,
        while the transfer runs or is waited for. ``total`` is reused afterwards."""


class Transport(Protocol):
    """Moves one FSSDP group's replicas.

    Attributes:
        name: "p2p" or "nvlink".
        scatters: whether receivers share the work of copying, and one copy goes to each node; else homes send them all.
        group: the ranks, in a process group of its own, so that copies do not queue behind tokens.
    """

    name: str
    scatters: bool
    group: dist.ProcessGroup

    def extra_bytes(self, layers: Sequence[LayerBuffer]) -> int:
        """Memory that it needs beside the buffers of replicas."""

    def allocate(self, size: int, layers: Sequence[LayerBuffer], device: torch.device) -> Tensor:
        """[size] uint8 for the buffers of replicas, where the transport can reach it. All ranks of the group call at
        once, once per model, before the first activations; what `extra_bytes` says comes on top."""

    def release(self) -> None:
        """Let go of what `allocate` gave: the attempt of the job is over. A transfer under way keeps what it uses."""

    def prepare(self, plan: TransferPlan, layer: LayerBuffer) -> None:
        """Work out who copies what to whom, for a fetch and a return of ``plan`` in ``layer`` that may come. Any thread
        may call it, at any time: it communicates nothing, and calls no CUDA."""

    def fetch(
        self,
        plan: TransferPlan,
        homes: Sequence[Sequence[Tensor]],
        slots: Sequence[Tensor],
        *,
        label: str,
        timed: bool = False,
    ) -> Transfer:
        """Begin a spAG.

        Args:
            plan: this rank's part.
            homes: the parameters of each own expert as they are stored, all of one type; they must not change before
                it is over.
            slots: a chunk of such elements for every slot, from what `allocate` gave; nothing else may write them.
            label: name of the layer.
            timed: whether `Transfer.seconds` will be asked for; the same on all ranks. It does not count how long this
                rank waits for others to begin.

        Raises (also from `Transfer.wait`):
            TransferError: when a peer dies or does not answer in time; not for messages of NCCL, see there.
        """

    def return_gradients(
        self, plan: TransferPlan, slots: Sequence[Tensor], homes: HomeGradients, *, label: str
    ) -> Transfer:
        """Begin a spRS. The gradients of one expert are summed in fp32 and in a fixed order: bitwise repeatable.

        Args:
            plan: this rank's part.
            slots: [elements] gradients of every slot, from what `allocate` gave; they are used up.
            homes: takes the sums.
            label: name of the layer.
        """


def chunks_in(memory: Tensor, count: int, elements: int, dtype: torch.dtype) -> list[Tensor]:
    """``count`` chunks [elements] in ``memory`` (uint8): new tensors over it, which count their own versions.

    A replica's weights are written while autograd holds on to them for the backward (lifetime ``layer`` fetches the
    same weights to the same place again), so its version check must not see it.
    """
    apart = LayerBuffer.aligned(elements, dtype) // dtype.itemsize
    storage, begin = memory.untyped_storage(), memory.storage_offset() // dtype.itemsize
    return [
        torch.empty(0, dtype=dtype, device=memory.device).set_(
            storage, begin + i * apart, (elements,), (1,)
        )
        for i in range(count)
    ]
