"""The pulls of one rank in a transfer, as arrays of integers, computed in compiled code.

A row is one source of a pull: a pull with several sources has as many consecutive rows. Constants
in capitals number the columns of a row and the kinds of memory. A *part* is a row of which only the
source and the elements are set.
"""

from __future__ import annotations

from typing import Literal, NamedTuple, get_args

import numpy as np

from megatron_hecate.nvlink.chunks import WHOLE, ChunkTable
from megatron_hecate.plan.compiled import compiled

# Elements. Parts of a chunk begin at multiples of this, so that their addresses are aligned.
GRAIN: int = 128

Memory = Literal["parameters", "send", "slot", "grad", "partial", "main_grad", "stripe"]
MEMORIES: tuple[Memory, ...] = get_args(Memory)
PARAMETERS: int = MEMORIES.index("parameters")
SEND: int = MEMORIES.index("send")
SLOT: int = MEMORIES.index("slot")
GRAD: int = MEMORIES.index("grad")
PARTIAL: int = MEMORIES.index("partial")
MAIN_GRAD: int = MEMORIES.index("main_grad")
STRIPE: int = MEMORIES.index("stripe")

# The first steps of a spAG, if the home of a chunk is in the domain.
PACK: int = 0
FETCH: int = 1

STEP: int = 0
DISTANCE: int = 1  # ranks from this one to the rank of the pull's first source, upwards
BEGIN: int = 2  # first element
END: int = 3  # element after the last
ADD: int = 4  # 1 to add the elements to the content of the destination
MORE: int = 5  # 1 if the row is a further source of the same pull as the row before
INTO: int = 6  # place that is written, on this rank: memory, index, first element
INTO_INDEX: int = 7
INTO_FIRST: int = 8
RANK: int = 9  # place that is read: rank, memory, index, first element
FROM: int = 10
FROM_INDEX: int = 11
FROM_FIRST: int = 12
INTO_NUMBER: int = 13  # the same places, without rank and first element, in the list of places
FROM_NUMBER: int = 14
COLUMNS: int = 15


class PartTable(NamedTuple):
    """Parts of the chunks that are moved in parts.

    Args:
        begins: offset of each chunk's parts, and the total, [chunks + 1].
        rows: all parts, [parts, `COLUMNS`].
    """

    begins: np.ndarray
    rows: np.ndarray


class RankPulls(NamedTuple):
    """Pulls of one rank.

    Args:
        rows: sources of all pulls, in no particular order, [sources, `COLUMNS`].
        is_peer: whether this rank reads from each rank, or is read by it, [ranks].
        num_steps: steps of every rank of the domain.
    """

    rows: np.ndarray
    is_peer: np.ndarray
    num_steps: int


@compiled
def list_fetch_pulls(chunks: ChunkTable, parts: PartTable, rank: int, elements: int) -> RankPulls:
    """List the pulls of a spAG on rank ``rank``.

    Args:
        chunks: chunks of the domain.
        parts: see `TransferSchedule.of_fetch`.
        rank: this rank.
        elements: elements of a chunk.
    """
    rows = np.zeros((_most_rows(chunks, parts), COLUMNS), np.int64)
    count = 0
    exchange = FETCH + 1 if _has_homes(chunks) else 0
    for chunk in range(len(chunks.keys)):
        home = chunks.keys[chunk, 0]
        index = chunks.keys[chunk, 1]
        slot = _slot_of(chunks, chunk, rank)
        wanted_rows = parts.rows[parts.begins[chunk] : parts.begins[chunk + 1]]
        if home == rank:
            rows[count, END] = elements
            _read(rows[count], rank, PARAMETERS, index)
            _write(rows[count], PACK, SEND, index)
            count += 1
        if len(wanted_rows) == 0 and (slot < 0 or not chunks.is_exchanged[chunk]):
            if slot >= 0:
                rows[count, END] = elements
                _read(rows[count], home, SEND, index)
                _write(rows[count], FETCH, SLOT, slot)
                count += 1
            continue
        sources = wanted_rows
        is_from_here = _is_member(chunks, home)
        if is_from_here and chunks.begins[chunk] < chunks.begins[chunk + 1]:
            sources = _divide(chunks, chunk, SLOT, elements)
            for target in wanted_rows:
                # Other places, send buffers and slots, receive the complete chunk anyway.
                if target[RANK] == rank and target[FROM] == STRIPE:
                    count = _fill_stripe(rows, count, exchange, target, sources)
        for part in sources:
            if is_from_here and home != rank and part[RANK] == rank:
                rows[count] = part
                _write_part(rows[count], FETCH, part)
                _read(rows[count], home, SEND, index)
                count += 1
            if slot >= 0 and part[RANK] != rank:
                rows[count] = part
                _write(rows[count], exchange, SLOT, slot)
                count += 1
    num_steps = exchange
    if chunks.is_exchanged.any() or chunks.in_parts.any():
        num_steps += 1
    _set_distances(rows[:count], rank, len(chunks.is_member))
    return RankPulls(rows[:count], _find_peers(chunks, parts, rank), num_steps)


@compiled
def list_return_pulls(chunks: ChunkTable, parts: PartTable, rank: int, elements: int) -> RankPulls:
    """List the pulls of a spRS on rank ``rank``. Args as `list_fetch_pulls`."""
    rows = np.zeros((_most_rows(chunks, parts), COLUMNS), np.int64)
    count = 0
    sums, num_steps = _return_steps(chunks)
    for chunk in range(len(chunks.keys)):
        home = chunks.keys[chunk, 0]
        index = chunks.keys[chunk, 1]
        is_exchanged = chunks.is_exchanged[chunk]
        has_copies = chunks.begins[chunk] < chunks.begins[chunk + 1]
        if not is_exchanged and not chunks.in_parts[chunk]:
            if home == rank:
                end = _read_gradients(rows, count, chunks, chunk)
                for row in rows[count:end]:
                    row[END] = elements
                    row[ADD] = 1
                    _write(row, sums, MAIN_GRAD, index)
                count = end
            continue
        sources = parts.rows[parts.begins[chunk] : parts.begins[chunk + 1]]
        if is_exchanged:
            if home != rank and _slot_of(chunks, chunk, rank) < 0:
                continue
            sources = _divide(chunks, chunk, PARTIAL, elements)
        for part in sources:
            if has_copies and part[RANK] == rank:
                end = _read_gradients(rows, count, chunks, chunk)
                for row in rows[count:end]:
                    row[BEGIN] = part[BEGIN]
                    row[END] = part[END]
                    _write_part(row, 0, part)
                count = end
            if home == rank and (is_exchanged or not has_copies):
                rows[count] = part
                rows[count, ADD] = 1
                _write(rows[count], sums, MAIN_GRAD, index)
                count += 1
    _set_distances(rows[:count], rank, len(chunks.is_member))
    return RankPulls(rows[:count], _find_peers(chunks, parts, rank), num_steps)


@compiled
def _return_steps(chunks: ChunkTable) -> tuple[int, int]:
    """Return the number of the step that sums on homes, and the number of steps.

    An exchange comes before. All ranks must have the same steps, so the decision depends on the
    domain only.
    """
    num_whole = 0
    begun = 0
    for chunk in range(len(chunks.keys)):
        if not chunks.in_parts[chunk]:
            num_whole += 1
        elif chunks.begins[chunk] < chunks.begins[chunk + 1]:
            begun += 1
    sums = 1 if chunks.is_exchanged.any() or begun > 0 else 0
    if num_whole > 0 or begun < len(chunks.keys) - num_whole:
        return sums, sums + 1
    return sums, sums


@compiled
def number_places(rows: np.ndarray) -> np.ndarray:
    """List the memory and index of all places in ``rows``, [places, 2], and number the places."""
    indices = 0
    for row in rows:
        indices = max(indices, 1 + row[INTO_INDEX], 1 + row[FROM_INDEX])
    numbers = np.full((len(MEMORIES), indices), -1, np.int64)
    places = np.empty((2 * len(rows), 2), np.int64)
    count = 0
    for row in rows:
        for memory, number in ((INTO, INTO_NUMBER), (FROM, FROM_NUMBER)):
            place = row[memory : memory + 2]
            if numbers[place[0], place[1]] < 0:
                numbers[place[0], place[1]] = count
                places[count] = place
                count += 1
            row[number] = numbers[place[0], place[1]]
    return places[:count]


@compiled
def _most_rows(chunks: ChunkTable, parts: PartTable) -> int:
    """Return an upper bound of the rows of a rank, which has one part of a chunk at most."""
    count = 0
    for chunk in range(len(chunks.keys)):
        copies = chunks.begins[chunk + 1] - chunks.begins[chunk]
        in_parts = parts.begins[chunk + 1] - parts.begins[chunk]
        count += 2 + 3 * (copies + in_parts)
    return count


@compiled
def _has_homes(chunks: ChunkTable) -> bool:
    """Return whether the home of a chunk is in the domain."""
    has_home = False
    for home in chunks.keys[:, 0]:
        has_home = has_home or _is_member(chunks, home)
    return has_home


@compiled
def _is_member(chunks: ChunkTable, rank: int) -> bool:
    return 0 <= rank < len(chunks.is_member) and chunks.is_member[rank]


@compiled
def _slot_of(chunks: ChunkTable, chunk: int, rank: int) -> int:
    """Return the slot in which ``rank`` receives a chunk, or -1 if it receives none."""
    for copy in range(chunks.begins[chunk], chunks.begins[chunk + 1]):
        if chunks.ranks[copy] == rank:
            return chunks.slots[copy]
    return -1


@compiled
def _read(row: np.ndarray, rank: int, memory: int, index: int) -> None:
    """Set the place that a row reads."""
    row[RANK] = rank
    row[FROM] = memory
    row[FROM_INDEX] = index
    row[FROM_FIRST] = 0


@compiled
def _write(row: np.ndarray, step: int, memory: int, index: int) -> None:
    """Set the step of a row, and the place that it writes."""
    row[STEP] = step
    row[INTO] = memory
    row[INTO_INDEX] = index


@compiled
def _write_part(row: np.ndarray, step: int, part: np.ndarray) -> None:
    """Set the step of a row, which writes the place of ``part``."""
    _write(row, step, part[FROM], part[FROM_INDEX])
    row[INTO_FIRST] = part[FROM_FIRST]


@compiled
def _read_gradients(rows: np.ndarray, count: int, chunks: ChunkTable, chunk: int) -> int:
    """Set the sources of a sum over all replicas of a chunk; return the new number of rows."""
    for copy in range(chunks.begins[chunk], chunks.begins[chunk + 1]):
        _read(rows[count], chunks.ranks[copy], GRAD, chunks.slots[copy])
        rows[count, MORE] = copy > chunks.begins[chunk]
        count += 1
    return count


@compiled
def _divide(chunks: ChunkTable, chunk: int, memory: int, elements: int) -> np.ndarray:
    """Divide a chunk among its receiving ranks, into ``memory`` of their slots.

    Returns:
        Parts, without empty ones, [parts, `COLUMNS`].
    """
    first = chunks.begins[chunk]
    last = chunks.begins[chunk + 1]
    parts = np.zeros((last - first, COLUMNS), np.int64)
    count = 0
    grains = -(-elements // GRAIN)
    so_far = 0
    begin = 0
    for copy in range(first, last):
        if chunks.is_exchanged[chunk]:
            so_far += chunks.shares[copy]
            end = grains * so_far // WHOLE * GRAIN
        else:
            so_far += 1
            end = grains * so_far // (last - first) * GRAIN
        end = min(elements, end)
        if begin < end:
            parts[count, BEGIN] = begin
            parts[count, END] = end
            _read(parts[count], chunks.ranks[copy], memory, chunks.slots[copy])
            count += 1
        begin = end
    return parts[:count]


@compiled
def _fill_stripe(
    rows: np.ndarray, count: int, step: int, target: np.ndarray, source_row: np.ndarray
) -> int:
    """List the pulls that fill a stripe buffer; return the new number of rows.

    Args:
        rows: rows; appended to.
        count: number of rows.
        step: step of the pulls.
        target: part that is wanted in the stripe buffer.
        source_row: parts of the chunk.
    """
    for part in source_row:
        begin = max(part[BEGIN], target[BEGIN])
        end = min(part[END], target[END])
        if begin < end:
            rows[count] = part
            rows[count, BEGIN] = begin
            rows[count, END] = end
            _write_part(rows[count], step, target)
            count += 1
    return count


@compiled
def _set_distances(rows: np.ndarray, rank: int, num_ranks: int) -> None:
    """Set the distance of every pull in ``rows`` from rank ``rank``."""
    for index in range(len(rows)):
        if rows[index, MORE]:
            rows[index, DISTANCE] = rows[index - 1, DISTANCE]
        else:
            rows[index, DISTANCE] = (rows[index, RANK] - rank) % num_ranks


@compiled
def _find_peers(chunks: ChunkTable, parts: PartTable, own_rank: int) -> np.ndarray:
    """Return whether rank ``own_rank`` reads from each rank, or is read by it, [ranks]."""
    is_peer = np.zeros(len(chunks.is_member), np.bool_)
    for chunk in range(len(chunks.keys)):
        home = chunks.keys[chunk, 0]
        takers = chunks.ranks[chunks.begins[chunk] : chunks.begins[chunk + 1]]
        carriers = parts.rows[parts.begins[chunk] : parts.begins[chunk + 1], RANK]
        takes = own_rank in takers or own_rank in carriers
        if takes and _is_member(chunks, home):
            is_peer[home] = True
        if home == own_rank or (takes and (chunks.is_exchanged[chunk] or chunks.in_parts[chunk])):
            for rank in takers:
                is_peer[rank] = True
            for rank in carriers:
                is_peer[rank] = True
    is_peer[own_rank] = False
    return is_peer
