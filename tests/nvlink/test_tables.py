"""Transfers of the transport ``nvlink``, in one NVLink domain and over several, by the kernels of the host.

Oracle: brute force over the copies. All ranks are in this process, each with memory of its own; messages are copies.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from kernel_scripts import DTYPES, REDUCES, one_hot, random_copies
from torch import Tensor

from megatron_hecate.comm.transport import Copy, LayerBuffer
from megatron_hecate.nvlink.launch import TransferKernels
from megatron_hecate.nvlink.memory import (
    FAILURE,
    MAX_STEPS,
    Memory,
    SharedLayout,
    Signals,
    describe,
    description_bytes,
)
from megatron_hecate.nvlink.messages import rounds_of
from megatron_hecate.nvlink.tables import (
    GRAIN,
    DomainPlan,
    Domains,
    most_numbers,
    most_stripes,
    part_size,
)

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
COUNTERS = 1024  # bytes at the beginning of a rank's memory
CPU = torch.device("cpu")


class Ranks:
    """Memory of all ranks, and a transfer of one layer between them."""

    def __init__(
        self, copies: Sequence[Copy], domains: Domains, layer: LayerBuffer, elements: int
    ) -> None:
        self.domains = tuple(map(tuple, domains))
        self.sizes = tuple(map(len, self.domains))
        self.layer, self.elements = layer, elements
        self.ranks = sorted(itertools.chain.from_iterable(domains))
        self.plans = [DomainPlan(tuple(copies), rank, self.domains) for rank in self.ranks]
        # chunks of homes and of slots, of 4 bytes per element at most, then the shared buffer
        self._chunk = LayerBuffer.aligned(elements, torch.float32)
        self._shared = COUNTERS + (layer.homes + layer.slots) * self._chunk
        fetch = SharedLayout.of_fetch(layer.homes, 4 * elements, min(self.sizes))
        back = SharedLayout.of_return(layer.slots, elements, min(self.sizes))
        in_fetch, in_return = most_stripes(layer, self.sizes)
        size = self._shared + max(fetch.size(in_fetch), back.size(in_return))
        self.memory = torch.zeros(len(self.ranks), size, dtype=torch.uint8)
        self.failure = np.zeros(1, FAILURE)
        self._begin = 1
        self._kernels = TransferKernels(CPU)

    def chunk(self, rank: int, number: int, dtype: torch.dtype) -> Tensor:
        """A home, or after the homes a slot."""
        begin = COUNTERS + number * self._chunk
        return self.memory[rank, begin:][: self.elements * dtype.itemsize].view(dtype)

    def slot(self, copy: Copy, dtype: torch.dtype) -> Tensor:
        return self.chunk(copy.rank, self.layer.homes + copy.slot, dtype)

    def run(self, kernel: str, *, itemsize: int, main_itemsize: int) -> None:
        """Run all stages; sizes of elements of slots and of homes."""
        sums = kernel != "fssdp_gather"
        size = self.elements if sums else self.elements * itemsize
        layout = (
            SharedLayout.of_return(self.layer.slots, size, min(self.sizes))
            if sums
            else SharedLayout.of_fetch(self.layer.homes, size, min(self.sizes))
        )
        self._launch(kernel, layout, size, main_itemsize, away=False)
        if len(self.domains) == 1:
            return
        stripe = part_size(size, min(self.sizes)) * (4 if sums else 1)
        assert stripe <= layout.stripe_stride
        for messages in zip(
            *(rounds_of(plan, size, sums=sums) for plan in self.plans), strict=True
        ):
            self._deliver(messages, layout, torch.float32 if sums else torch.uint8)
        self._launch(kernel, layout, size, main_itemsize, away=True)

    def _stripe(self, rank: int, layout: SharedLayout, buffer: int, size: int) -> Tensor:
        begin = self._shared + layout.stripes_begin + buffer * layout.stripe_stride
        assert begin + size <= self.memory.shape[1], "more stripe buffers than set aside"
        return self.memory[rank, begin : begin + size]

    def _deliver(self, messages: tuple, layout: SharedLayout, dtype: torch.dtype) -> None:
        domain_of = {rank: domain for domain in self.domains for rank in domain}
        under_way: dict[tuple[int, int], list[Tensor]] = {}
        for rank, stage in enumerate(messages):
            for buffer, size, peer in stage.sends:
                assert peer not in domain_of[rank]
                stripe = self._stripe(rank, layout, buffer, size * dtype.itemsize)
                under_way.setdefault((rank, peer), []).append(stripe.clone())
        for rank, stage in enumerate(messages):
            for buffer, size, peer in stage.receives:
                stripe = self._stripe(rank, layout, buffer, size * dtype.itemsize)
                stripe.copy_(under_way[peer, rank].pop(0))
            for source, into in stage.adds:
                parts = [
                    self._stripe(rank, layout, buffer, source.size * dtype.itemsize).view(dtype)
                    for buffer in (into, source.buffer)
                ]
                parts[0].add_(parts[1])
        assert not any(under_way.values())

    def _launch(
        self, kernel: str, layout: SharedLayout, size: int, main_itemsize: int, *, away: bool
    ) -> None:
        kept = []
        for domain in self.domains:
            bases = [self.memory[rank].data_ptr() for rank in domain]
            for place, rank in enumerate(domain):
                table = self.plans[rank].table
                assert len(table) <= most_numbers(len(self.ranks), self.layer.slots)
                shared, stripes = layout.chunks(bases[place] + self._shared)
                is_sum = kernel != "fssdp_gather"
                first = bases[place] + COUNTERS
                homes = [first + index * self._chunk for index in range(self.layer.homes)]
                half = size // 2 // (1 if is_sum else 4) * (1 if is_sum else 4)
                bytes_of_half = half * (main_itemsize if is_sum else 1)
                memory = Memory(
                    homes=tuple((home, home + bytes_of_half) for home in homes),
                    sizes=(half, size - half),
                    chunks=(
                        shared,
                        (first + self.layer.homes * self._chunk, self._chunk),
                        shared,
                        stripes,
                    ),
                    table=table.ctypes.data,
                )
                signals = Signals(
                    rank=place,
                    progress=bases,
                    arrived=bases[place] + 512,
                    epoch=bases[place] + 768,
                    failure=self.failure.ctypes.data,
                    timeout=20.0,
                )
                description = torch.zeros(description_bytes(memory), dtype=torch.uint8)
                data = describe(memory, signals, description.data_ptr())
                description.copy_(torch.from_numpy(data))
                kept.append(description)
        begin, self._begin = self._begin, self._begin + MAX_STEPS

        def run(description: Tensor) -> None:
            self._kernels.run(kernel, description, position=begin, away=away, ranks=8)

        with ThreadPoolExecutor(len(kept)) as pool:
            list(pool.map(run, kept))
        assert not self.failure["failed"], self.failure


def _check(ranks: Ranks, copies: Sequence[Copy], rng: np.random.Generator) -> None:
    """A spAG, and a spRS of all types of gradients, of values whose sum shows the order."""

    def drawn(dtype: torch.dtype) -> Tensor:
        values = rng.standard_normal(ranks.elements) * 2.0 ** rng.integers(0, 12, ranks.elements)
        return torch.from_numpy(values).to(dtype)

    sent = sorted({(copy.home, copy.index) for copy in copies})
    weights = {key: drawn(torch.float32) for key in sent}
    for (home, index), values in weights.items():
        ranks.chunk(home, index, torch.float32).copy_(values)
    ranks.run("fssdp_gather", itemsize=4, main_itemsize=4)
    for copy in copies:
        assert torch.equal(ranks.slot(copy, torch.float32), weights[copy.home, copy.index]), copy
    domain_of = {rank: i for i, domain in enumerate(ranks.domains) for rank in domain}
    for bits, main_bits in REDUCES:
        dtype, main_dtype = DTYPES[bits], DTYPES[main_bits]
        grads = {copy: drawn(dtype) for copy in copies}
        before = {key: drawn(main_dtype) for key in sent}
        for copy, grad in grads.items():
            ranks.slot(copy, dtype).copy_(grad)
        for (home, index), values in before.items():
            ranks.chunk(home, index, main_dtype).copy_(values)
        ranks.run(
            f"fssdp_reduce_{bits}_{main_bits}",
            itemsize=dtype.itemsize,
            main_itemsize=main_dtype.itemsize,
        )
        for home, index in sent:
            # by domain, from the home's on, and in each by rank
            sums: dict[int, Tensor] = {}
            for copy in sorted(grads, key=lambda copy: copy.rank):
                if (copy.home, copy.index) == (home, index):
                    turn = (domain_of[copy.rank] - domain_of[home]) % len(ranks.domains)
                    grad = grads[copy].float()
                    sums[turn] = sums[turn] + grad if turn in sums else grad
            total = None
            for turn in sorted(sums):
                total = sums[turn] if total is None else total + sums[turn]
            expected = (before[home, index].float() + total).to(main_dtype)
            assert torch.equal(ranks.chunk(home, index, main_dtype), expected), (home, index)


@pytest.mark.parametrize("name", list(DOMAINS))
@pytest.mark.parametrize(
    "seeds", [range(3), pytest.param(range(3, 60), marks=pytest.mark.slow)], ids=["few", "many"]
)
def test_random_copies(name: str, seeds: range) -> None:
    """And no rank needs more stripe buffers, or larger ones, than memory is set aside for."""
    for seed in seeds:
        rng = np.random.default_rng(seed)
        experts, slots = int(rng.integers(1, 4)), int(rng.integers(1, 4))
        fill, count = float(rng.uniform(0.2, 1)), sum(map(len, DOMAINS[name]))
        copies = random_copies(rng, ranks=count, slots=slots, experts=experts, fill=fill)
        elements = int(rng.choice([2, GRAIN, 5 * GRAIN + 3, 40_001]))
        layer = LayerBuffer(slots=slots, elements=elements, dtype=torch.float32, homes=experts)
        _check(Ranks(copies, DOMAINS[name], layer, elements), copies, rng)


@pytest.mark.parametrize("name", ["2 of 4", "2 of 6", "3 of 2, not in order"])
@pytest.mark.parametrize("sums", [False, True])
def test_one_copy_crosses_to_a_domain_in_stripes(name: str, sums: bool) -> None:
    """One expert to all ranks of all domains: every adapter carries an equal share of one copy per other domain."""
    domains, elements = DOMAINS[name], 24 * GRAIN
    ranks = sorted(itertools.chain.from_iterable(domains))
    copies = tuple(one_hot(len(ranks), 0, len(ranks) - 1))
    crossed: Counter[int] = Counter()
    for rank in ranks:
        plan = DomainPlan(copies, rank, tuple(map(tuple, domains)))
        for messages in rounds_of(plan, elements, sums=sums):
            crossed[rank] += sum(stripe.size for stripe in messages.sends)
    assert crossed.total() == (len(domains) - 1) * elements
    senders = [count for count in crossed.values() if count]
    assert (
        max(senders)
        == min(senders)
        == elements // len(domains[0]) * (1 if sums else len(domains) - 1)
    )


def test_ranks_begin_at_different_homes() -> None:
    copies = tuple(
        Copy(home, 0, rank, home) for home in range(4) for rank in range(4) if home != rank
    )
    for rank in range(4):
        table = DomainPlan(copies, rank, (tuple(range(4)),)).table
        chunks, receivers = table[:2]
        slot, *_ = table[6 + 5 * chunks + 2 * receivers :]
        assert slot == (rank + 1) % 4, "a slot has its home's number here"
