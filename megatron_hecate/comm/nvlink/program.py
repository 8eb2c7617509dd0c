"""Schedules in the kernels' format: one block of descriptors with addresses (`schedule.cuh`).

A `Program` is one rank's part of one transfer. The host creates it for the address at which it will
be stored: in host memory for the host build of the kernels, in GPU memory for a GPU.
"""

from __future__ import annotations

import bisect
import dataclasses
import struct
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property

import numpy as np

from megatron_hecate.comm.nvlink.chunks import MAX_RANKS
from megatron_hecate.comm.nvlink.places import Place, Pull
from megatron_hecate.comm.nvlink.schedule import TransferSchedule

MAX_STEPS: int = 4
TILE: int = 65536  # bytes
LOCAL: int = -1  # rank of a source that needs no wait
ADD: int = 1  # flag of a sum that is added to its destination

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
SUMMED: int = 4  # bytes of an element of a sum
# The same records as structs: packing one takes less time than an element of an array.
_COPY = struct.Struct("<QQQiI")
_SOURCE = struct.Struct("<QiI")
_SUM = struct.Struct("<QQ4I")
_STEP = struct.Struct("<QQII")
_ALL_STEPS = struct.Struct("<" + "QQII" * MAX_STEPS)
assert [_COPY.size, _SOURCE.size, _SUM.size, _STEP.size] == [
    d.itemsize for d in (COPY, SOURCE, SUM, STEP)
]
_FIELDS: dict[str, int] = {name: field[1] for name, field in (TRANSFER.fields or {}).items()}
_PEERS = _FIELDS["peers"]
_NUM_STEPS = _FIELDS["num_steps"]
_BEGIN = _FIELDS["begin"]
_STEPS = _FIELDS["steps"]

Extent = tuple[int, int]  # address, elements
Extents = Callable[[Place], Sequence[Extent]]


@dataclasses.dataclass(frozen=True)
class Signals:
    """Memory of the progress counters and of the failure record, and the timeout.

    All addresses are in the address space of this rank.

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
    def bits(self) -> dict[int, int]:
        """Bit of each rank in the field "peers" of `TRANSFER`."""
        return {rank: 1 << number for rank, number in self.numbers.items()}

    @cached_property
    def waits(self) -> dict[int, int]:
        """Number of the counter to wait for before a rank's memory is read, by rank."""
        return {**self.numbers, self.rank: LOCAL}

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
        extents: function that returns the memory of a place in order of the chunk, (address,
            elements) of each tensor. Addresses of peers' memory are in this rank's address space.
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
        assert len(schedule.steps) <= MAX_STEPS and (not sums or itemsize == SUMMED), itemsize
        self._signals = signals
        self._itemsize = itemsize
        data = bytearray(signals.header)
        peers = sum(map(signals.bits.__getitem__, schedule.peers))
        struct.pack_into("<QQ", data, _PEERS, peers & (2**64 - 1), peers >> 64)
        struct.pack_into("<II", data, _NUM_STEPS, len(schedule.steps), begin % 2**32)
        for number, pulls in enumerate(schedule.steps):
            pieces = self._pieces(pulls, extents)
            if sums:
                pieces = [piece for piece in pieces if not _is_done(piece)]
            self._check(pieces)
            if sums:
                step = self._add_sums(data, pieces)
            else:
                step = self._add_copies(data, pieces)
            _STEP.pack_into(data, _STEPS + number * _STEP.size, *step)
        self._at = 0  # address of the program
        self.ranks = len(signals.numbers)  # ranks of the domain
        self._hold(data)

    def _hold(self, data: bytearray) -> None:
        self._bytes = data
        self.data = np.frombuffer(data, np.uint8)

    def again(self, begin: int) -> Program:
        """Return a copy for another transfer, which begins at progress counters ``begin``."""
        # A copy of the bytes takes much less time than `__init__`, which resolves all places.
        other = object.__new__(Program)
        other.__dict__.update(self.__dict__)
        other._hold(self._bytes[:])
        struct.pack_into("<I", other._bytes, _BEGIN, begin % 2**32)
        return other

    def relocate(self, at: int) -> None:
        """Relocate the program to address ``at``, a multiple of `ALIGNMENT`."""
        assert at % ALIGNMENT == 0
        moved = at - self._at
        steps = list(_ALL_STEPS.unpack_from(self._bytes, _STEPS))
        # The first two fields of a `STEP` are the addresses of its items and sources.
        for items in range(0, len(steps), len(steps) // MAX_STEPS):
            steps[items] += moved
            steps[items + 1] += moved
        _ALL_STEPS.pack_into(self._bytes, _STEPS, *steps)
        self._at = at

    def copies(self) -> list[np.ndarray]:
        """Return the `COPY` items of every step of a spAG."""
        transfer = self.data[: TRANSFER.itemsize].view(TRANSFER)[0]
        found = []
        for step in transfer["steps"][: transfer["num_steps"]]:
            begin = int(step["items"]) - self._at
            found.append(self.data[begin : begin + int(step["count"]) * COPY.itemsize].view(COPY))
        return found

    def _add_copies(self, data: bytearray, pieces: Sequence[_Piece]) -> tuple[int, int, int, int]:
        """Append the items of a step of copies, and return the fields of its `STEP`."""
        items = len(data)
        tiles = 0
        # Local names save attribute look-ups in the loop, which runs for every copy of a plan.
        itemsize = self._itemsize
        waits = self._signals.waits
        pack = _COPY.pack
        for sources, _, into, elements, _, (address,) in pieces:
            size = elements * itemsize
            data += pack(address, into, size, waits[sources[0][0]], tiles)
            tiles += -(-size // TILE)
        return items, 0, len(pieces), tiles

    def _add_sums(self, data: bytearray, pieces: Sequence[_Piece]) -> tuple[int, int, int, int]:
        """Append the items of a step of sums and their sources; return the fields of its `STEP`."""
        items = len(data)
        tiles = 0
        source_items = bytearray()
        first = 0
        waits = self._signals.waits
        pack = _SOURCE.pack
        for sources, _, into, elements, add, addresses in pieces:
            data += _SUM.pack(into, elements, first, len(sources), tiles, ADD * add)
            for source, address in zip(sources, addresses, strict=True):
                source_items += pack(address, waits[source[0]], 0)
            first += len(sources)
            tiles += -(-elements * SUMMED // TILE)
        at = len(data)
        data += source_items
        return items, at, len(pieces), tiles

    def _pieces(self, pulls: Sequence[Pull], extents: Extents) -> list[_Piece]:
        """Resolve the pulls of a step to addresses, divided where a tensor ends."""
        size = self._itemsize
        pieces: list[_Piece] = []
        last: Place | None = None
        written: Sequence[Extent] = ()
        for pull in pulls:
            sources, into, begin, end, add = pull
            # Consecutive pulls often write to one place.
            if into is not last:
                last = into
                written = extents(into)
            if len(sources) > 1 or len(written) > 1:
                pieces += self._divide(pull, written, extents)
                continue
            # Most pulls have one source and lie in one tensor at both ends: `_divide` takes longer.
            source = sources[0]
            read = extents(source)
            address, elements = read[0]
            into_address, into_elements = written[0]
            first = source[3]
            into_first = into[3]
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
        """Resolve a pull to addresses, divided where a tensor ends.

        Args:
            pull: the pull.
            written: memory of its ``into``.
            extents: see `Program`.
        """
        sources, into, at, end, add = pull
        size = self._itemsize
        pieces: list[_Piece] = []
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
        """Raise ValueError if a step writes memory twice, or reads memory that it writes.

        The destination of a sum may be one of its own sources. Sources on other ranks are never in
        the memory that this rank writes.
        """
        rank = self._signals.rank
        size = self._itemsize
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
            # Most pieces are copies from other ranks.
            if len(sources) == 1 and sources[0][0] != rank:
                continue
            for place, address in zip(sources, addresses, strict=True):
                if place[0] != rank or (address == into and len(sources) > 1):
                    continue
                # The written ranges are disjoint and sorted, so only the last one that begins
                # before the end of the source can overlap with the source.
                at = bisect.bisect_left(written, (address + elements * size,)) - 1
                if at >= 0 and written[at][1] > address:
                    raise ValueError(
                        f"{place} is read in the step that writes {written[at][2]} over it"
                    )


# A pull, or a part of one, whose memory is contiguous at both ends: the pull's sources and
# ``into``, the address in ``into``, elements, ``add``, and the address in each source. A plain
# tuple, which takes less time to create than a class.
_Piece = tuple[tuple[Place, ...], Place, int, int, bool, Sequence[int]]


def _is_done(piece: _Piece) -> bool:
    """Return True for the sum of one gradient in place, which changes nothing."""
    _, _, into, _, add, addresses = piece
    return len(addresses) == 1 and addresses[0] == into and not add


def _find(place: Place, memory: Sequence[Extent], at: int, itemsize: int) -> tuple[int, int]:
    """Return the address of element ``at`` of a chunk, and the end of its tensor, in elements.

    Args:
        place: place of the chunk.
        memory: memory of the place.
        at: element of the chunk.
        itemsize: bytes per element.

    Raises:
        ValueError: the memory is not aligned, or does not hold the element.
    """
    first = place[3]
    for address, elements in memory:
        ends = first + elements
        if first <= at < ends:
            if address % itemsize:
                raise ValueError(
                    f"{place} lies at {address:#x}, which is not a multiple of its elements' "
                    f"{itemsize} bytes"
                )
            return address + (at - first) * itemsize, ends
        first = ends
    raise ValueError(f"{place} has no memory for element {at} of the chunk, only up to {first}")


def _pad(data: bytearray) -> None:
    """Append zeros up to a multiple of `ALIGNMENT`."""
    data += bytes(-len(data) % ALIGNMENT)
