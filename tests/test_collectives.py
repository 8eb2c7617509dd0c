"""spAG and spRS against a dense reference: every rank builds all chunks and all gradients itself, without messages.

If a chunk went to the wrong slot, a sum missed a guest, or ranks disagreed on the order of transfers, the values differ
or the test hangs.
"""

from __future__ import annotations

import os
import signal
import time

import numpy as np
import pytest
import torch
import torch.distributed as dist
from ranks import ranks

from megatron_hecate.collectives import Route, sparse_all_gather, sparse_reduce_scatter
from megatron_hecate.p2p import TransferError
from megatron_hecate.plan import Placement

SHAPES = [(3, 2), (5,), (2, 3)]  # fc1 and fc2 of one size: the parts are told apart by position, not by shape
CHUNK = sum(int(np.prod(s)) for s in SHAPES)


def _placement(kind: str, num_experts: int, num_ranks: int, seed: int = 0) -> Placement:
    most = num_experts - num_experts // num_ranks
    placement = Placement.initial(num_experts, num_ranks, num_slots=most)
    away = [(e, r) for e in range(num_experts) for r in range(num_ranks) if placement.home[e] != r]
    if kind == "empty":
        pairs = []
    elif kind == "one to all":
        pairs = [(e, r) for e, r in away if e == 0]
    elif kind == "all to all":
        pairs = away
    elif kind == "rank 1 has nothing":
        pairs = [(e, r) for e, r in away if r != 1 and placement.home[e] != 1]
    else:
        rng = np.random.default_rng(seed)
        pairs = [pair for pair in away if rng.random() < 0.4]
        rng.shuffle(pairs)
    return placement.with_guests([(int(e), int(r)) for e, r in pairs])


def _chunk(expert: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(CHUNK, generator=torch.Generator().manual_seed(expert), dtype=torch.float64).to(dtype)


def _grad(expert: int, rank: int, dtype: torch.dtype) -> torch.Tensor:
    seed = 1000 + 100 * expert + rank
    return torch.randn(CHUNK, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def _split(chunk: torch.Tensor) -> list[torch.Tensor]:
    sizes = [int(np.prod(s)) for s in SHAPES]
    return [part.view(shape).clone() for part, shape in zip(chunk.split(sizes), SHAPES, strict=True)]


KINDS = ["empty", "one to all", "all to all", "rank 1 has nothing", "random"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("kind", KINDS)
@ranks(4)
def test_matches_dense_reference(kind: str, dtype: torch.dtype) -> None:
    rank, group = dist.get_rank(), dist.group.WORLD
    for seed in range(3 if kind == "random" else 1):
        placement = _placement(kind, 8, 4, seed)
        route = Route.of(placement, rank)
        mine = np.flatnonzero(placement.home == rank).tolist()
        homes = [[t.requires_grad_() for t in _split(_chunk(e, dtype))] for e in mine]

        guests = sparse_all_gather(homes, route, group, label="layer 1", timeout=30)
        expected = [_chunk(e, dtype) for e in placement.table[rank].tolist() if e >= 0 and placement.home[e] != rank]
        assert [placement.table[rank].tolist().index(e) for e in route.experts] == sorted(
            np.flatnonzero(placement.is_guest[rank]).tolist()
        )
        assert torch.equal(guests, torch.stack(expected) if expected else guests.new_empty(0, CHUNK))

        grads = (
            torch.stack([_grad(e, rank, dtype) for e in route.experts]) if route.experts else torch.zeros_like(guests)
        )
        wide = torch.promote_types(dtype, torch.float32)
        sums = {}
        for e in mine:
            hosts = [r for r in range(4) if placement.holders[e, r] and r != rank]
            if hosts:
                total = torch.zeros(CHUNK, dtype=wide)
                for r in hosts:  # in order of rank: the result is compared bit for bit
                    total += _grad(e, r, dtype)
                sums[e] = total
        total = sparse_reduce_scatter(grads, route, group, label="layer 1", timeout=30)
        assert total.dtype == wide and route.lent == tuple(mine.index(e) for e in sums)
        assert torch.equal(total, torch.stack(list(sums.values())) if sums else total.new_empty(0, CHUNK))

        guests.backward(grads)  # autograd pairs the two ops
        for e, tensors in zip(mine, homes, strict=True):
            want = _split(sums[e].to(dtype)) if e in sums else [torch.zeros(s, dtype=dtype) for s in SHAPES]
            for tensor, value in zip(tensors, want, strict=True):
                assert torch.equal(tensor.grad, value)


@ranks(3)
def test_adjoint_of_the_adjoint() -> None:
    """The backward of spRS is spAG: against what each home gave."""
    rank, group = dist.get_rank(), dist.group.WORLD
    placement = _placement("random", 6, 3, seed=5)
    route = Route.of(placement, rank)
    y = torch.stack([_grad(e, rank, torch.float64) for e in route.experts] or [torch.zeros(CHUNK).double()])
    y = y[: len(route.experts)].requires_grad_()
    total = sparse_reduce_scatter(y, route, group, label="layer 1", timeout=30)
    weight = torch.arange(total.numel(), dtype=torch.float64).view_as(total) + 100 * rank
    (total * weight).sum().backward()
    # dense: the gradient of a guest's chunk is the weight that its home gave to the sum
    by_rank = [None] * 3
    dist.all_gather_object(by_rank, {int(i): w for i, w in zip(route.lent, weight, strict=True)})
    homes = [np.flatnonzero(placement.home == r).tolist() for r in range(3)]
    for row, expert in enumerate(route.experts):
        home = int(placement.home[expert])
        assert torch.equal(y.grad[row], by_rank[home][homes[home].index(expert)])


@ranks(2)
def test_nan_and_inf_arrive_at_home() -> None:
    rank, group = dist.get_rank(), dist.group.WORLD
    placement = Placement.initial(2, 2, num_slots=1).with_guests([(0, 1)])
    route = Route.of(placement, rank)
    grads = torch.ones(len(route.experts), CHUNK)
    if rank == 1:
        grads[0, 0], grads[0, 1] = float("nan"), float("inf")
    total = sparse_reduce_scatter(grads, route, group, label="layer 1", timeout=30)
    if rank == 0:
        assert total[0, 0].isnan() and total[0, 1].isinf() and (total[0, 2:] == 1).all()


@ranks(2)
def test_peer_that_hangs_is_named_within_the_timeout() -> None:
    rank, group = dist.get_rank(), dist.group.WORLD
    placement = Placement.initial(4, 2, num_slots=1).with_guests([(2, 0)])
    homes = [_split(_chunk(e, torch.float32)) for e in range(2)]
    if rank == 1:
        time.sleep(6)
        return
    start = time.monotonic()
    with pytest.raises(TransferError, match=r"layer 7: sparse_all_gather failed on rank 0 .* receive from rank 1 .*"):
        sparse_all_gather(homes, Route.of(placement, rank), group, label="layer 7", timeout=2)
    assert time.monotonic() - start < 5


@ranks(2, killed=frozenset({1}))
def test_peer_that_dies_is_named_within_the_timeout() -> None:
    rank, group = dist.get_rank(), dist.group.WORLD
    placement = Placement.initial(4, 2, num_slots=1).with_guests([(2, 0)])
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    homes = [_split(_chunk(e, torch.float32)) for e in range(2)]
    start = time.monotonic()
    with pytest.raises(TransferError, match=r"layer 7: sparse_all_gather failed on rank 0 .* receive from rank 1 .*"):
        sparse_all_gather(homes, Route.of(placement, rank), group, label="layer 7", timeout=20)
    assert time.monotonic() - start < 15
