"""Scripts of iterations of spAG and spRS over random placements, for ``kernels/selftest.cpp`` and `test_virtual_ranks`.

The tables and descriptions are those of training; what must come out is said from the copies alone.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from megatron_hecate.comm.transport import Copy
from megatron_hecate.nvlink.memory import (
    FAILURE,
    MAX_RANKS,
    MAX_STEPS,
    Memory,
    SharedLayout,
    Signals,
    describe,
    description_bytes,
)
from megatron_hecate.nvlink.tables import DomainPlan, most_numbers

# Kinds of operations, as in selftest.cpp; of the sums by bits of gradients and of main gradients.
WRITE, CHECK, GATHER = range(3)
REDUCES = {(32, 32): 3, (32, 16): 4, (16, 32): 5, (16, 16): 6}
EXCHANGE = 7
DTYPES = {32: torch.float32, 16: torch.bfloat16}
# bytes between regions that nobody may write, at least; regions begin at multiples of it
GUARD = 256
DESCRIPTION = 2048  # bytes set aside for the description of a transfer
TOKENS, EXPERTS = 11, 5  # of a rank's exchange of loads, at most


@dataclasses.dataclass(frozen=True)
class Setup:
    """What all ranks have."""

    ranks: int
    slots: int
    experts: int
    sizes: tuple[int, ...]  # elements of the tensors of a chunk
    shift: int = 0  # elements by which all memory is off its alignment
    bits: tuple[int, int] = (32, 32)  # of gradients and of main gradients


class Operation(NamedTuple):
    """Write or check ``data`` at ``address``, or run the transfer that it describes at ``position``, or an exchange of
    the loads of ``position`` experts.

    Args:
        data: uint8; on the script's device, but a description on the host.
    """

    kind: int
    address: int
    data: Tensor
    position: int


class Script:
    """Regions of memory, the same on every rank, and what each rank does, one after the other.

    Args:
        begin: what progress counters stand at.
        allocate: given the bytes of a rank's memory, says where it lies for each rank; for ``selftest.cpp``, which
            relocates it, rank r's lies at (r + 1) << 40.
        device: where values are drawn and kept. Those of experts of real size fit on a GPU, and take long on a host.
    """

    def __init__(
        self,
        setup: Setup,
        *,
        begin: int = 0,
        allocate: Callable[[int], Sequence[int]] | None = None,
        device: str = "cpu",
    ) -> None:
        self.setup, self.begin, self._device = setup, begin, device
        self.told = (begin - 1) % 2**32  # by everyone, before the first transfer
        self.operations: list[list[Operation]] = [[] for _ in range(setup.ranks)]
        self._random = torch.Generator(device).manual_seed(begin + setup.shift)
        self._end = 0
        self._guards: list[tuple[int, int]] = []  # [begin, end) of what lies between regions
        self.progress, self.arrived = self._region(4 * setup.ranks), self._region(4 * MAX_STEPS)
        self.epoch, self.failure = self._region(4), self._region(FAILURE.itemsize)
        self.exchanges = self._region(4 * (MAX_RANKS + 1))
        self.map, self.gathered = (
            self._region(TOKENS * EXPERTS),
            self._region(4 * setup.ranks * EXPERTS),
        )
        self.loads = self._region(2 * 4 * setup.ranks * EXPERTS)
        self.table = self._region(4 * most_numbers(setup.ranks, setup.slots))
        self.description = self._region(DESCRIPTION)
        elements, (grad, main_grad) = sum(setup.sizes), (DTYPES[bits] for bits in setup.bits)
        self._fetch = SharedLayout.of_fetch(setup.experts, 2 * elements, setup.ranks)
        self._return = SharedLayout.of_return(setup.slots, elements, setup.ranks)
        self.shared = self._region(max(self._fetch.size(0), self._return.size(0)))
        # offset and elements of each tensor
        self.regions: dict[tuple[str, int], list[tuple[int, int]]] = {}
        for memory, count, dtype, sizes in (
            ("slot", setup.slots, torch.bfloat16, (elements,)),
            ("grad", setup.slots, grad, (elements,)),
            ("parameters", setup.experts, torch.bfloat16, setup.sizes),
            ("main_grad", setup.experts, main_grad, setup.sizes),
        ):
            for i in range(count):
                shift = setup.shift * dtype.itemsize
                self.regions[memory, i] = [
                    (self._region(n * dtype.itemsize + shift) + shift, n) for n in sizes
                ]
        self.bases: Sequence[int] = [(rank + 1) << 40 for rank in range(setup.ranks)]
        if allocate is not None:
            self.bases = allocate(self._end)
        guards = [(begin, end) for begin, end in self._guards if begin > self.shared]
        # of each rank: what lies between regions, and where
        self._noise: list[list[tuple[int, Tensor]]] = []
        for rank in range(setup.ranks):
            noise = torch.randint(
                256, (self._end,), generator=self._random, dtype=torch.uint8, device=device
            )
            self._do(rank, WRITE, at=self.shared, values=noise[self.shared :])
            self._noise.append([(begin, noise[begin:end].clone()) for begin, end in guards])

    def _region(self, size: int) -> int:
        begin = self._end
        self._end = -(-(begin + size) // GUARD) * GUARD + GUARD
        self._guards.append((begin + size, self._end))
        return begin

    def _do(self, rank: int, kind: int, *, at: int, values: Tensor, position: int = 0) -> None:
        data = values.contiguous().view(torch.uint8)
        self.operations[rank].append(Operation(kind, self.bases[rank] + at, data, position))

    def _do_chunk(self, rank: int, kind: int, *, memory: tuple[str, int], values: Tensor) -> None:
        parts = values.split([elements for _, elements in self.regions[memory]])
        for (offset, _), part in zip(self.regions[memory], parts, strict=True):
            self._do(rank, kind, at=offset, values=part)

    def _drawn(self, dtype: torch.dtype) -> Tensor:
        """[elements] of mixed magnitude, so that the order of a sum shows; always the same of them are -0.0, so that it
        shows when a sum starts with 0."""
        elements = sum(self.setup.sizes)
        scale = torch.randint(
            16, (elements,), generator=self._random, dtype=torch.uint8, device=self._device
        )
        values = torch.randn(elements, generator=self._random, device=self._device).mul_(2.0**scale)
        values[::16] = -0.0
        return values.to(dtype)

    def _memory(self, rank: int, kind: int) -> Memory:
        base, nothing = self.bases[rank], (0, 0)
        slot, home = ("slot", "parameters") if kind == GATHER else ("grad", "main_grad")
        first = self.regions[slot, 0][0][0]
        [(second, _)] = self.regions.get((slot, 1), [(first, 0)])
        slots = base + first, second - first
        layout = self._fetch if kind == GATHER else self._return
        shared, _ = layout.chunks(base + self.shared)
        homes = (self.regions[home, index] for index in range(self.setup.experts))
        return Memory(
            homes=tuple(tuple(base + begin for begin, _ in tensors) for tensors in homes),
            sizes=tuple(size * (2 if kind == GATHER else 1) for size in self.setup.sizes),
            chunks=(shared, slots, nothing, nothing)
            if kind == GATHER
            else (nothing, slots, shared, nothing),
            table=base + self.table,
        )

    def _signals(self, rank: int) -> Signals:
        base = self.bases[rank]
        return Signals(
            rank=rank,
            progress=[base + self.progress for base in self.bases],
            arrived=base + self.arrived,
            epoch=base + self.epoch,
            exchanges=base + self.exchanges,
            failure=base + self.failure,
            timeout=20.0,
        )

    def exchange(self, rng: np.random.Generator, experts: int = EXPERTS) -> None:
        """Loads of all ranks, which each counts in tokens of its own, and has checked before the next exchange."""
        maps = [
            torch.from_numpy(
                rng.integers(0, 2, (int(rng.integers(1, TOKENS + 1)), experts), np.uint8)
            )
            for _ in self.bases
        ]
        loads = torch.stack([chosen.sum(dim=0, dtype=torch.int32) for chosen in maps])
        for rank, (base, chosen) in enumerate(zip(self.bases, maps, strict=True)):
            size = 4 * self.setup.ranks * EXPERTS
            description = self._signals(rank).of_exchange(base + self.loads, size)
            description["send"] = base + self.map, len(chosen)
            description["parts"] = base + self.gathered, 0
            data = torch.from_numpy(description.view(np.uint8))
            self._do(rank, WRITE, at=self.map, values=chosen.flatten())
            self._do(rank, EXCHANGE, at=self.description, values=data, position=experts)
            self._do(rank, CHECK, at=self.gathered, values=loads.flatten())

    def _transfer(self, copies: Sequence[Copy], kind: int) -> None:
        domain = tuple(range(self.setup.ranks))
        for rank, base in enumerate(self.bases):
            signals = self._signals(rank)
            table = DomainPlan(tuple(copies), rank, (domain,)).table
            self._do(rank, WRITE, at=self.table, values=torch.from_numpy(table).to(self._device))
            memory = self._memory(rank, kind)
            data = torch.from_numpy(describe(memory, signals, base + self.description))
            assert len(data) == description_bytes(memory) <= DESCRIPTION
            self._do(rank, kind, at=self.description, values=data, position=self.begin % 2**32)
        self.begin += MAX_STEPS

    def iteration(self, copies: Sequence[Copy]) -> None:
        """New weights; to the replicas, and checked; new gradients; home, written over by the next backward as soon as
        they may be, and checked."""
        sent = sorted({(copy.home, copy.index) for copy in copies})
        weights = {key: self._drawn(torch.bfloat16) for key in sent}
        grad_dtype, main_dtype = (DTYPES[bits] for bits in self.setup.bits)
        totals = {key: self._drawn(main_dtype) for key in sent}
        for home, index in sent:
            self._do_chunk(home, WRITE, memory=("parameters", index), values=weights[home, index])
            self._do_chunk(home, WRITE, memory=("main_grad", index), values=totals[home, index])
        self._transfer(copies, GATHER)
        grads = {copy: self._drawn(grad_dtype) for copy in copies}
        for copy in copies:
            self._do_chunk(
                copy.rank, CHECK, memory=("slot", copy.slot), values=weights[copy.home, copy.index]
            )
            self._do_chunk(copy.rank, WRITE, memory=("grad", copy.slot), values=grads[copy])
        self._transfer(copies, REDUCES[self.setup.bits])
        for copy in copies:
            values = self._drawn(grad_dtype)
            self._do_chunk(copy.rank, WRITE, memory=("grad", copy.slot), values=values)
        for home, index in sent:
            replicas = sorted(
                (c for c in copies if (c.home, c.index) == (home, index)), key=lambda c: c.rank
            )
            total, *others = [grads[copy].float() for copy in replicas]
            for grad in others:
                total = total + grad
            values = (totals[home, index].float() + total).to(main_dtype)
            self._do_chunk(home, CHECK, memory=("main_grad", index), values=values)

    def end(self) -> None:
        """A last look at the memory between regions."""
        for rank, guards in enumerate(self._noise):
            for begin, noise in guards:
                self._do(rank, CHECK, at=begin, values=noise)

    def write(self, path: Path, *, blocks: int, threads: int) -> None:
        """As ``selftest.cpp`` reads it."""
        head = [self.setup.ranks, self._end, blocks, threads, self.told, self.exchanges, self.told]
        words = [np.array(head, "<u8")]
        for operations in self.operations:
            parts = []
            for op in operations:
                padded = np.zeros(-(-len(op.data) // 8) * 8, np.uint8)
                padded[: len(op.data)] = op.data.numpy()
                kind = op.kind | op.position << 32
                parts += [np.array([kind, op.address, len(op.data)], "<u8"), padded.view("<u8")]
            words += [np.array([sum(map(len, parts))], "<u8"), *parts]
        np.concatenate(words).tofile(path)


def random_copies(
    rng: np.random.Generator, *, ranks: int, slots: int, experts: int, fill: float = 0.7
) -> list[Copy]:
    """Replicas of random chunks in random slots, of which a share ``fill`` is taken; some ranks receive none."""
    copies = []
    for rank in range(ranks):
        chunks = [
            (home, index) for home in range(ranks) if home != rank for index in range(experts)
        ]
        count = int(rng.binomial(slots, fill))
        chosen = rng.choice(len(chunks), size=min(count, len(chunks)), replace=False)
        order = rng.permutation(slots)
        copies += [
            Copy(*chunks[at], rank, int(slot)) for at, slot in zip(chosen, order, strict=False)
        ]
    return copies


def one_hot(ranks: int, home: int, fan_out: int) -> list[Copy]:
    """One chunk to the next ``fan_out`` ranks."""
    return [Copy(home, 0, (home + 1 + i) % ranks, 0) for i in range(fan_out)]
