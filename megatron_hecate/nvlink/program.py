"""Schedules in the kernels' format: one block of descriptors with addresses (`schedule.cuh`).

A `Program` is one rank's part of one transfer. The host creates it for the address at which it will
be stored: in host memory for the host build of the kernels, in GPU memory for a GPU.
"""

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
    FINE,
    ITEM,
    LOCAL,
    OVERLAP,
    OVERWRITTEN,
    STEP_WORDS,
    SUMMED,
    WORD,
    Format,
    MemoryTable,
    Problem,
    assemble,
)
from megatron_hecate.nvlink.places import Place
from megatron_hecate.nvlink.pulls import INTO_NUMBER, MEMORIES
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
Extents = Callable[[Place], Sequence[Extent]]


@dataclasses.dataclass(frozen=True)
class Signals:
    """Addresses of the domain's memory, progress counters and failure record, and the timeout.

    All addresses are in the address space of this rank.

    Args:
        rank: this rank.
        progress_at: address of each rank's progress counters, one u32 for each rank of the domain,
            in the order of the counters.
        arrived: address of ``MAX_STEPS`` u32 counters of this rank's thread blocks, initially 0.
        failure: address of this rank's `FAILURE` record, initially 0.
        timeout: seconds per wait.
        apart: base address of each peer's memory minus the base address of this rank's memory. All
            ranks have the same layout.
    """

    rank: int
    progress_at: Mapping[int, int]
    arrived: int
    failure: int
    timeout: float
    apart: Mapping[int, int] = dataclasses.field(default_factory=dict)

    @cached_property
    def numbers(self) -> dict[int, int]:
        """Number of each rank's counter."""
        return {rank: number for number, rank in enumerate(self.progress_at)}

    @cached_property
    def bits(self) -> dict[int, int]:
        """Bit of each rank in the field "peers" of `TRANSFER`."""
        return {rank: 1 << number for rank, number in self.numbers.items()}

    @cached_property
    def by_rank(self) -> np.ndarray:
        """See `assembly.MemoryTable`."""
        table = np.zeros((1 + max(self.numbers), 2), np.int64)
        for rank, number in self.numbers.items():
            if rank != self.rank:
                table[rank] = (self.apart[rank], number)
        table[self.rank] = (0, LOCAL)
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
        data = bytearray(transfer.tobytes())
        _pad(data)
        return bytes(data)


class Program:
    """One rank's part of a transfer as bytes, beginning with the `TRANSFER`.

    Call `relocate` before use.

    Args:
        schedule: steps of the rank.
        extents: function that returns the memory of a place of this rank in order of the chunk,
            (address, elements) of each tensor.
        signals: counters by which ranks wait for each other.
        itemsize: bytes per element.
        sums: True for a spRS, whose gradients and sums are fp32; False for a spAG.
        begin: value of the progress counters before the first step, the same on all ranks and
            larger than at the end of the previous transfer.

    Raises:
        ValueError: memory is not aligned to its elements, or one step writes it twice, or reads and
            writes it.
    """

    def __init__(
        self,
        schedule: TransferSchedule,
        extents: Extents,
        *,
        signals: Signals,
        itemsize: int,
        sums: bool,
        begin: int,
    ) -> None:
        assert schedule.num_steps <= MAX_STEPS and (not sums or itemsize == SUMMED), itemsize
        self._signals = signals
        self._itemsize = itemsize
        places = list(map(extents, schedule.places))
        data = bytearray(signals.header)
        begins = np.fromiter(itertools.accumulate(map(len, places), initial=0), np.int64)
        numbers = itertools.chain.from_iterable(itertools.chain.from_iterable(places))
        tensors = np.fromiter(numbers, np.int64).reshape(-1, 2)
        memory = MemoryTable(begins, tensors, signals.by_rank)
        how = Format(itemsize, sums, TILE, len(data))
        assembled = assemble(schedule.rows, schedule.num_steps, memory, how)
        if assembled.problem.kind != FINE:
            raise ValueError(self._explain(assembled.problem, schedule, places))
        peers = sum(map(signals.bits.__getitem__, schedule.peers))
        struct.pack_into("<QQ", data, _PEERS, peers & (2**64 - 1), peers >> 64)
        struct.pack_into("<II", data, _NUM_STEPS, schedule.num_steps, begin % 2**32)
        data[_STEPS : _STEPS + assembled.steps.nbytes] = assembled.steps.tobytes()
        data += assembled.words.tobytes()
        self._at = 0  # address of the program
        self.ranks = len(signals.numbers)  # ranks of the domain
        self._hold(data)

    def _hold(self, data: bytearray) -> None:
        self._bytes = data
        self.data = np.frombuffer(data, np.uint8)

    def again(self, begin: int) -> Program:
        """Return a copy for another transfer, which begins at progress counters ``begin``."""
        # A copy of the bytes takes much less time than `__init__`, which resolves all places.
        program = object.__new__(Program)
        program.__dict__.update(self.__dict__)
        program._hold(self._bytes[:])
        struct.pack_into("<I", program._bytes, _BEGIN, begin % 2**32)
        return program

    def relocate(self, address: int) -> None:
        """Relocate the program to address ``address``, a multiple of `ALIGNMENT`."""
        assert address % ALIGNMENT == 0
        distance = address - self._at
        steps = list(_ALL_STEPS.unpack_from(self._bytes, _STEPS))
        # The first two fields of a `STEP` are the addresses of its items and sources.
        for items in range(0, len(steps), len(steps) // MAX_STEPS):
            steps[items] += distance
            steps[items + 1] += distance
        _ALL_STEPS.pack_into(self._bytes, _STEPS, *steps)
        self._at = address

    def _explain(
        self, problem: Problem, schedule: TransferSchedule, memory: Sequence[Sequence[Extent]]
    ) -> str:
        """Describe a problem. ``memory``: memory of every place of ``schedule``."""
        row = problem.row
        if problem.kind == OVERLAP:
            places = f"{schedule.written(row)} and {schedule.written(problem.other)}"
            return f"{places} overlap, and one step writes both"
        if problem.kind == OVERWRITTEN:
            return (
                f"{schedule.read(row)} is read in the step that writes "
                f"{schedule.written(problem.other)} over it"
            )
        place = schedule.written(row) if problem.other == INTO_NUMBER else schedule.read(row)
        end = place.begin
        for address, elements in memory[schedule.rows[row, problem.other]]:
            if end <= problem.at < end + elements:
                address += int(self._signals.by_rank[place.rank, 0])
                return (
                    f"{place} lies at {address:#x}, which is not a multiple of its elements' "
                    f"{self._itemsize} bytes"
                )
            end += elements
        return f"{place} has no memory for element {problem.at} of the chunk, only up to {end}"


@functools.cache
def compile_programs(notice: Callable[[], None] = lambda: None) -> None:
    """Compile all functions of schedules and programs by a copy from rank 0 to rank 1.

    Ranks that compile in their first transfer would begin it at different times.

    Args:
        notice: called first if code is not cached, so that compiling takes seconds.
    """
    signals = Signals(
        rank=0,
        progress_at={0: 0, 1: 0},
        arrived=0,
        failure=0,
        timeout=1.0,
        apart={0: 0, 1: 0},
    )
    with in_turn(notice):
        for build, sums in ((TransferSchedule.of_fetch, False), (TransferSchedule.of_return, True)):
            schedule = build([Copy(0, 0, 1, 0)], 0, domain=(0, 1), elements=1)
            Program(
                schedule,
                lambda place: [(MEMORIES.index(place.memory) * SUMMED, 1)],
                signals=signals,
                itemsize=SUMMED,
                sums=sums,
                begin=1,
            )


def _pad(data: bytearray) -> None:
    """Append zeros up to a multiple of `ALIGNMENT`."""
    data += bytes(-len(data) % ALIGNMENT)
