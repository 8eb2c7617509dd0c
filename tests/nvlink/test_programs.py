"""Programs of the transport ``nvlink``, over random copies and tensors.

Oracle: brute force, which looks up the address of every element of every pull.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np
import pytest
from kernel_scripts import random_copies

from megatron_hecate.comm.transport import Copy
from megatron_hecate.nvlink import program, pulls
from megatron_hecate.nvlink.domains import Domains, Messages, Stages
from megatron_hecate.nvlink.program import COPY, SOURCE, SUM, TRANSFER, Program, Signals
from megatron_hecate.nvlink.schedule import Place, TransferSchedule

pytestmark = pytest.mark.fast
DOMAINS: tuple[Domains, ...] = (
    (tuple(range(7)),),
    ((0, 1, 2), (3, 4, 5)),
    ((0, 3), (1, 4), (2, 5)),
    ((0, 1, 2), (3,), (4, 5)),
)
ITEMSIZE = {False: 2, True: 4}  # of a spAG, of a spRS
TILE = 256
# destination address of an element: source addresses with the counters to wait for, and whether it is added to
Moved = dict[int, tuple[list[tuple[int, int]], bool]]


@dataclasses.dataclass(frozen=True)
class Layout:
    """Memory of a domain: every place has several tensors, with gaps."""

    domain: tuple[int, ...]
    rank: int
    sizes: tuple[int, ...]

    def tensors(self, place: Place) -> list[tuple[int, int]]:
        kind = "grad" if place.memory == "partial" else place.memory
        begin = (1 + pulls.MEMORIES.index(kind)) << 20 | place.index << 14
        return [(begin + 4 * sum(self.sizes[:i]) + 64 * i, n) for i, n in enumerate(self.sizes)]

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

    def address(self, place: Place, element: int, itemsize: int) -> int:
        at = element - place.begin
        for address, elements in self.tensors(place):
            if at < elements:
                return self.base(place.rank) + address + at * itemsize
            at -= elements
        raise AssertionError(f"{place} has no element {element}")


def _expected(schedule: TransferSchedule, layout: Layout, *, sums: bool) -> list[Moved]:
    itemsize = ITEMSIZE[sums]
    counters = {rank: number for number, rank in enumerate(layout.domain)} | {layout.rank: -1}
    steps = []
    for step in schedule.steps:
        moved: Moved = {}
        for pull in step:
            for element in range(pull.begin, pull.end):
                into = layout.address(pull.into, element, itemsize)
                sources = [
                    (layout.address(source, element, itemsize), counters[source.rank])
                    for source in pull.sources
                ]
                assert into not in moved
                if sums and not pull.add and [address for address, _ in sources] == [into]:
                    continue  # nothing changes
                moved[into] = (sources, pull.add)
        steps.append(moved)
    return steps


def _moved(made: Program, *, sums: bool) -> list[Moved]:
    """What the descriptors move, and a look at the numbers of their tiles."""
    data = made.at(0, begin=1)
    transfer = data[: TRANSFER.itemsize].view(TRANSFER)[0]
    itemsize = ITEMSIZE[sums]
    steps = []
    for step in transfer["steps"][: transfer["num_steps"]]:
        moved: Moved = {}
        dtype = SUM if sums else COPY
        begin, count, tiles = int(step["items"]), int(step["count"]), 0
        for item in data[begin : begin + count * dtype.itemsize].view(dtype):
            assert item["first_tile"] == tiles
            if sums:
                first = int(step["sources"]) + int(item["first_source"]) * SOURCE.itemsize
                last = first + int(item["sources"]) * SOURCE.itemsize
                sources = [(int(s["src"]), int(s["rank"])) for s in data[first:last].view(SOURCE)]
                elements = int(item["elements"])
                add = bool(item["flags"])
            else:
                sources = [(int(item["src"]), int(item["rank"]))]
                elements, rest = divmod(int(item["bytes"]), itemsize)
                assert rest == 0
                add = False
            tiles += -(-elements * itemsize // TILE)
            for e in range(elements):
                at = [((address + e * itemsize) % 2**64, rank) for address, rank in sources]
                into = int(item["dst"]) + e * itemsize
                assert into not in moved, "written twice"
                moved[into] = (at, add)
        assert step["tiles"] == tiles
        steps.append(moved)
    return steps


def _programs(
    domains: Domains, copies: list, sizes: tuple[int, ...]
) -> Iterator[tuple[int, Layout, bool, TransferSchedule, Program]]:
    """Yield rank, layout, whether gradients are summed, schedule and program, of all ranks and stages of kernels."""
    for rank in range(sum(map(len, domains))):
        (domain,) = (tuple(domain) for domain in domains if rank in domain)
        layout = Layout(domain, rank, sizes)
        for sums, build in ((False, Stages.of_fetch), (True, Stages.of_return)):
            for stage in build(copies, rank, domains=domains, elements=sum(sizes)):
                if isinstance(stage, Messages):
                    continue
                made = Program(
                    stage,
                    list(map(layout.tensors, stage.places)),
                    signals=layout.signals,
                    itemsize=ITEMSIZE[sums],
                    sums=sums,
                )
                yield rank, layout, sums, stage, made


@pytest.mark.parametrize("domains", DOMAINS, ids=str)
def test_every_element_is_moved(domains: Domains, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program, "TILE", TILE)
    checked = 0
    for seed in range(3):
        rng = np.random.default_rng(seed)
        copies = random_copies(rng, ranks=sum(map(len, domains)), slots=3, experts=2)
        sizes = tuple(map(int, rng.integers(1, 300, size=int(rng.integers(1, 4)))))
        for _, layout, sums, stage, made in _programs(domains, copies, sizes):
            expected = [
                {
                    into: ([(at % 2**64, rank) for at, rank in sources], add)
                    for into, (sources, add) in step.items()
                }
                for step in _expected(stage, layout, sums=sums)
            ]
            assert _moved(made, sums=sums) == expected
            checked += sum(map(len, expected))
    assert checked > 1000


def test_a_program_is_stored_anywhere_and_begins_anywhere() -> None:
    """Only the addresses of its own steps, and the count at which it begins, differ."""
    _, _, _, _, made = next(_programs(((0, 1),), [Copy(0, 0, 1, 0)], (5, 9)))
    one, two = made.at(16, begin=3), made.at(1 << 40, begin=2**32 + 5)
    headers = [data[: TRANSFER.itemsize].view(TRANSFER)[0] for data in (one, two)]
    assert [int(header["begin"]) for header in headers] == [3, 5]
    moved = headers[1]["steps"]["items"] - headers[0]["steps"]["items"]
    assert set(moved.tolist()) == {(1 << 40) - 16}
    assert one[TRANSFER.itemsize :].tobytes() == two[TRANSFER.itemsize :].tobytes()
