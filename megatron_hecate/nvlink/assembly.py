"""The descriptors of a program, computed in compiled code as words of 8 bytes.

A *piece* is a pull, or a part of one, whose memory is contiguous at both ends.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from megatron_hecate.nvlink.pulls import (
    ADD,
    BEGIN,
    END,
    FROM_FIRST,
    FROM_NUMBER,
    INTO_FIRST,
    INTO_NUMBER,
    MORE,
    RANK,
    STEP,
)
from megatron_hecate.plan.compiled import compiled_if_possible

LOCAL: int = -1  # counter of a source that needs no wait
SUMMED: int = 4  # bytes of an element of a sum
WORD: int = 8  # bytes
ITEM: int = 4  # words of a `COPY` and of a `SUM`
SOURCE: int = 2  # words of a `SOURCE`
STEP_WORDS: int = 3  # words of a `STEP`
LOW: int = 2**32 - 1  # the lower half of a word

# Columns of a piece.
ROW: int = 0  # first row of the pull
ADDRESS: int = 1  # that is written
ELEMENTS: int = 2
FIRST_READ: int = 3
NUM_READS: int = 4
PIECE: int = 5
# Number of columns of a read of a piece: address, and row of the source.
READ: int = 2

# Kinds of problems.
FINE: int = 0
NO_MEMORY: int = 1  # a place ends before an element
MISALIGNED: int = 2  # a tensor is not aligned to its elements
OVERLAP: int = 3  # one step writes memory twice
OVERWRITTEN: int = 4  # one step reads memory that it writes


class MemoryTable(NamedTuple):
    """Memory of the places of a schedule.

    Args:
        begins: offset of each place's tensors in ``tensors``, and the total, [places + 1].
        tensors: address and elements of each tensor in this rank's memory, [tensors, 2].
        by_rank: base address of each rank's memory minus the base address of this rank's, and the
            counter to wait for before its memory is read, [ranks, 2].
    """

    begins: np.ndarray
    tensors: np.ndarray
    by_rank: np.ndarray


class Format(NamedTuple):
    """Parameters of the descriptors besides pulls and memory.

    Args:
        itemsize: bytes per element.
        sums: see `Program`.
        tile: bytes of a tile.
        at: offset of the words in the program, bytes.
    """

    itemsize: int
    sums: bool
    tile: int
    at: int


class Problem(NamedTuple):
    """Reason why a program cannot be assembled.

    Args:
        kind: `FINE` or a kind of problem.
        row: row of the schedule.
        other: column of the place's number; if two rows contradict each other, the other row.
        at: element of the chunk; 0 if two rows contradict each other.
    """

    kind: int
    row: int
    other: int
    at: int


class Located(NamedTuple):
    """A tensor of a place: its address, and its elements [begin, end) of the chunk."""

    address: int
    begin: int
    end: int


class Assembly(NamedTuple):
    """Descriptors of a program.

    Args:
        words: items of each step, followed by their sources in a spRS.
        steps: `STEP` of each step, [steps, words].
        problem: first problem.
    """

    words: np.ndarray
    steps: np.ndarray
    problem: Problem


@compiled_if_possible
def assemble(rows: np.ndarray, num_steps: int, memory: MemoryTable, how: Format) -> Assembly:
    """Assemble the descriptors of all steps.

    Args:
        rows: see `TransferSchedule`.
        num_steps: number of steps.
        memory: memory of the places.
        how: format of the descriptors.
    """
    pieces, reads, problem = _resolve(rows, memory, how)
    num_words = ITEM * len(pieces)
    if how.sums:
        num_words += SOURCE * len(reads)
    words = np.zeros(num_words, np.int64)
    steps = np.zeros((num_steps, STEP_WORDS), np.int64)
    first = 0
    num_reads = 0
    size = 0
    for step in range(num_steps):
        last = first
        while last < len(pieces) and rows[pieces[last, ROW], STEP] == step:
            last += 1
        step_pieces = pieces[first:last]
        first = last
        if problem.kind == FINE:
            problem = _check(step_pieces, reads, rows, memory, how.itemsize)
        steps[step, 0] = how.at + WORD * size
        items = words[size : size + ITEM * len(step_pieces)].reshape(-1, ITEM)
        size += ITEM * len(step_pieces)
        if not how.sums:
            tiles = _fill_copies(items, step_pieces, reads, rows, memory, how)
            steps[step, 2] = len(step_pieces) | tiles << 32
            continue
        sum_reads = reads[num_reads : num_reads + step_pieces[:, NUM_READS].sum()]
        num_reads += len(sum_reads)
        sources = words[size : size + SOURCE * len(sum_reads)].reshape(-1, SOURCE)
        steps[step, 1] = how.at + WORD * size
        tiles = _fill_sums(items, step_pieces, rows, how.tile)
        steps[step, 2] = len(step_pieces) | tiles << 32
        _fill_sources(sources, sum_reads, rows, memory)
        size += SOURCE * len(sum_reads)
    return Assembly(words, steps, problem)


@compiled_if_possible
def _resolve(
    rows: np.ndarray, memory: MemoryTable, how: Format
) -> tuple[np.ndarray, np.ndarray, Problem]:
    """Resolve all pulls to addresses, divided where a tensor ends.

    Returns:
        Pieces, [pieces, `PIECE`]; their reads, [reads, `READ`]; first problem.
    """
    most_pieces, most_reads = _most_pieces(rows, memory)
    pieces = np.empty((most_pieces, PIECE), np.int64)
    reads = np.empty((most_reads, READ), np.int64)
    count = 0
    num_reads = 0
    row = 0
    while row < len(rows):
        end = _end_of_pull(rows, row)
        begin = rows[row, BEGIN]
        while begin < rows[row, END]:
            target = _find(memory, rows[row, INTO_NUMBER], rows[row, INTO_FIRST], begin)
            kind = _kind_of_problem(target, begin, 0, how.itemsize)
            if kind != FINE:
                return pieces[:0], reads[:0], Problem(kind, row, INTO_NUMBER, begin)
            until = min(target.end, rows[row, END])
            for source in range(row, end):
                distance = memory.by_rank[rows[source, RANK], 0]
                read = _find(memory, rows[source, FROM_NUMBER], rows[source, FROM_FIRST], begin)
                kind = _kind_of_problem(read, begin, distance, how.itemsize)
                if kind != FINE:
                    return pieces[:0], reads[:0], Problem(kind, source, FROM_NUMBER, begin)
                until = min(until, read.end)
                source_read = reads[num_reads + source - row]
                source_read[0] = read.address + distance + (begin - read.begin) * how.itemsize
                source_read[1] = source
            piece = pieces[count]
            piece[ROW] = row
            piece[ADDRESS] = target.address + (begin - target.begin) * how.itemsize
            piece[ELEMENTS] = until - begin
            piece[FIRST_READ] = num_reads
            piece[NUM_READS] = end - row
            begin = until
            # The sum of one gradient in place changes nothing.
            in_place = how.sums and end - row == 1 and reads[num_reads, 0] == piece[ADDRESS]
            if not in_place or rows[row, ADD]:
                count += 1
                num_reads += end - row
        row = end
    return pieces[:count], reads[:num_reads], Problem(FINE, 0, 0, 0)


@compiled_if_possible
def _end_of_pull(rows: np.ndarray, row: int) -> int:
    """Return the row after the pull that begins with ``row``."""
    end = row + 1
    while end < len(rows) and rows[end, MORE]:
        end += 1
    return end


@compiled_if_possible
def _most_pieces(rows: np.ndarray, memory: MemoryTable) -> tuple[int, int]:
    """Return upper bounds of the number of pieces, and of the number of their reads."""
    pieces = 0
    reads = 0
    row = 0
    while row < len(rows):
        end = _end_of_pull(rows, row)
        number = rows[row, INTO_NUMBER]
        count = memory.begins[number + 1] - memory.begins[number]
        for number in rows[row:end, FROM_NUMBER]:
            count += memory.begins[number + 1] - memory.begins[number] - 1
        pieces += count
        reads += count * (end - row)
        row = end
    return pieces, reads


@compiled_if_possible
def _find(memory: MemoryTable, number: int, first: int, byte: int) -> Located:
    """Find element ``byte`` of a chunk.

    Args:
        memory: memory of all places.
        number: number of the place of the chunk.
        first: element of the chunk with which the place begins.
        byte: element.

    Returns:
        The tensor; if the place does not have the element, its end.
    """
    begin = first
    for tensor in range(memory.begins[number], memory.begins[number + 1]):
        end = begin + memory.tensors[tensor, 1]
        if begin <= byte < end:
            return Located(memory.tensors[tensor, 0], begin, end)
        begin = end
    return Located(0, begin, begin)


@compiled_if_possible
def _kind_of_problem(tensor: Located, begin: int, distance: int, itemsize: int) -> int:
    """Return the kind of problem of a tensor on another rank. Args as `_find` and `MemoryTable`."""
    if not tensor.begin <= begin < tensor.end:
        return NO_MEMORY
    if (tensor.address + distance) % itemsize:
        return MISALIGNED
    return FINE


@compiled_if_possible
def _check(
    pieces: np.ndarray, reads: np.ndarray, rows: np.ndarray, memory: MemoryTable, itemsize: int
) -> Problem:
    """Return the problem if a step writes memory twice, or reads memory that it writes.

    The destination of a sum may be one of its own sources. Sources on other ranks are never in the
    memory that this rank writes. A step has a few dozen pieces: each is compared with all others.
    """
    begins = pieces[:, ADDRESS]
    ends = begins + pieces[:, ELEMENTS] * itemsize
    for index in range(len(pieces)):
        for earlier_index in range(index):
            if begins[index] < ends[earlier_index] and begins[earlier_index] < ends[index]:
                if begins[earlier_index] < begins[index]:
                    return Problem(OVERLAP, pieces[earlier_index, ROW], pieces[index, ROW], 0)
                return Problem(OVERLAP, pieces[index, ROW], pieces[earlier_index, ROW], 0)
    for index in range(len(pieces)):
        first = pieces[index, FIRST_READ]
        several = pieces[index, NUM_READS] > 1
        for read in range(first, first + pieces[index, NUM_READS]):
            address = reads[read, 0]
            row = reads[read, 1]
            if memory.by_rank[rows[row, RANK], 1] != LOCAL:
                continue
            if several and address == begins[index]:
                continue
            end = address + ends[index] - begins[index]
            for earlier_index in range(len(pieces)):
                if address < ends[earlier_index] and begins[earlier_index] < end:
                    return Problem(OVERWRITTEN, row, pieces[earlier_index, ROW], 0)
    return Problem(FINE, 0, 0, 0)


@compiled_if_possible
def _fill_copies(
    items: np.ndarray,
    pieces: np.ndarray,
    reads: np.ndarray,
    rows: np.ndarray,
    memory: MemoryTable,
    how: Format,
) -> int:
    """Fill the `COPY` items of a step; return its tiles."""
    tiles = 0
    for index in range(len(pieces)):
        piece = pieces[index]
        address, row = reads[piece[FIRST_READ]]
        size = piece[ELEMENTS] * how.itemsize
        items[index, 0] = address
        items[index, 1] = piece[ADDRESS]
        items[index, 2] = size
        items[index, 3] = (memory.by_rank[rows[row, RANK], 1] & LOW) | tiles << 32
        tiles += -(-size // how.tile)
    return tiles


@compiled_if_possible
def _fill_sums(items: np.ndarray, pieces: np.ndarray, rows: np.ndarray, tile: int) -> int:
    """Fill the `SUM` items of a step; return its tiles."""
    tiles = 0
    first = 0
    for index in range(len(pieces)):
        piece = pieces[index]
        items[index, 0] = piece[ADDRESS]
        items[index, 1] = piece[ELEMENTS]
        items[index, 2] = first | piece[NUM_READS] << 32
        items[index, 3] = tiles | rows[piece[ROW], ADD] << 32
        first += piece[NUM_READS]
        tiles += -(-piece[ELEMENTS] * SUMMED // tile)
    return tiles


@compiled_if_possible
def _fill_sources(
    sources: np.ndarray, reads: np.ndarray, rows: np.ndarray, memory: MemoryTable
) -> None:
    """Fill the `SOURCE` items of a step."""
    for index in range(len(reads)):
        sources[index, 0] = reads[index, 0]
        sources[index, 1] = memory.by_rank[rows[reads[index, 1], RANK], 1] & LOW
