"""Schedules as the kernels read them: descriptors with addresses, in one block of memory (``kernels/schedule.cuh``).

A `Program` is one rank's part of one transfer. It is made on the host, for the address at which it will lie: in the
host's memory for the host build of the kernels, in the GPU's for a GPU.
"""

from __future__ import annotations

import bisect
import dataclasses
import struct
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np

from megatron_hecate.comm.nvlink.places import Memory as Memories
from megatron_hecate.comm.nvlink.places import Place, Pull
from megatron_hecate.comm.nvlink.schedule import MAX_RANKS, PLANS, Schedule

MAX_STEPS: int = 4
TILE: int = 65536  # bytes
LOCAL: int = -1  # a source that needs no waiting
ADD: int = 1

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
ALIGNMENT: int = 16  # bytes, of every array in a program
SUMMED: int = 4  # bytes of an element of a sum
TURNS: int = 8  # buffers of a layer whose programs are kept
# The same records, for one at a time: an array of them takes longer to make.
_COPY, _SOURCE, _SUM, _STEP = (struct.Struct(form) for form in ("<QQQiI", "<QiI", "<QQ4I", "<QQII"))
_ALL_STEPS = struct.Struct("<" + "QQII" * MAX_STEPS)
assert [_COPY.size, _SOURCE.size, _SUM.size, _STEP.size] == [
    d.itemsize for d in (COPY, SOURCE, SUM, STEP)
]
_FIELDS: dict[str, int] = {name: field[1] for name, field in (TRANSFER.fields or {}).items()}
_PEERS, _NUM_STEPS, _BEGIN, _STEPS = (
    _FIELDS[name] for name in ("peers", "num_steps", "begin", "steps")
)

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
            ((address, elements),) = found
            return ((address + apart, elements),)
        return [(address + apart, elements) for address, elements in found]

    def agrees(self, known: Known) -> bool:
        """Whether the places that another one was asked for lie where they did."""
        own, rank = self._own, self._rank
        return all(
            own(Place(rank, memory, index)) == found for (memory, index), found in known.items()
        )


class Programs:
    """Makes the programs of one rank, by those of earlier transfers where a schedule repeats in the same memory: all
    microbatches have one plan, and buffers take turns.

    Args:
        signals: as of `Program`.
    """

    def __init__(self, signals: Signals) -> None:
        self._signals = signals
        # the last for each schedule that is kept, by identity, and each of the buffers that take turns
        self._kept: OrderedDict[
            tuple[int, int, bool], tuple[Schedule, list[tuple[Known, Program]]]
        ] = OrderedDict()

    def make(
        self, schedule: Schedule, memory: Memory, *, itemsize: int, sums: bool, begin: int
    ) -> Program:
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
    def bits(self) -> dict[int, int]:
        """The bit of each rank in `TRANSFER`'s peers."""
        return {rank: 1 << number for rank, number in self.numbers.items()}

    @cached_property
    def waits(self) -> dict[int, int]:
        """By rank: whose counter to wait for before its memory is read."""
        return {**self.numbers, self.rank: LOCAL}

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
        self,
        schedule: Schedule,
        extents: Extents,
        *,
        signals: Signals,
        itemsize: int,
        sums: bool,
        begin: int,
    ) -> None:
        assert len(schedule.steps) <= MAX_STEPS and (not sums or itemsize == SUMMED), itemsize
        self._signals, self._itemsize = signals, itemsize
        data = bytearray(signals.header)
        peers = sum(map(signals.bits.__getitem__, schedule.peers))
        struct.pack_into("<QQ", data, _PEERS, peers & (2**64 - 1), peers >> 64)
        struct.pack_into("<II", data, _NUM_STEPS, len(schedule.steps), begin % 2**32)
        for number, pulls in enumerate(schedule.steps):
            pieces = self._pieces(pulls, extents)
            if sums:
                pieces = [piece for piece in pieces if not _is_done(piece)]
            self._check(pieces)
            step = self._add_sums(data, pieces) if sums else self._add_copies(data, pieces)
            _STEP.pack_into(data, _STEPS + number * _STEP.size, *step)
        self._at = 0  # its address
        self.ranks = len(signals.numbers)  # of the domain
        self._hold(data)

    def _hold(self, data: bytearray) -> None:
        self._bytes, self.data = data, np.frombuffer(data, np.uint8)

    def again(self, begin: int) -> Program:
        """The same for another transfer, when progress counters stand at ``begin``."""
        other = object.__new__(Program)
        other.__dict__.update(self.__dict__)
        other._hold(self._bytes[:])
        struct.pack_into("<I", other._bytes, _BEGIN, begin % 2**32)
        return other

    def relocate(self, at: int) -> None:
        """Make it one that lies at address ``at``, a multiple of `ALIGNMENT`."""
        assert at % ALIGNMENT == 0
        moved, steps = at - self._at, list(_ALL_STEPS.unpack_from(self._bytes, _STEPS))
        for items in range(0, len(steps), len(steps) // MAX_STEPS):
            steps[items] += moved
            steps[items + 1] += moved  # its sources
        _ALL_STEPS.pack_into(self._bytes, _STEPS, *steps)
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
        items, tiles, itemsize = len(data), 0, self._itemsize
        waits, pack = self._signals.waits, _COPY.pack
        for sources, _, into, elements, _, (address,) in pieces:
            size = elements * itemsize
            data += pack(address, into, size, waits[sources[0][0]], tiles)
            tiles += -(-size // TILE)
        return items, 0, len(pieces), tiles

    def _add_sums(self, data: bytearray, pieces: Sequence[_Piece]) -> tuple[int, int, int, int]:
        """Append the items of a step of sums, and their sources; returns its `STEP`."""
        items, tiles, summed, first = len(data), 0, bytearray(), 0
        waits, pack = self._signals.waits, _SOURCE.pack
        for sources, _, into, elements, add, addresses in pieces:
            data += _SUM.pack(into, elements, first, len(sources), tiles, ADD * add)
            for source, address in zip(sources, addresses, strict=True):
                summed += pack(address, waits[source[0]], 0)
            first += len(sources)
            tiles += -(-elements * SUMMED // TILE)
        at = len(data)
        data += summed
        return items, at, len(pieces), tiles

    def _pieces(self, pulls: Sequence[Pull], extents: Extents) -> list[_Piece]:
        """The pulls of a step, divided where a tensor ends."""
        size, pieces = self._itemsize, list[_Piece]()
        last: Place | None = None
        written: Sequence[Extent] = ()
        for pull in pulls:
            sources, into, begin, end, add = pull
            if into is not last:
                last, written = into, extents(into)
            if len(sources) > 1 or len(written) > 1:
                pieces += self._divide(pull, written, extents)
                continue
            # most pulls: of one source, in one tensor at both ends, for which `_divide` takes longer
            source = sources[0]
            read = extents(source)
            address, elements = read[0]
            into_address, into_elements = written[0]
            first, into_first = source[3], into[3]
            if (
                first <= begin
                and into_first <= begin
                and end <= first + elements
                and end <= into_first + into_elements
                and not (address | into_address) & (size - 1)
            ):
                address += (begin - first) * size
                into_address += (begin - into_first) * size
                pieces.append((sources, into, into_address, end - begin, add, (address,)))
            else:
                pieces += self._divide(pull, written, extents)
        return pieces

    def _divide(self, pull: Pull, written: Sequence[Extent], extents: Extents) -> list[_Piece]:
        """The pull, divided where a tensor ends; ``written``: the memory of its ``into``."""
        sources, into, at, end, add = pull
        size, pieces = self._itemsize, list[_Piece]()
        reads = list(map(extents, sources))
        while at < end:
            into_address, until = _find(into, written, at, size)
            if until > end:
                until = end
            addresses = []
            for place, memory in zip(sources, reads, strict=True):
                address, ends = _find(place, memory, at, size)
                if ends < until:
                    until = ends
                addresses.append(address)
            pieces.append((sources, into, into_address, until - at, add, addresses))
            at = until
        return pieces

    def _check(self, pieces: Sequence[_Piece]) -> None:
        """What a step writes is written once, and is no source but of a sum in its own place. Sources on other ranks
        are not of the memory that this one writes."""
        rank, size = self._signals.rank, self._itemsize
        written = sorted(
            [
                (address, address + elements * size, into)
                for _, into, address, elements, _, _ in pieces
            ]
        )
        before = 0
        for number, (begin, end, place) in enumerate(written):
            if begin < before:
                raise ValueError(
                    f"{written[number - 1][2]} and {place} overlap, and one step writes both"
                )
            before = end
        for sources, _, into, elements, _, addresses in pieces:
            if len(sources) == 1 and sources[0][0] != rank:
                continue
            for place, address in zip(sources, addresses, strict=True):
                # a sum may lie in the place of one of its sources
                if place[0] != rank or (address == into and len(sources) > 1):
                    continue
                at = bisect.bisect_left(written, (address + elements * size,)) - 1
                if at >= 0 and written[at][1] > address:
                    raise ValueError(
                        f"{place} is read in the step that writes {written[at][2]} over it"
                    )


# A pull, or a part of one, of memory that is consecutive at both ends: the pull's sources and ``into``, the address in
# ``into``, elements, ``add``, and the address in each source. A plain tuple, since a class takes longer to make.
_Piece = tuple[tuple[Place, ...], Place, int, int, bool, Sequence[int]]


def _is_done(piece: _Piece) -> bool:
    """Whether it is the sum of one gradient, in the place of that."""
    _, _, into, _, add, addresses = piece
    return len(addresses) == 1 and addresses[0] == into and not add


def _find(place: Place, memory: Sequence[Extent], at: int, itemsize: int) -> tuple[int, int]:
    """The address of element ``at`` of the chunk in ``place``, and the element with which its tensor ends."""
    first = place[3]
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


def _pad(data: bytearray) -> None:
    data += bytes(-len(data) % ALIGNMENT)
