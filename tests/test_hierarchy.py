"""Transfers over several NVLink domains. Oracle: brute force: all ranks' legs over dictionaries of elements."""

from __future__ import annotations

from collections import Counter, defaultdict

import numpy as np
import pytest
from kernel_scripts import random_loans

from megatron_hecate import hierarchy
from megatron_hecate.exchange import CUT
from megatron_hecate.hierarchy import Crossing, Domains
from megatron_hecate.schedule import Loan, Place, Schedule

DOMAINS: dict[str, Domains] = {
    "2 of 4": ((0, 1, 2, 3), (4, 5, 6, 7)),
    "2 of 6": (tuple(range(6)), tuple(range(6, 12))),
    "3 of 2, not in order": ((0, 3), (1, 4), (2, 5)),
    "uneven": ((0, 1, 2), (3,), (4, 5)),
    "one each": ((0,), (1,), (2,)),
    "one": ((0, 1, 2, 3),),
}
Cell = tuple[int, str, int, int]  # rank, memory, index, element


def _cell(place: Place, element: int) -> Cell:
    return place.rank, place.memory, place.index, element


class Played:
    """All legs of all ranks; what one step writes is seen in the next. Counts what they move, and where it lies."""

    def __init__(
        self, loans: list[Loan], domains: Domains, elements: int, cells: dict[Cell, tuple], sums: bool
    ) -> None:
        build = hierarchy.reduce if sums else hierarchy.gather
        ranks = sum(map(len, domains))
        self.of = {rank: set(domain) for domain in domains for rank in domain}
        self.cells, self.crossed = cells, Counter()
        self.sent, self.got = Counter(), Counter()  # elements, to and from other ranks of the domain
        self.relays, self.width = 0, 0
        plans = [build(loans, rank, domains=domains, elements=elements) for rank in range(ranks)]
        assert len({len(plan) for plan in plans}) == 1, "ranks must agree on the number of legs"
        for legs in zip(*plans, strict=True):
            if isinstance(legs[0], Crossing):
                self._cross(legs)
            else:
                for domain in domains:
                    self._pull({rank: legs[rank] for rank in domain})

    def _note(self, place: Place, begin: int, end: int) -> None:
        if place.memory == "relay":
            self.relays = max(self.relays, place.index + 1)
            self.width = max(self.width, end - place.begin)
            assert begin >= place.begin

    def _pull(self, plans: dict[int, Schedule]) -> None:
        assert len({len(plan.steps) for plan in plans.values()}) == 1, "a domain must agree on the number of steps"
        for step in range(len(next(iter(plans.values())).steps)):
            written: dict[Cell, tuple] = {}
            for rank, plan in plans.items():
                for pull in plan.steps[step]:
                    assert pull.into.rank == rank and pull.begin < pull.end
                    self._note(pull.into, pull.begin, pull.end)
                    for source in pull.sources:
                        if source.rank != rank:
                            assert source.rank in plan.peers and rank in plans[source.rank].peers
                            self.sent[source.rank] += pull.end - pull.begin
                            self.got[rank] += pull.end - pull.begin
                    for e in range(pull.begin, pull.end):
                        value = tuple(x for source in pull.sources for x in self.cells[_cell(source, e)])
                        assert _cell(pull.into, e) not in written, "written twice in one step"
                        before = self.cells[_cell(pull.into, e)] if pull.add else ()
                        written[_cell(pull.into, e)] = (*before, *value)
            self.cells.update(written)

    def _cross(self, legs: tuple[Crossing, ...]) -> None:
        on_the_way: dict[tuple[int, int], list] = defaultdict(list)
        for rank, leg in enumerate(legs):
            for stripe in leg.sends:
                assert stripe.at.rank == rank and stripe.rank not in self.of[rank]
                values = [self.cells[_cell(stripe.at, e)] for e in range(stripe.begin, stripe.end)]
                on_the_way[rank, stripe.rank].append((stripe.begin, stripe.end, values))
                self.crossed[rank] += stripe.end - stripe.begin
        for rank, leg in enumerate(legs):
            for stripe in leg.recvs:
                self._note(stripe.at, stripe.begin, stripe.end)
                begin, end, values = on_the_way[stripe.rank, rank].pop(0)
                assert (begin, end) == (stripe.begin, stripe.end) and stripe.at.rank == rank
                self.cells.update({_cell(stripe.at, e): v for e, v in zip(range(begin, end), values, strict=True)})
        assert not any(on_the_way.values())


def _gather(loans: list[Loan], domains: Domains, elements: int) -> Played:
    homes = {(loan.home, loan.lent) for loan in loans}
    cells = {(home, "home", i, e): ((home, i, e),) for home, i in homes for e in range(elements)}
    played = Played(loans, domains, elements, cells, sums=False)
    for loan in loans:
        for e in range(elements):
            assert played.cells[loan.host, "slot", loan.guest, e] == ((loan.home, loan.lent, e),)
    return played


def _reduce(loans: list[Loan], domains: Domains, elements: int) -> Played:
    cells = {(a.host, "grad", a.guest, e): ((a.host, e),) for a in loans for e in range(elements)}
    homes = sorted({(loan.home, loan.lent) for loan in loans})
    cells |= {(home, "total", i, e): (("before", e),) for home, i in homes for e in range(elements)}
    played = Played(loans, domains, elements, cells, sums=True)
    at = {rank: i for i, domain in enumerate(domains) for rank in domain}
    for home, i in homes:
        hosts = [loan.host for loan in loans if (loan.home, loan.lent) == (home, i)]
        hosts.sort(key=lambda host, home=home: ((at[host] - at[home]) % len(domains), host))
        for e in range(elements):
            assert played.cells[home, "total", i, e] == (("before", e), *((host, e) for host in hosts))
    return played


@pytest.mark.parametrize("name", list(DOMAINS))
@pytest.mark.parametrize("seed", range(8))
def test_random_loans(name: str, seed: int) -> None:
    """And no rank needs more relays, or larger ones, than memory is set aside for."""
    domains, rng = DOMAINS[name], np.random.default_rng(seed)
    sizes = [len(domain) for domain in domains]
    lent, slots = int(rng.integers(1, 4)), int(rng.integers(1, 4))
    fill = float(rng.uniform(0.2, 1))
    loans = random_loans(rng, ranks=sum(sizes), slots=slots, lent=lent, fill=fill)
    elements = int(rng.choice([1, CUT, 5 * CUT + 3]))
    rows = hierarchy.relays(sizes, homes=lent, slots=slots)
    for played, most in zip((_gather(loans, domains, elements), _reduce(loans, domains, elements)), rows, strict=True):
        assert played.relays <= most
        assert played.width <= hierarchy.width(elements, sizes)


@pytest.mark.parametrize("beside", range(6))
@pytest.mark.parametrize("name", ["2 of 4", "2 of 6", "3 of 2, not in order"])
def test_one_copy_crosses_to_a_domain_in_stripes(name: str, beside: int) -> None:
    """One expert, hosted by all ranks of other domains, and some beside its home. No link carries much more than it."""
    domains, elements = DOMAINS[name], 64 * CUT
    others = [rank for domain in domains[1:] for rank in domain]
    loans = [Loan(domains[0][0], 0, host, 0) for host in (*domains[0][1 : 1 + beside], *others)]
    for sums in (False, True):
        played = (_reduce if sums else _gather)(loans, domains, elements)
        hosts = sum(loan.host in domains[0] for loan in loans)
        carriers = len(domains[0]) - (sums and hierarchy.spared(len(domains[0]), hosts))
        assert sum(played.crossed.values()) == (len(domains) - 1) * elements
        share = (len(domains) - 1) * elements / carriers
        assert max(played.crossed.values()) <= share + CUT, "all adapters carry it"
        assert max([*played.sent.values(), *played.got.values()]) <= 1.25 * elements


def test_domains_that_need_nothing_from_each_other_send_nothing() -> None:
    loans = [Loan(0, 0, 1, 0), Loan(4, 1, 6, 0)]
    for played in (_gather(loans, DOMAINS["2 of 4"], CUT), _reduce(loans, DOMAINS["2 of 4"], CUT)):
        assert not played.crossed and not played.relays
