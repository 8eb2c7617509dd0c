"""The chunks of a transfer in one NVLink domain: who receives which, and who exchanges which."""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from collections.abc import Collection, Sequence
from typing import NamedTuple

import numpy as np

from megatron_hecate.comm.transport import Copy
from megatron_hecate.nvlink.exchange import choose_exchanges
from megatron_hecate.nvlink.places import Key
from megatron_hecate.plan.compiled import compiled_if_possible

MAX_RANKS: int = 72  # ranks of one NVLink domain; the same constant as in kernels/schedule.cuh
PLANS: int = 512  # plans whose schedules are cached; two per layer are in use
NO_RANK: int = -1


class ChunkTable(NamedTuple):
    """All chunks of a transfer in one domain, the same for all ranks and for both directions.

    Shapes: C chunks, N copies, R ranks up to the last of the domain.

    Args:
        keys: home and index of each chunk, sorted, including chunks without copies, [C, 2].
        begins: offset of each chunk's copies, and the total, [C + 1].
        ranks: receiving rank of every copy, sorted by chunk, then rank, [N].
        slots: slot of every copy, [N].
        shares: share of `exchange.WHOLE` that the receiver of every copy fetches from the home,
            [N]; zeros for chunks that are not exchanged.
        is_exchanged: whether each chunk is exchanged, [C].
        in_parts: whether each chunk is moved in parts because other domains take part, [C].
        is_member: whether each rank is in the domain, [R].
        fit: False if copies contradict each other or the domain; the rest is then incomplete.
    """

    keys: np.ndarray
    begins: np.ndarray
    ranks: np.ndarray
    slots: np.ndarray
    shares: np.ndarray
    is_exchanged: np.ndarray
    in_parts: np.ndarray
    is_member: np.ndarray
    fit: bool

    @staticmethod
    @functools.lru_cache(maxsize=PLANS)
    def of(
        copies: tuple[Copy, ...], members: frozenset[int], in_parts: frozenset[Key]
    ) -> ChunkTable:
        """Group ``copies`` by chunk and choose the chunks to exchange.

        Args:
            copies: all copies of the domain.
            members: ranks of the domain.
            in_parts: chunks that are moved in parts because other domains take part.

        Raises:
            ValueError: more ranks than the kernels support, or contradictory copies.
        """
        # Before the copies of a chunk that is moved in parts stands a row without a rank.
        rows = sorted([*copies, *((*key, NO_RANK, NO_RANK) for key in in_parts)])
        fields = itertools.chain.from_iterable(rows)
        table = np.fromiter(fields, np.int64, 4 * len(rows)).reshape(-1, 4)
        is_member = np.zeros(1 + max(members), np.bool_)
        is_member[list(members)] = True
        num_slots = 1 + int(table[:, 3].max(initial=NO_RANK))
        chunks = _group(table, is_member, num_slots)
        if not chunks.fit or len(chunks.ranks) < len(copies) or len(members) > MAX_RANKS:
            _explain_misfit(copies, members, in_parts)
        return chunks


@compiled_if_possible
def _group(rows: np.ndarray, is_member: np.ndarray, num_slots: int) -> ChunkTable:
    """Group copies by chunk, check them, and choose the chunks to exchange.

    Args:
        rows: fields of every copy, sorted, [rows, 4]; before the copies of a chunk that is moved in
            parts a row with `NO_RANK`.
        is_member: whether each rank is in the domain, [ranks].
        num_slots: slots of a rank.
    """
    num_ranks = len(is_member)
    keys = np.empty((len(rows), 2), np.int64)
    begins = np.zeros(len(rows) + 1, np.int64)
    ranks = np.empty(len(rows), np.int64)
    slots = np.empty(len(rows), np.int64)
    in_parts = np.zeros(len(rows), np.bool_)
    is_taken = np.zeros((num_ranks, num_slots), np.bool_)
    sends = np.zeros(num_ranks, np.int64)
    receives = np.zeros(num_ranks, np.int64)
    chunk = -1
    copy = 0
    fit = True
    for index in range(len(rows)):
        home = rows[index, 0]
        rank = rows[index, 2]
        slot = rows[index, 3]
        is_from_here = 0 <= home < num_ranks and is_member[home]
        is_new = index == 0 or home != rows[index - 1, 0] or rows[index, 1] != rows[index - 1, 1]
        if is_new:
            chunk += 1
            keys[chunk] = rows[index, :2]
            begins[chunk + 1] = copy
            in_parts[chunk] = rank == NO_RANK
            if rank == NO_RANK:
                # A chunk in parts costs its home one send.
                if is_from_here:
                    sends[home] += 1
                continue
        # The rows of a chunk are sorted by rank.
        is_twice = not is_new and rank == rows[index - 1, 2]
        fit = not is_twice and (is_from_here or in_parts[chunk])
        fit = fit and rank != home and 0 <= rank < num_ranks and is_member[rank]
        fit = fit and slot >= 0 and not is_taken[rank, slot]
        if not fit:
            break
        is_taken[rank, slot] = True
        if not in_parts[chunk]:
            sends[home] += 1
        # Parts from other domains are not received from homes.
        if is_from_here:
            receives[rank] += 1
        ranks[copy] = rank
        slots[copy] = slot
        copy += 1
        begins[chunk + 1] = copy
    num_chunks = chunk + 1
    keys = keys[:num_chunks]
    begins = begins[: num_chunks + 1]
    ranks = ranks[:copy]
    in_parts = in_parts[:num_chunks]
    homes = np.where(in_parts, NO_RANK, keys[:, 0])
    is_exchanged, shares = choose_exchanges(begins, ranks, homes, sends, receives)
    return ChunkTable(
        keys, begins, ranks, slots[:copy], shares, is_exchanged, in_parts, is_member, fit
    )


def _explain_misfit(
    copies: Sequence[Copy], members: frozenset[int], in_parts: Collection[Key]
) -> None:
    """Raise ValueError for a domain with too many ranks, or for contradictory copies."""
    if len(members) > MAX_RANKS:
        raise ValueError(
            f"{len(members)} ranks are too many for one NVLink domain: nvlink supports "
            f"{MAX_RANKS}; use transport p2p"
        )
    for copy in sorted(copies):
        home, index, rank, slot = copy
        if (
            home == rank
            or rank not in members
            or (home not in members and (home, index) not in in_parts)
        ):
            raise ValueError(f"{copy} needs two different ranks of {sorted(members)}")
        if slot < 0:
            raise ValueError(f"{copy} needs a slot of 0 or more")
    _raise_twice("chunk for a rank", [copy[:3] for copy in copies])
    _raise_twice("slot", [copy[2:] for copy in copies])


def _raise_twice(what: str, named: Sequence[tuple[int, ...]]) -> None:
    """Raise ValueError for the first item that is in ``named`` twice, if there is one."""
    twice = [place for place, count in Counter(named).items() if count > 1]
    if twice:
        raise ValueError(f"a {what} is named twice: {min(twice)}")
