"""Steps of a spAG or spRS in one NVLink domain, whose ranks read each other's memory.

`domains` combines the schedules of several domains. A rank only reads (it *pulls*). The result of a
step may be read by other ranks in the next step:

| | step | reads | into |
|---|---|---|---|
| spAG | pack | the parameters of the rank's own experts | its send buffer, visible to peers |
| | fetch | chunks from the send buffer of their home | slots |
| | exchange | the parts that this rank did not fetch, from the ranks that did | slots |
| spRS | exchange | this rank's part of the gradients of all replicas | a part of the sum |
| | sum | gradients, or parts of sums | the home's main gradient |

*Exchange*: where a home would send more than any rank receives, each rank that receives a chunk
fetches a different part of it from the home, and the remaining parts from the other receivers. The
chunk is then sent once by its home, at the cost of one more step. A spRS sums the same parts.
Chunks that are sent to other domains, or received from there, are moved in parts as well.

Every rank derives the parts of all ranks from the copies alone, without communication (`pulls`).
Places are symbolic; `program` resolves them to addresses.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from megatron_hecate.comm.transport import Copy
from megatron_hecate.nvlink import pulls
from megatron_hecate.nvlink.chunks import ChunkTable, Key
from megatron_hecate.nvlink.pulls import MEMORIES, Memory, PartTable, RankPulls


class Place(NamedTuple):
    """Place of a chunk in the memory of a rank.

    ``grad``, ``partial``, ``main_grad``, and in a spRS ``stripe``, are fp32. ``partial`` may be the
    same memory as ``grad``: each part of a gradient is read only by the sum that overwrites it.

    Args:
        rank: rank that owns the memory.
        memory: kind of memory.
        index: number of the own expert (parameters, send, main_grad), slot (slot, grad, partial) or
            stripe.
        begin: element of the chunk with which the memory begins.
    """

    rank: int
    memory: Memory
    index: int  # type: ignore[assignment]  # hides that of tuples
    begin: int = 0


class Pull(NamedTuple):
    """Copy or sum of elements [begin, end) of a chunk, from ``sources`` into ``into``.

    Args:
        sources: places that are read; several are summed in this order.
        into: place that is written.
        begin: first element.
        end: element after the last.
        add: True to add the elements to the content of ``into``.
    """

    sources: tuple[Place, ...]
    into: Place
    begin: int
    end: int
    add: bool = False


class Part(NamedTuple):
    """Elements [begin, end) of a chunk, or of its sum, and the place that holds them first."""

    at: Place
    begin: int
    end: int


Parts = Mapping[Key, Sequence[Part]]
NONE: Parts = MappingProxyType({})
Listing = Callable[[ChunkTable, PartTable, int, int], RankPulls]


@dataclasses.dataclass(frozen=True, eq=False)
class TransferSchedule:
    """One rank's part of a transfer.

    Args:
        rank: this rank.
        rows: sources of all pulls, sorted by step, [sources, `pulls.COLUMNS`].
        num_steps: steps of all ranks; a rank's step may be empty.
        places: places in ``rows`` by their numbers, with the memory and index of this rank.
        peers: ranks that this rank reads from, or that read from this rank.
    """

    rank: int
    rows: np.ndarray
    num_steps: int
    places: tuple[Place, ...]
    peers: frozenset[int]

    @classmethod
    def of_fetch(
        cls,
        copies: Sequence[Copy],
        rank: int,
        *,
        domain: Sequence[int],
        elements: int,
        parts: Parts = NONE,
    ) -> TransferSchedule:
        """Schedule the spAG of ``rank``.

        Args:
            copies: all copies of the domain, in the same order on all ranks; a rank receives a
                chunk at most once.
            rank: rank whose part is scheduled.
            domain: ranks that read each other's memory.
            elements: elements of a chunk.
            parts: for chunks that are sent to other domains, the places that their parts must reach
                in the end; for chunks that were received from another, the places of their parts.
                A rank has one part of a chunk at most.
        """
        chunks = ChunkTable.of(tuple(copies), frozenset(domain), frozenset(parts))
        return cls._of(pulls.list_fetch_pulls, chunks, rank, elements=elements, parts=parts)

    @classmethod
    def of_return(
        cls,
        copies: Sequence[Copy],
        rank: int,
        *,
        domain: Sequence[int],
        elements: int,
        parts: Parts = NONE,
    ) -> TransferSchedule:
        """Schedule the spRS of ``rank``.

        Each home's sum is over the replicas in order of rank, added to its main gradient.

        Args:
            copies: see `of_fetch`.
            rank: see `of_fetch`.
            domain: see `of_fetch`.
            elements: see `of_fetch`.
            parts: for chunks with replicas in several domains, the places that the sums over this
                domain's replicas must reach; for chunks without a replica in this domain, the
                places of the complete sums.
        """
        chunks = ChunkTable.of(tuple(copies), frozenset(domain), frozenset(parts))
        return cls._of(pulls.list_return_pulls, chunks, rank, elements=elements, parts=parts)

    @classmethod
    def of_pulls(
        cls, steps: Sequence[Sequence[Pull]], rank: int, *, peers: frozenset[int] = frozenset()
    ) -> TransferSchedule:
        """Schedule the pulls of each of the ``steps`` of ``rank``, in the same order."""
        rows: list[list[int]] = []
        for number, step in enumerate(steps):
            for pull in step:
                for index, source in enumerate(pull.sources):
                    row = [0] * pulls.COLUMNS
                    row[pulls.STEP] = number
                    row[pulls.BEGIN] = pull.begin
                    row[pulls.END] = pull.end
                    row[pulls.ADD] = pull.add
                    row[pulls.MORE] = index > 0
                    row[pulls.INTO : pulls.RANK] = _encode(pull.into)[1:]
                    row[pulls.RANK : pulls.INTO_NUMBER] = _encode(source)
                    rows.append(row)
        table = np.array(rows, np.int64).reshape(-1, pulls.COLUMNS)
        return cls._of_rows(table, len(steps), rank, peers=peers)

    @classmethod
    def _of(
        cls, listing: Listing, chunks: ChunkTable, rank: int, *, elements: int, parts: Parts
    ) -> TransferSchedule:
        """List the pulls of ``rank``, sorted within each step."""
        listed = listing(chunks, _encode_parts(parts, chunks), rank, elements)
        rows = listed.rows
        # Every step begins with the rank after this one, so that not all ranks read from one home
        # at the same time.
        order = np.lexsort((rows[:, pulls.BEGIN], rows[:, pulls.DISTANCE], rows[:, pulls.STEP]))
        rows = rows[order]
        peers = frozenset(np.flatnonzero(listed.is_peer).tolist())
        return cls._of_rows(rows, listed.num_steps, rank, peers=peers)

    @classmethod
    def _of_rows(
        cls, rows: np.ndarray, num_steps: int, rank: int, *, peers: frozenset[int]
    ) -> TransferSchedule:
        numbered = pulls.number_places(rows).tolist()
        places = tuple(Place(rank, MEMORIES[memory], index) for memory, index in numbered)
        return cls(rank, rows, num_steps, places, peers)

    @property
    def steps(self) -> tuple[tuple[Pull, ...], ...]:
        """Pulls of each step, decoded."""
        steps: list[list[Pull]] = [[] for _ in range(self.num_steps)]
        for row in self.rows.tolist():
            sources = (_decode(row[pulls.RANK : pulls.INTO_NUMBER]),)
            into = _decode([self.rank, *row[pulls.INTO : pulls.RANK]])
            step = steps[row[pulls.STEP]]
            if row[pulls.MORE]:
                sources = step.pop().sources + sources
            begin, end = row[pulls.BEGIN], row[pulls.END]
            step.append(Pull(sources, into, begin, end, bool(row[pulls.ADD])))
        return tuple(map(tuple, steps))


def _encode_parts(parts: Parts, chunks: ChunkTable) -> PartTable:
    """Convert ``parts`` to rows, in the order of ``chunks``."""
    begins = np.zeros(len(chunks.keys) + 1, np.int64)
    rows: list[list[int]] = []
    if parts:
        for number, key in enumerate(map(tuple, chunks.keys.tolist())):
            rows += map(_encode_part, parts.get(key, ()))
            begins[number + 1] = len(rows)
    return PartTable(begins, np.array(rows, np.int64).reshape(-1, pulls.COLUMNS))


def _encode_part(part: Part) -> list[int]:
    row = [0] * pulls.COLUMNS
    row[pulls.BEGIN] = part.begin
    row[pulls.END] = part.end
    row[pulls.RANK : pulls.INTO_NUMBER] = _encode(part.at)
    return row


def _encode(place: Place) -> list[int]:
    return [place.rank, MEMORIES.index(place.memory), place.index, place.begin]


def _decode(place: Sequence[int]) -> Place:
    rank, memory, index, begin = place
    return Place(rank, MEMORIES[memory], index, begin)
