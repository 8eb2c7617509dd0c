"""Steps of a spAG or spRS in one NVLink domain, whose ranks read each other's memory.

`domains` combines the schedules of several domains. A rank only reads (it *pulls*). The result of a
step may be read by other ranks in the next step:

| | step | reads | into |
|---|---|---|---|
| spAG | pack | the parameters of the rank's own experts | its send buffer, visible to peers |
| | fetch | chunks from the send buffer of their home | slots |
| | exchange | the parts that this rank did not fetch, from the ranks that did | slots |
| spRS | exchange | this rank's part of the gradients of all replicas | its slot |
| | sum | gradients, or parts of sums | the home's main gradient |

*Exchange*: where a home would send more than any rank receives, each rank that receives a chunk
fetches a different part of it from the home, and the remaining parts from the other receivers. The
chunk is then sent once by its home, at the cost of one more step. A spRS sums the same parts, each
over the part of a gradient that no other sum reads. Chunks that are sent to other domains, or
received from there, are moved in parts as well.

Every rank derives the parts of all ranks from the copies alone, without communication.
Places are symbolic; `program` resolves them to addresses.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from types import MappingProxyType

import numpy as np

from megatron_hecate.comm.transport import Copy
from megatron_hecate.nvlink.chunks import (
    HOME,
    SEND,
    SLOT,
    STRIPE,
    WHOLE,
    ChunkTable,
    Part,
    Parts,
    parts_of,
)
from megatron_hecate.plan.compiled import compiled

# Elements. Parts of a chunk begin at multiples of this, so that their addresses are aligned.
GRAIN: int = 128

# Steps of a spAG.
PACK, FETCH, EXCHANGE = range(3)

# One source of a pull: a pull with several sources has as many consecutive rows. `rank`, `memory`,
# `index` and `first` are the place that is read, see `Part`; `into_...` is the place on this rank
# that is written; main gradients are added to. `distance`: ranks from this one to the rank of the
# first source, upwards. `more`: whether the row is a further source of the pull of the row before.
PULL = np.dtype(
    [(name, np.int64) for name in ("step", "distance", "begin", "end", "more")]
    + [(name, np.int64) for name in ("rank", "memory", "index", "first")]
    + [(name, np.int64) for name in ("into_memory", "into_index", "into_first")]
)
FAR: int = 1 << 20  # more than all ranks
NONE: Parts = MappingProxyType({})


@dataclasses.dataclass(frozen=True, eq=False)
class TransferSchedule:
    """One rank's part of a transfer.

    Args:
        rows: sources of all pulls, sorted by step, [sources] of `PULL`.
        num_steps: steps of all ranks; a rank's step may be empty.
        participants: ranks that read or are read; they wait for each other.
    """

    rows: np.ndarray
    num_steps: int
    participants: frozenset[int]

    @classmethod
    def of(
        cls,
        copies: Sequence[Copy],
        rank: int,
        *,
        domain: Sequence[int],
        elements: int,
        sums: bool,
        parts: Parts = NONE,
    ) -> TransferSchedule:
        """Schedule the spAG or spRS of ``rank``.

        Each home's sum in a spRS is over the replicas in order of rank, added to its main gradient.

        Args:
            copies: all copies of the domain, in the same order on all ranks; a rank receives a
                chunk at most once.
            rank: rank whose part is scheduled.
            domain: ranks that read each other's memory.
            elements: elements of a chunk.
            sums: True for a spRS.
            parts: parts of chunks that cross to other domains; a rank has one part of a chunk at
                most. In a spAG, what the chunk must reach in the end if its home is in the domain,
                else what has received it. In a spRS, what the sum over this domain's replicas must
                reach; without a replica in the domain, what holds the complete sum.
        """
        listed = tuple((key, tuple(chunk_parts)) for key, chunk_parts in parts.items())
        chunks = ChunkTable.of(tuple(copies), tuple(domain), listed)
        if sums:
            is_begun = (np.diff(chunks.begins) > 0) & (np.diff(chunks.part_begins) > 0)
            first_sum = int(chunks.is_exchanged.any() or is_begun.any())
            num_steps = first_sum + int(not is_begun.all())
            rows = _list_return(chunks, rank, elements, first_sum)
        else:
            num_steps = EXCHANGE + int(chunks.is_exchanged.any() or len(chunks.parts) > 0)
            rows = _list_fetch(chunks, rank, elements)
        # Every step begins with the rank after this one, so that not all ranks read from one home
        # at the same time.
        rows = rows[np.lexsort((rows["begin"], rows["distance"], rows["step"]))]
        ranks = np.concatenate((chunks.keys[:, 0], chunks.ranks, chunks.parts[:, 0]))
        return cls(rows, num_steps, frozenset(ranks.tolist()).intersection(domain))


@compiled
def _list_fetch(chunks: ChunkTable, rank: int, elements: int) -> np.ndarray:
    """List the pulls of a spAG on rank ``rank``.

    Args:
        chunks: chunks of the domain.
        rank: this rank.
        elements: elements of a chunk.

    Returns:
        Sources of all pulls, in no particular order, [sources] of `PULL`.
    """
    rows = _new_rows(chunks)
    count = 0
    for chunk in range(len(chunks.keys)):
        home, index = chunks.keys[chunk]
        whole = Part(home, SEND, index, 0, elements, 0)
        slot = _slot_of(chunks, chunk, rank)
        target = Part(rank, SLOT, slot, 0, elements, 0)
        if home == rank:
            parameters = Part(rank, HOME, index, 0, elements, 0)
            count = _pull(rows, count, PACK, parameters, whole, False)
        parts = parts_of(chunks, chunk)
        is_from_here = chunks.is_member[home]
        if len(parts) == 0 and not chunks.is_exchanged[chunk]:
            if slot >= 0:
                count = _pull(rows, count, FETCH, whole, target, False)
            continue
        if is_from_here and chunks.begins[chunk] < chunks.begins[chunk + 1]:
            stripes = parts
            parts = _divide(chunks, chunk, elements)
            for number in range(len(stripes)):
                stripe = _part(stripes, number)
                # Other places, send buffers and slots, receive the complete chunk anyway.
                if stripe.rank == rank and stripe.memory == STRIPE:
                    count = _gather(rows, count, EXCHANGE, parts, stripe)
        for number in range(len(parts)):
            part = _part(parts, number)
            if is_from_here and home != rank and part.rank == rank:
                count = _pull(rows, count, FETCH, whole, part, False)
        if slot >= 0:
            count = _gather(rows, count, EXCHANGE, parts, target)
    return rows[:count]


@compiled
def _list_return(chunks: ChunkTable, rank: int, elements: int, first_sum: int) -> np.ndarray:
    """List the pulls of a spRS on rank ``rank``. Args and returns as `_list_fetch`.

    Homes sum in step ``first_sum``; an exchange comes before.
    """
    rows = _new_rows(chunks)
    count = 0
    for chunk in range(len(chunks.keys)):
        home, index = chunks.keys[chunk]
        total = Part(home, HOME, index, 0, elements, 0)
        is_exchanged = chunks.is_exchanged[chunk]
        has_copies = chunks.begins[chunk] < chunks.begins[chunk + 1]
        parts = _divide(chunks, chunk, elements) if is_exchanged else parts_of(chunks, chunk)
        if len(parts) == 0 and home == rank:
            count = _sum(rows, count, first_sum, chunks, chunk, total)
        for number in range(len(parts)):
            part = _part(parts, number)
            if has_copies and part.rank == rank:
                count = _sum(rows, count, 0, chunks, chunk, part)
            if home == rank and (is_exchanged or not has_copies):
                count = _pull(rows, count, first_sum, part, total, False)
    return rows[:count]


@compiled
def _new_rows(chunks: ChunkTable) -> np.ndarray:
    """Return as many rows as a rank may need, which has one part of a chunk at most."""
    # One more, for a pull without elements.
    count = 1 + 2 * len(chunks.keys) + 3 * (len(chunks.ranks) + len(chunks.parts))
    return np.empty(count, PULL)


@compiled
def _slot_of(chunks: ChunkTable, chunk: int, rank: int) -> int:
    """Return the slot in which ``rank`` receives a chunk, or -1 if it receives none."""
    for copy in range(chunks.begins[chunk], chunks.begins[chunk + 1]):
        if chunks.ranks[copy] == rank:
            return chunks.slots[copy]
    return -1


@compiled
def _part(parts: np.ndarray, number: int) -> Part:
    """Return a row of ``parts``."""
    rank, memory, index, begin, end, first = parts[number]
    return Part(rank, memory, index, begin, end, first)


@compiled
def _pull(rows: np.ndarray, count: int, step: int, source: Part, target: Part, more: bool) -> int:
    """List the pull of the elements that ``source`` and ``target`` have in common, if any.

    Args:
        rows: rows; appended to.
        count: number of rows.
        step: step of the pull.
        source: part that is read.
        target: part that is written.
        more: whether the row is a further source of the same pull as the row before.

    Returns:
        The new number of rows.
    """
    row = rows[count]
    row.step = step
    row.distance = (source.rank - target.rank) % FAR
    if more:
        row.distance = rows[count - 1].distance
    row.begin = max(source.begin, target.begin)
    row.end = min(source.end, target.end)
    row.more = more
    row.rank = source.rank
    row.memory = source.memory
    row.index = source.index
    row.first = source.first
    row.into_memory = target.memory
    row.into_index = target.index
    row.into_first = target.first
    return count + 1 if row.begin < row.end else count


@compiled
def _gather(rows: np.ndarray, count: int, step: int, parts: np.ndarray, target: Part) -> int:
    """List the pulls of ``parts`` on other ranks into ``target``. Args and returns as `_pull`."""
    for number in range(len(parts)):
        part = _part(parts, number)
        if part.rank != target.rank:
            count = _pull(rows, count, step, part, target, False)
    return count


@compiled
def _sum(
    rows: np.ndarray, count: int, step: int, chunks: ChunkTable, chunk: int, target: Part
) -> int:
    """List the sum of the gradients of all replicas of a chunk. Args and returns as `_pull`."""
    first = chunks.begins[chunk]
    for copy in range(first, chunks.begins[chunk + 1]):
        source = Part(chunks.ranks[copy], SLOT, chunks.slots[copy], target.begin, target.end, 0)
        count = _pull(rows, count, step, source, target, copy > first)
    return count


@compiled
def _divide(chunks: ChunkTable, chunk: int, elements: int) -> np.ndarray:
    """Divide a chunk among its receiving ranks, in their slots.

    Returns:
        Parts, [parts, fields of `Part`]; a part may be empty.
    """
    first = chunks.begins[chunk]
    last = chunks.begins[chunk + 1]
    parts = np.empty((last - first, 6), np.int64)
    grains = -(-elements // GRAIN)
    is_exchanged = chunks.is_exchanged[chunk]
    total = WHOLE if is_exchanged else last - first
    so_far = 0
    begin = 0
    for copy in range(first, last):
        so_far += chunks.shares[copy] if is_exchanged else 1
        end = min(elements, grains * so_far // total * GRAIN)
        parts[copy - first] = (chunks.ranks[copy], SLOT, chunks.slots[copy], begin, end, 0)
        begin = end
    return parts


# x
