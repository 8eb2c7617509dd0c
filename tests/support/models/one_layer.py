"""Transfers of one layer between ranks, against a dense reference: every rank can say what all chunks and all gradients
are, and what must come out, without a message. Also for processes that share a GPU (`one_gpu.py`).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_hecate.comm.p2p import P2P
from megatron_hecate.comm.transfer import Transfer
from megatron_hecate.comm.transport import Copy, LayerBuffer, TransferPlan, Transport, chunks_in
from megatron_hecate.nvlink.transport import NVLink

HOMES, SLOTS = 2, 4  # of every rank
SHAPES = ((40, 30), (77,), (30, 40), (1,))  # parts of one size are told apart by their place
ELEMENTS = sum(int(np.prod(shape)) for shape in SHAPES)
CPU = torch.device("cpu")
Domains = Sequence[Sequence[int]]


def make_transport(name: str, domains: Domains = (), *, timeout: float = 20.0) -> Transport:
    """Between all ranks; ``domains`` are of NVLink, one of all ranks if left out."""
    if name == "p2p":
        return P2P(dist.group.WORLD, timeout=timeout)
    domains = domains or (range(dist.get_world_size()),)
    groups = [dist.new_group(list(domain)) for domain in domains]
    own = next(
        group for group, domain in zip(groups, domains, strict=True) if dist.get_rank() in domain
    )
    return NVLink(dist.group.WORLD, own, domains=domains, timeout=timeout)


def copies(kind: str, seed: int = 0) -> tuple[Copy, ...]:
    """Replicas of all ranks: expert ``index`` of ``home`` in slots drawn at random."""
    ranks, rng = dist.get_world_size(), np.random.default_rng(seed)
    away = [(h, i, r) for h in range(ranks) for i in range(HOMES) for r in range(ranks) if h != r]
    if kind == "none":
        away = []
    elif kind == "one to all":
        away = [(h, i, r) for h, i, r in away if (h, i) == (0, 1)]
    elif kind == "rank 1 has nothing":
        away = [(h, i, r) for h, i, r in away if 1 not in (h, r)]
    elif kind == "one to all, others at random":
        away = [(h, i, r) for h, i, r in away if (h, i) == (0, 1) or rng.random() < 0.4]
    free = [rng.permutation(SLOTS).tolist() for _ in range(ranks)]
    hot = sorted(away, key=lambda copy: copy[:2] != (0, 1))
    placed = {(h, i, r): free[r].pop() for h, i, r in hot if free[r]}
    return tuple(Copy(h, i, r, placed[h, i, r]) for h, i, r in away if (h, i, r) in placed)


KINDS = ("none", "one to all", "all to all", "rank 1 has nothing", "one to all, others at random")


class Sums:
    """Takes the sums of own experts, in place of main gradients or, with ``direct`` off, one by one."""

    def __init__(self, before: Sequence[Sequence[Tensor]], *, direct: bool) -> None:
        self.before, self.direct, self.added = before, direct, {}

    def main_grads(self, index: int) -> Sequence[Tensor] | None:
        return self.before[index] if self.direct else None

    def add(self, index: int, total: Tensor) -> None:
        assert index not in self.added, "a sum came twice"
        self.added[index] = total.clone()


@dataclasses.dataclass(frozen=True)
class Reference:
    """What chunks and gradients are, at a seed, and what their sums must be, which are made in order of ``domains``."""

    seed: int
    dtype: torch.dtype = torch.float32
    domains: Domains = ()

    def drawn(self, *key: int) -> list[Tensor]:
        generator = torch.Generator().manual_seed(hash((self.seed, *key)) % 2**62)
        return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in SHAPES]

    def parameters(self, home: int, index: int) -> list[Tensor]:
        return [part.to(self.dtype) for part in self.drawn(0, home, index)]

    def grad(self, copy: Copy) -> Tensor:
        """[elements] of one replica."""
        return flat(self.drawn(1, copy.home, copy.index, copy.rank)).to(wide(self.dtype))

    def sums(self, copies: Sequence[Copy], rank: int) -> dict[int, Tensor]:
        """Of the gradients of own experts of ``rank``: by domain, from the home's on, and by rank."""
        domains = self.domains or (range(dist.get_world_size()),)
        of = {r: i for i, domain in enumerate(domains) for r in domain}
        totals: dict[int, Tensor] = {}
        for index in sorted({copy.index for copy in copies if copy.home == rank}):
            mine = [copy for copy in copies if (copy.home, copy.index) == (rank, index)]
            for turn in range(len(domains)):
                there = [copy for copy in mine if of[copy.rank] == (of[rank] + turn) % len(domains)]
                if there:
                    ordered = sorted(there, key=lambda copy: copy.rank)
                    total = functools.reduce(torch.add, [self.grad(copy) for copy in ordered])
                    totals[index] = totals[index] + total if index in totals else total
        return totals


def wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def flat(parts: Sequence[Tensor]) -> Tensor:
    return torch.cat([part.flatten() for part in parts])


class Layer:
    """One layer's slots on this rank, in ``memory``, and its transfers."""

    def __init__(self, transport: Transport, memory: Tensor, buffer: LayerBuffer) -> None:
        self.transport, self.rank, self.device = transport, dist.get_rank(), memory.device
        self.weights = chunks_in(memory, SLOTS, ELEMENTS, buffer.dtype)
        self.grads = chunks_in(memory[buffer.weight_bytes :], SLOTS, ELEMENTS, buffer.grad_dtype)

    def fetch(self, plan: TransferPlan, reference: Reference) -> Transfer:
        homes = [
            [part.to(self.device) for part in reference.parameters(self.rank, i)]
            for i in range(HOMES)
        ]
        self.homes = homes  # they must live until it is over
        return self.transport.fetch(plan, homes, self.weights, label="layer 1")

    def check_weights(self, plan: TransferPlan, reference: Reference) -> None:
        for copy in plan.copies:
            if copy.rank == self.rank:
                expected = flat(reference.parameters(copy.home, copy.index))
                assert torch.equal(self.weights[copy.slot].cpu(), expected), copy

    def give_back(self, plan: TransferPlan, reference: Reference, sums: Sums) -> Transfer:
        for copy in plan.copies:
            if copy.rank == self.rank:
                self.grads[copy.slot].copy_(reference.grad(copy))
        return self.transport.return_gradients(plan, self.grads, sums, label="layer 1")


def allocate(
    transport: Transport, device: torch.device, dtype: torch.dtype, *, layers: int = 1
) -> list[Layer]:
    """As a model of so many layers does, whose replicas share nothing."""
    grad_dtype = torch.promote_types(dtype, torch.float32)
    buffer = LayerBuffer(SLOTS, ELEMENTS, dtype, HOMES, grad_dtype=grad_dtype)
    size = buffer.weight_bytes + buffer.grad_bytes
    memory = transport.allocate(layers * size, [buffer] * layers, device)
    assert memory.shape == (layers * size,) and memory.dtype is torch.uint8
    return [Layer(transport, part, buffer) for part in memory.split(size)]


def check_sums(sums: Sums, before: Sequence[Tensor], expected: dict[int, Tensor]) -> None:
    """Bitwise; main gradients of experts without replicas stay as they were."""
    for index in range(HOMES):
        if index in sums.added:
            assert torch.equal(sums.added[index].cpu(), expected[index])
            assert torch.equal(flat(sums.before[index]).cpu(), before[index])
        else:
            total = before[index] + expected[index] if index in expected else before[index]
            assert torch.equal(flat(sums.before[index]).cpu(), total)
    if sums.added or not sums.direct:
        assert list(sums.added) == sorted(expected), "ascending, and all of them"


def check(transport: Transport, reference: Reference, device: torch.device = CPU) -> None:
    """A spAG and two spRS of every kind of plan, one after another; values are compared bit for bit."""
    (layer,) = allocate(transport, device, reference.dtype)
    for number, kind in enumerate((*KINDS, *KINDS[-1:] * 4)):
        reference = dataclasses.replace(reference, seed=number)
        plan = TransferPlan(layer.rank, copies(kind, number))
        for chunk in layer.weights:
            chunk.fill_(7)
        layer.fetch(plan, reference).wait()
        layer.check_weights(plan, reference)
        for slot in set(range(SLOTS)) - set(plan.slots):
            assert (layer.weights[slot] == 7).all(), "a slot without a replica was written"
        for direct in (True, False):
            main_grads = [
                [t.to(wide(reference.dtype)) for t in reference.drawn(2, layer.rank, i)]
                for i in range(HOMES)
            ]
            before = [flat(parts) for parts in main_grads]
            sums = Sums([[t.to(device) for t in parts] for parts in main_grads], direct=direct)
            layer.give_back(plan, reference, sums).wait()
            check_sums(sums, before, reference.sums(plan.copies, layer.rank))
