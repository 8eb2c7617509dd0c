"""Schedules as the kernels read them: descriptors with addresses, in one block of memory (``kernels/schedule.cuh``).

A `Program` is one rank's part of one transfer. It is made on the host, for the address at which it will lie: in the
host's memory for the host build of the kernels, in the GPU's for a GPU.
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property

import numpy as np

from megatron_hecate.comm.nvlink.schedule import MAX_RANKS, Place, Pull, Schedule

MAX_STEPS: int = 4
TILE: int = 65536  # bytes
LOCAL: int = -1  # a source that needs no waiting
ADD, BF16 = 1, 2

COPY = np.dtype([("src", "<u8"), ("dst", "<u8"), ("bytes", "<u8"), ("rank", "<i4"), ("first_tile", "<u4")])
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
FAILURE = np.dtype([(name, "<u4") for name in ("failed", "rank", "peer", "expected", "seen", "begin")])
ALIGNMENT: int = 16  # bytes, of every array in a program

Extent = tuple[int, int]  # address, elements
Extents = Callable[[Place], Sequence[Extent]]


@dataclasses.dataclass(frozen=True)
class Signals:
    """Where ranks tell each other how far they are. All addresses as this rank sees them.

    Args:
        rank: this one.
        progress_at: of every rank's counters, one u32 for each rank of its domain, in the order of the counters.
        arrived: of ``MAX_STEPS`` u32 that count this rank's blocks; zero.
        failure: of this rank's `FAILURE` record; zero.
        timeout: seconds per wait.
    """

    rank: int
    progress_at: Mapping[int, int]
    arrived: int
    failure: int
    timeout: float

    @cached_property
    def numbers(self) -> dict[int, int]:
        """The counter of each rank."""
        return {rank: number for number, rank in enumerate(self.progress_at)}


class Program:
    """One rank's part of a transfer as bytes, the `TRANSFER` first. `relocate` it before use.

    Args:
        schedule: what the rank does.
        extents: the memory of a place, in order of the chunk: (address, elements), several for a chunk of several
            tensors. Addresses of peers' memory are those at which this rank sees it.
        signals: by which ranks wait for each other.
        itemsize: bytes per element of what travels; gradients of 2 are bf16, of 4 fp32.
        sums: spRS rather than spAG. Sums are fp32 always.
        begin: what progress counters stand at; the same on all ranks, and more than the last transfer's end.

    Raises:
        ValueError: for memory that is not aligned to its elements, or is written twice, or read and written at once.
    """

    def __init__(
        self, schedule: Schedule, extents: Extents, *, signals: Signals, itemsize: int, sums: bool, begin: int
    ) -> None:
        assert len(schedule.steps) <= MAX_STEPS
        self._signals, self._itemsize, self._sums = signals, itemsize, sums
        transfer = np.zeros((), TRANSFER)
        self._parts: list[np.ndarray] = [transfer.reshape(1)]
        self._end = _padded(TRANSFER.itemsize)
        transfer["progress"], transfer["arrived"] = signals.progress_at[signals.rank], signals.arrived
        transfer["failure"] = signals.failure
        transfer["progress_at"][: len(signals.numbers)] = list(signals.progress_at.values())
        peers = sum(1 << signals.numbers[peer] for peer in schedule.peers)
        transfer["peers"] = peers & (2**64 - 1), peers >> 64
        transfer["timeout"] = round(signals.timeout * 1e9)
        transfer["num_steps"], transfer["begin"] = len(schedule.steps), begin % 2**32
        transfer["rank"], transfer["world"] = signals.numbers[signals.rank], len(signals.numbers)
        for step, pulls in zip(transfer["steps"], schedule.steps, strict=False):
            pieces = [piece for pull in pulls for piece in self._pieces(pull, extents)]
            pieces = [piece for piece in pieces if not (sums and piece.is_done)]
            _check(pieces)
            (self._add_sums if sums else self._add_copies)(step, pieces)
        self.data = np.zeros(self._end, np.uint8)
        position = 0
        for part in self._parts:
            self.data[position : position + part.nbytes] = part.view(np.uint8).reshape(-1)
            position += _padded(part.nbytes)
        self._at = 0  # its address
        self.ranks = len(signals.numbers)  # of the domain

    def relocate(self, at: int) -> None:
        """Make it one that lies at address ``at``, a multiple of `ALIGNMENT`."""
        assert at % ALIGNMENT == 0
        steps = self.data[: TRANSFER.itemsize].view(TRANSFER)["steps"]
        for name in ("items", "sources"):
            steps[name] += np.uint64(at - self._at)
        self._at = at

    def copies(self) -> list[np.ndarray]:
        """The `COPY` items of every step of a spAG."""
        transfer = self.data[: TRANSFER.itemsize].view(TRANSFER)[0]
        found = []
        for step in transfer["steps"][: transfer["num_steps"]]:
            begin = int(step["items"]) - self._at
            found.append(self.data[begin : begin + int(step["count"]) * COPY.itemsize].view(COPY))
        return found

    def _append(self, array: np.ndarray) -> int:
        """Where ``array`` will lie, from the beginning."""
        self._parts.append(array)
        offset, self._end = self._end, self._end + _padded(array.nbytes)
        return offset

    def _add_copies(self, step: np.ndarray, pieces: list[_Piece]) -> None:
        items, tiles = np.zeros(len(pieces), COPY), 0
        for item, piece in zip(items, pieces, strict=True):
            (source,) = piece.sources
            item["src"], item["dst"], item["bytes"] = source.address, piece.into.address, source.bytes
            item["rank"], item["first_tile"] = self._rank_of(source), tiles
            tiles += -(-source.bytes // TILE)
        step["items"], step["count"], step["tiles"] = self._append(items), len(items), tiles

    def _add_sums(self, step: np.ndarray, pieces: list[_Piece]) -> None:
        items, tiles = np.zeros(len(pieces), SUM), 0
        sources = np.zeros(sum(len(piece.sources) for piece in pieces), SOURCE)
        first = 0
        for item, piece in zip(items, pieces, strict=True):
            item["dst"], item["elements"] = piece.into.address, piece.into.elements
            item["first_source"], item["sources"], item["first_tile"] = first, len(piece.sources), tiles
            item["flags"] = ADD * piece.add | BF16 * (piece.sources[0].itemsize == 2)
            for source in piece.sources:
                sources[first]["src"], sources[first]["rank"] = source.address, self._rank_of(source)
                first += 1
            tiles += -(-piece.sources[0].bytes // TILE)
        step["items"], step["count"], step["tiles"] = self._append(items), len(items), tiles
        step["sources"] = self._append(sources)

    def _rank_of(self, source: _Memory) -> int:
        rank = source.place.rank
        return LOCAL if rank == self._signals.rank else self._signals.numbers[rank]

    def _pieces(self, pull: Pull, extents: Extents) -> list[_Piece]:
        """The pull, divided where a tensor ends."""
        places = (*pull.sources, pull.into)
        memories = [extents(place) for place in places]
        bounds = {pull.begin, pull.end}
        for place, memory in zip(places, memories, strict=True):
            ends = itertools.accumulate((elements for _, elements in memory), initial=place.begin)
            bounds.update(end for end in ends if pull.begin < end < pull.end)
        pieces = []
        for begin, end in itertools.pairwise(sorted(bounds)):
            *sources, into = (
                self._memory(place, memory, begin=begin, end=end)
                for place, memory in zip(places, memories, strict=True)
            )
            pieces.append(_Piece(tuple(sources), into, pull.add))
        return pieces

    def _memory(self, place: Place, extents: Sequence[Extent], *, begin: int, end: int) -> _Memory:
        """Elements [begin, end) of the chunk in ``place``."""
        itemsize = 4 if self._sums and place.memory != "grad" else self._itemsize
        begin, end = begin - place.begin, end - place.begin
        for address, elements in extents:
            if 0 <= begin < elements:
                if address % itemsize:
                    raise ValueError(
                        f"{place} lies at {address:#x}, which is not a multiple of its elements' {itemsize} bytes"
                    )
                return _Memory(place, address + begin * itemsize, end - begin, itemsize)
            begin, end = begin - elements, end - elements
        raise ValueError(f"{place} has no memory for the last {end - begin} elements of the chunk")


@dataclasses.dataclass(frozen=True)
class _Memory:
    """Consecutive elements on a rank."""

    place: Place
    address: int
    elements: int
    itemsize: int

    @property
    def bytes(self) -> int:
        return self.elements * self.itemsize

    def is_same(self, other: _Memory) -> bool:
        return self.address == other.address and self.itemsize == other.itemsize


@dataclasses.dataclass(frozen=True)
class _Piece:
    """A pull, or a part of one, of memory that is consecutive at both ends."""

    sources: tuple[_Memory, ...]
    into: _Memory
    add: bool

    @property
    def is_done(self) -> bool:
        """Whether it is the sum of one gradient, in the place of that."""
        first, *others = self.sources
        return first.is_same(self.into) and not others and not self.add


def _padded(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def _check(pieces: list[_Piece]) -> None:
    """What a step writes is written once, and is no source but of a sum in its own place."""
    written = sorted((piece.into for piece in pieces), key=lambda memory: memory.address)
    for before, memory in itertools.pairwise(written):
        if before.address + before.bytes > memory.address:
            raise ValueError(f"{before.place} and {memory.place} overlap, and one step writes both")
    begins = [memory.address for memory in written]
    for piece in pieces:
        for source in piece.sources:
            if source.is_same(piece.into) and len(piece.sources) > 1:
                continue
            at = bisect.bisect_left(begins, source.address + source.bytes) - 1
            if at >= 0 and written[at].address + written[at].bytes > source.address:
                raise ValueError(f"{source.place} is read in the step that writes {written[at].place} over it")
