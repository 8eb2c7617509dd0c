"""Programs of the transport ``nvlink``, over random copies and tensors.

Oracle: brute force, which looks up the address of every element of every pull.
"""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest
from kernel_scripts import ITEM, SOURCE, pulls_of, random_copies

from megatron_hecate.nvlink import program
from megatron_hecate.nvlink.chunks import HOME, STRIPE, Part
from megatron_hecate.nvlink.domains import Domains, Messages, stages_of
from megatron_hecate.nvlink.program import TRANSFER, Memory, Signals, assemble
from megatron_hecate.nvlink.schedule import TransferSchedule

pytestmark = pytest.mark.fast
DOMAINS: tuple[Domains, ...] = (
    (tuple(range(7)),),
    ((0, 1, 2), (3, 4, 5)),
    ((0, 3), (1, 4), (2, 5)),
    ((0, 1, 2), (3,), (4, 5)),
)
TILE = 256
# destination address of an element: source addresses with the counters to wait for, and whether it is added to
Moved = dict[int, tuple[list[tuple[int, int]], bool]]


@dataclasses.dataclass(frozen=True)
class Layout:
    """Memory of a domain: an own expert has several tensors, with gaps."""

    domain: tuple[int, ...]
    rank: int
    sizes: tuple[int, ...]
    itemsize: int

    def tensors(self, memory: int, index: int) -> list[tuple[int, int]]:
        """Address on this rank and elements of each."""
        begin = (1 + memory) << 20 | index << 14
        if memory != HOME:
            return [(begin, sum(self.sizes))]
        return [(begin + 4 * sum(self.sizes[:i]) + 64 * i, n) for i, n in enumerate(self.sizes)]

    @property
    def memory(self) -> Memory:
        buffers = [(self.tensors(kind, 0)[0][0], 1 << 14) for kind in range(1 + STRIPE)]
        homes = [tuple(begin for begin, _ in self.tensors(HOME, index)) for index in range(2)]
        return Memory(tuple(buffers), tuple(homes), self.sizes, self.itemsize)

    def base(self, rank: int) -> int:
        return (rank - self.rank) << 30

    @property
    def signals(self) -> Signals:
        return Signals(
            rank=self.rank,
            progress_at={rank: self.base(rank) + (1 << 40) for rank in self.domain},
            arrived=0,
            failure=0,
            timeout=1.0,
        )

    def address(self, part: Part, element: int) -> int:
        place = element - part.first
        for address, elements in self.tensors(part.memory, part.index):
            if place < elements:
                return (self.base(part.rank) + address + place * self.itemsize) % 2**64
            place -= elements
        raise AssertionError(f"{part} has no element {element}")


def _expected(schedule: TransferSchedule, layout: Layout, *, sums: bool) -> list[Moved]:
    counters = {rank: number for number, rank in enumerate(layout.domain)} | {layout.rank: -1}
    steps = []
    for step in pulls_of(schedule, layout.rank):
        moved: Moved = {}
        for reads, into in step:
            adds = sums and into.memory == HOME
            for element in range(into.begin, into.end):
                target = layout.address(into, element)
                sources = [(layout.address(read, element), counters[read.rank]) for read in reads]
                assert target not in moved
                if not adds and [address for address, _ in sources] == [target]:
                    continue  # nothing changes
                moved[target] = (sources, adds)
        steps.append(moved)
    return steps


def _moved(data: np.ndarray, itemsize: int) -> list[Moved]:
    """What the descriptors move, and a look at the numbers of their tiles."""
    transfer = data[: TRANSFER.itemsize].view(TRANSFER)[0]
    steps = []
    for step in transfer["steps"][: transfer["num_steps"]]:
        moved: Moved = {}
        begin, count, tiles = int(step["items"]), int(step["count"]), 0
        for item in data[begin : begin + count * ITEM.itemsize].view(ITEM):
            assert item["first_tile"] == tiles
            first = int(step["sources"]) + int(item["first_source"]) * SOURCE.itemsize
            last = first + int(item["sources"]) * SOURCE.itemsize
            sources = [(int(s["src"]), int(s["rank"])) for s in data[first:last].view(SOURCE)]
            elements, rest = divmod(int(item["bytes"]), itemsize)
            assert rest == 0
            tiles += -(-elements * itemsize // TILE)
            for e in range(elements):
                reads = [((address + e * itemsize) % 2**64, rank) for address, rank in sources]
                into = int(item["dst"]) + e * itemsize
                assert into not in moved, "written twice"
                moved[into] = (reads, bool(item["flags"]))
        assert step["tiles"] == tiles
        steps.append(moved)
    return steps


@pytest.mark.parametrize("domains", DOMAINS, ids=str)
def test_every_element_is_moved(domains: Domains, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of all ranks and stages of kernels."""
    monkeypatch.setattr(program, "TILE", TILE)
    checked = 0
    for seed, sums in itertools.product(range(3), (False, True)):
        rng = np.random.default_rng(seed)
        copies = random_copies(rng, ranks=sum(map(len, domains)), slots=3, experts=2)
        sizes = tuple(map(int, rng.integers(1, 300, size=int(rng.integers(1, 4)))))
        for rank in range(sum(map(len, domains))):
            (domain,) = (tuple(domain) for domain in domains if rank in domain)
            layout = Layout(domain, rank, sizes, 4 if sums else 2)
            for stage in stages_of(copies, rank, domains=domains, elements=sum(sizes), sums=sums):
                if isinstance(stage, Messages):
                    continue
                data = assemble(stage, layout.memory, layout.signals, begin=2**32 + 5)
                assert data[: TRANSFER.itemsize].view(TRANSFER)["begin"] == 5
                expected = _expected(stage, layout, sums=sums)
                assert _moved(data, layout.itemsize) == expected
                checked += sum(map(len, expected))
    assert checked > 1000
