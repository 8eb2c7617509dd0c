"""A spAG or spRS over several NVLink domains, in stages: inside each domain by kernels, between them by messages.

One copy of a chunk goes to each domain that has replicas of it, in stripes: the n-th rank of the home's domain sends
the n-th stripe to the n-th rank of the other, so that all network adapters of both carry it.

| | stage | |
|---|---|---|
| spAG | in each domain | replicas beside the home get the chunk; each rank gets its stripe of what leaves |
| | between | stripes, all at once |
| | in each domain | replicas elsewhere get the chunk from the ranks that received its stripes |
| spRS | in each domain | what stays goes to the homes; of the rest each rank sums its stripe over the replicas |
| | between | stripes of sums, added to the stripes there: in as many rounds as there are other domains |
| | in each domain | stripes go to the homes |

In a round a domain receives from one other, each from a different one: a rank needs room for one round's stripes, and
domains are added in the same order in every run. A home with many replicas beside it sums no stripe over them: it
receives the chunk once in the end.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from megatron_hecate.comm.nvlink.places import Key, Part, Place, Pull
from megatron_hecate.comm.nvlink.schedule import Schedule
from megatron_hecate.comm.transport import Copy, LayerBuffer

Domains = Sequence[Sequence[int]]  # the ranks of every NVLink domain of a group, ascending


@dataclasses.dataclass(frozen=True)
class Messages:
    """One rank's messages between domains; those between two ranks stand in the same order on both.

    Args:
        sends: which part goes to which rank.
        receives: which part comes from which rank.
    """

    sends: tuple[tuple[Part, int], ...]
    receives: tuple[tuple[Part, int], ...]


Stage = Schedule | Messages


class Stages:
    """A transfer over several domains, stage by stage: as many on every rank."""

    @staticmethod
    def of_fetch(
        copies: Sequence[Copy], rank: int, *, domains: Domains, elements: int
    ) -> tuple[Stage, ...]:
        """The spAG of ``rank``, stage by stage; as many on every rank.

        Args:
            copies: all of the group, in the same order on all ranks; a rank receives a chunk once.
            rank: whose part.
            domains: of the group.
            elements: of a chunk.

        Raises:
            ValueError: as `Schedule.of_fetch`.
        """
        if len(domains) == 1:
            return (Schedule.of_fetch(copies, rank, domain=domains[0], elements=elements),)
        group = _Group(domains, rank, elements=elements, sums=False)
        leaving: dict[Key, list[Part]] = {}
        entering: dict[Key, list[Part]] = {}
        sends: list[tuple[Part, int]] = []
        receives: list[tuple[Part, int]] = []
        for chunk in group.crossing(copies):
            home, index = chunk.key
            slots = {copy.rank: Place(copy.rank, "slot", copy.slot) for copy in chunk.here}
            if group.of[home] == group.own:
                leaving[chunk.key] = group.stripes(
                    chunk, {home: Place(home, "send", index), **slots}
                )
                for other in chunk.others:
                    sends += group.messages(chunk, leaving[chunk.key], other=other)
            else:
                entering[chunk.key] = group.stripes(chunk, slots)
                receives += group.messages(chunk, entering[chunk.key], other=group.of[home])
        beside, apart = group.copies_to_here(copies)
        domain = domains[group.own]
        return (
            Schedule.of_fetch(beside, rank, domain=domain, elements=elements, parts=leaving),
            Messages(tuple(sends), tuple(receives)),
            Schedule.of_fetch(apart, rank, domain=domain, elements=elements, parts=entering),
        )

    @staticmethod
    def of_return(
        copies: Sequence[Copy], rank: int, *, domains: Domains, elements: int
    ) -> tuple[Stage, ...]:
        """The spRS of ``rank``, stage by stage. As `of_fetch`.

        A home's sum: gradients of replicas in its domain in order of rank; then, domain by domain from its own on, the
        sums over their replicas.
        """
        if len(domains) == 1:
            return (Schedule.of_return(copies, rank, domain=domains[0], elements=elements),)
        group, rounds = _Group(domains, rank, elements=elements, sums=True), range(1, len(domains))
        sums: dict[Key, list[Part]] = {}  # where the stripes of the sums are to be
        begun: dict[Key, list[Part]] = {}  # those of them that hold a sum
        sends: dict[int, list[tuple[Part, int]]] = {turn: [] for turn in rounds}
        crossing = list(group.crossing(copies))
        for chunk in crossing:
            key, homes = chunk.key, group.of[chunk.key[0]]
            sums[key] = group.stripes(
                chunk, {copy.rank: Place(copy.rank, "partial", copy.slot) for copy in chunk.here}
            )
            if chunk.here:
                begun[key] = sums[key]
            if homes != group.own:
                sends[(group.own - homes) % len(domains)] += group.messages(
                    chunk, sums[key], other=homes
                )
        beside, apart = group.copies_to_here(copies)
        domain = domains[group.own]
        stages: list[Stage] = [
            Schedule.of_return(
                [*beside, *apart], rank, domain=domain, elements=elements, parts=begun.copy()
            )
        ]
        used, own = (
            group.used.copy(),
            dict.fromkeys(key for key in sums if group.of[key[0]] == group.own),
        )
        for turn in rounds:
            group.used = used.copy()
            receives: list[tuple[Part, int]] = []
            adds: list[Pull] = []
            other = (group.own + turn) % len(domains)
            for chunk in (
                chunk for chunk in crossing if chunk.key in own and other in chunk.others
            ):
                key = chunk.key
                arrived = group.stripes(chunk, {}) if key in begun else sums[key]
                receives += group.messages(chunk, arrived, other=other)
                if key in begun:
                    pairs = zip(arrived, sums[key], strict=True)
                    adds += [
                        Pull((a.at,), b.at, a.begin, a.end, add=True)
                        for a, b in pairs
                        if b.at.rank == rank
                    ]
                begun[key] = sums[key]
            stages += [
                Messages(tuple(sends[turn]), tuple(receives)),
                Schedule((tuple(adds),), frozenset()),
            ]
        last = Schedule.of_return(
            [], rank, domain=domain, elements=elements, parts={key: sums[key] for key in own}
        )
        return (*stages, last)

    @staticmethod
    def stripe_buffers(
        layer: LayerBuffer, elements: int, sizes: Sequence[int]
    ) -> tuple[int, int, int]:
        """The stripes that a rank holds for others: elements of the largest; how many at once in a spAG, and in a spRS.

        Args:
            layer: whose chunks cross.
            elements: of a chunk.
            sizes: of the domains.
        """
        least, largest = min(sizes), max(sizes)
        fewest = least - 1 if _is_spared(least, least - 1) else least
        elements = max(end - begin for begin, end in Part.bounds(elements, [1] * fewest))
        if len(sizes) == 1:
            return elements, 0, 0
        leave = min(largest * layer.homes, (sum(sizes) - least) * layer.slots)
        enter = largest * layer.slots
        return elements, leave + enter, enter + leave + min(largest * layer.homes, enter)


def _is_spared(size: int, beside: int) -> bool:
    """Whether a home carries no stripe of a sum, in a domain of ``size`` ranks with ``beside`` replicas beside it: it
    would receive over 1.25 chunks, a stripe of each replica's gradient and all other stripes of the sum."""
    return (beside + size - 1) / size > 1.25


@dataclasses.dataclass(frozen=True)
class _Chunk:
    """A chunk that leaves this domain, or enters it.

    Args:
        here: copies in this domain.
        others: domains with copies, but the home's.
        spared: the home carries no stripe, having enough to receive.
    """

    key: Key
    here: Sequence[Copy]
    others: Sequence[int]
    spared: bool


class _Group:
    """The domains as one rank sees them."""

    def __init__(self, domains: Domains, rank: int, *, elements: int, sums: bool) -> None:
        self.domains, self.rank, self._elements, self._sums = domains, rank, elements, sums
        self.of = {r: i for i, domain in enumerate(domains) for r in domain}
        self.own = self.of[rank]
        self.used: Counter[int] = Counter()  # stripe buffers of each rank of this domain

    def crossing(self, copies: Sequence[Copy]) -> Iterator[_Chunk]:
        """The chunks that leave this domain, or enter it, in the order of their homes."""
        by_chunk: dict[Key, list[Copy]] = {}
        for copy in copies:
            by_chunk.setdefault((copy.home, copy.index), []).append(copy)
        for key in sorted(by_chunk):
            homes, counts = self.of[key[0]], Counter(self.of[copy.rank] for copy in by_chunk[key])
            others = sorted(counts.keys() - {homes})
            if self.own in others or (others and homes == self.own):
                here = [copy for copy in by_chunk[key] if self.of[copy.rank] == self.own]
                spared = self._sums and _is_spared(len(self.domains[homes]), counts[homes])
                yield _Chunk(key, here, others, spared=spared)

    def copies_to_here(self, copies: Sequence[Copy]) -> tuple[list[Copy], list[Copy]]:
        """Copies to this domain, from it and from others."""
        to_here = [copy for copy in copies if self.of[copy.rank] == self.own]
        beside = [copy for copy in to_here if self.of[copy.home] == self.own]
        return beside, [copy for copy in to_here if self.of[copy.home] != self.own]

    def stripes(self, chunk: _Chunk, places: Mapping[int, Place]) -> list[Part]:
        """The stripes on the ranks of this domain: in ``places``, or in stripe buffers of ranks that have none."""
        carriers = self._carriers(chunk, self.own)
        parts = []
        for rank, (begin, end) in zip(
            carriers, Part.bounds(self._elements, [1] * len(carriers)), strict=True
        ):
            if begin == end:
                continue
            place = places.get(rank)
            if place is None:
                place = Place(rank, "stripe", self.used[rank], begin)
                self.used[rank] += 1
            parts.append(Part(place, begin, end))
        return parts

    def messages(
        self, chunk: _Chunk, parts: Sequence[Part], *, other: int
    ) -> list[tuple[Part, int]]:
        """Those of ``parts`` that this rank exchanges with domain ``other``, and with which rank of it."""
        opposite = dict(
            zip(self._carriers(chunk, self.own), self._carriers(chunk, other), strict=True)
        )
        return [(part, opposite[self.rank]) for part in parts if part.at.rank == self.rank]

    def _carriers(self, chunk: _Chunk, domain: int) -> list[int]:
        """Who carries the stripes: in the home's domain beginning with the home, elsewhere with its opposite number; or
        each time with the rank after that."""
        beside, ranks = self.domains[self.of[chunk.key[0]]], self.domains[domain]
        first = beside.index(chunk.key[0]) + chunk.spared
        count = min(*map(len, self.domains), len(beside) - chunk.spared)
        return [ranks[(first + i) % len(ranks)] for i in range(count)]
