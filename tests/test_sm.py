"""The ``sm`` transport on CPU ranks: the host build of the kernels, over shared memory."""

from __future__ import annotations

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


@pytest.mark.parametrize("domains", [((0, 1, 2, 3),), ((0, 1), (2, 3)), ((0, 2), (1,), (3,))])
@pytest.mark.parametrize("copy_engines", [False, True], ids=["sm", "ce"])
@ranks(4, timeout=120)
def test_one_layer_after_another(domains: tuple, copy_engines: bool) -> None:
    """Oracle: what this process computes by itself, in the order that `hierarchy` promises; in one domain p2p as well.
    Chunks of three tensors, of odd sizes; weights, sums and totals are bitwise the same."""
    import one_layer
    import torch

    one_layer.check(torch.device("cpu"), domains, copy_engines=copy_engines, p2p=len(domains) == 1)


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


@pytest.mark.parametrize("transport", ["sm", "ce"])
@ranks(2)
def test_groups_of_one_rank(transport: str) -> None:
    """Oracle: stock Megatron. Nobody to lend to, and nothing to wait for; with slots it is refused."""
    import tiny_gpt

    from megatron_hecate import HecateConfig, fssdp

    case = tiny_gpt.Case(ep=1)
    tiny_gpt.initialize(case)
    stock = tiny_gpt.train(case, steps=2)
    ours = tiny_gpt.train(case, steps=2, hook=fssdp(HecateConfig(slots=0, transport=transport, timeout=30)))
    assert ours.losses == stock.losses and not ours.guests


@ranks(2)
def test_a_failure_on_record_is_explained() -> None:
    """As a GPU leaves it, whose counters cannot be read any more: with rank, peer, expected and seen, on stderr too."""
    import contextlib
    import io
    import weakref

    import torch
    import torch.distributed as dist

    from megatron_hecate import sm as module
    from megatron_hecate.kernel import FAILURE
    from megatron_hecate.peers import Peers
    from megatron_hecate.schedule import Loan

    group, own = dist.group.WORLD, dist.get_rank()
    sm = module.Sm(Peers(group, 1 << 12, torch.device("cpu")), group, [range(2)])
    rows = [sm.peers.arena[256 * i : 256 * i + 64].view(torch.float32) for i in range(2)]
    for layer in (7, 8, 9):
        sm.gather([[torch.zeros(16)]], [Loan(0, 0, 1, 0)], rows[:1], rows[1:], label=f"layer {layer}", timeout=5.0)
    record = sm.peers._record.numpy().view(FAILURE)
    record[0] = (1, own, 1 - own, 1, 2**32 - 3, 1 + 3)  # in the second of the three, which began at 1 + 3
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        module._watch(weakref.ref(sm))
    assert said.getvalue() == (
        f"FSSDP: rank {own} of 2: layer 8: spAG failed (timeout 5 s): expected rank {1 - own} to finish 2 steps; it "
        f"waited for step 1, 0 were seen. Rank {1 - own} died, hangs, or did not take part.\n"
    )
