"""The chunks of a transfer in one NVLink domain: who receives which, and who exchanges which."""

from __future__ import annotations

import functools
import itertools
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple, NoReturn

import numpy as np

from megatron_hecate.comm.nvlink.exchange import choose_exchanges
from megatron_hecate.comm.nvlink.places import Key
from megatron_hecate.comm.transport import Copy
from megatron_hecate.plan.compiled import compiled_if_possible

MAX_RANKS: int = 72  # ranks of one NVLink domain; the same constant as in kernels/schedule.cuh
PLANS: int = 512  # plans whose schedules are cached; two per layer are in use
NO_RANK: int = -1


class Chunk(NamedTuple):
    """A chunk, the ranks that receive it, ascending, and the slot on each of the ranks."""

    key: Key
    ranks: Sequence[int]
    slots: Sequence[int]


class Chunks(NamedTuple):
    """All chunks of a transfer in one domain, the same for all ranks and for both directions.

    Args:
        keys: all chunks, sorted, including chunks without copies.
        begins: offset of each chunk's copies in ``ranks`` and ``slots``, and the total.
        ranks: receiving rank of every copy, sorted by chunk, then rank.
        slots: slot of every copy, in the order of ``ranks``.
        shares: chunks to exchange, with the share of `exchange.WHOLE` that each receiving rank
            fetches from the home.
        sends_any: True if the home of a chunk is in the domain.
    """

    keys: Sequence[Key]
    begins: Sequence[int]
    ranks: Sequence[int]
    slots: Sequence[int]
    shares: Mapping[Key, Sequence[int]]
    sends_any: bool

    @staticmethod
    @functools.lru_cache(maxsize=PLANS)
    def of(copies: tuple[Copy, ...], members: frozenset[int], in_parts: frozenset[Key]) -> Chunks:
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
        table = np.fromiter(itertools.chain.from_iterable(rows), np.int64, 4 * len(rows))
        is_member = np.zeros(1 + max(members), np.bool_)
        is_member[list(members)] = True
        found = _group(table.reshape(-1, 4), is_member)
        ranks = found.ranks.tolist()
        slots = found.slots.tolist()
        if not found.fit or len(ranks) + len(in_parts) < len(rows) or len(members) > MAX_RANKS:
            _explain_misfit(copies, members, in_parts)
        placed = set(zip(ranks, slots, strict=True))
        if len(placed) < len(ranks):
            _raise_twice("slot", list(zip(ranks, slots, strict=True)))
        keys = list(map(tuple, found.keys.tolist()))
        begins = found.begins.tolist()
        shares = {
            keys[at]: found.shares[begins[at] : begins[at + 1]].tolist()
            for at in found.exchanged.tolist()
        }
        sends_any = any(home in members for home, _ in keys)
        return Chunks(keys, begins, ranks, slots, shares, sends_any=sends_any)

    def of_rank(self, rank: int, in_parts: Iterable[Key]) -> list[Chunk]:
        """Return the chunks that ``rank`` sends or receives, and all ``in_parts``, in order."""
        # The keys are sorted, so the chunks of one home are contiguous.
        keys = self.keys
        begins = self.begins
        found = set(range(bisect_left(keys, (rank, 0)), bisect_left(keys, (rank + 1, 0))))
        found.update(
            bisect_right(begins, at) - 1
            for at, receiving in enumerate(self.ranks)
            if receiving == rank
        )
        found.update(bisect_left(keys, key) for key in in_parts)
        chunks = []
        for at in sorted(found):
            span = slice(begins[at], begins[at + 1])
            chunks.append(Chunk(keys[at], self.ranks[span], self.slots[span]))
        return chunks


class _Grouped(NamedTuple):
    """Copies by chunk. Shapes: C chunks, N copies.

    Args:
        keys: home and index of each chunk, sorted, [C, 2].
        begins: offset of each chunk's copies, and the total, [C + 1].
        ranks: receiving rank of every copy, [N].
        slots: slot of every copy, [N].
        shares: share of every copy, [N], see `choose_exchanges`.
        exchanged: numbers of the exchanged chunks.
        fit: False if a copy contradicts the domain or the copy before it; the rest is then
            incomplete.
    """

    keys: np.ndarray
    begins: np.ndarray
    ranks: np.ndarray
    slots: np.ndarray
    shares: np.ndarray
    exchanged: np.ndarray
    fit: bool


@compiled_if_possible
def _group(rows: np.ndarray, is_member: np.ndarray) -> _Grouped:
    """Group copies by chunk, check them, and choose the chunks to exchange.

    Args:
        rows: fields of every copy, sorted, [rows, 4]; before the copies of a chunk that is moved in
            parts a row with `NO_RANK`.
        is_member: whether each rank is in the domain, [ranks].
    """
    num_ranks = len(is_member)
    keys = np.empty((len(rows), 2), np.int64)
    begins = np.zeros(len(rows) + 1, np.int64)
    ranks = np.empty(len(rows), np.int64)
    slots = np.empty(len(rows), np.int64)
    # Home of a chunk that may be exchanged, else `NO_RANK`.
    homes = np.empty(len(rows), np.int64)
    sends = np.zeros(num_ranks, np.int64)
    receives = np.zeros(num_ranks, np.int64)
    chunk = -1
    copy = 0
    fit = True
    for at in range(len(rows)):
        home = rows[at, 0]
        rank = rows[at, 2]
        is_own = 0 <= home < num_ranks and is_member[home]
        if at == 0 or home != rows[at - 1, 0] or rows[at, 1] != rows[at - 1, 1]:
            chunk += 1
            keys[chunk] = rows[at, :2]
            homes[chunk] = rank if rank == NO_RANK else home
            # A chunk in parts costs its home one send.
            if rank == NO_RANK:
                if is_own:
                    sends[home] += 1
                begins[chunk + 1] = copy
                continue
        elif rank == rows[at - 1, 2]:
            fit = False
        is_whole = homes[chunk] != NO_RANK
        if rank == home or not 0 <= rank < num_ranks or not is_member[rank]:
            fit = False
        if not fit or (is_whole and not is_own):
            fit = False
            break
        if is_whole:
            sends[home] += 1
        # Parts from other domains are not received from homes.
        if is_own:
            receives[rank] += 1
        ranks[copy] = rank
        slots[copy] = rows[at, 3]
        copy += 1
        begins[chunk + 1] = copy
    keys = keys[: chunk + 1]
    begins = begins[: chunk + 2]
    ranks = ranks[:copy]
    exchanged, shares = choose_exchanges(begins, ranks, homes[: chunk + 1], sends, receives)
    return _Grouped(keys, begins, ranks, slots[:copy], shares, exchanged, fit)


def _explain_misfit(
    copies: Sequence[Copy], members: frozenset[int], in_parts: Collection[Key]
) -> NoReturn:
    """Raise ValueError for a domain with too many ranks, or for contradictory copies."""
    if len(members) > MAX_RANKS:
        raise ValueError(
            f"{len(members)} ranks are too many for one NVLink domain: nvlink supports "
            f"{MAX_RANKS}; use transport p2p"
        )
    for copy in sorted(copies):
        home, index, rank, _ = copy
        if (
            home == rank
            or rank not in members
            or (home not in members and (home, index) not in in_parts)
        ):
            raise ValueError(f"{copy} needs two different ranks of {sorted(members)}")
    _raise_twice("chunk for a rank", [copy[:3] for copy in copies])


def _raise_twice(what: str, named: Sequence[tuple[int, ...]]) -> NoReturn:
    """Raise ValueError for the first item that is in ``named`` twice."""
    twice = min(at for at, count in Counter(named).items() if count > 1)
    raise ValueError(f"a {what} is named twice: {twice}")
