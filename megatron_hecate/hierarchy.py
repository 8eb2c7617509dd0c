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
domains are added in the same order in every run.
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
    group = _Group(domains, rank, elements)
    departs: dict[Key, list[Part]] = {}
    arrives: dict[Key, list[Part]] = {}
    sends, recvs = [], []
    for key, hosts, others in group.leaving(loans):
        home, lent = key
        slots = {loan.host: Place(loan.host, "slot", loan.guest) for loan in hosts}
        if group.of[home] == group.here:
            departs[key] = group.parts(home, {home: Place(home, "outbox", lent), **slots})
            for other in others:
                sends += group.stripes(departs[key], home, other)
        else:
            arrives[key] = group.parts(home, slots)
            recvs += group.stripes(arrives[key], home, group.of[home])
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
    group, rounds = _Group(domains, rank, elements), range(1, len(domains))
    sums: dict[Key, list[Part]] = {}
    begun: dict[Key, list[Part]] = {}
    sends: dict[int, list[Stripe]] = {turn: [] for turn in rounds}
    leaving = list(group.leaving(loans))
    for key, hosts, _ in leaving:
        home = key[0]
        sums[key] = group.parts(home, {loan.host: Place(loan.host, "part", loan.guest) for loan in hosts})
        if hosts:
            begun[key] = sums[key]
        if group.of[home] != group.here:
            sends[(group.here - group.of[home]) % len(domains)] += group.stripes(sums[key], home, group.of[home])
    beside, apart = group.hosted(loans)
    inside = dict(domain=domains[group.here], elements=elements)
    legs: list[Leg] = [schedule.reduce([*beside, *apart], rank, parts=begun.copy(), **inside)]
    used, own = group.relays.copy(), dict.fromkeys(key for key in sums if group.of[key[0]] == group.here)
    for turn in rounds:
        group.relays, recvs, adds = used.copy(), [], []
        other = (group.here + turn) % len(domains)
        for key in (key for key, _, others in leaving if key in own and other in others):
            landed = group.parts(key[0], {}) if key in begun else sums[key]
            recvs += group.stripes(landed, key[0], other)
            if key in begun:
                pairs = zip(landed, sums[key], strict=True)
                adds += [Pull((a.at,), b.at, a.begin, a.end, add=True) for a, b in pairs if b.at.rank == rank]
            begun[key] = sums[key]
        legs += [Crossing(tuple(sends[turn]), tuple(recvs)), Schedule((tuple(adds),), frozenset())]
    return (*legs, schedule.reduce([], rank, parts={key: sums[key] for key in own}, **inside))


def width(elements: int, sizes: Sequence[int]) -> int:
    """Elements of the largest stripe, and of a relay, where domains have these ``sizes``."""
    return max(end - begin for begin, end in cut(elements, [1] * min(sizes)))


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


class _Group:
    """The domains as one rank sees them."""

    def __init__(self, domains: Domains, rank: int, elements: int) -> None:
        self.domains, self.rank = domains, rank
        self.of = {r: i for i, domain in enumerate(domains) for r in domain}
        self.here = self.of[rank]
        self.relays: Counter[int] = Counter()  # how many each rank of this domain has in use
        self._bounds = [bound for bound in cut(elements, [1] * min(map(len, domains))) if bound[0] < bound[1]]

    def leaving(self, loans: Sequence[Loan]) -> Iterator[tuple[Key, list[Loan], list[int]]]:
        """Chunks that leave or enter this domain: their hosts here, and the other domains that have some."""
        by_chunk: dict[Key, list[Loan]] = {}
        for loan in loans:
            by_chunk.setdefault((loan.home, loan.lent), []).append(loan)
        for key in sorted(by_chunk):
            domains = {self.of[loan.host] for loan in by_chunk[key]}
            others = sorted(domains - {self.of[key[0]]})
            if self.here in others or (others and self.of[key[0]] == self.here):
                yield key, [loan for loan in by_chunk[key] if self.of[loan.host] == self.here], others

    def hosted(self, loans: Sequence[Loan]) -> tuple[list[Loan], list[Loan]]:
        """Loans to this domain, from it and from others."""
        to_here = [loan for loan in loans if self.of[loan.host] == self.here]
        beside = [loan for loan in to_here if self.of[loan.home] == self.here]
        return beside, [loan for loan in to_here if self.of[loan.home] != self.here]

    def parts(self, home: int, places: Mapping[int, Place]) -> list[Part]:
        """The stripes of a chunk on the ranks of this domain: in ``places``, or relays of those that have none."""
        parts = []
        for rank, (begin, end) in zip(self._carriers(home, self.here), self._bounds, strict=False):
            place = places.get(rank)
            if place is None:
                place = Place(rank, "relay", self.relays[rank], begin)
                self.relays[rank] += 1
            parts.append(Part(place, begin, end))
        return parts

    def stripes(self, parts: Sequence[Part], home: int, other: int) -> list[Stripe]:
        """Those of ``parts`` that this rank exchanges with domain ``other``."""
        pairs = zip(parts, self._carriers(home, other), strict=False)
        return [Stripe(part.at, part.begin, part.end, rank) for part, rank in pairs if part.at.rank == self.rank]

    def _carriers(self, home: int, domain: int) -> list[int]:
        """Who carries the stripes: in the home's domain beginning with the home, elsewhere with its opposite number."""
        first, ranks = self.domains[self.of[home]].index(home), self.domains[domain]
        return [ranks[(first + i) % len(ranks)] for i in range(len(ranks))]
