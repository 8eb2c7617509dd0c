"""The protocol of transports: callers do not depend on the transport in use.

| call | data | before | after |
|---|---|---|---|
| `fetch` (spAG) | weights | every expert on its home | and in every slot of a replica |
| `return_gradients` (spRS) | gradients | in every slot of a replica | their sum added on the home |

Both calls start the transfer and return a `Transfer`, which the caller waits for where the result
is used. All ranks of the group start the same transfers in the same order.

A `TransferPlan` lists the copies: sender, expert, receiver, slot. A *chunk* is one expert's
parameters laid end to end. `index` counts a rank's own experts, `slot` its replica slots, both from
0. Example: E = 4 experts on R = 2 ranks; expert 0 has a replica in the second of rank 1's two
slots::

    table = [[0, 1, -1, -1],      copies = (Copy(home=0, index=0, rank=1, slot=1),)
             [2, 3, -1,  0]]
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import NamedTuple, Protocol

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_hecate.comm.transfer import Transfer
from megatron_hecate.plan import EMPTY, Placement

ALIGNMENT: int = 256  # bytes; copies and GEMMs are fastest at this alignment


class Copy(NamedTuple):
    """One replica, described identically on all ranks.

    Args:
        home: rank that owns the expert.
        index: number of the expert among the home's own experts.
        rank: rank that holds the replica.
        slot: slot of the replica on ``rank``.
    """

    home: int
    index: int  # type: ignore[assignment]  # hides that of tuples
    rank: int
    slot: int


@dataclasses.dataclass(frozen=True)
class TransferPlan:
    """All copies of one layer that are moved together, seen from one rank.

    Args:
        rank: this rank.
        copies: copies of all ranks, sorted by expert, then rank. Every transport keeps this order.
        covered: numbers of slots and own experts that launches cover in any plan, as a CUDA graph
            needs; ``None`` if launches cover the copies only.
    """

    rank: int
    copies: tuple[Copy, ...]
    covered: tuple[int, int] | None = None

    @classmethod
    def from_placement(
        cls, placement: Placement, rank: int, covered: tuple[int, int] | None = None
    ) -> TransferPlan:
        """Plan the fetch of all replicas of ``placement``, which is the same on all ranks."""
        table = placement.table
        home = placement.home
        ranks = np.arange(len(table))[:, None]
        is_home = (table != EMPTY) & (home[table] == ranks)
        index = np.empty(len(home), np.int64)
        index[table[is_home]] = (np.cumsum(is_home, axis=1) - 1)[is_home]
        holder, slot = np.nonzero((table != EMPTY) & ~is_home)
        expert = table[holder, slot]
        order = np.lexsort((holder, expert))
        expert = expert[order]
        holder = holder[order]
        replica_slot = slot[order] - is_home.sum(axis=1)[holder]
        fields = (home[expert], index[expert], holder, replica_slot)
        rows = zip(*(field.tolist() for field in fields), strict=True)
        return cls(rank, tuple(map(Copy._make, rows)), covered)

    def without(self, transfers: TransferPlan) -> TransferPlan:
        """Return the plan of the copies that ``transfers`` does not have: the late replicas."""
        copies = set(transfers.copies)
        return TransferPlan(self.rank, tuple(copy for copy in self.copies if copy not in copies))

    @cached_property
    def sends(self) -> tuple[tuple[int, int], ...]:
        """(index, destination rank) of every chunk that this rank sends in a fetch."""
        return tuple((copy.index, copy.rank) for copy in self.copies if copy.home == self.rank)

    @cached_property
    def receives(self) -> tuple[tuple[int, int], ...]:
        """(slot, source rank) of every chunk that this rank receives in a fetch."""
        return tuple((copy.slot, copy.home) for copy in self.copies if copy.rank == self.rank)

    @cached_property
    def turns(self) -> tuple[int, ...]:
        """For each of `receives`, the number of chunks that its home sends before it."""
        num_sent: Counter[int] = Counter()  # by home
        turns = []
        for copy in self.copies:
            if copy.rank == self.rank:
                turns.append(num_sent[copy.home])
            num_sent[copy.home] += 1
        return tuple(turns)

    @cached_property
    def replicated(self) -> tuple[int, ...]:
        """Indices of this rank's own experts that have a replica elsewhere, ascending."""
        if self.covered is not None:
            return tuple(range(self.covered[1]))
        return tuple(sorted({index for index, _ in self.sends}))

    @cached_property
    def slots(self) -> tuple[int, ...]:
        """This rank's slots that receive a replica, ascending."""
        if self.covered is not None:
            return tuple(range(self.covered[0]))
        return tuple(sorted(slot for slot, _ in self.receives))


@dataclasses.dataclass(frozen=True)
class LayerBuffer:
    """Sizes of one layer's replicas, from which buffer sizes follow.

    Args:
        slots: replicas that this rank can hold.
        elements: elements of one chunk.
        dtype: data type of the weights.
        homes: experts that this rank owns; each may be sent.
        stored_bytes: bytes of one chunk's weights where they are quantized and sent as bytes;
            else 0.
        grad_dtype: data type in which gradients of replicas are accumulated and sent.
    """

    slots: int
    elements: int
    dtype: torch.dtype
    homes: int
    stored_bytes: int = 0
    grad_dtype: torch.dtype = torch.float32

    @cached_property
    def weights(self) -> tuple[int, torch.dtype]:
        """Elements and data type of one chunk's weights as they are sent."""
        if self.stored_bytes:
            return self.stored_bytes, torch.uint8
        return self.elements, self.dtype

    @property
    def chunk_bytes(self) -> int:
        """Bytes of one replica's weights."""
        elements, dtype = self.weights
        return elements * dtype.itemsize

    @property
    def weight_bytes(self) -> int:
        return self.slots * self.aligned(*self.weights)

    @property
    def grad_bytes(self) -> int:
        return self.slots * self.aligned(self.elements, self.grad_dtype)

    @staticmethod
    def aligned(elements: int, dtype: torch.dtype) -> int:
        """Return the bytes of a chunk, padded to `ALIGNMENT`."""
        return -(-elements * dtype.itemsize // ALIGNMENT) * ALIGNMENT


class HomeGradients(Protocol):
    """Destination of the sums of a spRS."""

    def main_grads(self, index: int) -> Sequence[Tensor] | None:
        """Return the gradients of own expert ``index`` to add its sum to, or ``None``.

        They are all fp32 or all bf16; bf16 gradients are added to in fp32 and rounded once.
        """

    def add(self, index: int, total: Tensor) -> None:
        """Add the sum ``total``, [elements], to the gradient of own expert ``index``.

        Called while the transfer runs or is waited for, where `main_grads` returned ``None`` or the
        transport does not use it. ``total`` is reused afterwards.
        """


class LoadExchange(NamedTuple):
    """Exchange of a layer's loads between all ranks, by the kernels after the gate.

    Args:
        description: its description on the device, the same in every launch.
        number: of the layer in failures.
        check: raises a `TransferError` if a peer did not send its loads in time.
    """

    description: Tensor
    number: int
    check: Callable[[], None]


class Transport(Protocol):
    """Transport of one FSSDP group's replicas.

    Attributes:
        name: "p2p" or "nvlink".
        scatters: True if receivers share the work of copying and each node receives one copy; False
            if homes send all copies.
        is_capturable: True if a CUDA graph can hold its transfers for changing plans.
        group: process group of the ranks, used by transfers only, so that copies do not queue
            behind tokens.
    """

    name: str
    scatters: bool
    is_capturable: bool
    group: dist.ProcessGroup

    def extra_bytes(self, layers: Sequence[LayerBuffer]) -> int:
        """Return the bytes that the transport needs in addition to the buffers of replicas."""

    def allocate(self, size: int, layers: Sequence[LayerBuffer], device: torch.device) -> Tensor:
        """Allocate [size] uint8 for the buffers of replicas, in memory the transport can reach.

        Collective: all ranks of the group call, once per model, before the first activations.
        Allocates the transport's own `extra_bytes` as well.
        """

    def release(self) -> None:
        """Release the memory of `allocate` at the end of an attempt of the job.

        A transfer in flight keeps the memory that it uses.
        """

    def exchange_loads(self, num_experts: int, *, label: str) -> LoadExchange | None:
        """Return the exchange of a layer's loads; ``None``, on all ranks, if there is none.

        All ranks launch the same exchanges, in the same order, on one stream.

        Raises:
            TransferError: a peer died or did not answer in time.
        """

    def write(self, plans: Mapping[str, TransferPlan]) -> None:
        """Write what a CUDA graph's transfers of the next iteration read.

        Args:
            plans: plan of each layer, by its name.
        """

    def prepare(self, plan: TransferPlan) -> None:
        """Compute and cache the steps of a fetch and a return of ``plan``.

        Any thread may call it at any time: it neither communicates nor calls CUDA.
        """

    def fetch(
        self,
        plan: TransferPlan,
        homes: Sequence[Sequence[Tensor]],
        slots: Sequence[Tensor],
        *,
        label: str,
    ) -> Transfer:
        """Begin a spAG.

        Args:
            plan: copies of the layer, seen from this rank.
            homes: parameters of each own expert as they are stored, all of one data type; they must
                not change before the transfer is over.
            slots: chunk of every slot, of the same data type, in the memory of `allocate`; no other
                writer until the transfer is over.
            label: name of the layer.

        Raises (also from `Transfer.wait`):
            TransferError: a peer died or did not answer in time. Not raised for messages of NCCL,
                see `TransferError`.
        """

    def return_gradients(
        self, plan: TransferPlan, slots: Sequence[Tensor], homes: HomeGradients, *, label: str
    ) -> Transfer:
        """Begin a spRS.

        The gradients of one expert are summed in fp32 and in a fixed order, so that the result is
        bitwise repeatable.

        Args:
            plan: copies of the layer, seen from this rank.
            slots: gradients of every slot, [elements], in the memory of `allocate`; fp32, or bf16
                where fused GEMMs add to bf16.
            homes: destination of the sums.
            label: name of the layer.
        """


def chunks_in(memory: Tensor, count: int, elements: int, dtype: torch.dtype) -> list[Tensor]:
    """Return ``count`` chunks, [elements] each, as tensors over ``memory``, uint8.

    The tensors have a version counter of their own: a replica's weights are written while autograd
    keeps them for the backward (lifetime ``layer`` fetches the same weights to the same place
    again), and its version check must not see that.
    """
    stride = LayerBuffer.aligned(elements, dtype) // dtype.itemsize
    begin = memory.storage_offset() // dtype.itemsize
    chunks = torch.empty(0, dtype=dtype, device=memory.device).set_(
        memory.untyped_storage(), begin, (count, elements), (stride, 1)
    )
    return [chunks[i] for i in range(count)]
