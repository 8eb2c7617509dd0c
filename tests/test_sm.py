"""The ``sm`` transport on CPU ranks: the host build of the kernels, over shared memory."""

from __future__ import annotations

from typing import Any

import pytest
from ranks import ranks

FULL = dict(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)
# name: (fields of tiny_gpt.Case, fields of TransformerConfig, settings of FSSDP)
CASES: dict[str, tuple[dict, dict, dict]] = {
    "iteration": (dict(ep=4, accumulate=2), {}, dict(late=2)),
    "microbatch": (dict(ep=4, accumulate=2), {}, dict(late=2, lifetime="microbatch")),
    "layer": (dict(ep=4, accumulate=2), {}, dict(late=2, lifetime="layer")),
    "layer-recompute-bf16": (
        dict(ep=4, bf16=True, distributed_optimizer=True, overlap=True),
        dict(FULL, num_layers=4),
        dict(lifetime="layer"),
    ),
    "pipeline": (dict(pp=2, vpp=2, accumulate=4), dict(num_layers=8), dict(lifetime="microbatch")),
    "tensor-parallel": (dict(tp=2, ep=4, accumulate=2), {}, {}),
}


@pytest.mark.parametrize("name", list(CASES))
@ranks(4, timeout=240)
def test_training_is_bitwise_that_of_p2p(name: str) -> None:
    """Oracle: the same run by transport p2p, which has parity tests of its own."""
    import tiny_gpt
    import torch

    from megatron_hecate import HecateConfig, fssdp

    fields, model, settings = CASES[name]
    case = tiny_gpt.Case(**fields, skew=2.0, settings=tuple(model.items()))
    tiny_gpt.initialize(case)
    runs = {}
    for transport in ("p2p", "sm"):
        config = HecateConfig(costs=tiny_gpt.FREE, slots=2, transport=transport, timeout=60, **settings)
        runs[transport] = tiny_gpt.train(case, steps=5, hook=fssdp(config))
    p2p, sm = runs.values()
    assert sm.guests == p2p.guests > 0
    assert sm.losses == p2p.losses and sm.grad_norms == p2p.grad_norms
    for param, value in p2p.params.items():
        assert torch.equal(value, sm.params[param]), param


def _placement(seed: int) -> Any:
    """Guests drawn at random; expert 0 is a guest everywhere else."""
    import numpy as np

    from megatron_hecate.plan import Placement

    rng = np.random.default_rng(seed)
    homes = Placement.initial(8, 4, num_slots=3)
    guests = [(0, rank) for rank in (1, 2, 3)]
    guests += [(int(e), r) for r in range(4) for e in rng.permutation(range(1, 8))[:2] if homes.home[e] != r]
    return homes.with_guests(guests)


@ranks(4, timeout=120)
def test_one_layer_after_another() -> None:
    """Oracle: transport p2p. Chunks of three tensors, of odd sizes; weights, sums and totals are bitwise the same."""
    import torch
    import torch.distributed as dist

    from megatron_hecate.collectives import Fused, Route, start_gather, start_reduce
    from megatron_hecate.materialization import Materialization
    from megatron_hecate.peers import Peers
    from megatron_hecate.sm import Sm

    group, rank = dist.group.WORLD, dist.get_rank()
    shapes = ((40, 30), (77,), (1,))
    elements = sum(torch.Size(shape).numel() for shape in shapes)
    sm = Sm(Peers(group, 4 << 20, torch.device("cpu")))
    arena = sm.peers.arena.view(torch.float32)
    outbox = [arena[i * 2048 : i * 2048 + elements] for i in range(2)]
    rows = [arena[(2 + i) * 2048 : (2 + i) * 2048 + elements] for i in range(3)]
    for seed in range(12):
        torch.manual_seed(100 * seed + rank)
        homes = [[torch.randn(shape) for shape in shapes] for _ in range(2)]
        what = Materialization.of(_placement(seed), rank)
        fused = Fused(sm, what.loans(), rows, outbox)
        hosted = what.route.experts
        fetched = [torch.empty(elements) for _ in hosted]
        settings = dict(label="layer 1", timeout=20.0)
        start_gather(homes, what.route, fetched, group, **settings).wait()
        start_gather(homes, what.route, [], group, fused=fused, **settings).wait()
        for row, chunk in zip(what.rows, fetched, strict=True):
            assert torch.equal(rows[row], chunk)
        grads = [torch.randn(elements) for _ in hosted]
        totals = [[torch.randn(shape) for shape in shapes] for _ in range(2)]
        expected = [[t.clone() for t in home] for home in totals]
        sums: dict[int, torch.Tensor] = {}

        def add(home: int, total: torch.Tensor, expected: list = expected, sums: dict = sums) -> None:
            sums[home] = total.clone()
            for t, part in zip(expected[home], total.split([t.numel() for t in expected[home]]), strict=True):
                t += part.view_as(t)

        staging = [torch.empty(elements) for _ in range(5)]
        start_reduce(grads, what.route, staging, add, group, **settings).wait()
        for direct in (True, False):
            for row, grad in zip(what.rows, grads, strict=True):
                rows[row].copy_(grad)
            found: dict[int, torch.Tensor] = {}
            start_reduce(
                [],
                what.route,
                [],
                found.__setitem__,
                group,
                fused=fused,
                totals=lambda home, direct=direct, totals=totals: totals[home] if direct else None,
                **settings,
            ).wait()
            if direct:
                assert all(
                    torch.equal(a, b) for x, y in zip(totals, expected, strict=True) for a, b in zip(x, y, strict=True)
                )
                assert not found
            else:
                assert found.keys() == sums.keys() and all(torch.equal(found[home], sums[home]) for home in sums)
    assert Route.of(what.placement, rank).lent == tuple(sorted(sums))


@ranks(3, timeout=60, killed=(2,))
def test_a_dead_peer_is_named_in_time() -> None:
    import os
    import signal
    import time

    import torch
    import torch.distributed as dist

    from megatron_hecate.p2p import TransferError
    from megatron_hecate.peers import Peers
    from megatron_hecate.schedule import Loan
    from megatron_hecate.sm import Sm
    from megatron_hecate.transfer import Transfer

    sm = Sm(Peers(dist.group.WORLD, 1 << 16, torch.device("cpu")))
    rows = [sm.peers.arena[256 * i : 256 * i + 64].view(torch.float32) for i in range(2)]
    if dist.get_rank() == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    loans = [Loan(2, 0, 0, 0), Loan(2, 0, 1, 0)]
    start = time.monotonic()
    steps = sm.gather([[torch.zeros(16)]], loans, rows[:1], rows[1:], label="layer 7", timeout=2.0)
    transfer = Transfer(steps, torch.device("cpu"), what="spAG", label="layer 7", queue=sm.queue)
    who = rf"layer 7: fssdp_gather failed on rank {dist.get_rank()} of 3 .*timeout 2 s.*: expected rank 2 to finish 3"
    with pytest.raises(TransferError, match=who):
        transfer.wait()
    assert time.monotonic() - start < 10
    with pytest.raises(TransferError, match=r"layer 8: fssdp_gather failed .*expected rank 2"):
        for _ in sm.gather([[torch.zeros(16)]], loans, rows[:1], rows[1:], label="layer 8", timeout=2.0):
            pass


@ranks(2)
def test_too_little_shared_memory_is_said_on_all_ranks() -> None:
    import torch
    import torch.distributed as dist

    from megatron_hecate import peers

    if dist.get_rank() == 1:

        def full(*_: int) -> None:
            raise OSError(28, "No space left on device")

        peers.os.posix_fallocate = full
    message = r"transport sm: rank 1 cannot have 1512 bytes of shared memory, \d+ are free in /dev/shm: .*use p2p"
    with pytest.raises(RuntimeError, match=message):
        peers.Peers(dist.group.WORLD, 1000, torch.device("cpu"))


@ranks(2)
def test_switching_it_on() -> None:
    """What speaks against it is said on every rank, before training."""
    import os

    import tiny_gpt
    import torch.distributed as dist

    from megatron_hecate import HecateConfig, fssdp, transports
    from megatron_hecate.agreement import Note
    from megatron_hecate.compile import CACHE

    case = tiny_gpt.Case()
    tiny_gpt.initialize(case)
    hook = fssdp(HecateConfig(costs=tiny_gpt.FREE, transport="sm", timeout=30))
    groups, nodes, shared = [(0, 1), (2, 3)], "aaab", [4024, 4023, 0, 9999]
    notes = [Note({}, [], [], groups=groups, node=nodes[rank], shared=shared[rank]) for rank in range(4)]
    refusals = transports.Transport("sm").refusals(notes, {0: 1000, 1: 2000, 3: 500})
    assert refusals == [
        "transport='sm' needs the ranks of an FSSDP group on one machine; those of [2, 3] are on a, b; use p2p",
        "transport='sm' needs 4024 bytes of shared memory on a, 4023 are free in /dev/shm; make it larger, or use p2p, "
        "fewer slots or a shorter lifetime",
    ]
    before = os.environ.get(CACHE)
    if dist.get_rank() == 1:
        os.environ[CACHE] = "/proc/nowhere"
        transports.peers.compile_for_host.cache_clear()
    with pytest.raises(
        ValueError, match=r"transport='sm': /proc/nowhere cannot be made .*name another folder in \$MEG"
    ):
        tiny_gpt.train(case, steps=1, hook=hook)
    if before is None:
        os.environ.pop(CACHE, None)
    else:
        os.environ[CACHE] = before
    dist.get_backend_config = lambda: "cuda:nccl"
    with pytest.raises(ValueError, match="transport='sm': it has not run on GPUs yet; use p2p"):
        tiny_gpt.train(case, steps=1, hook=hook)
