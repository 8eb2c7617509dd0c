"""The chunks of a transfer in one NVLink domain: who receives which, and who exchanges which.

The receivers of a chunk may *exchange* it, see `schedule`: each fetches a share of it from the
home.
"""

from __future__ import annotations

import functools
import itertools
from typing import NamedTuple

import numpy as np

from megatron_hecate.comm.transport import Copy
from megatron_hecate.plan.compiled import compiled

CACHED: int = 512  # transfers whose chunks and schedules are cached; two per layer are in use
WHOLE: int = 1 << 20  # sum of the shares of a chunk
NO_RANK: int = -1

Key = tuple[int, int]  # a chunk: its home, and its index among the home's own experts


class ChunkTable(NamedTuple):
    """All chunks of a transfer in one domain, the same for all ranks and for both directions.

    Shapes: C chunks, N copies, R ranks up to the last of the domain. The copies of a chunk are
    consecutive: those of chunk c are the elements ``begins[c]`` to ``begins[c + 1]`` of an array
    [N].

    Args:
        keys: home and index of each chunk, sorted, including chunks without copies, [C, 2].
        begins: offset of each chunk's copies, and the total, [C + 1].
        ranks: receiving rank of every copy, sorted by chunk, then rank, [N].
        slots: slot of every copy, [N].
        in_parts: whether each chunk is moved in parts because other domains take part, [C].
        is_member: whether each rank is in the domain, [R].
        is_exchanged: whether each chunk is exchanged, [C].
        shares: share of `WHOLE` that the receiver of every copy fetches from the home, [N]; zeros
            for chunks that are not exchanged.
    """

    keys: np.ndarray
    begins: np.ndarray
    ranks: np.ndarray
    slots: np.ndarray
    in_parts: np.ndarray
    is_member: np.ndarray
    is_exchanged: np.ndarray
    shares: np.ndarray

    @staticmethod
    @functools.lru_cache(maxsize=CACHED)
    def of(
        copies: tuple[Copy, ...], members: frozenset[int], in_parts: frozenset[Key]
    ) -> ChunkTable:
        """Group ``copies`` by chunk and choose the chunks to exchange.

        Args:
            copies: all copies of the domain.
            members: ranks of the domain.
            in_parts: chunks that are moved in parts because other domains take part.
        """
        # Before the copies of a chunk that is moved in parts stands a row without a rank.
        rows = sorted([*copies, *((*key, NO_RANK, NO_RANK) for key in in_parts)])
        fields = itertools.chain.from_iterable(rows)
        is_member = np.zeros(1 + max(members), np.bool_)
        is_member[list(members)] = True
        table = np.fromiter(fields, np.int64, 4 * len(rows)).reshape(-1, 4)
        return _group(table, is_member)


@compiled
def _group(rows: np.ndarray, is_member: np.ndarray) -> ChunkTable:
    """Group copies by chunk and choose the chunks to exchange.

    Args:
        rows: fields of every copy, sorted, [rows, 4]; before the copies of a chunk that is moved in
            parts a row with `NO_RANK`.
        is_member: whether each rank is in the domain, [ranks].
    """
    first_rows = np.empty(len(rows), np.int64)
    begins = np.zeros(len(rows) + 1, np.int64)
    num_chunks = 0
    num_copies = 0
    for index in range(len(rows)):
        previous = rows[index - 1]
        if index == 0 or rows[index, 0] != previous[0] or rows[index, 1] != previous[1]:
            first_rows[num_chunks] = index
            num_chunks += 1
        if rows[index, 2] != NO_RANK:
            num_copies += 1
        begins[num_chunks] = num_copies
    first_rows = first_rows[:num_chunks]
    begins = begins[: num_chunks + 1]
    keys = rows[first_rows, :2]
    in_parts = rows[first_rows, 2] == NO_RANK
    copies = rows[rows[:, 2] != NO_RANK]
    ranks = copies[:, 2].copy()
    slots = copies[:, 3].copy()
    is_exchanged, shares = _choose_exchanges(keys, begins, ranks, in_parts, is_member)
    return ChunkTable(keys, begins, ranks, slots, in_parts, is_member, is_exchanged, shares)


@compiled
def _choose_exchanges(
    keys: np.ndarray,
    begins: np.ndarray,
    ranks: np.ndarray,
    in_parts: np.ndarray,
    is_member: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
    """Choose the chunks to exchange, and the share that each receiving rank fetches from the home.

    A home sends whole chunks to each rank as long as it sends no more than the rank that receives
    most. Beyond that, its chunks with the most receivers are exchanged first. A rank that fetches a
    share of a chunk sends it to every other receiver; the shares are chosen so that the ranks with
    the least to send otherwise send most. All chunks have one size. Args and returns as the fields
    of `ChunkTable`.
    """
    homes = keys[:, 0]
    sends, receives = _count_whole_chunks(keys, begins, ranks, in_parts, is_member)
    limit = receives.max()
    choices = np.empty(len(homes), np.int64)
    number = 0
    is_exchanged = np.zeros(len(homes), np.bool_)
    for size in range(len(sends), 1, -1):
        for chunk in range(len(homes)):
            if in_parts[chunk] or begins[chunk + 1] - begins[chunk] != size:
                continue
            if sends[homes[chunk]] > limit:
                choices[number] = chunk
                is_exchanged[chunk] = True
                number += 1
                sends[homes[chunk]] -= size - 1
    shares = np.zeros(len(ranks), np.int64)
    load = sends * WHOLE
    # The second pass improves the shares: only then do the loads include all other chunks' shares.
    for is_second in (False, True):
        for chunk in choices[:number]:
            begin = begins[chunk]
            end = begins[chunk + 1]
            num_others = end - begin - 1
            if is_second:
                for copy in range(begin, end):
                    load[ranks[copy]] -= shares[copy] * num_others
            _even_out(load, ranks[begin:end], shares[begin:end])
            for copy in range(begin, end):
                load[ranks[copy]] += shares[copy] * num_others
    return is_exchanged, shares


@compiled
def _count_whole_chunks(
    keys: np.ndarray,
    begins: np.ndarray,
    ranks: np.ndarray,
    in_parts: np.ndarray,
    is_member: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
    """Count the chunks that each rank sends as a home, and receives from homes, without exchanges.

    A chunk that is moved in parts because other domains take part costs its home one send.

    Returns:
        Sends and receives, each [ranks].
    """
    sends = np.zeros(len(is_member), np.int64)
    receives = np.zeros(len(is_member), np.int64)
    for chunk in range(len(keys)):
        home = keys[chunk, 0]
        # Parts from other domains are not received from homes.
        if home < len(is_member) and is_member[home]:
            receivers = ranks[begins[chunk] : begins[chunk + 1]]
            sends[home] += 1 if in_parts[chunk] else len(receivers)
            for rank in receivers:
                receives[rank] += 1
    return sends, receives


@compiled
def _even_out(load: np.ndarray, ranks: np.ndarray, shares: np.ndarray) -> None:
    """Choose shares of `WHOLE` that level the lowest loads of a chunk's receivers.

    Args:
        load: shares that each rank sends otherwise, [ranks].
        ranks: receivers of the chunk, [receivers]; each sends its share to all others.
        shares: share of each receiver, [receivers]; written.
    """
    num_others = len(ranks) - 1
    lowest = 0
    total = WHOLE * num_others
    for index in range(len(ranks)):
        total += load[ranks[index]]
        if load[ranks[index]] < load[ranks[lowest]]:
            lowest = index
    level = total // len(ranks)
    # Receivers with a load above the level send nothing. Without them the level is lower.
    last = -1
    while level != last:
        last = level
        total = WHOLE * num_others
        count = 0
        for rank in ranks:
            if load[rank] <= last:
                total += load[rank]
                count += 1
        level = total // count
    remainder = WHOLE
    for index in range(len(ranks)):
        shares[index] = max(0, level - load[ranks[index]]) // num_others
        remainder -= shares[index]
    # The least loaded rank takes the remainder of the rounding.
    shares[lowest] += remainder
