"""Schedules of the transport ``nvlink``, in one NVLink domain and over several.

Oracle: brute force, which runs all ranks' stages over dictionaries of elements and knows what each must hold then.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from kernel_scripts import one_hot, random_copies

from megatron_hecate.comm.transport import Copy, LayerBuffer
from megatron_hecate.nvlink.domains import Domains, Messages, Stages
from megatron_hecate.nvlink.pulls import GRAIN
from megatron_hecate.nvlink.schedule import Place, TransferSchedule

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
Cell = tuple[int, str, int, int]  # rank, memory, index, element


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
        build = Stages.of_return if sums else Stages.of_fetch
        self.of = {rank: set(domain) for domain in domains for rank in domain}
        self.cells = cells
        self.crossed: Counter[int] = Counter()  # elements that each rank sends to other domains
        self.sent: Counter[int] = Counter()  # and to others of its domain
        self.got: Counter[int] = Counter()
        self.stripes, self.stripe_elements = 0, 0
        plans = [
            build(copies, rank, domains=domains, elements=elements) for rank in range(len(self.of))
        ]
        assert len({len(plan) for plan in plans}) == 1, "ranks must agree on the number of stages"
        for stages in zip(*plans, strict=True):
            if isinstance(stages[0], Messages):
                self._deliver(stages)
            else:
                for domain in domains:
                    self._pull({rank: stages[rank] for rank in domain})

    def _cells(self, place: Place, begin: int, end: int) -> list[Cell]:
        if place.memory == "stripe":
            self.stripes = max(self.stripes, place.index + 1)
            self.stripe_elements = max(self.stripe_elements, end - place.begin)
            assert begin >= place.begin
        return [(place.rank, place.memory, place.index, element) for element in range(begin, end)]

    def _pull(self, plans: dict[int, TransferSchedule]) -> None:
        assert len({len(plan.steps) for plan in plans.values()}) == 1, (
            "a domain must agree on the number of steps"
        )
        for step in range(len(next(iter(plans.values())).steps)):
            written: dict[Cell, tuple] = {}
            writers: dict[Cell, tuple[int, int]] = {}  # the pull, by rank and number
            reads: dict[Cell, set[tuple[int, int]]] = {}
            for rank, plan in plans.items():
                for number, pull in enumerate(plan.steps[step]):
                    assert pull.into.rank == rank and pull.begin < pull.end
                    for source in (source for source in pull.sources if source.rank != rank):
                        assert source.rank in plan.peers and rank in plans[source.rank].peers
                        self.sent[source.rank] += pull.end - pull.begin
                        self.got[rank] += pull.end - pull.begin
                    sources = [self._cells(source, pull.begin, pull.end) for source in pull.sources]
                    for cell, *parts in zip(
                        self._cells(pull.into, pull.begin, pull.end), *sources, strict=True
                    ):
                        assert cell not in written, "written twice in one step"
                        before = self.cells[cell] if pull.add else ()
                        written[cell] = (*before, *(x for part in parts for x in self.cells[part]))
                        writers[_stored(cell)] = rank, number
                        for part in parts:
                            reads.setdefault(_stored(part), set()).add((rank, number))
            for cell, writer in writers.items():
                assert reads.get(cell, set()) <= {writer}, "read in the step that writes it"
            self.cells.update(written)

    def _deliver(self, stages: tuple[Messages, ...]) -> None:
        on_the_way: dict[tuple[int, int], list] = defaultdict(list)
        for rank, stage in enumerate(stages):
            for part, to in stage.sends:
                assert part.at.rank == rank and to not in self.of[rank]
                values = [self.cells[cell] for cell in self._cells(part.at, part.begin, part.end)]
                on_the_way[rank, to].append((part.begin, part.end, values))
                self.crossed[rank] += part.end - part.begin
        for rank, stage in enumerate(stages):
            for part, source in stage.receives:
                begin, end, values = on_the_way[source, rank].pop(0)
                assert (begin, end) == (part.begin, part.end) and part.at.rank == rank
                self.cells.update(zip(self._cells(part.at, begin, end), values, strict=True))
        assert not any(on_the_way.values())


def _stored(cell: Cell) -> Cell:
    """Parts of sums lie where the gradients do."""
    rank, memory, index, element = cell
    return rank, "grad" if memory == "partial" else memory, index, element


def _fetch(copies: Sequence[Copy], domains: Domains, elements: int) -> Played:
    sent = {(copy.home, copy.index) for copy in copies}
    cells = {
        (home, "parameters", i, e): ((home, i, e),) for home, i in sent for e in range(elements)
    }
    played = Played(copies, domains, elements, cells, sums=False)
    for copy in copies:
        for e in range(elements):
            assert played.cells[copy.rank, "slot", copy.slot, e] == ((copy.home, copy.index, e),)
    return played


def _return(copies: Sequence[Copy], domains: Domains, elements: int) -> Played:
    """Replicas of the home's domain come first, then those of the next one; in each, by rank."""
    cells: dict[Cell, tuple] = {
        (c.rank, "grad", c.slot, e): ((c.rank, e),) for c in copies for e in range(elements)
    }
    sent = sorted({(copy.home, copy.index) for copy in copies})
    cells |= {
        (home, "main_grad", i, e): (("before", e),) for home, i in sent for e in range(elements)
    }
    played = Played(copies, domains, elements, cells, sums=True)
    of = {rank: i for i, domain in enumerate(domains) for rank in domain}
    for home, i in sent:
        ranks = [copy.rank for copy in copies if (copy.home, copy.index) == (home, i)]
        ranks.sort(key=lambda rank, home=home: ((of[rank] - of[home]) % len(domains), rank))
        for e in range(elements):
            assert played.cells[home, "main_grad", i, e] == (
                ("before", e),
                *((rank, e) for rank in ranks),
            )
    return played


@pytest.mark.parametrize("name", list(DOMAINS))
@pytest.mark.parametrize(
    "seeds", [range(4), pytest.param(range(4, 200), marks=pytest.mark.slow)], ids=["few", "many"]
)
def test_random_copies(name: str, seeds: range) -> None:
    """And no rank needs more stripe buffers, or larger ones, than memory is set aside for."""
    sizes = [len(domain) for domain in DOMAINS[name]]
    for seed in seeds:
        rng = np.random.default_rng(seed)
        experts, slots, fill = (
            int(rng.integers(1, 4)),
            int(rng.integers(1, 4)),
            float(rng.uniform(0.2, 1)),
        )
        copies = random_copies(rng, ranks=sum(sizes), slots=slots, experts=experts, fill=fill)
        elements = int(rng.choice([1, GRAIN, 5 * GRAIN + 3]))
        layer = LayerBuffer(slots=slots, elements=elements, dtype=torch.bfloat16, homes=experts)
        width, *counts = Stages.stripe_buffers(layer, layer.elements, sizes)
        for play, most in zip((_fetch, _return), counts, strict=True):
            played = play(copies, DOMAINS[name], elements)
            assert played.stripes <= most and played.stripe_elements <= width


@pytest.mark.parametrize("fan_out", [1, 2, 3, 7, 8, 31, 71])
def test_no_link_carries_much_more_than_the_chunk(fan_out: int) -> None:
    """One hot expert: the home sends its chunk once, and so does every other at most; of gradients as well."""
    copies, ranks, elements = one_hot(fan_out + 1, 0, fan_out), range(fan_out + 1), 1_000_000
    for build in (TransferSchedule.of_fetch, TransferSchedule.of_return):
        carried: Counter[tuple[str, int]] = Counter()
        for rank in ranks:
            steps = build(copies, rank, domain=ranks, elements=elements).steps
            for pull in (pull for step in steps for pull in step):
                for source in (source for source in pull.sources if source.rank != rank):
                    carried["out", source.rank] += pull.end - pull.begin
                    carried["in", rank] += pull.end - pull.begin
        assert max(carried.values()) <= 1.25 * elements, build.__name__


def test_chunks_are_exchanged_only_where_their_home_would_send_most() -> None:
    """Where everyone sends and receives two, no third step is worth its time; else the hottest chunk is exchanged."""
    even = [Copy(home, 0, (home + turn) % 4, turn - 1) for home in range(4) for turn in (1, 2)]
    assert len(TransferSchedule.of_fetch(even, 0, domain=range(4), elements=GRAIN).steps) == 2
    one_more = [Copy(0, 0, 1, 0), Copy(0, 0, 2, 0), Copy(0, 1, 1, 1), Copy(0, 2, 2, 1)]
    played = _fetch(one_more, [range(3)], 8 * GRAIN)
    assert played.sent[0] == 3 * 8 * GRAIN, "4 chunks would leave, 2 arrive anywhere"


def test_no_more_chunks_are_exchanged_than_the_home_needs() -> None:
    """Rank 0 sends 5 chunks, and rank 1 receives 3. Once the first of rank 0's is exchanged, 3 leave rank 0 as well, so
    that its second one is fetched whole."""
    copies = [*one_hot(4, 0, 3), Copy(0, 1, 1, 1), Copy(0, 1, 2, 1), Copy(3, 0, 1, 2)]
    for rank in (1, 2):
        _, fetch, exchange = TransferSchedule.of_fetch(
            copies, rank, domain=range(4), elements=8 * GRAIN
        ).steps
        (whole,) = (pull for pull in fetch if pull.sources == (Place(0, "send", 1),))
        assert (whole.begin, whole.end) == (0, 8 * GRAIN)
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
    schedules = [
        TransferSchedule.of_fetch(copies, rank, domain=range(4), elements=GRAIN)
        for rank in range(4)
    ]
    assert [schedule.steps[1][0].sources[0].rank for schedule in schedules] == [1, 2, 3, 0]
