"""The chunks of a transfer in one NVLink domain: who receives which, and who exchanges which.

The receivers of a chunk may *exchange* it, see `schedule`: each fetches a share of it from the
home.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from megatron_hecate.comm.transport import Copy
from megatron_hecate.plan.compiled import compiled

CACHED: int = 512  # transfers whose chunks and stages are cached; two per layer are in use
WHOLE: int = 1 << 20  # sum of the shares of a chunk

# Kinds of memory. Of an own expert: its parameters in a spAG, its main gradients in a spRS.
HOME, SEND, SLOT, STRIPE = range(4)

Key = tuple[int, int]  # a chunk: its home, and its index among the home's own experts


class Part(NamedTuple):
    """Elements [begin, end) of a chunk, or of its sum, and the memory that holds them.

    Args:
        rank: rank that owns the memory.
        memory: kind of memory: `HOME`, `SEND`, `SLOT` or `STRIPE`.
        index: number of the own expert (`HOME`, `SEND`), slot or stripe buffer.
        begin: first element.
        end: element after the last.
        first: element of the chunk with which the memory begins.
    """

    rank: int
    memory: int
    index: int  # type: ignore[assignment]  # hides that of tuples
    begin: int
    end: int
    first: int


Parts = Mapping[Key, Sequence[Part]]


class ChunkTable(NamedTuple):
    """All chunks of a transfer in one domain, the same for all ranks and for both directions.

    Shapes: C chunks, N copies, P parts, R ranks up to the last of the domain and of all homes. The
    copies of a chunk are consecutive: those of chunk c are the elements ``begins[c]`` to
    ``begins[c + 1]`` of an array [N]. In the same way ``part_begins`` divides ``parts``.

    Args:
        keys: home and index of each chunk, sorted, including chunks without copies, [C, 2].
        begins: offset of each chunk's copies, and the total, [C + 1].
        ranks: receiving rank of every copy, sorted by chunk, then rank, [N].
        slots: slot of every copy, [N].
        part_begins: offset of each chunk's parts, and the total, [C + 1].
        parts: fields of the `Part` in which chunks are moved because other domains take part,
            [P, 6].
        is_member: whether each rank is in the domain, [R].
        is_exchanged: whether each chunk is exchanged, [C].
        shares: share of `WHOLE` that the receiver of every copy fetches from the home, [N]; zeros
            for chunks that are not exchanged.
    """

    keys: np.ndarray
    begins: np.ndarray
    ranks: np.ndarray
    slots: np.ndarray
    part_begins: np.ndarray
    parts: np.ndarray
    is_member: np.ndarray
    is_exchanged: np.ndarray
    shares: np.ndarray

    @staticmethod
    @functools.lru_cache(maxsize=CACHED)
    def of(
        copies: tuple[Copy, ...],
        domain: tuple[int, ...],
        parts: tuple[tuple[Key, tuple[Part, ...]], ...],
    ) -> ChunkTable:
        """Group ``copies`` by chunk and choose the chunks to exchange.

        Args:
            copies: all copies of the domain.
            domain: ranks of the domain.
            parts: parts of the chunks that are moved in parts because other domains take part.
        """
        given_parts = dict(parts)
        copies_of: dict[Key, list[Copy]] = {key: [] for key in given_parts}
        for copy in copies:
            copies_of.setdefault((copy.home, copy.index), []).append(copy)
        keys = sorted(copies_of)
        by_chunk = [sorted(copies_of[key]) for key in keys]
        ordered = list(itertools.chain.from_iterable(by_chunk))
        parts_by_chunk = [given_parts.get(key, ()) for key in keys]
        part_rows = np.array(list(itertools.chain.from_iterable(parts_by_chunk)), np.int64)
        is_member = np.zeros(1 + max([*domain, *(home for home, _ in keys)]), np.bool_)
        is_member[list(domain)] = True
        chunks = ChunkTable(
            keys=np.array(keys, np.int64).reshape(-1, 2),
            begins=np.cumsum([0, *map(len, by_chunk)]),
            ranks=np.array([copy.rank for copy in ordered], np.int64),
            slots=np.array([copy.slot for copy in ordered], np.int64),
            part_begins=np.cumsum([0, *map(len, parts_by_chunk)]),
            parts=part_rows.reshape(-1, len(Part._fields)),
            is_member=is_member,
            is_exchanged=np.zeros(len(keys), np.bool_),
            shares=np.zeros(len(ordered), np.int64),
        )
        _choose_exchanges(chunks)
        return chunks


@compiled
def _choose_exchanges(chunks: ChunkTable) -> None:
    """Choose the chunks to exchange, and their shares; written to ``chunks``.

    A home sends whole chunks to each rank as long as it sends no more than the rank that receives
    most. Beyond that, its chunks with the most receivers are exchanged first. A rank that fetches a
    share of a chunk sends it to every other receiver; the shares are chosen so that the ranks with
    the least to send otherwise send most. All chunks have one size.
    """
    homes = chunks.keys[:, 0]
    begins = chunks.begins
    sends, receives = _count_whole_chunks(chunks)
    limit = receives.max()
    order = np.argsort(begins[:-1] - begins[1:], kind="mergesort")
    for chunk in order:
        size = begins[chunk + 1] - begins[chunk]
        if size > 1 and sends[homes[chunk]] > limit and len(parts_of(chunks, chunk)) == 0:
            chunks.is_exchanged[chunk] = True
            sends[homes[chunk]] -= size - 1
    load = sends * WHOLE
    for chunk in order:
        if chunks.is_exchanged[chunk]:
            ranks = chunks.ranks[begins[chunk] : begins[chunk + 1]]
            shares = chunks.shares[begins[chunk] : begins[chunk + 1]]
            _even_out(load, ranks, shares)


@compiled
def parts_of(chunks: ChunkTable, chunk: int) -> np.ndarray:
    """Return the parts of a chunk because other domains take part, [parts, fields of `Part`]."""
    return chunks.parts[chunks.part_begins[chunk] : chunks.part_begins[chunk + 1]]


@compiled
def _count_whole_chunks(chunks: ChunkTable) -> tuple[np.ndarray, np.ndarray]:
    """Count the chunks that each rank sends as a home, and receives from homes, without exchanges.

    A chunk that is moved in parts because other domains take part costs its home one send.

    Returns:
        Sends and receives, each [ranks].
    """
    sends = np.zeros(len(chunks.is_member), np.int64)
    receives = np.zeros(len(chunks.is_member), np.int64)
    for chunk in range(len(chunks.keys)):
        home = chunks.keys[chunk, 0]
        # Parts from other domains are not received from homes.
        if chunks.is_member[home]:
            receivers = chunks.ranks[chunks.begins[chunk] : chunks.begins[chunk + 1]]
            sends[home] += 1 if len(parts_of(chunks, chunk)) else len(receivers)
            for rank in receivers:
                receives[rank] += 1
    return sends, receives


@compiled
def _even_out(load: np.ndarray, ranks: np.ndarray, shares: np.ndarray) -> None:
    """Choose shares of `WHOLE` that level the lowest loads of a chunk's receivers.

    Args:
        load: shares that each rank sends, [ranks]; those of the chunk are added.
        ranks: receivers of the chunk, [receivers]; each sends its share to all others.
        shares: share of each receiver, [receivers]; written.
    """
    num_others = len(ranks) - 1
    loads = load[ranks]
    # Receivers with a load above the level send nothing.
    sums = np.sort(loads).cumsum() + WHOLE * num_others
    level = (sums // np.arange(1, len(ranks) + 1)).min()
    shares[:] = np.maximum(0, level - loads) // num_others
    # The least loaded rank takes the remainder of the rounding.
    shares[loads.argmin()] += WHOLE - shares.sum()
    load[ranks] = loads + shares * num_others
