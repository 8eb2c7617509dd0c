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
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from operator import eq
from types import MappingProxyType
from typing import Literal, NamedTuple, NoReturn

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
        bounds, begin = [], 0
        for so_far in itertools.accumulate(shares):
            end = min(elements, grains * so_far // total * GRAIN)
            bounds.append((begin, end))
            begin = end
        return bounds


_Part = tuple[
    Place, int, int
]  # `Part`, or the same as a plain tuple, which takes less time to make
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
        cls,
        copies: Sequence[Copy],
        rank: int,
        *,
        domain: Sequence[int],
        elements: int,
        parts: Parts = NONE,
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
        for key, ranks, slots in here.chunks:
            home, index = key
            sent = Place(home, "send", index)
            if home == rank:
                pack.append(Pull((Place(rank, "parameters", index),), sent, 0, elements))
            into = Place(rank, "slot", slots[ranks.index(rank)]) if rank in ranks else None
            held: Sequence[_Part] = parts.get(key, ())
            if not held:
                if into is None:
                    continue
                if key not in here.shares:
                    fetch.append(Pull((sent,), into, 0, elements))
                    continue
            if home in here.members:
                wanted, held = (
                    held,
                    here.divide(key, ranks, slots, memory="slot") if ranks else held,
                )
                if home != rank:
                    fetch += [
                        Pull((sent,), at, begin, end) for at, begin, end in held if at.rank == rank
                    ]
                stripes = [
                    part for part in wanted if part[0].rank == rank and part[0].memory == "stripe"
                ]
                exchange += [
                    pull
                    for want in stripes
                    if ranks
                    for part in held
                    for pull in _overlap(part, want)
                ]
            if into is not None:
                exchange += [
                    Pull((at,), into, begin, end) for at, begin, end in held if at.rank != rank
                ]
        steps = [pack, fetch] if here.sends_any else []
        return here.schedule([*steps, exchange] if here.shares or parts else steps)

    @classmethod
    def of_return(
        cls,
        copies: Sequence[Copy],
        rank: int,
        *,
        domain: Sequence[int],
        elements: int,
        parts: Parts = NONE,
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
        for key, ranks, slots in here.chunks:
            home, index = key
            grads = tuple(_places(ranks, "grad", slots))
            main_grad = Place(rank, "main_grad", index)
            if key not in here.shares and key not in parts:
                if home == rank:
                    sums.append(Pull(grads, main_grad, 0, elements, add=True))
                continue
            held: Sequence[_Part] = parts.get(key, ())
            if key in here.shares:
                held = here.divide(key, ranks, slots, memory="partial")
            if grads:
                exchange += [
                    Pull(grads, at, begin, end) for at, begin, end in held if at.rank == rank
                ]
            if home == rank and (key in here.shares or not grads):
                sums += [Pull((at,), main_grad, begin, end, add=True) for at, begin, end in held]
        with_copies = sum(key in parts and len(ranks) > 0 for key, ranks, _ in here.chunks)
        in_parts = here.shares or with_copies
        to_homes = here.count > len(parts) or with_copies < len(parts)
        return here.schedule(([exchange] if in_parts else []) + ([sums] if to_homes else []))


def _overlap(held: _Part, wanted: _Part) -> list[Pull]:
    """What of a part brings elements of the other, if something does."""
    at, begin, end = held
    into, first, last = wanted
    begin, end = max(begin, first), min(end, last)
    return [Pull((at,), into, begin, end)] if begin < end else []


def _places(ranks: Sequence[int], memory: Memory, slots: Sequence[int]) -> Iterable[Place]:
    """A chunk's places on the ranks that receive it, made without a call in Python for each."""
    return map(Place._make, zip(ranks, itertools.repeat(memory), slots, itertools.repeat(0)))


class _Chunk(NamedTuple):
    """A chunk, and the ranks that receive it, ascending, each into which of its slots."""

    key: Key
    ranks: Sequence[int]
    slots: Sequence[int]


class _Chunks(NamedTuple):
    """What a transfer moves in one domain, the same for all its ranks and both directions.

    Args:
        keys: of all chunks, in order, those without copies among them.
        begins: where the copies of each begin in ``ranks`` and ``slots``, and the end.
        ranks, slots: of the copies, sorted: by chunk, then rank.
        shares: chunks to exchange, and what share of `WHOLE` each receiving rank fetches from the home.
        sends_any: whether a home is in the domain.
    """

    keys: Sequence[Key]
    begins: Sequence[int]
    ranks: Sequence[int]
    slots: Sequence[int]
    shares: Mapping[Key, Sequence[int]]
    sends_any: bool

    @staticmethod
    @functools.lru_cache(maxsize=PLANS)
    def of(copies: tuple[Copy, ...], members: frozenset[int], in_parts: frozenset[Key]) -> _Chunks:
        """Raises ValueError for more ranks than the kernels know, or copies that contradict each other."""
        homes, indices, ranks, slots = (
            zip(*sorted(copies), strict=True) if copies else ((), (), (), ())
        )
        fit = len(members) <= MAX_RANKS and members.issuperset(homes) and members.issuperset(ranks)
        if not fit or any(map(eq, homes, ranks)):
            _check_ranks(copies, members, in_parts)
        counts: dict[Key, int] = Counter(zip(homes, indices, strict=True))
        if in_parts - counts.keys():
            counts = {key: counts.get(key, 0) for key in sorted(in_parts | counts.keys())}
        keys, begins = list(counts), list(itertools.accumulate(counts.values(), initial=0))
        several = [at for at, count in enumerate(counts.values()) if count > 1]
        wanted = [(keys[at], ranks[begins[at] : begins[at + 1]]) for at in several]
        for key, receiving in wanted:
            if len(set(receiving)) < len(receiving):
                _raise_twice("chunk for a rank", [(*key, rank) for rank in receiving])
        if len(set(zip(ranks, slots, strict=True))) < len(ranks):
            _raise_twice("slot", list(zip(ranks, slots, strict=True)))
        sends = Counter(homes)
        received: Sequence[int] = ranks
        if in_parts:
            sends = Counter(
                [
                    home
                    for home, index in zip(homes, indices, strict=True)
                    if (home, index) not in in_parts
                ]
            )
            sends.update([home for home, _ in in_parts])
            received = [rank for home, rank in zip(homes, ranks, strict=True) if home in members]
            wanted = [chunk for chunk in wanted if chunk[0] not in in_parts]
        most = max(Counter(received).values(), default=0)
        shares = _exchanges(
            wanted, [sends.get(rank, 0) for rank in range(1 + max(members))], most=most
        )
        return _Chunks(
            keys, begins, ranks, slots, shares, sends_any=any(home in members for home, _ in keys)
        )

    def of_rank(self, rank: int, in_parts: Iterable[Key]) -> list[_Chunk]:
        """The chunks that ``rank`` sends or receives, and those in parts, in order."""
        keys, begins, ranks, slots = self.keys, self.begins, self.ranks, self.slots
        found = set(range(bisect_left(keys, (rank, 0)), bisect_left(keys, (rank + 1, 0))))
        found.update(
            bisect_right(begins, at) - 1 for at, receiving in enumerate(ranks) if receiving == rank
        )
        found.update(bisect_left(keys, key) for key in in_parts)
        spans = [(keys[at], slice(begins[at], begins[at + 1])) for at in sorted(found)]
        return [_Chunk(key, ranks[span], slots[span]) for key, span in spans]


class _Domain:
    """What a transfer moves in one domain, as ``rank`` sees it. Args as `of_fetch`."""

    def __init__(
        self,
        copies: Sequence[Copy],
        rank: int,
        *,
        members: frozenset[int],
        elements: int,
        parts: Parts,
    ) -> None:
        if elements < 1:
            raise ValueError(f"a chunk of {elements} elements cannot be moved")
        self.rank, self.members, self.elements, self.parts = rank, members, elements, parts
        chunks = _Chunks.of(tuple(copies), members, frozenset(parts))
        self.shares, self.sends_any, self.count = chunks.shares, chunks.sends_any, len(chunks.keys)
        self.chunks = chunks.of_rank(rank, parts)

    def divide(
        self, key: Key, ranks: Sequence[int], slots: Sequence[int], *, memory: Memory
    ) -> list[_Part]:
        """The part of a chunk for each receiving rank, in ``memory`` of its slot; none where it is empty."""
        bounds = Part.bounds(self.elements, self.shares.get(key, [1] * len(ranks)))
        places = _places(ranks, memory, slots)
        return [
            (place, begin, end)
            for place, (begin, end) in zip(places, bounds, strict=True)
            if begin < end
        ]

    def schedule(self, steps: list[list[Pull]]) -> Schedule:
        """Every step begins with the rank after this one, so that not all ranks read one home at once."""
        own, peers = self.rank, set[int]()
        for key, ranks, _ in self.chunks:
            others = {*ranks, *(part.at.rank for part in self.parts.get(key, ()))}
            if key[0] == own:
                peers |= others
            elif own in others:
                if key[0] in self.members:
                    peers.add(key[0])
                if key in self.shares or key in self.parts:
                    peers |= others
        peers.discard(own)
        size = max(self.members) + 1

        def distance(pull: Pull) -> tuple[int, int]:
            return (pull[0][0][0] - own) % size, pull[
                2
            ]  # of the first source's rank, and the element it begins with

        return Schedule(
            tuple([tuple(sorted(step, key=distance)) for step in steps]), frozenset(peers)
        )


def _check_ranks(
    copies: Sequence[Copy], members: frozenset[int], in_parts: Collection[Key]
) -> None:
    """Raises ValueError as `_Chunks.of`, for the ranks of ``copies``, or too many in the domain."""
    if len(members) > MAX_RANKS:
        raise ValueError(
            f"{len(members)} ranks share no NVLink domain: nvlink takes {MAX_RANKS}; use transport p2p"
        )
    for copy in sorted(copies):
        home, index, rank, _ = copy
        if (
            home == rank
            or rank not in members
            or (home not in members and (home, index) not in in_parts)
        ):
            raise ValueError(f"{copy} needs two different ranks of {sorted(members)}")


def _raise_twice(what: str, named: Sequence[tuple[int, ...]]) -> NoReturn:
    """Raises ValueError for the first of those that are in ``named`` twice."""
    twice = min(at for at, count in Counter(named).items() if count > 1)
    raise ValueError(f"a {what} is named twice: {twice}")


def _exchanges(
    wanted: Sequence[tuple[Key, Sequence[int]]], sends: list[int], *, most: int
) -> dict[Key, Sequence[int]]:
    """The chunks to exchange, and what share of `WHOLE` each receiving rank fetches from the home.

    A home sends whole chunks to each rank as long as it sends no more than the rank that receives most; beyond that,
    its most wanted chunks are exchanged first. A rank that fetches a share of a chunk sends it to every other: shares
    are such that those send most that have the least to send otherwise. Chunks have one size; those that are moved in
    parts anyway cost their home one each.

    Args:
        wanted: chunks with several receiving ranks, in order, and these ranks; without those moved in parts.
        sends: [ranks] chunks that each sends as a home; changed to what is left.
        most: chunks that a rank receives from homes here.
    """
    exchanged: list[tuple[Key, Sequence[int]]] = []
    for key, ranks in sorted(wanted, key=lambda chunk: -len(chunk[1])):
        if sends[key[0]] > most:
            exchanged.append((key, ranks))
            sends[key[0]] -= len(ranks) - 1
    return _shares(exchanged, [count * WHOLE for count in sends])


def _shares(
    exchanged: Sequence[tuple[Key, Sequence[int]]], load: list[int]
) -> dict[Key, Sequence[int]]:
    """What share of `WHOLE` each receiving rank fetches from the home, by chunk.

    Args:
        exchanged: chunks, and the ranks that receive them.
        load: [ranks] what each sends otherwise, as shares; in the end, what it sends in all.
    """
    chosen: dict[Key, Sequence[int]] = {}
    for again in (False, True):  # the second time, all others have shares
        for key, ranks in exchanged:
            others = len(ranks) - 1
            if others == 1:  # most chunks have two receivers
                one, other = ranks
                of_one, of_other = chosen[key] if again else (0, 0)
                without_one, without_other = load[one] - of_one, load[other] - of_other
                of_one = _even_out_two(without_one, without_other)
                chosen[key] = of_one, WHOLE - of_one
                load[one], load[other] = without_one + of_one, without_other + WHOLE - of_one
                continue
            if again:
                for rank, share in zip(ranks, chosen[key], strict=True):
                    load[rank] -= share * others
            chosen[key] = shares = _even_out([load[rank] for rank in ranks], others)
            for rank, share in zip(ranks, shares, strict=True):
                load[rank] += share * others
    return chosen


def _even_out(loads: Sequence[int], others: int) -> list[int]:
    """Shares of `WHOLE` that, each sent to ``others`` ranks, raise the lowest ``loads`` to one level."""
    to_raise = loads
    level = (sum(loads) + WHOLE * others) // len(loads)
    while level < max(to_raise):
        to_raise = [load for load in to_raise if load <= level]
        level = (sum(to_raise) + WHOLE * others) // len(to_raise)
    shares = [(level - load) // others if load < level else 0 for load in loads]
    rest = WHOLE - sum(shares)
    if rest:  # what rounding left
        shares[loads.index(min(loads))] += rest
    return shares


def _even_out_two(one: int, other: int) -> int:
    """What `_even_out` gives the first of two loads."""
    apart = other - one
    if -WHOLE < apart < WHOLE:
        return (WHOLE + apart + (apart >= 0)) // 2
    return WHOLE if apart > 0 else 0
