"""A spAG or spRS over several NVLink domains, as its legs: inside each domain by kernels, between them by messages.

One copy of a chunk goes to each domain that has guests of it, in stripes: the n-th rank of the home's domain sends the
n-th stripe to the n-th rank of the other, so that all network adapters of both carry it.

| | leg | |
|---|---|---|
| spAG | in each domain | hosts beside the home get the chunk; each rank gets its stripe of what leaves |
| | between | stripes, all at once |
| | in each domain | hosts elsewhere get the chunk from the ranks that received its stripes |
| spRS | in each domain | what stays: to the homes; of the rest each rank sums its stripe over the hosts |
| | between | stripes of sums, added to the stripes there: in as many rounds as there are other domains |
| | in each domain | stripes to the homes |

In a round a domain receives from one other, each from a different one: a rank needs room for one round's stripes, and
domains are added in the same order in every run. A home with many hosts beside it sums no stripe over them: it receives
the chunk once in the end.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from megatron_hecate import schedule
from megatron_hecate.exchange import Key, cut
from megatron_hecate.schedule import Loan, Part, Place, Pull, Schedule

Domains = Sequence[Sequence[int]]  # the ranks of every NVLink domain of a group, ascending


@dataclasses.dataclass(frozen=True)
class Stripe:
    """Elements [begin, end) of a chunk that a rank sends from ``at`` to ``rank``, or receives into it from there."""

    at: Place
    begin: int
    end: int
    rank: int


@dataclasses.dataclass(frozen=True)
class Crossing:
    """One rank's messages between domains; those between two ranks stand in the same order on both."""

    sends: tuple[Stripe, ...]
    recvs: tuple[Stripe, ...]


Leg = Schedule | Crossing


def gather(loans: Sequence[Loan], rank: int, *, domains: Domains, elements: int) -> tuple[Leg, ...]:
    """The spAG of ``rank``, leg by leg; as many on every rank.

    Args:
        loans: all guests of the group, in the same order on all ranks; a host has a chunk once.
        rank: whose part.
        domains: of the group.
        elements: of a chunk.

    Raises:
        ValueError: as `schedule.gather`.
    """
    if len(domains) == 1:
        return (schedule.gather(loans, rank, domain=domains[0], elements=elements),)
    group = _Group(domains, rank, elements, sums=False)
    departs: dict[Key, list[Part]] = {}
    arrives: dict[Key, list[Part]] = {}
    sends, recvs = [], []
    for chunk in group.leaving(loans):
        home, lent = chunk.key
        slots = {loan.host: Place(loan.host, "slot", loan.guest) for loan in chunk.hosts}
        if group.of[home] == group.here:
            departs[chunk.key] = group.parts(chunk, {home: Place(home, "outbox", lent), **slots})
            for other in chunk.others:
                sends += group.stripes(chunk, departs[chunk.key], other)
        else:
            arrives[chunk.key] = group.parts(chunk, slots)
            recvs += group.stripes(chunk, arrives[chunk.key], group.of[home])
    beside, apart = group.hosted(loans)
    inside = dict(domain=domains[group.here], elements=elements)
    return (
        schedule.gather(beside, rank, parts=departs, **inside),
        Crossing(tuple(sends), tuple(recvs)),
        schedule.gather(apart, rank, parts=arrives, **inside),
    )


def reduce(loans: Sequence[Loan], rank: int, *, domains: Domains, elements: int) -> tuple[Leg, ...]:
    """The spRS of ``rank``, leg by leg. As `gather`.

    A home's sum: gradients of hosts in its domain in order of rank; then, domain by domain from its own on, the sums
    over their hosts.
    """
    if len(domains) == 1:
        return (schedule.reduce(loans, rank, domain=domains[0], elements=elements),)
    group, rounds = _Group(domains, rank, elements, sums=True), range(1, len(domains))
    sums: dict[Key, list[Part]] = {}
    begun: dict[Key, list[Part]] = {}
    sends: dict[int, list[Stripe]] = {turn: [] for turn in rounds}
    leaving = list(group.leaving(loans))
    for chunk in leaving:
        key, homes = chunk.key, group.of[chunk.key[0]]
        sums[key] = group.parts(chunk, {loan.host: Place(loan.host, "part", loan.guest) for loan in chunk.hosts})
        if chunk.hosts:
            begun[key] = sums[key]
        if homes != group.here:
            sends[(group.here - homes) % len(domains)] += group.stripes(chunk, sums[key], homes)
    beside, apart = group.hosted(loans)
    inside = dict(domain=domains[group.here], elements=elements)
    legs: list[Leg] = [schedule.reduce([*beside, *apart], rank, parts=begun.copy(), **inside)]
    used, own = group.relays.copy(), dict.fromkeys(key for key in sums if group.of[key[0]] == group.here)
    for turn in rounds:
        group.relays, recvs, adds = used.copy(), [], []
        other = (group.here + turn) % len(domains)
        for chunk in (chunk for chunk in leaving if chunk.key in own and other in chunk.others):
            key = chunk.key
            landed = group.parts(chunk, {}) if key in begun else sums[key]
            recvs += group.stripes(chunk, landed, other)
            if key in begun:
                pairs = zip(landed, sums[key], strict=True)
                adds += [Pull((a.at,), b.at, a.begin, a.end, add=True) for a, b in pairs if b.at.rank == rank]
            begun[key] = sums[key]
        legs += [Crossing(tuple(sends[turn]), tuple(recvs)), Schedule((tuple(adds),), frozenset())]
    return (*legs, schedule.reduce([], rank, parts={key: sums[key] for key in own}, **inside))


def width(elements: int, sizes: Sequence[int]) -> int:
    """Elements of the largest stripe, and of a relay, where domains have these ``sizes``."""
    least = min(sizes)
    fewest = least - 1 if spared(least, least - 1) else least
    return max(end - begin for begin, end in cut(elements, [1] * fewest))


def spared(size: int, beside: int) -> bool:
    """Whether a home carries no stripe of a sum, in a domain of ``size`` ranks that has ``beside`` hosts: it would
    receive over 1.25 chunks, a stripe of each host's gradient and all other stripes of the sum."""
    return (beside + size - 1) / size > 1.25


def relays(sizes: Sequence[int], *, homes: int, slots: int) -> tuple[int, int]:
    """How many stripes a rank holds for others at once, at most, in spAG and in spRS.

    Args:
        sizes: of the domains.
        homes: experts of a rank.
        slots: guests of a rank.
    """
    if len(sizes) == 1:
        return 0, 0
    largest = max(sizes)
    leave, arrive = min(largest * homes, (sum(sizes) - min(sizes)) * slots), largest * slots
    return leave + arrive, arrive + leave + min(largest * homes, arrive)


@dataclasses.dataclass(frozen=True)
class _Leaving:
    """A chunk that leaves this domain, or enters it.

    Args:
        hosts: those in this domain.
        others: domains with hosts, but the home's.
        spared: the home carries no stripe, having enough to receive.
    """

    key: Key
    hosts: Sequence[Loan]
    others: Sequence[int]
    spared: bool


class _Group:
    """The domains as one rank sees them."""

    def __init__(self, domains: Domains, rank: int, elements: int, *, sums: bool) -> None:
        self.domains, self.rank, self._elements, self._sums = domains, rank, elements, sums
        self.of = {r: i for i, domain in enumerate(domains) for r in domain}
        self.here = self.of[rank]
        self.relays: Counter[int] = Counter()  # how many each rank of this domain has in use

    def leaving(self, loans: Sequence[Loan]) -> Iterator[_Leaving]:
        """In the order of their homes."""
        by_chunk: dict[Key, list[Loan]] = {}
        for loan in loans:
            by_chunk.setdefault((loan.home, loan.lent), []).append(loan)
        for key in sorted(by_chunk):
            homes, at = self.of[key[0]], Counter(self.of[loan.host] for loan in by_chunk[key])
            others = sorted(at.keys() - {homes})
            if self.here in others or (others and homes == self.here):
                hosts = [loan for loan in by_chunk[key] if self.of[loan.host] == self.here]
                much = spared(len(self.domains[homes]), at[homes])
                yield _Leaving(key, hosts, others, spared=self._sums and much)

    def hosted(self, loans: Sequence[Loan]) -> tuple[list[Loan], list[Loan]]:
        """Loans to this domain, from it and from others."""
        to_here = [loan for loan in loans if self.of[loan.host] == self.here]
        beside = [loan for loan in to_here if self.of[loan.home] == self.here]
        return beside, [loan for loan in to_here if self.of[loan.home] != self.here]

    def parts(self, chunk: _Leaving, places: Mapping[int, Place]) -> list[Part]:
        """Its stripes on the ranks of this domain: in ``places``, or relays of those that have none."""
        carriers = self._carriers(chunk, self.here)
        parts = []
        for rank, (begin, end) in zip(carriers, cut(self._elements, [1] * len(carriers)), strict=True):
            if begin == end:
                continue
            place = places.get(rank)
            if place is None:
                place = Place(rank, "relay", self.relays[rank], begin)
                self.relays[rank] += 1
            parts.append(Part(place, begin, end))
        return parts

    def stripes(self, chunk: _Leaving, parts: Sequence[Part], other: int) -> list[Stripe]:
        """Those of ``parts`` that this rank exchanges with domain ``other``."""
        carriers, here = self._carriers(chunk, other), self._carriers(chunk, self.here)
        opposite = dict(zip(here, carriers, strict=True))
        own = [part for part in parts if part.at.rank == self.rank]
        return [Stripe(part.at, part.begin, part.end, opposite[self.rank]) for part in own]

    def _carriers(self, chunk: _Leaving, domain: int) -> list[int]:
        """Who carries the stripes: in the home's domain beginning with the home, elsewhere with its opposite number; or
        each time with the rank after that."""
        beside, ranks = self.domains[self.of[chunk.key[0]]], self.domains[domain]
        first = beside.index(chunk.key[0]) + chunk.spared
        count = min(*map(len, self.domains), len(beside) - chunk.spared)
        return [ranks[(first + i) % len(ranks)] for i in range(count)]
