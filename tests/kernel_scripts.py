"""Scripts for ``kernels/selftest.cpp``: iterations of spAG and spRS over random placements, and what must come out.

The schedules and descriptors are those of training; what is expected is said from the loans alone.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from megatron_hecate import kernel, schedule
from megatron_hecate.kernel import TRANSFER, Signals, Wire
from megatron_hecate.schedule import Loan, Place

WRITE, CHECK, GATHER, REDUCE, COPIES = range(5)
BYTE, HALF, FLOAT = range(3)
NONE = 2**64 - 1
GUARD = 256  # bytes between regions that nobody may write
PROGRAM = 1 << 16  # bytes set aside for a transfer's program


def base(rank: int) -> int:
    """Where a rank's memory lies, before the test moves it."""
    return (rank + 1) << 40


class Script:
    """One script: regions of memory, the same on every rank, and what each rank does.

    Args:
        ranks, slots: of them.
        lent: chunks a rank can lend.
        sizes: elements of the tensors of a chunk.
        half: whether gradients are bf16 rather than fp32.
    """

    def __init__(
        self,
        ranks: int,
        *,
        slots: int,
        lent: int,
        sizes: tuple[int, ...],
        half: bool = False,
        begin: int = 0,
        timeout: float = 20.0,
        shift: int = 0,
    ) -> None:
        self.ranks, self.slots, self.lent, self.sizes, self.half = ranks, slots, lent, sizes, half
        self.elements, self.begin, self.timeout = sum(sizes), begin, timeout
        self.words: list[list[int]] = [[] for _ in range(ranks)]
        self.seed = 1
        self.end, self.guards = 0, []
        self.progress, self.arrived = self._region(4 * ranks), self._region(4 * kernel.MAX_STEPS)
        self.failure, self.program = self._region(kernel.FAILURE.itemsize), self._region(PROGRAM)
        wire = 2 if half else 4
        chunk = {"outbox": 2, "slot": 2, "grad": wire, "part": 4}
        self.regions = {
            (memory, i): self._region((self.elements + shift) * size) + shift * size
            for memory, size in chunk.items()
            for i in range(lent if memory == "outbox" else slots)
        }
        for i in range(lent):
            self.regions["home", i] = [self._region((size + shift) * 2) + shift * 2 for size in sizes]
            self.regions["total", i] = [self._region((size + shift) * 4) + shift * 4 for size in sizes]
        self.told = (begin - 1) % 2**32  # by everyone, before the first transfer
        for rank in range(ranks):
            for guard in self.guards:
                self._do(rank, WRITE, base(rank) + guard, BYTE, GUARD, 0)

    def _region(self, size: int) -> int:
        begin = self.end
        self.end = -(-(begin + size) // GUARD) * GUARD + GUARD
        self.guards.append(self.end - GUARD)
        return begin

    def _do(self, rank: int, *words: int) -> None:
        self.words[rank] += words

    def _seed(self) -> int:
        self.seed += 1
        return self.seed

    def extents(self, place: Place, *, wire_is_fp32: bool) -> list[tuple[int, int]]:
        memory = "grad" if place.memory == "part" and wire_is_fp32 else place.memory
        at = self.regions[memory, place.index]
        if isinstance(at, list):
            return [(base(place.rank) + begin, size) for begin, size in zip(at, self.sizes, strict=True)]
        return [(base(place.rank) + at, self.elements)]

    def _transfer(self, loans: list[Loan], op: int) -> None:
        for rank in range(self.ranks):
            build = schedule.reduce if op == REDUCE else schedule.gather
            steps = build(loans, rank, domain=range(self.ranks), elements=self.elements)
            signals = Signals(
                progress=base(rank) + self.progress,
                progress_at={r: base(r) + self.progress for r in range(self.ranks)},
                arrived=base(rank) + self.arrived,
                failure=base(rank) + self.failure,
            )
            program = kernel.program(
                steps,
                lambda place: self.extents(place, wire_is_fp32=not self.half),
                signals,
                wire=Wire(4 if op == REDUCE and not self.half else 2, sums=op == REDUCE),
                rank=rank,
                begin=self.begin,
                timeout=self.timeout,
            )
            kernel.relocate(program, base(rank) + self.program)
            assert len(program) <= PROGRAM
            if not steps.peers:
                continue
            padded = np.zeros(-(-len(program) // 8) * 8, np.uint8)
            padded[: len(program)] = program
            self._do(rank, op, base(rank) + self.program, len(program), *padded.view("<u8").tolist())
        self.begin += len(steps.steps) + 1

    def iteration(self, loans: list[Loan], *, copies: bool = False) -> None:
        """New weights; to the guests, by ``copies`` or the kernel, and checked; new gradients; home and checked."""
        lent = sorted({(loan.home, loan.lent) for loan in loans})
        weights = {key: [self._seed() for _ in self.sizes] for key in lent}
        totals = {key: [self._seed() for _ in self.sizes] for key in lent}
        for home, index in lent:
            for at, size, seed in zip(self.regions["home", index], self.sizes, weights[home, index], strict=True):
                self._do(home, WRITE, base(home) + at, HALF, size, seed)
            for at, size, seed in zip(self.regions["total", index], self.sizes, totals[home, index], strict=True):
                self._do(home, WRITE, base(home) + at, FLOAT, size, seed)
        self._transfer(loans, COPIES if copies else GATHER)
        grads: dict[Loan, list[int]] = {}
        for loan in loans:
            slot = base(loan.host) + self.regions["slot", loan.guest]
            grad = base(loan.host) + self.regions["grad", loan.guest]
            grads[loan] = []
            for size, seed in zip(self.sizes, weights[loan.home, loan.lent], strict=True):
                self._do(loan.host, CHECK, slot, HALF, size, seed, 0)
                slot += 2 * size
                grads[loan].append(self._seed())
                self._do(loan.host, WRITE, grad, HALF if self.half else FLOAT, size, grads[loan][-1])
                grad += size * (2 if self.half else 4)
        self._transfer(loans, REDUCE)
        for home, index in lent:
            hosts = sorted((loan for loan in loans if (loan.home, loan.lent) == (home, index)), key=lambda a: a.host)
            for part, (at, size) in enumerate(zip(self.regions["total", index], self.sizes, strict=True)):
                addends = [grads[loan][part] for loan in hosts]
                self._do(home, CHECK, base(home) + at, FLOAT, size, totals[home, index][part], len(addends), *addends)

    def write(self, path: Path, *, blocks: int, threads: int) -> None:
        """With a last look at the memory between regions."""
        for rank in range(self.ranks):
            for guard in self.guards:
                self._do(rank, CHECK, base(rank) + guard, BYTE, GUARD, 0, 0)
        words = [self.ranks, self.end, blocks, threads, self.told]
        for script in self.words:
            words += [len(script), *script]
        np.array(words, "<u8").tofile(path)


def random_loans(rng: np.random.Generator, *, ranks: int, slots: int, lent: int, fill: float) -> list[Loan]:
    """Guests of random chunks in random order of the slots; some hosts have none."""
    loans = []
    for host in range(ranks):
        chunks = [(home, index) for home in range(ranks) if home != host for index in range(lent)]
        count = int(rng.binomial(slots, fill))
        chosen = rng.choice(len(chunks), size=min(count, len(chunks)), replace=False)
        rows = rng.permutation(slots)
        loans += [Loan(*chunks[at], host, int(row)) for at, row in zip(chosen, rows, strict=False)]
    return loans


def hot(ranks: int, home: int, fan_out: int, lent: int = 0) -> list[Loan]:
    """One chunk to ``fan_out`` ranks."""
    return [Loan(home, lent, (home + 1 + i) % ranks, 0) for i in range(fan_out)]


assert TRANSFER.itemsize % 8 == 0
