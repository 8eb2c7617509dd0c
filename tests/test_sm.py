"""The ``sm`` transport on CPU ranks: the host build of the kernels, over shared memory."""

from __future__ import annotations

from typing import Any

import pytest
from ranks import ranks

from megatron_hecate.transports import Transport, Whereabouts, choose_transport, domains_of

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


@pytest.mark.parametrize("lifetime", ["iteration", "layer"])
@ranks(4, timeout=240)
def test_training_over_two_machines(lifetime: str) -> None:
    """Oracle: transport p2p, but for the order of sums; and the same run again, bitwise. Machines are only named so."""
    import types

    import tiny_gpt
    import torch
    import torch.distributed as dist

    from megatron_hecate import HecateConfig, fssdp, transports

    case = tiny_gpt.Case(ep=4, accumulate=2, skew=2.0, overlap=True, distributed_optimizer=True)
    tiny_gpt.initialize(case)
    transports.socket = types.SimpleNamespace(gethostname=lambda: f"machine {dist.get_rank() // 2}")
    runs = []
    for transport in ("p2p", "sm", "sm", "ce"):
        config = HecateConfig(costs=tiny_gpt.FREE, slots=2, late=2, transport=transport, timeout=60, lifetime=lifetime)
        runs.append(tiny_gpt.train(case, steps=5, hook=fssdp(config)))
    p2p, sm, *same = runs
    assert sm.guests == p2p.guests > 0
    assert sm.losses == pytest.approx(p2p.losses, rel=1e-6) and sm.grad_norms == pytest.approx(p2p.grad_norms, rel=1e-5)
    for other in same:
        assert other.losses == sm.losses and other.grad_norms == sm.grad_norms
        for param, value in other.params.items():
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


SHAPES = ((40, 30), (77,), (1,))
ELEMENTS = 40 * 30 + 77 + 1


def _drawn(kind: int, seed: int, rank: int) -> list:
    """Two chunks of a rank's own, or its guests' gradients: every rank can say what another has."""
    import torch

    torch.manual_seed(1000 * seed + 10 * rank + kind)
    return [[torch.randn(shape) for shape in SHAPES] for _ in range(3)]


@pytest.mark.parametrize("domains", [((0, 1, 2, 3),), ((0, 1), (2, 3)), ((0, 2), (1,), (3,))])
@pytest.mark.parametrize("copy_engines", [False, True], ids=["sm", "ce"])
@ranks(4, timeout=120)
def test_one_layer_after_another(domains: tuple, copy_engines: bool) -> None:
    """Oracle: what this process computes by itself, in the order that `hierarchy` promises; in one domain p2p as well.
    Chunks of three tensors, of odd sizes; weights, sums and totals are bitwise the same."""
    import functools

    import torch
    import torch.distributed as dist

    from megatron_hecate import hierarchy
    from megatron_hecate.collectives import Fused, start_gather, start_reduce
    from megatron_hecate.materialization import Materialization
    from megatron_hecate.peers import Peers
    from megatron_hecate.sm import Sm

    group, rank = dist.group.WORLD, dist.get_rank()
    groups = [dist.new_group(domain) for domain in domains]
    here = next(i for i, domain in enumerate(domains) if rank in domain)
    peers = Peers(groups[here], 4 << 20, torch.device("cpu"), ranks=domains[here])
    sm = Sm(peers, group, domains, copy_engines=copy_engines)
    arena = sm.peers.arena.view(torch.float32)
    chunks = [arena[i * 2048 : i * 2048 + ELEMENTS] for i in range(5)]
    outbox, rows = chunks[:2], chunks[2:]
    sizes = [len(domain) for domain in domains]
    width, count = hierarchy.width(ELEMENTS, sizes), max(hierarchy.relays(sizes, homes=2, slots=3))
    relays = list(arena[5 * 2048 :].split(width)[:count])
    settings = dict(label="layer 1", timeout=20.0)
    for seed in range(12):
        placement = _placement(seed)
        views = [Materialization.of(placement, r) for r in range(4)]
        what, homes = views[rank], _drawn(0, seed, rank)[:2]
        fused = Fused(sm, what.loans(), rows, outbox, relays)
        start_gather(homes, what.route, [], group, fused=fused, **settings).wait()
        for row, expert in zip(what.rows, what.route.experts, strict=True):
            home = _drawn(0, seed, expert // 2)[expert % 2]
            assert torch.equal(rows[row], torch.cat([t.flatten() for t in home]))
        grads = {
            (r, expert): torch.cat([t.flatten() for t in _drawn(1, seed, r)[i]])
            for r, view in enumerate(views)
            for i, expert in enumerate(view.route.experts)
        }
        before = _drawn(2, seed, rank)[:2]
        totals = [[t.clone() for t in home] for home in before]
        expected = {}
        for expert in (2 * rank, 2 * rank + 1):
            total, alone = torch.cat([t.flatten() for t in before[expert % 2]]), torch.zeros(ELEMENTS)
            for turn in range(len(domains)):
                hosts = sorted(r for r in domains[(here + turn) % len(domains)] if (r, expert) in grads)
                if hosts:
                    summed = functools.reduce(torch.add, [grads[host, expert] for host in hosts])
                    total, alone = total + summed, alone + summed
            expected[expert % 2] = total, alone
        for direct in (True, False):
            for row, expert in zip(what.rows, what.route.experts, strict=True):
                rows[row].copy_(grads[rank, expert])
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
            assert tuple(sorted(found)) == (() if direct else what.route.lent)
            for home in what.route.lent:
                seen = torch.cat([t.flatten() for t in totals[home]]) if direct else found[home]
                assert torch.equal(seen, expected[home][0 if direct else 1])
        if len(domains) == 1:
            sums: dict[int, torch.Tensor] = {}

            def add(home: int, total: torch.Tensor, sums: dict = sums) -> None:
                sums[home] = total.clone()

            staging = [torch.empty(ELEMENTS) for _ in range(5)]
            own = [grads[rank, expert] for expert in what.route.experts]
            start_reduce(own, what.route, staging, add, group, **settings).wait()
            assert sums.keys() == found.keys() and all(torch.equal(found[home], sums[home]) for home in sums)


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

    sm = Sm(Peers(dist.group.WORLD, 1 << 16, torch.device("cpu")), dist.group.WORLD, [range(3)])
    rows = [sm.peers.arena[256 * i : 256 * i + 64].view(torch.float32) for i in range(2)]
    if dist.get_rank() == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    loans = [Loan(2, 0, 0, 0), Loan(2, 0, 1, 0)]
    start = time.monotonic()
    steps = sm.gather([[torch.zeros(16)]], loans, rows[:1], rows[1:], label="layer 7", timeout=2.0)
    transfer = Transfer(steps, torch.device("cpu"), what="spAG", label="layer 7", queue=sm.queue)
    who = rf"layer 7: spAG failed on rank {dist.get_rank()} of 3 .*timeout 2 s.*: expected rank 2 to finish 3"
    with pytest.raises(TransferError, match=who):
        transfer.wait()
    assert time.monotonic() - start < 10
    with pytest.raises(TransferError, match=r"layer 8: spAG failed .*expected rank 2"):
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

    from megatron_hecate import HecateConfig, fssdp, launch
    from megatron_hecate.compile import CACHE

    case = tiny_gpt.Case()
    tiny_gpt.initialize(case)
    hook = fssdp(HecateConfig(costs=tiny_gpt.FREE, transport="sm", timeout=30))
    nodes, shared = "aaab", [4024, 4023, 0, 9999]
    ranks = [Whereabouts([(0, 1)], node, node, "", "", free, True) for node, free in zip(nodes, shared, strict=True)]
    assert Transport("sm").refusals(ranks, {0: 1000, 1: 2000, 3: 500}) == [
        "transport='sm' needs 4024 bytes of shared memory on a, 4023 are free in /dev/shm; make it larger, or use p2p, "
        "fewer slots or a shorter lifetime",
    ]
    before = os.environ.get(CACHE)
    if dist.get_rank() == 1:
        os.environ[CACHE] = "/proc/nowhere"
        launch.compile_for_host.cache_clear()
    with pytest.raises(
        ValueError, match=r"transport='sm': /proc/nowhere cannot be made .*name another folder in \$MEG"
    ):
        tiny_gpt.train(case, steps=1, hook=hook)
    if before is None:
        os.environ.pop(CACHE, None)
    else:
        os.environ[CACHE] = before


def _ranks(domains: str, **fields: Any) -> list[Whereabouts]:
    """One group; of every rank the name of its domain."""
    group = tuple(range(len(domains)))
    usual = dict(groups=[group], node="a", against="", slower="", shared=0, sound=True)
    return [Whereabouts(domain=domain, **(usual | fields)) for domain in domains]


@pytest.mark.parametrize(
    ("asked", "ranks", "chosen", "problems"),
    [
        ("auto", _ranks("aabb"), Transport("sm", "peers share NVLink domains"), []),
        ("auto", _ranks("abcd"), Transport("p2p", "no two ranks of a group share an NVLink domain"), []),
        ("auto", _ranks("aa", slower="GPU 1 has no NVLink"), Transport("p2p", "GPU 1 has no NVLink"), []),
        ("auto", _ranks("aa", against="no compiler"), Transport("p2p", "no compiler"), []),
        ("auto", _ranks("a" * 73), Transport("p2p", "73 ranks share a domain, 72 may"), []),
        ("p2p", _ranks("aa"), Transport("p2p"), []),
        ("sm", _ranks("abcd", slower="CPU ranks have no NVLink"), Transport("sm"), []),
        ("ce", _ranks("aa", against="no compiler"), Transport("ce"), ["transport='ce': no compiler"]),
        ("sm", _ranks("a" * 73), Transport("sm"), ["transport='sm': 73 ranks share a domain, 72 may"]),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_chosen(asked: str, ranks: list[Whereabouts], chosen: Transport, problems: list[str]) -> None:
    assert choose_transport(asked, ranks) == (chosen, problems)


def test_domains_are_in_the_order_of_their_first_rank() -> None:
    ranks = _ranks("bbabac")
    assert domains_of((1, 2, 3, 4, 5), ranks) == [(1, 3), (2, 4), (5,)]


@ranks(2)
def test_a_transport_that_moves_wrong_bytes_fails_its_trial() -> None:
    """Asked for, it is refused; with auto it is p2p, which says why."""
    import dataclasses

    from megatron_hecate import transports, trial

    trial.start_gather = lambda *args, **settings: _Nothing()
    problems: list[str] = []
    _, transport, transfers = trial.settle("sm", [(0, 1)], problems, timeout=20.0)
    wrong = [f"transport='sm' failed its trial: rank {r} got other weights than ranks [{1 - r}] sent" for r in range(2)]
    assert problems == wrong and transport.name == "sm" and set(transfers) == {(0, 1)}
    here = transports.Whereabouts.here

    def with_nvlink(*args: Any, **fields: Any) -> Whereabouts:
        return dataclasses.replace(here(*args, **fields), slower="")

    transports.Whereabouts.here = with_nvlink
    problems.clear()
    _, transport, _ = trial.settle("auto", [(0, 1)], problems, timeout=20.0)
    assert not problems
    assert transport.name == "p2p" and transport.why.startswith("sm failed its trial: rank 0 got other weights")


class _Nothing:
    """A transfer that moves nothing."""

    def wait(self) -> None:
        return
