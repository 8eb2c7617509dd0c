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
from megatron_hecate.plan.compiled import compiled

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


class Located(NamedTuple):
    """A tensor of a place: its address, and its elements [begin, end) of the chunk."""

    address: int
    begin: int
    end: int


@compiled
def assemble(
    rows: np.ndarray, num_steps: int, memory: MemoryTable, how: Format
) -> tuple[np.ndarray, np.ndarray]:
    """Assemble the descriptors of all steps.

    Args:
        rows: see `TransferSchedule`.
        num_steps: number of steps.
        memory: memory of the places.
        how: format of the descriptors.

    Returns:
        Words: items of each step, followed by their sources in a spRS; and the `STEP` of each step,
        [steps, words].
    """
    pieces, reads = _resolve(rows, memory, how)
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
    return words, steps


@compiled
def _resolve(rows: np.ndarray, memory: MemoryTable, how: Format) -> tuple[np.ndarray, np.ndarray]:
    """Resolve all pulls to addresses, divided where a tensor ends.

    Returns:
        Pieces, [pieces, `PIECE`]; their reads, [reads, `READ`].
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
            until = min(target.end, rows[row, END])
            for source in range(row, end):
                read = _find(memory, rows[source, FROM_NUMBER], rows[source, FROM_FIRST], begin)
                until = min(until, read.end)
                distance = memory.by_rank[rows[source, RANK], 0]
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
    return pieces[:count], reads[:num_reads]


@compiled
def _end_of_pull(rows: np.ndarray, row: int) -> int:
    """Return the row after the pull that begins with ``row``."""
    end = row + 1
    while end < len(rows) and rows[end, MORE]:
        end += 1
    return end


@compiled
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


@compiled
def _find(memory: MemoryTable, number: int, first: int, element: int) -> Located:
    """Find the tensor with element ``element`` of a chunk in a place.

    Args:
        memory: memory of all places.
        number: number of the place.
        first: element of the chunk with which the place begins.
        element: element.
    """
    begin = first
    for tensor in range(memory.begins[number], memory.begins[number + 1]):
        end = begin + memory.tensors[tensor, 1]
        if element < end:
            return Located(memory.tensors[tensor, 0], begin, end)
        begin = end
    raise AssertionError("a place has less memory than a chunk")


@compiled
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


@compiled
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


@compiled
def _fill_sources(
    sources: np.ndarray, reads: np.ndarray, rows: np.ndarray, memory: MemoryTable
) -> None:
    """Fill the `SOURCE` items of a step."""
    for index in range(len(reads)):
        sources[index, 0] = reads[index, 0]
        sources[index, 1] = memory.by_rank[rows[reads[index, 1], RANK], 1] & LOW
