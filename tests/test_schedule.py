"""Schedules of the ``sm`` transport. Oracle: brute force, which runs all ranks' steps over dictionaries of elements."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from kernel_scripts import hot, random_loans

from megatron_hecate import schedule
from megatron_hecate.exchange import CUT, WHOLE, exchanged
from megatron_hecate.schedule import Loan, Place

ELEMENTS = 5 * CUT + 3
Cell = tuple[Place, int]


def _run(loans: list[Loan], ranks: int, elements: int, *, sums: bool, cells: dict[Cell, tuple]) -> None:
    """All steps of all ranks; what one step writes is seen in the next."""
    build = schedule.reduce if sums else schedule.gather
    plans = [build(loans, rank, domain=range(ranks), elements=elements) for rank in range(ranks)]
    assert len({len(plan.steps) for plan in plans}) == 1, "ranks must agree on the number of steps"
    for step in range(len(plans[0].steps)):
        written: dict[Cell, tuple] = {}
        for rank, plan in enumerate(plans):
            for pull in plan.steps[step]:
                assert pull.into.rank == rank and pull.begin < pull.end
                for source in pull.sources:
                    if source.rank != rank:
                        assert source.rank in plan.peers and rank in plans[source.rank].peers
                for e in range(pull.begin, pull.end):
                    value = tuple(x for source in pull.sources for x in cells[source, e])
                    assert (pull.into, e) not in written, "written twice in one step"
                    written[pull.into, e] = (*cells[pull.into, e], *value) if pull.add else value
        cells.update(written)


def _gather(loans: list[Loan], ranks: int, elements: int) -> None:
    homes = {(loan.home, loan.lent) for loan in loans}
    cells = {(Place(home, "home", i), e): ((home, i, e),) for home, i in homes for e in range(elements)}
    _run(loans, ranks, elements, sums=False, cells=cells)
    for loan in loans:
        for e in range(elements):
            assert cells[Place(loan.host, "slot", loan.guest), e] == ((loan.home, loan.lent, e),)


def _reduce(loans: list[Loan], ranks: int, elements: int) -> None:
    cells = {(Place(a.host, "grad", a.guest), e): ((a.host, e),) for a in loans for e in range(elements)}
    homes = sorted({(loan.home, loan.lent) for loan in loans})
    cells |= {(Place(home, "total", i), e): (("before", e),) for home, i in homes for e in range(elements)}
    _run(loans, ranks, elements, sums=True, cells=cells)
    for home, i in homes:
        hosts = sorted(loan.host for loan in loans if (loan.home, loan.lent) == (home, i))
        for e in range(elements):
            assert cells[Place(home, "total", i), e] == (("before", e), *((host, e) for host in hosts))


@pytest.mark.parametrize("seed", range(30))
def test_random_loans(seed: int) -> None:
    rng = np.random.default_rng(seed)
    ranks, lent = int(rng.integers(2, 9)), int(rng.integers(1, 4))
    slots = int(rng.integers(1, 4))
    loans = random_loans(rng, ranks=ranks, slots=slots, lent=lent, fill=float(rng.uniform(0.2, 1)))
    elements = int(rng.choice([1, CUT, ELEMENTS]))
    _gather(loans, ranks, elements)
    _reduce(loans, ranks, elements)


@pytest.mark.parametrize("fan_out", [1, 2, 3, 7, 8, 31, 71])
def test_no_link_carries_much_more_than_the_chunk(fan_out: int) -> None:
    """One hot expert, in chunks: the home sends one, and so does every host at most; of gradients as well."""
    loans, ranks, elements = hot(fan_out + 1, 0, fan_out), fan_out + 1, 1_000_000
    for build in (schedule.gather, schedule.reduce):
        carried: Counter = Counter()
        for rank in range(ranks):
            steps = build(loans, rank, domain=range(ranks), elements=elements).steps
            for pull in (pull for step in steps for pull in step):
                for source in (source for source in pull.sources if source.rank != rank):
                    carried["out", source.rank] += pull.end - pull.begin
                    carried["in", rank] += pull.end - pull.begin
        assert max(carried.values()) <= 1.25 * elements, build.__name__


def test_chunks_are_exchanged_only_where_their_home_would_send_most() -> None:
    assert not exchanged({(r, 0): [(r + 1) % 4, (r + 2) % 4] for r in range(4)}), "everyone sends and receives two"
    assert exchanged({(1, 0): [2, 3]}) == {(1, 0): [WHOLE // 2] * 2}
    one_more = {(0, 0): [1, 2], (0, 1): [1], (0, 2): [2]}
    assert exchanged(one_more).keys() == {(0, 0)}, "4 chunks leave, 2 arrive anywhere: exchanged, 3 leave"


def test_who_sends_least_otherwise_sends_most() -> None:
    """Rank 1 lends an expert itself: ranks 2 and 3 pass on rank 0's, and nobody sends more than one chunk."""
    shares = exchanged({(0, 0): [1, 2, 3], (1, 0): [2]})
    assert shares == {(0, 0): [0, WHOLE // 2, WHOLE // 2]}
    level = {1: 1 + 2 * shares[0, 0][0] / WHOLE, 2: 2 * shares[0, 0][1] / WHOLE, 3: 2 * shares[0, 0][2] / WHOLE}
    assert max(level.values()) == 1.0


@pytest.mark.parametrize("seed", range(20))
def test_shares_make_whole_chunks(seed: int) -> None:
    rng = np.random.default_rng(seed)
    ranks = int(rng.integers(3, 40))
    hosts = {}
    for home in range(ranks):
        others = rng.permutation([r for r in range(ranks) if r != home])[: int(rng.integers(0, ranks))]
        hosts |= {(home, 0): sorted(others.tolist())} if len(others) else {}
    for key, shares in exchanged(hosts).items():
        assert len(shares) == len(hosts[key]) and sum(shares) == WHOLE and min(shares) >= 0


def test_ranks_begin_at_different_homes() -> None:
    loans = [Loan(home, 0, host, home) for home in range(4) for host in range(4) if home != host]
    firsts = [schedule.gather(loans, r, domain=range(4), elements=CUT).steps[1][0].sources[0].rank for r in range(4)]
    assert firsts == [1, 2, 3, 0]


@pytest.mark.parametrize(
    ("loans", "ranks", "elements", "message"),
    [
        ([], 73, 1, "73 ranks share no NVLink domain: the sm transport takes 72; use transport p2p"),
        ([], 2, 0, "a chunk of 0 elements cannot be moved"),
        ([Loan(0, 0, 0, 0)], 2, 1, r"needs two different ranks of \[0, 1\]"),
        ([Loan(0, 0, 2, 0)], 2, 1, r"needs two different ranks of \[0, 1\]"),
        ([Loan(0, 0, 1, 0), Loan(0, 1, 1, 0)], 2, 1, r"a guest is named twice: \(1, 0\)"),
        ([Loan(0, 0, 1, 0), Loan(0, 0, 1, 1)], 2, 1, r"a chunk on a host is named twice: \(0, 0, 1\)"),
    ],
)
def test_bad_loans(loans: list[Loan], ranks: int, elements: int, message: str) -> None:
    for build in (schedule.gather, schedule.reduce):
        with pytest.raises(ValueError, match=message):
            build(loans, 0, domain=range(ranks), elements=elements)
