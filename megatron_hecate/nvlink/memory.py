"""Addresses of a layer's transfers, in the kernels' format (``kernels/schedule.cuh``)."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from megatron_hecate.comm.transport import LayerBuffer
from megatron_hecate.nvlink.tables import part_size

MAX_RANKS: int = 72  # ranks of one NVLink domain; the same constant as in kernels/schedule.cuh
MAX_STEPS: int = 4  # progress of a transfer at most
LARGEST: int = 2**32 - 256  # bytes of a chunk, which kernels count in 32 bits
CHUNKS: tuple[str, ...] = ("send", "slots", "parts", "stripes")

TRANSFER = np.dtype(
    [
        ("progress", "<u8"),
        ("distance", "<i8", MAX_RANKS),
        ("arrived", "<u8"),
        ("failure", "<u8"),
        ("epoch", "<u8"),
        ("timeout", "<u8"),
        ("table", "<u8"),
        ("homes", "<u8"),
        ("ends", "<u8"),
        *((name, "<u8", 2) for name in CHUNKS),
        *((name, "<u4") for name in ("size", "tensors", "rank", "world")),
    ]
)
FAILURE = np.dtype([(name, "<u4") for name in ("failed", "rank", "peer", "expected", "seen", "id")])


class Memory(NamedTuple):
    """Addresses of a layer's memory in one direction on this rank.

    Args:
        homes: addresses of the tensors of each own expert: parameters in a spAG, main gradients in
            a spRS; 0 for an expert that has none.
        sizes: size of each tensor of an expert, in bytes for a spAG, else in elements.
        chunks: address of the first chunk and bytes from chunk to chunk, for each of `CHUNKS`.
        table: address of the plan's table, see `tables`; 0 if it is not known yet.
    """

    homes: tuple[tuple[int, ...], ...]
    sizes: tuple[int, ...]
    chunks: tuple[tuple[int, int], ...]
    table: int = 0


@dataclasses.dataclass(frozen=True, eq=False)
class Signals:
    """Addresses of progress counters and failure record, and the timeout.

    All addresses are in the address space of this rank. All ranks have the same layout of memory:
    the distance of a peer's counters from this rank's is that of all of its memory.

    Args:
        rank: number of this rank in the domain.
        progress: address of each rank's progress counters, one u32 for each rank of the domain.
        arrived: address of ``MAX_STEPS`` u32 counters of this rank's thread blocks, initially 0.
        epoch: address of the u32 from which the positions of launches count.
        failure: address of this rank's `FAILURE` record, initially 0.
        timeout: seconds per wait.
        exchanges: address of the counters of exchanges of loads, initially 0: one u32 for each rank
            of the domain, then one; 0 for none.
    """

    rank: int
    progress: Sequence[int]
    arrived: int
    epoch: int
    failure: int
    timeout: float
    exchanges: int = 0

    @cached_property
    def header(self) -> np.ndarray:
        """A `TRANSFER` without the memory of a layer, [1]."""
        transfer = np.zeros(1, TRANSFER)
        own_progress = self.progress[self.rank]
        transfer["progress"] = own_progress
        for peer, address in enumerate(self.progress):
            transfer["distance"][0, peer] = address - own_progress
        transfer["arrived"] = self.arrived
        transfer["failure"] = self.failure
        transfer["epoch"] = self.epoch
        transfer["timeout"] = round(self.timeout * 1e9)
        transfer["rank"] = self.rank
        transfer["world"] = len(self.progress)
        return transfer

    def of_exchange(self, address: int, size: int) -> np.ndarray:
        """Return the description of exchanges of loads in two buffers of ``size`` bytes, [1]."""
        transfer = self.header.copy()
        transfer["progress"] = self.exchanges
        transfer["arrived"] = self.exchanges + 4 * MAX_RANKS
        transfer["slots"] = address, size
        return transfer


class SharedLayout(NamedTuple):
    """Division of the buffer that peers read, in one direction: chunks, then stripe buffers.

    Args:
        num_chunks: own experts that are sent, or parts of sums by slot.
        stride: bytes from chunk to chunk.
        stripe_stride: bytes from stripe buffer to stripe buffer.
    """

    num_chunks: int
    stride: int
    stripe_stride: int

    @classmethod
    def of_fetch(cls, num_homes: int, size: int, num_carriers: int) -> SharedLayout:
        """Divide the buffer for a spAG of chunks of ``size`` bytes."""
        stripe = part_size(size, num_carriers)
        return cls(num_homes, aligned_bytes(size), aligned_bytes(stripe))

    @classmethod
    def of_return(cls, num_slots: int, elements: int, num_carriers: int) -> SharedLayout:
        """Divide the buffer for a spRS of chunks of ``elements``; sums are fp32."""
        # The sum over a single replica is no part.
        part, stripe = (4 * part_size(elements, count) for count in (2, num_carriers))
        return cls(num_slots, aligned_bytes(part), aligned_bytes(stripe))

    @property
    def stripes_begin(self) -> int:
        """Bytes before the stripe buffers."""
        return self.num_chunks * self.stride

    def size(self, num_stripes: int) -> int:
        """Return the bytes of the buffer with ``num_stripes`` stripe buffers."""
        return self.stripes_begin + num_stripes * self.stripe_stride

    def chunks(self, address: int) -> tuple[tuple[int, int], tuple[int, int]]:
        """Return first address and stride of chunks and stripe buffers of a buffer's address."""
        return (address, self.stride), (address + self.stripes_begin, self.stripe_stride)


def check_chunks(layers: Sequence[LayerBuffer]) -> None:
    """Raise a ValueError if the kernels cannot count the bytes of an expert."""
    size = max(layer.chunk_bytes for layer in layers)
    if size > LARGEST:
        raise ValueError(
            f"transport nvlink: an expert has {size} bytes, at most {LARGEST} are supported; use "
            "--moe-fssdp-transport p2p"
        )


def places_of(chunks: Sequence[Tensor]) -> tuple[int, int]:
    """Return the address of the first of ``chunks``, and bytes from chunk to chunk."""
    first = chunks[0]
    return first.data_ptr(), LayerBuffer.aligned(len(first), first.dtype)


def aligned_bytes(size: int) -> int:
    """Return ``size``, padded to the alignment of chunks."""
    return LayerBuffer.aligned(size, torch.uint8)


def description_bytes(memory: Memory) -> int:
    """Return the bytes of a description."""
    return TRANSFER.itemsize + (8 * len(memory.homes) + 4) * len(memory.sizes)


def describe(memory: Memory, signals: Signals, address: int) -> np.ndarray:
    """Return the description of a layer's transfers, uint8, that lies at ``address``.

    A `TRANSFER` is followed by the addresses of the own experts' tensors, and by their ends in a
    chunk.
    """
    transfer = signals.header.copy()
    homes = np.array(memory.homes, np.uint64)
    ends = np.cumsum(memory.sizes).astype(np.uint32)
    transfer["homes"] = address + TRANSFER.itemsize
    transfer["ends"] = address + TRANSFER.itemsize + homes.nbytes
    transfer["size"] = ends[-1]
    transfer["tensors"] = len(memory.sizes)
    transfer["table"] = memory.table
    for name, chunks in zip(CHUNKS, memory.chunks, strict=True):
        transfer[name] = chunks
    return np.concatenate([part.view(np.uint8).ravel() for part in (transfer, homes, ends)])
