"""Schedules as the kernels read them: descriptors with addresses, in one block of memory (``kernels/schedule.cuh``).

A `Program` is one rank's part of one transfer. It is made on the host, for the address at which it will lie: in the
host's memory for the host build of the kernels, in the GPU's for a GPU.
"""

from __future__ import annotations

import bisect
import copy
import dataclasses
import itertools
import struct
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from megatron_hecate.comm.nvlink.schedule import MAX_RANKS, PLANS, Place, Pull, Schedule
from megatron_hecate.comm.nvlink.schedule import Memory as Memories

MAX_STEPS: int = 4
TILE: int = 65536  # bytes
LOCAL: int = -1  # a source that needs no waiting
ADD: int = 1

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
SUMMED: int = 4  # bytes of an element of a sum
TURNS: int = 8  # buffers of a layer whose programs are kept
# The same records, for one at a time: an array of them takes longer to make.
_COPY, _SOURCE, _SUM, _STEP = (struct.Struct(form) for form in ("<QQQiI", "<QiI", "<QQ4I", "<QQII"))
assert [_COPY.size, _SOURCE.size, _SUM.size, _STEP.size] == [d.itemsize for d in (COPY, SOURCE, SUM, STEP)]
_FIELDS: dict[str, int] = {name: field[1] for name, field in (TRANSFER.fields or {}).items()}
_PEERS, _NUM_STEPS, _BEGIN, _STEPS = (_FIELDS[name] for name in ("peers", "num_steps", "begin", "steps"))

Extent = tuple[int, int]  # address, elements
Extents = Callable[[Place], Sequence[Extent]]
Known = dict[tuple[Memories, int], Sequence[Extent]]  # by memory and index


class Memory:
    """`Extents` where peers have what this rank has, at another address each.

    Args:
        own: address and elements of this rank's tensors in a place.
        rank: this one.
        apart: by how much the addresses of each peer's memory differ from those of this rank's.
    """

    def __init__(self, own: Extents, *, rank: int, apart: Mapping[int, int]) -> None:
        self._own, self._rank, self._apart = own, rank, apart
        self.known: Known = {}  # of this rank's places, as far as they were asked for

    def __call__(self, place: Place) -> Sequence[Extent]:
        rank, memory, index, _ = place
        found = self.known.get((memory, index))
        if found is None:
            found = self.known[memory, index] = self._own(place)
        if rank == self._rank:
            return found
        apart = self._apart[rank]
        if len(found) == 1:
            address, elements = found[0]
            return ((address + apart, elements),)
        return [(address + apart, elements) for address, elements in found]

    def agrees(self, known: Known) -> bool:
        """Whether the places that another one was asked for lie where they did."""
        return all(self(Place(self._rank, *at)) == found for at, found in known.items())


class Programs:
    """Makes the programs of one rank, by those of earlier transfers where a schedule repeats in the same memory: all
    microbatches have one plan, and buffers take turns.

    Args:
        signals: as of `Program`.
    """

    def __init__(self, signals: Signals) -> None:
        self._signals = signals
        # the last for each schedule that is kept, by identity, and each of the buffers that take turns
        self._kept: OrderedDict[tuple[int, int, bool], tuple[Schedule, list[tuple[Known, Program]]]] = OrderedDict()

    def make(self, schedule: Schedule, memory: Memory, *, itemsize: int, sums: bool, begin: int) -> Program:
        """As `Program`."""
        key = id(schedule), itemsize, sums
        _, made = self._kept.setdefault(key, (schedule, []))
        self._kept.move_to_end(key)
        for known, program in made:
            if memory.agrees(known):
                return program.again(begin)
        how: dict[str, Any] = dict(signals=self._signals, itemsize=itemsize, sums=sums, begin=begin)
        program = Program(schedule, memory, **how)
        made.append((memory.known, program))
        del made[:-TURNS]
        if len(self._kept) > PLANS:
            self._kept.popitem(last=False)
        return program.again(begin)


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

    @cached_property
    def header(self) -> bytes:
        """A `TRANSFER` without peers and steps, padded."""
        transfer = np.zeros((), TRANSFER)
        transfer["progress"], transfer["arrived"] = self.progress_at[self.rank], self.arrived
        transfer["failure"], transfer["timeout"] = self.failure, round(self.timeout * 1e9)
        transfer["progress_at"][: len(self.numbers)] = list(self.progress_at.values())
        transfer["rank"], transfer["world"] = self.numbers[self.rank], len(self.numbers)
        data = bytearray(transfer.tobytes())
        _pad(data)
        return bytes(data)


class Program:
    """One rank's part of a transfer as bytes, the `TRANSFER` first. `relocate` it before use.

    Args:
        schedule: what the rank does.
        extents: the memory of a place, in order of the chunk: (address, elements), several for a chunk of several
            tensors. Addresses of peers' memory are those at which this rank sees it.
        signals: by which ranks wait for each other.
        itemsize: bytes per element of what travels.
        sums: spRS rather than spAG. Gradients and their sums are fp32.
        begin: what progress counters stand at; the same on all ranks, and more than the last transfer's end.

    Raises:
        ValueError: for memory that is not aligned to its elements, or is written twice, or read and written at once.
    """

    def __init__(
        self, schedule: Schedule, extents: Extents, *, signals: Signals, itemsize: int, sums: bool, begin: int
    ) -> None:
        assert len(schedule.steps) <= MAX_STEPS and (not sums or itemsize == SUMMED), itemsize
        self._signals, self._itemsize, self._sums = signals, itemsize, sums
        data = bytearray(signals.header)
        peers = sum(1 << signals.numbers[peer] for peer in schedule.peers)
        struct.pack_into("<QQ", data, _PEERS, peers & (2**64 - 1), peers >> 64)
        struct.pack_into("<II", data, _NUM_STEPS, len(schedule.steps), begin % 2**32)
        for number, pulls in enumerate(schedule.steps):
            pieces = [piece for pull in pulls for piece in self._pieces(pull, extents)]
            if sums:
                pieces = [piece for piece in pieces if not piece.is_done]
            _check(pieces, signals.rank)
            step = self._add_sums(data, pieces) if sums else self._add_copies(data, pieces)
            _STEP.pack_into(data, _STEPS + number * _STEP.size, *step)
        self._bytes, self.data = data, np.frombuffer(data, np.uint8)
        self._at = 0  # its address
        self.ranks = len(signals.numbers)  # of the domain

    def again(self, begin: int) -> Program:
        """The same for another transfer, when progress counters stand at ``begin``."""
        other = copy.copy(self)
        other._bytes = bytearray(self._bytes)
        other.data = np.frombuffer(other._bytes, np.uint8)
        struct.pack_into("<I", other._bytes, _BEGIN, begin % 2**32)
        return other

    def relocate(self, at: int) -> None:
        """Make it one that lies at address ``at``, a multiple of `ALIGNMENT`."""
        assert at % ALIGNMENT == 0
        for step in range(_STEPS, _STEPS + MAX_STEPS * _STEP.size, _STEP.size):
            items, sources, *counts = _STEP.unpack_from(self._bytes, step)
            _STEP.pack_into(self._bytes, step, items + at - self._at, sources + at - self._at, *counts)
        self._at = at

    def copies(self) -> list[np.ndarray]:
        """The `COPY` items of every step of a spAG."""
        transfer = self.data[: TRANSFER.itemsize].view(TRANSFER)[0]
        found = []
        for step in transfer["steps"][: transfer["num_steps"]]:
            begin = int(step["items"]) - self._at
            found.append(self.data[begin : begin + int(step["count"]) * COPY.itemsize].view(COPY))
        return found

    def _add_copies(self, data: bytearray, pieces: Sequence[_Piece]) -> tuple[int, int, int, int]:
        """Append the items of a step of copies; returns its `STEP`."""
        items, tiles = len(data), 0
        for (source,), _, ((address, itemsize),), into, _, elements, _ in pieces:
            size = elements * itemsize
            data += _COPY.pack(address, into, size, self._number_of(source), tiles)
            tiles += -(-size // TILE)
        _pad(data)
        return items, 0, len(pieces), tiles

    def _add_sums(self, data: bytearray, pieces: Sequence[_Piece]) -> tuple[int, int, int, int]:
        """Append the items of a step of sums, and their sources; returns its `STEP`."""
        items, tiles, sources, first = len(data), 0, bytearray(), 0
        for piece in pieces:
            size = piece.read[0][1]
            data += _SUM.pack(piece.address, piece.elements, first, len(piece.read), tiles, ADD * piece.add)
            for place, (address, _) in zip(piece.sources, piece.read, strict=True):
                sources += _SOURCE.pack(address, self._number_of(place), 0)
            first += len(piece.read)
            tiles += -(-piece.elements * size // TILE)
        _pad(data)
        at = len(data)
        data += sources
        _pad(data)
        return items, at, len(pieces), tiles

    def _number_of(self, source: Place) -> int:
        return LOCAL if source.rank == self._signals.rank else self._signals.numbers[source.rank]

    def _pieces(self, pull: Pull, extents: Extents) -> list[_Piece]:
        """The pull, divided where a tensor ends."""
        sources, into, at, end, add = pull
        written, size = extents(into), self._itemsize
        reads = [(source, extents(source)) for source in sources]
        pieces = []
        while at < end:
            until = end
            address, ends = _find(into, written, at, size)
            if ends < until:
                until = ends
            read = []
            for place, memory in reads:
                found, ends = _find(place, memory, at, size)
                if ends < until:
                    until = ends
                read.append((found, size))
            pieces.append(_Piece(sources, into, tuple(read), address, size, until - at, add))
            at = until
        return pieces


def _find(place: Place, memory: Sequence[Extent], at: int, itemsize: int) -> tuple[int, int]:
    """The address of element ``at`` of the chunk in ``place``, and the element with which its tensor ends."""
    first = place.begin
    for address, elements in memory:
        ends = first + elements
        if first <= at < ends:
            if address % itemsize:
                raise ValueError(
                    f"{place} lies at {address:#x}, which is not a multiple of its elements' {itemsize} bytes"
                )
            return address + (at - first) * itemsize, ends
        first = ends
    raise ValueError(f"{place} has no memory for element {at} of the chunk, only up to {first}")


class _Piece(NamedTuple):
    """A pull, or a part of one, of memory that is consecutive at both ends.

    Args:
        sources, into: as in `Pull`.
        read: address, and bytes of an element, of each source.
        address, itemsize: of ``into``.
        elements: of each.
        add: as in `Pull`.
    """

    sources: tuple[Place, ...]
    into: Place
    read: tuple[tuple[int, int], ...]
    address: int
    itemsize: int
    elements: int
    add: bool

    @property
    def is_done(self) -> bool:
        """Whether it is the sum of one gradient, in the place of that."""
        return self.read == ((self.address, self.itemsize),) and not self.add


def _pad(data: bytearray) -> None:
    data += bytes(-len(data) % ALIGNMENT)


def _check(pieces: Sequence[_Piece], rank: int) -> None:
    """What a step writes is written once, and is no source but of a sum in its own place. Sources on other ranks are
    not of the memory that ``rank`` writes."""
    written = sorted((p.address, p.address + p.elements * p.itemsize, p.into) for p in pieces)
    for (_, end, place), (begin, _, other) in itertools.pairwise(written):
        if end > begin:
            raise ValueError(f"{place} and {other} overlap, and one step writes both")
    for piece in pieces:
        for place, (address, size) in zip(piece.sources, piece.read, strict=True):
            if place.rank != rank:
                continue
            if len(piece.read) > 1 and (address, size) == (piece.address, piece.itemsize):
                continue  # a sum in its own place
            at = bisect.bisect_left(written, (address + piece.elements * size,)) - 1
            if at >= 0 and written[at][1] > address:
                raise ValueError(f"{place} is read in the step that writes {written[at][2]} over it")
