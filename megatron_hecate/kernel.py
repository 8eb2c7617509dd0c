"""Schedules as the kernels read them: descriptors with addresses, in one block of memory (``kernels/schedule.cuh``).

A `Program` is one rank's part of one transfer. It is made on the host, for the address at which it will lie: in the
host's memory for the host build of the kernels, in the GPU's for a GPU.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
import itertools
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from megatron_hecate.schedule import MAX_RANKS, Place, Pull, Schedule

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
        progress: of this rank's counters, one u32 for each rank of its domain.
        progress_at: of every rank's, in the order of the counters.
        arrived: of ``MAX_STEPS`` u32 that count this rank's blocks; zero.
        failure: of this rank's `FAILURE` record; zero.
    """

    progress: int
    progress_at: Mapping[int, int]
    arrived: int
    failure: int

    @functools.cached_property
    def numbers(self) -> dict[int, int]:
        """The counter of each rank."""
        return {rank: number for number, rank in enumerate(self.progress_at)}

    def number(self, rank: int) -> int:
        """The counter of ``rank``."""
        return self.numbers[rank]


@dataclasses.dataclass(frozen=True)
class Wire:
    """What the chunks of a transfer are made of.

    Args:
        itemsize: bytes per element; gradients of 2 are bf16, of 4 fp32. Sums are fp32 always.
        sums: spRS rather than spAG.
    """

    itemsize: int
    sums: bool = False

    def itemsize_of(self, place: Place) -> int:
        """Bytes per element in ``place``."""
        return 4 if self.sums and place.memory != "grad" else self.itemsize


def program(
    schedule: Schedule,
    extents: Extents,
    signals: Signals,
    *,
    wire: Wire,
    rank: int,
    begin: int,
    timeout: float,
) -> np.ndarray:
    """``schedule`` as bytes, the `TRANSFER` first. `relocate` it before use.

    Args:
        extents: the memory of a place, in order of the chunk: (address, elements), several for a chunk of several
            tensors. Addresses of peers' memory are those at which this rank sees it.
        wire: what travels.
        begin: what progress counters stand at; the same on all ranks, and more than the last transfer's end.
        timeout: seconds per wait.

    Raises:
        ValueError: for memory that is not aligned to its elements, or is written twice, or read and written at once.
    """
    assert len(schedule.steps) <= MAX_STEPS
    transfer = np.zeros((), TRANSFER)
    parts: list[np.ndarray] = [transfer.reshape(1)]
    end = _padded(TRANSFER.itemsize)

    def place(array: np.ndarray) -> int:
        nonlocal end
        parts.append(array)
        offset, end = end, end + _padded(array.nbytes)
        return offset

    transfer["progress"], transfer["arrived"] = signals.progress, signals.arrived
    transfer["failure"] = signals.failure
    world = len(signals.progress_at)
    transfer["progress_at"][:world] = list(signals.progress_at.values())
    peers = sum(1 << signals.number(peer) for peer in schedule.peers)
    transfer["peers"] = peers & (2**64 - 1), peers >> 64
    transfer["timeout"] = round(timeout * 1e9)
    transfer["num_steps"], transfer["begin"] = len(schedule.steps), begin % 2**32
    transfer["rank"], transfer["world"] = signals.number(rank), world
    for step, pulls in zip(transfer["steps"], schedule.steps, strict=False):
        pieces = [piece for pull in pulls for piece in _pieces(pull, extents, wire)]
        pieces = [piece for piece in pieces if not (wire.sums and _is_there(piece))]
        _check(pieces)
        items, sources, tiles = (_sums if wire.sums else _copies)(pieces, rank, signals)
        step["items"], step["count"], step["tiles"] = place(items), len(items), tiles
        if sources is not None:
            step["sources"] = place(sources)
    out = np.zeros(end, np.uint8)
    position = 0
    for part in parts:
        out[position : position + part.nbytes] = part.view(np.uint8).reshape(-1)
        position += _padded(part.nbytes)
    return out


def relocate(program: np.ndarray, at: int) -> None:
    """Make ``program`` one that lies at address ``at``, a multiple of `ALIGNMENT`."""
    assert at % ALIGNMENT == 0
    steps = program[: TRANSFER.itemsize].view(TRANSFER)["steps"]
    steps["items"] += np.uint64(at)
    steps["sources"] += np.uint64(at)


def copies(program: np.ndarray, at: int) -> list[np.ndarray]:
    """The `COPY` items of every step of a spAG that lies at ``at``."""
    transfer = program[: TRANSFER.itemsize].view(TRANSFER)[0]
    begins = [(int(step["items"]) - at, int(step["count"])) for step in transfer["steps"][: transfer["num_steps"]]]
    return [program[begin : begin + count * COPY.itemsize].view(COPY) for begin, count in begins]


def _padded(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


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


@dataclasses.dataclass(frozen=True)
class _Piece:
    """A pull, or a part of one, between memory without seams."""

    sources: tuple[_Memory, ...]
    into: _Memory
    add: bool


def _pieces(pull: Pull, extents: Extents, wire: Wire) -> list[_Piece]:
    """The pull, cut where a tensor ends."""
    places = (*pull.sources, pull.into)
    memories = [extents(place) for place in places]
    bounds = {pull.begin, pull.end}
    for place, memory in zip(places, memories, strict=True):
        ends = itertools.accumulate((elements for _, elements in memory), initial=place.begin)
        bounds.update(end for end in ends if pull.begin < end < pull.end)
    ordered = sorted(bounds)
    pieces = []
    for begin, end in itertools.pairwise(ordered):
        *sources, into = (_part(p, m, begin, end, wire.itemsize_of(p)) for p, m in zip(places, memories, strict=True))
        pieces.append(_Piece(tuple(sources), into, pull.add))
    return pieces


def _part(place: Place, memory: Sequence[Extent], begin: int, end: int, itemsize: int) -> _Memory:
    begin, end = begin - place.begin, end - place.begin
    for address, elements in memory:
        if 0 <= begin < elements:
            if address % itemsize:
                raise ValueError(
                    f"{place} lies at {address:#x}, which is not a multiple of its elements' {itemsize} bytes"
                )
            return _Memory(place, address + begin * itemsize, end - begin, itemsize)
        begin, end = begin - elements, end - elements
    raise ValueError(f"{place} has no memory for the last {end - begin} elements of the chunk")


def _is_there(piece: _Piece) -> bool:
    """Whether it is the sum of one gradient, in the place of that."""
    first, *others = piece.sources
    in_place = first.address == piece.into.address and first.itemsize == piece.into.itemsize
    return in_place and not others and not piece.add


def _source_rank(memory: _Memory, own: int, signals: Signals) -> int:
    return LOCAL if memory.place.rank == own else signals.number(memory.place.rank)


def _copies(pieces: list[_Piece], rank: int, signals: Signals) -> tuple[np.ndarray, None, int]:
    items, tiles = np.zeros(len(pieces), COPY), 0
    for item, piece in zip(items, pieces, strict=True):
        (source,) = piece.sources
        item["src"], item["dst"], item["bytes"] = source.address, piece.into.address, source.bytes
        item["rank"], item["first_tile"] = _source_rank(source, rank, signals), tiles
        tiles += -(-source.bytes // TILE)
    return items, None, tiles


def _sums(pieces: list[_Piece], rank: int, signals: Signals) -> tuple[np.ndarray, np.ndarray, int]:
    items, tiles = np.zeros(len(pieces), SUM), 0
    sources = np.zeros(sum(len(piece.sources) for piece in pieces), SOURCE)
    first = 0
    for item, piece in zip(items, pieces, strict=True):
        bf16 = piece.sources[0].itemsize == 2
        item["dst"], item["elements"] = piece.into.address, piece.into.elements
        item["first_source"], item["sources"], item["first_tile"] = first, len(piece.sources), tiles
        item["flags"] = ADD * piece.add | BF16 * bf16
        for source in piece.sources:
            sources[first]["src"], sources[first]["rank"] = source.address, _source_rank(source, rank, signals)
            first += 1
        tiles += -(-piece.sources[0].bytes // TILE)
    return items, sources, tiles


def _check(pieces: list[_Piece]) -> None:
    """What a step writes is written once, and is no source but of a sum in its own place."""
    written = sorted((piece.into for piece in pieces), key=lambda memory: memory.address)
    for before, memory in itertools.pairwise(written):
        if before.address + before.bytes > memory.address:
            raise ValueError(f"{before.place} and {memory.place} overlap, and one step writes both")
    begins = [memory.address for memory in written]
    for piece in pieces:
        for source in piece.sources:
            if (
                source.address == piece.into.address
                and source.itemsize == piece.into.itemsize
                and len(piece.sources) > 1
            ):
                continue
            at = bisect.bisect_left(begins, source.address + source.bytes) - 1
            if at >= 0 and written[at].address + written[at].bytes > source.address:
                raise ValueError(f"{source.place} is read in the step that writes {written[at].place} over it")
