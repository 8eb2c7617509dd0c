"""The steps of a spAG or spRS in one NVLink domain, whose ranks read each other's memory: who reads what, and when.

`domains` puts domains together. A rank only reads (*pulls*). What a step writes, others may read in the next one:

| | step | reads | into |
|---|---|---|---|
| spAG | pack | the parameters of the rank's own experts | its send buffer, where peers can see them |
| | fetch | chunks from the send buffer of their home | slots |
| | exchange | the parts that this rank did not fetch, from the ranks that did | slots |
| spRS | exchange | this rank's part of the gradients of all replicas | a part of the sum |
| | sum | gradients, or parts of sums | the home's main gradient |

*Exchange*: where a home would send more than any rank receives, each rank that receives a chunk fetches a different
part of it from the home, and the rest from the others. So the chunk leaves its home once, for one more step. In a spRS
the same parts are summed. Chunks that go to other domains, or come from there, are in parts as well.

Every rank knows every other's part, from the copies alone. Places are named; `program` turns them into addresses.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Literal, NamedTuple

import numpy as np

from megatron_hecate.comm.transport import Copy

MAX_RANKS: int = 72  # of one NVLink domain; kernels/schedule.cuh has the same

GRAIN: int = 128  # elements: parts of a chunk begin at multiples of this, so that their addresses are aligned
WHOLE: int = 1 << 20  # shares of a chunk add up to this
PLANS: int = 512  # whose schedules are kept: two per layer are in use

Key = tuple[int, int]  # a chunk: its home, and its index among the experts of that home
Memory = Literal["parameters", "send", "slot", "grad", "partial", "main_grad", "stripe"]


class Place(NamedTuple):
    """Where a chunk lies on a rank.

    ``grad``, ``partial``, ``main_grad``, and in spRS ``stripe``, are fp32. ``partial`` may be ``grad``: each part of it
    is read by its own sum alone.

    Args:
        rank: whose memory.
        memory: which one.
        index: counts own experts (parameters, send, main_grad), slots (slot, grad, partial), or stripes.
        begin: element of the chunk with which the memory begins.
    """

    rank: int
    memory: Memory
    index: int  # type: ignore[assignment]  # hides that of tuples
    begin: int = 0


class Pull(NamedTuple):
    """Elements [begin, end) of a chunk into ``into``: those of the only source, or the sum of several, in this order.

    Args:
        add: whether they are added to what is there.
    """

    sources: tuple[Place, ...]
    into: Place
    begin: int
    end: int
    add: bool = False


class Part(NamedTuple):
    """Elements [begin, end) of a chunk, and the place that holds them first, or their sum."""

    at: Place
    begin: int
    end: int

    @staticmethod
    def bounds(elements: int, shares: Sequence[int]) -> list[tuple[int, int]]:
        """[begin, end) of each part of a chunk, in proportion to ``shares``; some are empty where it is small."""
        grains, total = -(-elements // GRAIN), sum(shares)
        bounds = [min(elements, grains * so_far // total * GRAIN) for so_far in itertools.accumulate(shares, initial=0)]
        return list(itertools.pairwise(bounds))


Parts = Mapping[Key, Sequence[Part]]
NONE: Parts = MappingProxyType({})


@dataclasses.dataclass(frozen=True)
class Schedule:
    """One rank's part of a transfer.

    Args:
        steps: as many on every rank; a rank may have nothing to do in one.
        peers: ranks it reads from, or which read from it.
    """

    steps: tuple[tuple[Pull, ...], ...]
    peers: frozenset[int]

    @classmethod
    def of_fetch(
        cls, copies: Sequence[Copy], rank: int, *, domain: Sequence[int], elements: int, parts: Parts = NONE
    ) -> Schedule:
        """The spAG of ``rank``.

        Args:
            copies: all of the domain, in the same order on all ranks; a rank receives a chunk once.
            rank: whose part.
            domain: ranks that read each other's memory.
            elements: of a chunk.
            parts: of chunks that leave the domain: where they are to be in the end; of chunks that come from another:
                where they are.

        Raises:
            ValueError: for more ranks than the kernels know, an empty chunk, or copies that contradict each other.
        """
        here = _Domain(copies, rank, members=frozenset(domain), elements=elements, parts=parts)
        pack, fetch, exchange = [], [], []
        for key, chunk in here.by_chunk.items():
            home, index = key
            sent = Place(home, "send", index)
            if home == rank:
                pack.append(Pull((Place(rank, "parameters", index),), sent, 0, elements))
            wanted = parts.get(key, ())
            if not wanted and key not in here.shares:
                own = (Place(rank, "slot", copy.slot) for copy in chunk if copy.rank == rank)
                fetch += [Pull((sent,), slot, 0, elements) for slot in own]
                continue
            if not wanted and home == rank:
                continue
            slots = {copy.rank: Place(copy.rank, "slot", copy.slot) for copy in chunk}
            held = wanted
            if home in here.members:
                held = here.divide(key, list(slots.values())) if chunk else wanted
                fetch += [Pull((sent,), part.at, part.begin, part.end) for part in held if part.at.rank == rank != home]
                stripes = [part for part in wanted if part.at.rank == rank and part.at.memory == "stripe"]
                exchange += [pull for want in stripes if chunk for part in held for pull in _overlap(part, want)]
            if rank in slots:
                others = [part for part in held if part.at.rank != rank]
                exchange += [Pull((part.at,), slots[rank], part.begin, part.end) for part in others]
        steps = [pack, fetch] if here.sends_any else []
        return here.schedule([*steps, exchange] if here.shares or parts else steps)

    @classmethod
    def of_return(
        cls, copies: Sequence[Copy], rank: int, *, domain: Sequence[int], elements: int, parts: Parts = NONE
    ) -> Schedule:
        """The spRS of ``rank``: every home's sum over the replicas in order of rank, added to its main gradient.

        Args:
            copies, rank, domain, elements: as `of_fetch`.
            parts: of chunks with replicas in several domains: where the sums over those of this one are to be; of
                chunks without a replica here: where the whole sums are.

        Raises:
            ValueError: as `of_fetch`.
        """
        here = _Domain(copies, rank, members=frozenset(domain), elements=elements, parts=parts)
        exchange, sums = [], []
        for key, chunk in here.by_chunk.items():
            home, index = key
            grads = tuple(Place(copy.rank, "grad", copy.slot) for copy in chunk)
            main_grad = Place(rank, "main_grad", index)
            if key not in here.shares and key not in parts:
                if home == rank:
                    sums.append(Pull(grads, main_grad, 0, elements, add=True))
                continue
            held: Sequence[Part] = parts.get(key, ())
            if key in here.shares:
                held = here.divide(key, [Place(copy.rank, "partial", copy.slot) for copy in chunk])
            if grads:
                exchange += [Pull(grads, part.at, part.begin, part.end) for part in held if part.at.rank == rank]
            if home == rank and (key in here.shares or not grads):
                sums += [Pull((part.at,), main_grad, part.begin, part.end, add=True) for part in held]
        in_parts = here.shares or any(here.by_chunk[key] for key in parts)
        to_homes = here.count > len(parts) or any(not here.by_chunk[key] for key in parts)
        return here.schedule(([exchange] if in_parts else []) + ([sums] if to_homes else []))


def _overlap(held: Part, wanted: Part) -> list[Pull]:
    """What of a part brings elements of the other, if something does."""
    begin, end = max(held.begin, wanted.begin), min(held.end, wanted.end)
    return [Pull((held.at,), wanted.at, begin, end)] if begin < end else []


@dataclasses.dataclass(frozen=True, eq=False)
class _Chunks:
    """What a transfer moves in one domain, the same for all its ranks and both directions.

    Args:
        copies: sorted: by chunk, then the rank that receives it.
        keys: of all chunks, in order, those without copies among them.
        begins: where the copies of each begin, and the end.
        shares: chunks to exchange, and what share of `WHOLE` each receiving rank fetches from the home.
        sends_any: whether a home is in the domain.
    """

    copies: Sequence[Copy]
    keys: Sequence[Key]
    begins: Sequence[int]
    shares: Mapping[Key, Sequence[int]]
    sends_any: bool

    @staticmethod
    @functools.lru_cache(maxsize=PLANS)
    def of(copies: tuple[Copy, ...], members: frozenset[int], in_parts: frozenset[Key]) -> _Chunks:
        """Raises ValueError for more ranks than the kernels know, or copies that contradict each other."""
        ordered = sorted(copies)
        table = np.fromiter(itertools.chain.from_iterable(ordered), np.int64, 4 * len(copies)).reshape(-1, 4)
        _check(ordered, table, members, in_parts)
        chunk = (table[:, 0] << 32) + table[:, 1]
        starts = np.flatnonzero(chunk[1:] != chunk[:-1]) + 1
        begins = [0, *starts.tolist(), len(table)] if copies else [0]
        keys = [(ordered[begin].home, ordered[begin].index) for begin in begins[:-1]]
        if in_parts:
            of_key = dict(zip(keys, begins, strict=False))
            missing = in_parts - of_key.keys()
            keys = sorted([*keys, *missing])
            begins = [*begins[:-1], len(table)]
            for at, key in enumerate(keys):
                if key in missing:  # no copies: it begins where the next one does
                    begins.insert(at, begins[at])
        sends_any = any(key[0] in members for key in keys)
        return _Chunks(ordered, keys, begins, _exchanges(table, keys, begins, members, in_parts), sends_any)

    def of_rank(self, rank: int, in_parts: Parts) -> Iterator[tuple[Key, Sequence[Copy]]]:
        """The chunks that ``rank`` sends or receives, and those in parts, in order, with their copies."""
        copies = self.copies
        own = {(copy[0], copy[1]) for copy in copies if rank in (copy[0], copy[2])}
        for key, begin, end in zip(self.keys, self.begins, self.begins[1:], strict=False):
            if key in own or key in in_parts:
                yield key, copies[begin:end]


class _Domain:
    """What a transfer moves in one domain, as ``rank`` sees it. Args as `of_fetch`."""

    def __init__(
        self, copies: Sequence[Copy], rank: int, *, members: frozenset[int], elements: int, parts: Parts
    ) -> None:
        if elements < 1:
            raise ValueError(f"a chunk of {elements} elements cannot be moved")
        self.rank, self.members, self.elements, self.parts = rank, members, elements, parts
        chunks = _Chunks.of(tuple(copies), members, frozenset(parts))
        self.shares, self.sends_any, self.count = chunks.shares, chunks.sends_any, len(chunks.keys)
        # those that this rank sends or receives, and those in parts
        self.by_chunk = dict(chunks.of_rank(rank, parts))

    def divide(self, key: Key, places: Sequence[Place]) -> list[Part]:
        """A part of a chunk for each of the places; none where it is empty."""
        bounds = Part.bounds(self.elements, self.shares.get(key, [1] * len(places)))
        return [Part(place, begin, end) for place, (begin, end) in zip(places, bounds, strict=True) if begin < end]

    def schedule(self, steps: list[list[Pull]]) -> Schedule:
        """Every step begins with the rank after this one, so that not all ranks read one home at once."""
        peers: set[int] = set()
        for key, copies in self.by_chunk.items():
            others = {copy.rank for copy in copies} | {part.at.rank for part in self.parts.get(key, ())}
            if key[0] == self.rank:
                peers |= others
            elif self.rank in others:
                in_parts = key in self.shares or key in self.parts
                peers |= ({key[0]} & self.members) | (others if in_parts else set())
        ranks = max(self.members) + 1

        def distance(pull: Pull) -> tuple[int, int]:
            return (pull.sources[0].rank - self.rank) % ranks, pull.begin

        return Schedule(tuple(tuple(sorted(step, key=distance)) for step in steps), frozenset(peers - {self.rank}))


def _check(copies: Sequence[Copy], table: np.ndarray, members: frozenset[int], in_parts: frozenset[Key]) -> None:
    """Raises ValueError as `_Chunks.of`. ``table``: [n, 4] the same copies."""
    if len(members) > MAX_RANKS:
        raise ValueError(f"{len(members)} ranks share no NVLink domain: nvlink takes {MAX_RANKS}; use transport p2p")
    home, index, rank, slot = table.T
    inside = np.zeros(1 + max(*members, int(home.max(initial=0)), int(rank.max(initial=0))), bool)
    inside[list(members)] = True
    for at in np.flatnonzero(~(inside[rank] & inside[home] & (home != rank))).tolist():
        copy = copies[at]
        if copy.home == copy.rank or copy.rank not in members or (copy.home, copy.index) not in in_parts:
            raise ValueError(f"{copy} needs two different ranks of {sorted(members)}")
    chunks, slots = (home << 48) + (index << 16) + rank, np.sort((rank << 32) + slot)
    for what, named in (("chunk for a rank", chunks), ("slot", slots)):
        if (named[1:] == named[:-1]).any():
            at = int(named[:-1][named[1:] == named[:-1]][0])
            parts = (at >> 32, at % (1 << 32)) if what == "slot" else (at >> 48, (at >> 16) % (1 << 32), at % (1 << 16))
            raise ValueError(f"a {what} is named twice: {parts}")


def _exchanges(
    table: np.ndarray, keys: Sequence[Key], begins: Sequence[int], members: frozenset[int], in_parts: frozenset[Key]
) -> dict[Key, list[int]]:
    """The chunks to exchange, and what share of `WHOLE` each receiving rank fetches from the home.

    A home sends whole chunks to each rank as long as it sends no more than the rank that receives most; beyond that,
    its most wanted chunks are exchanged first. A rank that fetches a share of a chunk sends it to every other: shares
    are such that those send most that have the least to send otherwise. Chunks have one size; those that are moved in
    parts anyway cost their home one each.

    Args:
        table: [n, 4] copies, sorted by chunk.
        keys, begins: as in `_Chunks`.
    """
    home, _, rank, _ = table.T
    counts, size = np.diff(begins), 1 + max(members)
    whole = counts > 0  # chunks that their homes send to each rank
    if in_parts:
        from_here = np.array([key[0] in members for key in keys])
        whole = whole & from_here & np.array([key not in in_parts for key in keys])
        rank, home = rank[np.repeat(from_here, counts)], home[np.repeat(whole, counts)]
    most = int(np.bincount(rank, minlength=1).max())
    sends = np.bincount(home, minlength=size).tolist()
    for of_part, _ in in_parts:
        if of_part in members:
            sends[of_part] += 1
    wanted = [(-count, at) for at, count in enumerate(counts.tolist()) if count > 1 and whole[at]]
    exchanged: list[tuple[Key, list[int]]] = []  # and the ranks that receive it
    for count, at in sorted(wanted):
        key = keys[at]
        if sends[key[0]] > most:
            exchanged.append((key, table[begins[at] : begins[at + 1], 2].tolist()))
            sends[key[0]] += count + 1
    load = [count * WHOLE for count in sends]
    chosen = {key: [0] * len(receiving) for key, receiving in exchanged}
    for key, receiving in [*exchanged, *exchanged]:  # a second time, when all of them have shares
        shares = chosen[key]
        if len(receiving) == 2:
            (one, other), (of_one, of_other) = receiving, shares
            without_one, without_other = load[one] - of_one, load[other] - of_other
            of_one = _even_out_two(without_one, without_other)
            chosen[key] = [of_one, WHOLE - of_one]
            load[one], load[other] = without_one + of_one, without_other + WHOLE - of_one
            continue
        others = len(receiving) - 1
        without = [load[r] - share * others for r, share in zip(receiving, shares, strict=True)]
        chosen[key] = shares = _even_out(without, others)
        for r, before, share in zip(receiving, without, shares, strict=True):
            load[r] = before + share * others
    return chosen


def _even_out(loads: Sequence[int], others: int) -> list[int]:
    """Shares of `WHOLE` that, each sent to ``others`` ranks, raise the lowest ``loads`` to one level."""
    count, total = len(loads), sum(loads) + WHOLE * others
    level = total // count
    if level >= max(loads):
        shares = [(level - load) // others for load in loads]
    else:
        shares, order = [0] * count, sorted(range(count), key=loads.__getitem__)
        while level < loads[order[count - 1]]:
            count -= 1
            total -= loads[order[count]]
            level = total // count
        for i in order[:count]:
            shares[i] = (level - loads[i]) // others
    shares[loads.index(min(loads))] += WHOLE - sum(shares)  # what rounding left
    return shares


def _even_out_two(one: int, other: int) -> int:
    """What `_even_out` gives the first of two loads: most chunks have two receivers."""
    apart = other - one
    if abs(apart) >= WHOLE:
        return WHOLE if apart > 0 else 0
    return (WHOLE + apart + (apart >= 0)) // 2
