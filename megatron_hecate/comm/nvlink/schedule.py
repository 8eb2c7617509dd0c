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
import itertools
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Literal

from megatron_hecate.comm.transport import Copy

MAX_RANKS: int = 72  # of one NVLink domain; kernels/schedule.cuh has the same

GRAIN: int = 128  # elements: parts of a chunk begin at multiples of this, so that their addresses are aligned
WHOLE: int = 1 << 20  # shares of a chunk add up to this

Key = tuple[int, int]  # a chunk: its home, and its index among the experts of that home
Memory = Literal["parameters", "send", "slot", "grad", "partial", "main_grad", "stripe"]


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a chunk lies on a rank.

    ``grad`` has the type in which gradients travel; ``partial``, ``main_grad``, and in spRS ``stripe``, are fp32. Where
    gradients are fp32, ``partial`` may be ``grad``: each part of it is read by its own sum alone.

    Args:
        rank: whose memory.
        memory: which one.
        index: counts own experts (parameters, send, main_grad), slots (slot, grad, partial), or stripes.
        begin: element of the chunk with which the memory begins.
    """

    rank: int
    memory: Memory
    index: int
    begin: int = 0


@dataclasses.dataclass(frozen=True)
class Pull:
    """Elements [begin, end) of a chunk into ``into``: those of the only source, or the sum of several, in this order.

    Args:
        add: whether they are added to what is there.
    """

    sources: tuple[Place, ...]
    into: Place
    begin: int
    end: int
    add: bool = False


@dataclasses.dataclass(frozen=True)
class Part:
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
            slots = {copy.rank: Place(copy.rank, "slot", copy.slot) for copy in chunk}
            if home == rank:
                pack.append(Pull((Place(rank, "parameters", index),), sent, 0, elements))
            wanted = parts.get(key, ())
            if not wanted and key not in here.shares:
                if rank in slots:
                    fetch.append(Pull((sent,), slots[rank], 0, elements))
                continue
            held = wanted
            if home in here.members:
                held = here.divide(key, list(slots.values())) if chunk else wanted
                fetch += [Pull((sent,), part.at, part.begin, part.end) for part in held if part.at.rank == rank != home]
                stripes = [part for part in wanted if part.at.rank == rank and part.at.memory == "stripe"]
                exchange += [pull for want in stripes if chunk for part in held for pull in _overlap(part, want)]
            if rank in slots:
                others = [part for part in held if part.at.rank != rank]
                exchange += [Pull((part.at,), slots[rank], part.begin, part.end) for part in others]
        steps = [pack, fetch] if any(home in here.members for home, _ in here.by_chunk) else []
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
        in_parts = here.shares or any(key in parts for key, chunk in here.by_chunk.items() if chunk)
        to_homes = any(key not in parts or not chunk for key, chunk in here.by_chunk.items())
        return here.schedule(([exchange] if in_parts else []) + ([sums] if to_homes else []))


def _overlap(held: Part, wanted: Part) -> list[Pull]:
    """What of a part brings elements of the other, if something does."""
    begin, end = max(held.begin, wanted.begin), min(held.end, wanted.end)
    return [Pull((held.at,), wanted.at, begin, end)] if begin < end else []


class _Domain:
    """What a transfer moves in one domain, as ``rank`` sees it. Args as `of_fetch`."""

    def __init__(
        self, copies: Sequence[Copy], rank: int, *, members: frozenset[int], elements: int, parts: Parts
    ) -> None:
        self.rank, self.members, self.elements, self.parts = rank, members, elements, parts
        self._check(copies)
        by_chunk: defaultdict[Key, list[Copy]] = defaultdict(list, {key: [] for key in parts})
        for copy in copies:
            by_chunk[copy.home, copy.index].append(copy)
        # of each chunk, in order of the ranks that receive it
        self.by_chunk = {key: sorted(by_chunk[key], key=lambda copy: copy.rank) for key in sorted(by_chunk)}
        self.shares = self._exchanges()

    def _check(self, copies: Sequence[Copy]) -> None:
        if self.elements < 1:
            raise ValueError(f"a chunk of {self.elements} elements cannot be moved")
        if len(self.members) > MAX_RANKS:
            count = len(self.members)
            raise ValueError(f"{count} ranks share no NVLink domain: nvlink takes {MAX_RANKS}; use transport p2p")
        for copy in copies:
            known = copy.home in self.members or (copy.home, copy.index) in self.parts
            if not known or copy.rank not in self.members or copy.home == copy.rank:
                raise ValueError(f"{copy} needs two different ranks of {sorted(self.members)}")
        chunks = Counter((copy.home, copy.index, copy.rank) for copy in copies)
        slots = Counter((copy.rank, copy.slot) for copy in copies)
        for what, counts in (("chunk for a rank", chunks), ("slot", slots)):
            if twice := [key for key, count in counts.items() if count > 1]:
                raise ValueError(f"a {what} is named twice: {twice[0]}")

    def _exchanges(self) -> dict[Key, list[int]]:
        """The chunks to exchange, and what share of `WHOLE` each receiving rank fetches from the home.

        A home sends whole chunks to each rank as long as it sends no more than the rank that receives most; beyond
        that, its most wanted chunks are exchanged first. A rank that fetches a share of a chunk sends it to every
        other: shares are such that those send most that have the least to send otherwise. Chunks have one size; those
        that are moved in ``parts`` anyway cost their home one each.
        """
        inside = {key: copies for key, copies in self.by_chunk.items() if key[0] in self.members}
        most = max(Counter(copy.rank for copies in inside.values() for copy in copies).values(), default=0)
        whole = {key: [copy.rank for copy in copies] for key, copies in inside.items() if key not in self.parts}
        sends = Counter(home for home, _ in self.parts)
        for (home, _), ranks in whole.items():
            sends[home] += len(ranks)
        chosen: dict[Key, list[int]] = {}
        for key in sorted(whole, key=lambda key: (-len(whole[key]), key)):
            count = len(whole[key])
            if sends[key[0]] > most and count > 1:
                chosen[key] = [0] * count
                sends[key[0]] -= count - 1
        load = Counter({rank: count * WHOLE for rank, count in sends.items()})
        for key in [*chosen, *chosen]:  # a second time, when all of them have shares
            ranks, others = whole[key], len(whole[key]) - 1
            for rank, share in zip(ranks, chosen[key], strict=True):
                load[rank] -= share * others
            chosen[key] = _even_out([load[rank] for rank in ranks], others)
            for rank, share in zip(ranks, chosen[key], strict=True):
                load[rank] += share * others
        return chosen

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


def _even_out(loads: Sequence[int], others: int) -> list[int]:
    """Shares of `WHOLE` that, each sent to ``others`` ranks, raise the lowest ``loads`` to one level."""
    order = sorted(range(len(loads)), key=lambda i: (loads[i], i))
    shares, level, count = [0] * len(loads), 0, 0
    for count in range(len(order), 0, -1):
        level = (sum(loads[i] for i in order[:count]) + WHOLE * others) // count
        if level >= loads[order[count - 1]]:
            break
    for i in order[:count]:
        shares[i] = (level - loads[i]) // others
    shares[order[0]] += WHOLE - sum(shares)  # what rounding left
    return shares
