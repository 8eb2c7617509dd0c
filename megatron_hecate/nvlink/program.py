"""Schedules in the kernels' format: one block of descriptors with addresses (`schedule.cuh`).

Descriptors are computed in compiled code as words of 8 bytes.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np
from torch import Tensor

from megatron_hecate.comm.transport import Copy
from megatron_hecate.nvlink.chunks import HOME, STRIPE
from megatron_hecate.nvlink.schedule import TransferSchedule
from megatron_hecate.plan.compiled import compiled, in_turn

MAX_RANKS: int = 72  # ranks of one NVLink domain; the same constant as in kernels/schedule.cuh
MAX_STEPS: int = 4
TILE: int = 65536  # bytes
LOCAL: int = -1  # counter of a source that needs no wait

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
WORD: int = 8  # bytes
FIELDS: dict[str, int] = {name: field[1] for name, field in (TRANSFER.fields or {}).items()}
STEPS: int = FIELDS["steps"] // WORD  # word of a `TRANSFER`
PROGRAMS: int = 4096  # programs that are cached: schedules, times the buffers of a layer
ITEM: int = 4  # words of an `Item`
SOURCE: int = 2  # words of a `Source`
LOW: int = 2**32 - 1  # the lower half of a word


class Memory(NamedTuple):
    """Addresses of the memory of a transfer on this rank.

    Args:
        buffers: address of the first chunk and bytes from chunk to chunk, by kind of memory.
        homes: addresses of the tensors of each own expert that is moved, by index.
        sizes: elements of these tensors.
        itemsize: bytes per element.
    """

    buffers: tuple[tuple[int, int], ...]
    homes: tuple[tuple[int, ...], ...]
    sizes: tuple[int, ...]
    itemsize: int

    @classmethod
    def of(
        cls,
        homes: Mapping[int, Sequence[Tensor]],
        buffers: tuple[tuple[int, int], ...],
        itemsize: int,
    ) -> Memory:
        """Return the addresses of ``homes``, by index, together with those of ``buffers``."""
        tensors = next(iter(homes.values()), ())
        rows = [(0,) * len(tensors)] * (1 + max(homes, default=-1))
        for index, own_tensors in homes.items():
            rows[index] = tuple(tensor.data_ptr() for tensor in own_tensors)
        sizes = tuple(tensor.numel() for tensor in tensors)
        return cls(buffers, tuple(rows), sizes, itemsize)


class _MemoryTable(NamedTuple):
    """`Memory` as arrays: buffers, [kinds, 2], homes, [experts, tensors], and sizes, [tensors]."""

    buffers: np.ndarray
    homes: np.ndarray
    sizes: np.ndarray
    itemsize: int


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
    def by_rank(self) -> np.ndarray:
        """Distance of each rank's memory from this rank's, and the counter to wait for, [ranks, 2].

        The counter is waited for before the memory is read.
        """
        table = np.zeros((1 + max(self.progress_at), 2), np.int64)
        for number, (rank, address) in enumerate(self.progress_at.items()):
            table[rank] = (address - self.progress_at[self.rank], number)
        table[self.rank, 1] = LOCAL
        return table

    @cached_property
    def header(self) -> np.ndarray:
        """A `TRANSFER` without peers and steps, [1]."""
        transfer = np.zeros(1, TRANSFER)
        transfer["progress"] = self.progress_at[self.rank]
        transfer["arrived"] = self.arrived
        transfer["failure"] = self.failure
        transfer["timeout"] = round(self.timeout * 1e9)
        transfer["progress_at"][0, : len(self.progress_at)] = list(self.progress_at.values())
        transfer["rank"] = list(self.progress_at).index(self.rank)
        transfer["world"] = len(self.progress_at)
        return transfer


def assemble(
    schedule: TransferSchedule, memory: Memory, signals: Signals, *, begin: int
) -> np.ndarray:
    """Return one rank's part of a transfer as bytes, uint8, beginning with the `TRANSFER`.

    Args:
        schedule: steps of the rank.
        memory: memory of the transfer.
        signals: counters by which ranks wait for each other.
        begin: value of the progress counters before the first step, the same on all ranks and
            larger than at the end of the previous transfer.
    """
    # A copy takes much less time than a new program.
    program = _cached_program(schedule, memory, signals, TILE).copy()
    program[: TRANSFER.itemsize].view(TRANSFER)["begin"] = begin % 2**32
    return program


@functools.lru_cache(maxsize=PROGRAMS)
def _cached_program(
    schedule: TransferSchedule, memory: Memory, signals: Signals, tile: int
) -> np.ndarray:
    """Return the part of `assemble` that is the same for all microbatches of a placement."""
    assert schedule.num_steps <= MAX_STEPS
    transfer = signals.header.copy()
    numbers = signals.by_rank[list(schedule.participants - {signals.rank}), 1]
    peers = sum(1 << number for number in numbers.tolist())
    transfer["peers"] = (peers & (2**64 - 1), peers >> 64)
    transfer["num_steps"] = schedule.num_steps
    table = _MemoryTable(
        np.array(memory.buffers, np.int64),
        np.array(memory.homes, np.int64).reshape(len(memory.homes), len(memory.sizes)),
        np.array(memory.sizes, np.int64),
        memory.itemsize,
    )
    header = transfer.view(np.int64)
    return _assemble(schedule.rows, table, signals.by_rank, header, tile).view(np.uint8)


@compiled
def _assemble(
    rows: np.ndarray, memory: _MemoryTable, by_rank: np.ndarray, header: np.ndarray, tile: int
) -> np.ndarray:
    """Return ``header``, followed by the items and the sources of all steps, int64.

    A pull is divided into items where a tensor ends. Args as `assemble`; see `Signals.by_rank`.
    """
    num_items = 0
    num_sources = 0
    for row in rows:
        count = len(memory.sizes) if HOME in (row.memory, row.into_memory) else 1
        num_sources += count
        num_items += 0 if row.more else count
    sources_begin = len(header) + ITEM * num_items
    words = np.empty(sources_begin + SOURCE * num_sources, np.int64)
    words[: len(header)] = header
    steps = words[STEPS : STEPS + 3 * MAX_STEPS].reshape(MAX_STEPS, 3)
    items = words[len(header) : sources_begin].reshape(-1, ITEM)
    sources = words[sources_begin:].reshape(-1, SOURCE)
    item = 0
    source = 0
    row = 0
    for step in range(MAX_STEPS):
        steps[step, 0] = WORD * (len(header) + ITEM * item)
        steps[step, 1] = WORD * (sources_begin + SOURCE * source)
        first_item = item
        while row < len(rows) and rows[row].step == step:
            end = row + 1
            while end < len(rows) and rows[end].more:
                end += 1
            new_items = _divide_pull(rows[row:end], memory, by_rank, items[item:], sources[source:])
            item += new_items
            source += new_items * (end - row)
            row = end
        tiles = _number_items(items[first_item:item], tile)
        steps[step, 2] = (item - first_item) | tiles << 32
    return words


@compiled
def _divide_pull(
    rows: np.ndarray,
    memory: _MemoryTable,
    by_rank: np.ndarray,
    items: np.ndarray,
    sources: np.ndarray,
) -> int:
    """Divide a pull into items where a tensor ends.

    Args:
        rows: sources of the pull.
        memory: memory of the transfer.
        by_rank: see `Signals.by_rank`.
        items: items, without the numbers of the first source and tile; written.
        sources: sources of the items; written.

    Returns:
        Number of the items.
    """
    pull = rows[0]
    adds = pull.into_memory == HOME
    count = 0
    begin = pull.begin
    while begin < pull.end:
        place = (pull.into_memory, pull.into_index, pull.into_first)
        target, until = _find(memory, place, begin)
        until = min(until, pull.end)
        for number in range(len(rows)):
            row = rows[number]
            address, tensor_end = _find(memory, (row.memory, row.index, row.first), begin)
            until = min(until, tensor_end)
            source = sources[count * len(rows) + number]
            source[0] = address + by_rank[row.rank, 0]
            source[1] = by_rank[row.rank, 1] & LOW
        item = items[count]
        item[0] = target
        item[1] = (until - begin) * memory.itemsize
        item[2] = len(rows) << 32
        item[3] = adds << 32
        begin = until
        # The sum of one gradient in place changes nothing.
        if len(rows) > 1 or adds or sources[count, 0] != target:
            count += 1
    return count


@compiled
def _find(memory: _MemoryTable, place: tuple[int, int, int], element: int) -> tuple[int, int]:
    """Return the address of ``element`` of a chunk, and the element where its tensor ends.

    Args:
        memory: memory of the transfer.
        place: kind of memory, index, and element of the chunk with which the memory begins.
        element: element.
    """
    kind, index, begin = place
    if kind != HOME:
        base, stride = memory.buffers[kind]
        return base + index * stride + (element - begin) * memory.itemsize, sys.maxsize
    for tensor in range(len(memory.sizes)):
        end = begin + memory.sizes[tensor]
        if element < end:
            return memory.homes[index, tensor] + (element - begin) * memory.itemsize, end
        begin = end
    raise AssertionError("an expert has less memory than a chunk")


@compiled
def _number_items(items: np.ndarray, tile: int) -> int:
    """Set the first source and the first tile of all items of a step; return its tiles."""
    num_sources = 0
    tiles = 0
    for item in items:
        count = item[2] >> 32
        item[2] |= num_sources
        item[3] |= tiles
        num_sources += count
        tiles += -(-item[1] // tile)
    return tiles


@functools.cache
def compile_programs(notice: Callable[[], None] = lambda: None) -> None:
    """Compile all functions of schedules and programs by a copy from rank 0 to rank 1.

    Ranks that compile in their first transfer would begin it at different times.

    Args:
        notice: called first if code is not cached, so that compiling takes seconds.
    """
    signals = Signals(rank=0, progress_at={0: 0, 1: 0}, arrived=0, failure=0, timeout=1.0)
    memory = Memory(((0, 1),) * (1 + STRIPE), ((0,),), (1,), 4)
    with in_turn(notice):
        for sums in (False, True):
            schedule = TransferSchedule.of(
                [Copy(0, 0, 1, 0)], 0, domain=(0, 1), elements=1, sums=sums
            )
            assemble(schedule, memory, signals, begin=1)
