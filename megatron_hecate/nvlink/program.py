"""Schedules in the kernels' format: one block of descriptors with addresses (`schedule.cuh`)."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import struct
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property

import numpy as np

from megatron_hecate.comm.transport import Copy
from megatron_hecate.nvlink.assembly import (
    ITEM,
    LOCAL,
    STEP_WORDS,
    SUMMED,
    WORD,
    Format,
    MemoryTable,
    assemble,
)
from megatron_hecate.nvlink.pulls import MEMORIES
from megatron_hecate.nvlink.schedule import TransferSchedule
from megatron_hecate.plan.compiled import in_turn

MAX_RANKS: int = 72  # ranks of one NVLink domain; the same constant as in kernels/schedule.cuh
MAX_STEPS: int = 4
TILE: int = 65536  # bytes

COPY = np.dtype(
    [("src", "<u8"), ("dst", "<u8"), ("bytes", "<u8"), ("rank", "<i4"), ("first_tile", "<u4")]
)
SOURCE = np.dtype([("src", "<u8"), ("rank", "<i4"), ("reserved", "<u4")])
SUM = np.dtype(
    [("dst", "<u8"), ("elements", "<u8")]
    + [(name, "<u4") for name in ("first_source", "sources", "first_tile", "flags")]
)
STEP = np.dtype([("items", "<u8"), ("sources", "<u8"), ("count", "<u4"), ("tiles", "<u4")])
TRANSFER = np.dtype(
    [
        ("progress", "<u8"),
        ("progress_at", "<u8", MAX_RANKS),
        ("arrived", "<u8"),
        ("failure", "<u8"),
        ("peers", "<u8", 2),
        ("timeout", "<u8"),
        ("steps", STEP, MAX_STEPS),
        ("num_steps", "<u4"),
        ("begin", "<u4"),
        ("rank", "<i4"),
        ("world", "<i4"),
    ]
)
FAILURE = np.dtype(
    [(name, "<u4") for name in ("failed", "rank", "peer", "expected", "seen", "begin")]
)
ALIGNMENT: int = 16  # alignment of every array in a program, bytes
# The steps as a struct, which takes less time than elements of an array.
_ALL_STEPS = struct.Struct("<" + "QQII" * MAX_STEPS)
assert COPY.itemsize == SUM.itemsize == WORD * ITEM and STEP.itemsize == WORD * STEP_WORDS
_FIELDS: dict[str, int] = {name: field[1] for name, field in (TRANSFER.fields or {}).items()}
_PEERS = _FIELDS["peers"]
_NUM_STEPS = _FIELDS["num_steps"]
_BEGIN = _FIELDS["begin"]
_STEPS = _FIELDS["steps"]

Extent = tuple[int, int]  # address, elements


@dataclasses.dataclass(frozen=True, eq=False)
class Signals:
    """Addresses of progress counters and failure record, and the timeout.

    All addresses are in the address space of this rank. All ranks have the same layout of memory:
    the distance of a peer's counters from this rank's is that of all of its memory.

    Args:
        rank: this rank.
        progress_at: address of each rank's progress counters, one u32 for each rank of the domain,
            in the order of the counters.
        arrived: address of ``MAX_STEPS`` u32 counters of this rank's thread blocks, initially 0.
        failure: address of this rank's `FAILURE` record, initially 0.
        timeout: seconds per wait.
    """

    rank: int
    progress_at: Mapping[int, int]
    arrived: int
    failure: int
    timeout: float

    @cached_property
    def numbers(self) -> dict[int, int]:
        """Number of each rank's counter."""
        return {rank: number for number, rank in enumerate(self.progress_at)}

    @cached_property
    def by_rank(self) -> np.ndarray:
        """See `assembly.MemoryTable`."""
        table = np.zeros((1 + max(self.numbers), 2), np.int64)
        for rank, number in self.numbers.items():
            table[rank] = (self.progress_at[rank] - self.progress_at[self.rank], number)
        table[self.rank, 1] = LOCAL
        return table

    @cached_property
    def header(self) -> bytes:
        """A `TRANSFER` without peers and steps, padded to `ALIGNMENT`."""
        transfer = np.zeros((), TRANSFER)
        transfer["progress"] = self.progress_at[self.rank]
        transfer["arrived"] = self.arrived
        transfer["failure"] = self.failure
        transfer["timeout"] = round(self.timeout * 1e9)
        transfer["progress_at"][: len(self.numbers)] = list(self.progress_at.values())
        transfer["rank"] = self.numbers[self.rank]
        transfer["world"] = len(self.numbers)
        return transfer.tobytes() + bytes(-TRANSFER.itemsize % ALIGNMENT)


class Program:
    """One rank's part of a transfer as bytes, beginning with the `TRANSFER`.

    Args:
        schedule: steps of the rank.
        memory: memory of each of the places of ``schedule`` in order of the chunk, (address,
            elements) of each tensor on this rank.
        signals: counters by which ranks wait for each other.
        itemsize: bytes per element.
        sums: True for a spRS, whose gradients and sums are fp32; False for a spAG.

    Attributes:
        num_ranks: ranks of the domain.
    """

    def __init__(
        self,
        schedule: TransferSchedule,
        memory: Sequence[Sequence[Extent]],
        *,
        signals: Signals,
        itemsize: int,
        sums: bool,
    ) -> None:
        assert schedule.num_steps <= MAX_STEPS and (not sums or itemsize == SUMMED), itemsize
        data = bytearray(signals.header)
        begins = np.fromiter(itertools.accumulate(map(len, memory), initial=0), np.int64)
        numbers = itertools.chain.from_iterable(itertools.chain.from_iterable(memory))
        tensors = np.fromiter(numbers, np.int64).reshape(-1, 2)
        table = MemoryTable(begins, tensors, signals.by_rank)
        how = Format(itemsize, sums, TILE, len(data))
        words, steps = assemble(schedule.rows, schedule.num_steps, table, how)
        peers = sum(1 << signals.numbers[rank] for rank in schedule.peers)
        struct.pack_into("<QQ", data, _PEERS, peers & (2**64 - 1), peers >> 64)
        struct.pack_into("<I", data, _NUM_STEPS, schedule.num_steps)
        data[_STEPS : _STEPS + steps.nbytes] = steps.tobytes()
        self._bytes = bytes(data + words.tobytes())
        self.num_ranks = len(signals.progress_at)

    def __len__(self) -> int:
        """Return the bytes of the program."""
        return len(self._bytes)

    def at(self, address: int, *, begin: int) -> np.ndarray:
        """Return the program for one transfer, uint8.

        Args:
            address: address at which the program will be stored, a multiple of `ALIGNMENT`: in host
                memory for the host build of the kernels, in GPU memory for a GPU.
            begin: value of the progress counters before the first step, the same on all ranks and
                larger than at the end of the previous transfer.
        """
        assert address % ALIGNMENT == 0
        # A copy of the bytes takes much less time than `__init__`, which resolves all places.
        data = bytearray(self._bytes)
        struct.pack_into("<I", data, _BEGIN, begin % 2**32)
        steps = list(_ALL_STEPS.unpack_from(data, _STEPS))
        # The first two fields of a `STEP` are the addresses of its items and sources.
        for items in range(0, len(steps), len(steps) // MAX_STEPS):
            steps[items] += address
            steps[items + 1] += address
        _ALL_STEPS.pack_into(data, _STEPS, *steps)
        return np.frombuffer(data, np.uint8)


@functools.cache
def compile_programs(notice: Callable[[], None] = lambda: None) -> None:
    """Compile all functions of schedules and programs by a copy from rank 0 to rank 1.

    Ranks that compile in their first transfer would begin it at different times.

    Args:
        notice: called first if code is not cached, so that compiling takes seconds.
    """
    signals = Signals(rank=0, progress_at={0: 0, 1: 0}, arrived=0, failure=0, timeout=1.0)
    with in_turn(notice):
        for build, sums in ((TransferSchedule.of_fetch, False), (TransferSchedule.of_return, True)):
            schedule = build([Copy(0, 0, 1, 0)], 0, domain=(0, 1), elements=1)
            memory = [[(MEMORIES.index(place.memory) * SUMMED, 1)] for place in schedule.places]
            Program(schedule, memory, signals=signals, itemsize=SUMMED, sums=sums)
