"""Schedules of the transport ``nvlink``, in one NVLink domain and over several.

Oracle: brute force, which runs all ranks' stages over dictionaries of elements and knows what each must hold then.
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from kernel_scripts import one_hot, pulls_of, random_copies

from megatron_hecate.comm.transport import Copy, LayerBuffer
from megatron_hecate.nvlink.chunks import HOME, SEND, SLOT, STRIPE, Part
from megatron_hecate.nvlink.domains import (
    Domains,
    Messages,
    most_stripes,
    stages_of,
    stripe_elements,
)
from megatron_hecate.nvlink.schedule import GRAIN, TransferSchedule

pytestmark = pytest.mark.fast
DOMAINS: dict[str, Domains] = {
    "one of 2": ((0, 1),),
    "one of 5": (tuple(range(5)),),
    "one of 8": (tuple(range(8)),),
    "2 of 4": ((0, 1, 2, 3), (4, 5, 6, 7)),
    "2 of 6": (tuple(range(6)), tuple(range(6, 12))),
    "3 of 2, not in order": ((0, 3), (1, 4), (2, 5)),
    "uneven": ((0, 1, 2), (3,), (4, 5)),
    "one each": ((0,), (1,), (2,)),
}
Cell = tuple[int, int, int, int]  # rank, memory, index, element


class Played:
    """All stages of all ranks; what one step writes is seen in the next. Counts what they move, and where it lies.

    Args:
        cells: what the memory holds before; as values tuples of all that was added up.
    """

    def __init__(
        self,
        copies: Sequence[Copy],
        domains: Domains,
        elements: int,
        cells: dict[Cell, tuple],
        *,
        sums: bool,
    ) -> None:
        self.adds = sums  # to what main gradients hold
        self.of = {rank: set(domain) for domain in domains for rank in domain}
        self.cells = cells
        self.crossed: Counter[int] = Counter()  # elements that each rank sends to other domains
        self.sent: Counter[int] = Counter()  # and to others of its domain
        self.got: Counter[int] = Counter()
        self.stripes, self.stripe_elements = 0, 0
        plans = [
            stages_of(copies, rank, domains=domains, elements=elements, sums=sums)
            for rank in range(len(self.of))
        ]
        assert len({len(plan) for plan in plans}) == 1, "ranks must agree on the number of stages"
        for stages in zip(*plans, strict=True):
            if isinstance(stages[0], Messages):
                self._deliver(stages)
            else:
                for domain in domains:
                    self._pull({rank: stages[rank] for rank in domain})

    def _cells(self, part: Part) -> list[Cell]:
        if part.memory == STRIPE:
            self.stripes = max(self.stripes, part.index + 1)
            self.stripe_elements = max(self.stripe_elements, part.end - part.first)
            assert part.begin >= part.first
        cells = range(part.begin, part.end)
        return [(part.rank, part.memory, part.index, element) for element in cells]

    def _pull(self, plans: dict[int, TransferSchedule]) -> None:
        assert len({plan.num_steps for plan in plans.values()}) == 1, (
            "a domain must agree on the number of steps"
        )
        assert len({plan.participants for plan in plans.values()}) == 1
        steps = {rank: pulls_of(plan, rank) for rank, plan in plans.items()}
        for step in range(next(iter(plans.values())).num_steps):
            written: dict[Cell, tuple] = {}
            writers: dict[Cell, tuple[int, int]] = {}  # the pull, by rank and number
            reads: dict[Cell, set[tuple[int, int]]] = {}
            for rank, plan in plans.items():
                for number, (sources, into) in enumerate(steps[rank][step]):
                    size = into.end - into.begin
                    assert size > 0 and {rank, *(s.rank for s in sources)} <= plan.participants
                    for source in (source for source in sources if source.rank != rank):
                        self.sent[source.rank] += size
                        self.got[rank] += size
                    for cell, *parts in zip(
                        self._cells(into), *map(self._cells, sources), strict=True
                    ):
                        assert cell not in written, "written twice in one step"
                        before = self.cells[cell] if self.adds and into.memory == HOME else ()
                        written[cell] = (*before, *(x for part in parts for x in self.cells[part]))
                        writers[cell] = rank, number
                        for part in parts:
                            reads.setdefault(part, set()).add((rank, number))
            for cell, writer in writers.items():
                assert reads.get(cell, set()) <= {writer}, "read in the step that writes it"
            self.cells.update(written)

    def _deliver(self, stages: tuple[Messages, ...]) -> None:
        on_the_way: dict[tuple[int, int], list] = defaultdict(list)
        for rank, stage in enumerate(stages):
            for part, to in stage.sends:
                assert part.rank == rank and to not in self.of[rank]
                values = [self.cells[cell] for cell in self._cells(part)]
                on_the_way[rank, to].append((part.begin, part.end, values))
                self.crossed[rank] += part.end - part.begin
        for rank, stage in enumerate(stages):
            for part, source in stage.receives:
                begin, end, values = on_the_way[source, rank].pop(0)
                assert (begin, end) == (part.begin, part.end) and part.rank == rank
                self.cells.update(zip(self._cells(part), values, strict=True))
            for source, total in stage.adds:
                assert source.rank == total.rank == rank
                for cell, add in zip(self._cells(total), self._cells(source), strict=True):
                    self.cells[cell] += self.cells[add]
        assert not any(on_the_way.values())


def _fetch(copies: Sequence[Copy], domains: Domains, elements: int) -> Played:
    sent = {(copy.home, copy.index) for copy in copies}
    cells = {(home, HOME, i, e): ((home, i, e),) for home, i in sent for e in range(elements)}
    played = Played(copies, domains, elements, cells, sums=False)
    for copy in copies:
        for e in range(elements):
            assert played.cells[copy.rank, SLOT, copy.slot, e] == ((copy.home, copy.index, e),)
    return played


def _schedule(copies: Sequence[Copy], rank: int, elements: int) -> TransferSchedule:
    """A spAG of four ranks."""
    return TransferSchedule.of(copies, rank, domain=range(4), elements=elements, sums=False)


def _return(copies: Sequence[Copy], domains: Domains, elements: int) -> Played:
    """Replicas of the home's domain come first, then those of the next one; in each, by rank."""
    cells: dict[Cell, tuple] = {
        (c.rank, SLOT, c.slot, e): ((c.rank, e),) for c in copies for e in range(elements)
    }
    sent = sorted({(copy.home, copy.index) for copy in copies})
    cells |= {(home, HOME, i, e): (("before", e),) for home, i in sent for e in range(elements)}
    played = Played(copies, domains, elements, cells, sums=True)
    of = {rank: i for i, domain in enumerate(domains) for rank in domain}
    for home, i in sent:
        ranks = [copy.rank for copy in copies if (copy.home, copy.index) == (home, i)]
        ranks.sort(key=lambda rank, home=home: ((of[rank] - of[home]) % len(domains), rank))
        for e in range(elements):
            assert played.cells[home, HOME, i, e] == (("before", e), *((rank, e) for rank in ranks))
    return played


@pytest.mark.parametrize("name", list(DOMAINS))
@pytest.mark.parametrize(
    "seeds", [range(4), pytest.param(range(4, 200), marks=pytest.mark.slow)], ids=["few", "many"]
)
def test_random_copies(name: str, seeds: range) -> None:
    """And no rank needs more stripe buffers, or larger ones, than memory is set aside for."""
    sizes = tuple(map(len, DOMAINS[name]))
    for seed in seeds:
        rng = np.random.default_rng(seed)
        experts, slots = int(rng.integers(1, 4)), int(rng.integers(1, 4))
        fill = float(rng.uniform(0.2, 1))
        copies = random_copies(rng, ranks=sum(sizes), slots=slots, experts=experts, fill=fill)
        elements = int(rng.choice([1, GRAIN, 5 * GRAIN + 3]))
        layer = LayerBuffer(slots=slots, elements=elements, dtype=torch.bfloat16, homes=experts)
        width, counts = stripe_elements(elements, sizes), most_stripes(layer, sizes)
        for play, most in zip((_fetch, _return), counts, strict=True):
            played = play(copies, DOMAINS[name], elements)
            assert played.stripes <= most and played.stripe_elements <= width


@pytest.mark.parametrize("fan_out", [1, 2, 3, 7, 8, 31, 71])
def test_no_link_carries_much_more_than_the_chunk(fan_out: int) -> None:
    """One hot expert: the home sends its chunk once, and so does every other at most; of gradients as well."""
    copies, ranks, elements = one_hot(fan_out + 1, 0, fan_out), range(fan_out + 1), 1_000_000
    for sums in (False, True):
        carried: Counter[tuple[str, int]] = Counter()
        for rank in ranks:
            schedule = TransferSchedule.of(copies, rank, domain=ranks, elements=elements, sums=sums)
            for sources, into in itertools.chain(*pulls_of(schedule, rank)):
                for source in (source for source in sources if source.rank != rank):
                    carried["out", source.rank] += into.end - into.begin
                    carried["in", rank] += into.end - into.begin
        assert max(carried.values()) <= 1.25 * elements, sums


def test_chunks_are_exchanged_only_where_their_home_would_send_most() -> None:
    """Where everyone sends and receives two, no third step is worth its time; else the hottest chunk is exchanged."""
    even = [Copy(home, 0, (home + turn) % 4, turn - 1) for home in range(4) for turn in (1, 2)]
    assert _schedule(even, 0, GRAIN).num_steps == 2
    one_more = [Copy(0, 0, 1, 0), Copy(0, 0, 2, 0), Copy(0, 1, 1, 1), Copy(0, 2, 2, 1)]
    played = _fetch(one_more, [range(3)], 8 * GRAIN)
    assert played.sent[0] == 3 * 8 * GRAIN, "4 chunks would leave, 2 arrive anywhere"


def test_no_more_chunks_are_exchanged_than_the_home_needs() -> None:
    """Rank 0 sends 5 chunks, and rank 1 receives 3. Once the first of rank 0's is exchanged, 3 leave rank 0 as well, so
    that its second one is fetched whole."""
    copies = [*one_hot(4, 0, 3), Copy(0, 1, 1, 1), Copy(0, 1, 2, 1), Copy(3, 0, 1, 2)]
    for rank in (1, 2):
        _, fetch, exchange = pulls_of(_schedule(copies, rank, 8 * GRAIN), rank)
        (whole,) = (pull for pull in fetch if pull.sources[0][:3] == (0, SEND, 1))
        assert (whole.into.begin, whole.into.end) == (0, 8 * GRAIN)
        assert {pull.into.index for pull in exchange} == {0}


def test_who_sends_least_otherwise_sends_most() -> None:
    """Rank 1 sends an expert of its own: ranks 2 and 3 pass on rank 0's, and nobody sends more than one chunk."""
    elements = 64 * GRAIN
    played = _fetch([*one_hot(4, 0, 3), Copy(1, 0, 2, 1)], [range(4)], elements)
    assert max(played.sent.values()) == elements


@pytest.mark.parametrize("beside", [0, 1, 3, 5])
@pytest.mark.parametrize("name", ["2 of 4", "2 of 6", "3 of 2, not in order"])
def test_one_copy_crosses_to_a_domain_in_stripes(name: str, beside: int) -> None:
    """One expert to all ranks of other domains, and some beside its home. No link carries much more than it."""
    domains, elements = DOMAINS[name], 32 * GRAIN
    others = [rank for domain in domains[1:] for rank in domain]
    copies = [Copy(domains[0][0], 0, rank, 0) for rank in (*domains[0][1 : 1 + beside], *others)]
    for play in (_fetch, _return):
        played = play(copies, domains, elements)
        assert sum(played.crossed.values()) == (crossing := (len(domains) - 1) * elements)
        carriers = len(domains[0]) - 1  # a home that receives enough carries none
        assert max(played.crossed.values()) <= crossing / max(1, carriers) + GRAIN, (
            "all adapters carry it"
        )
        assert max([*played.sent.values(), *played.got.values()]) <= 1.25 * elements


def test_ranks_begin_at_different_homes() -> None:
    copies = [Copy(home, 0, rank, home) for home in range(4) for rank in range(4) if home != rank]
    steps = [pulls_of(_schedule(copies, rank, GRAIN), rank) for rank in range(4)]
    assert [fetch[0].sources[0].rank for _, fetch in steps] == [1, 2, 3, 0]
