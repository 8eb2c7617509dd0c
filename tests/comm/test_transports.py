"""spAG and spRS by both transports. Oracle: a dense reference (`one_layer`), which needs no messages; bitwise.

If a chunk went to the wrong slot, a sum missed a replica, or ranks disagreed on the order of transfers, the values
differ or the test hangs. In one NVLink domain both transports are held to the same sums, so they give the same bits.
"""

from __future__ import annotations

import random

import pytest
import torch
import torch.distributed as dist
from one_layer import (
    CPU,
    HOMES,
    Reference,
    Sums,
    allocate,
    check,
    check_sums,
    copies,
    flat,
    make_transport,
)
from ranks import ranks

from megatron_hecate.comm.p2p import _arriving
from megatron_hecate.comm.transport import TransferPlan, Transport

APART = ((0, 1), (2, 3))
UNEVEN = ((0, 2), (1,), (3,))
TRANSPORTS = ["p2p", "nvlink"]


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("p2p", "float32"),
        ("p2p", "bfloat16"),
        ("p2p", "float64"),
        ("nvlink", "float32"),
        ("nvlink", "bfloat16"),
    ],
)
@ranks(4)
def test_every_kind_of_plan(name: str, dtype: str) -> None:
    check(make_transport(name), Reference(0, getattr(torch, dtype)))


@pytest.mark.parametrize("domains", [APART, UNEVEN], ids=["two domains", "uneven"])
@ranks(4)
def test_several_nvlink_domains(domains: tuple) -> None:
    check(make_transport("nvlink", domains), Reference(0, torch.bfloat16, domains))


SEEDS = [range(4), pytest.param(range(4, 150), marks=pytest.mark.slow)]


@pytest.mark.parametrize("name", TRANSPORTS)
@pytest.mark.parametrize("seeds", SEEDS, ids=["few", "many"])
@ranks(4, timeout=900)
def test_random_schedules(name: str, seeds: range) -> None:
    transport = make_transport(name)
    for seed in seeds:
        _random_schedule(transport, random.Random(seed))


def _random_schedule(transport: Transport, rng: random.Random) -> None:
    """Three layers, several of whose transfers are under way at once; late replicas; a new model in between."""
    for _ in range(2):
        layers = allocate(transport, CPU, torch.float32, layers=3)
        for step in range(rng.randint(1, 6)):
            fetched, returned = [], []
            for number, layer in enumerate(layers):
                reference = Reference(10 * step + number)
                late = TransferPlan(
                    layer.rank, copies("one to all, others at random", rng.randrange(99))
                )
                chosen = {copy for copy in late.copies if rng.random() < 0.6}
                early = TransferPlan(
                    layer.rank, tuple(copy for copy in late.copies if copy in chosen)
                )
                transfer = layer.fetch(early, reference)
                if rng.random() < 0.5:
                    transfer.wait()
                if rng.random() < 0.5:
                    early = late
                    transfer.wait()
                    transfer = layer.fetch(
                        late.without(TransferPlan(layer.rank, tuple(chosen))), reference
                    )
                fetched.append((layer, early, reference, transfer))
            for layer, plan, reference, transfer in reversed(fetched):
                transfer.wait()
                layer.check_weights(plan, reference)
                main_grads = [reference.drawn(2, layer.rank, i) for i in range(HOMES)]
                sums = Sums(
                    [[t.float() for t in parts] for parts in main_grads], direct=rng.random() < 0.5
                )
                before = [flat(parts) for parts in sums.before]
                returned.append(
                    (layer.give_back(plan, reference, sums), sums, before, plan, reference)
                )
                if rng.random() < 0.3:
                    returned[-1][0].wait()
            for transfer, sums, before, plan, reference in returned:
                transfer.wait()
                check_sums(sums, before, reference.sums(plan.copies, plan.rank))


@ranks(2)
def test_what_our_kernels_cannot_move_is_named() -> None:
    (layer,) = allocate(make_transport("nvlink"), CPU, torch.float64)
    plan = TransferPlan(dist.get_rank(), copies("one to all"))
    with pytest.raises(
        ValueError,
        match=r"layer 1: gradients of torch.float64 cannot be summed by our kernels; use p2p",
    ):
        layer.give_back(plan, Reference(0, torch.float64), Sums([], direct=True))
    if plan.rank == 0:
        homes = [[torch.zeros(4, 3).t()]] * HOMES
        with pytest.raises(
            ValueError, match="layer 1: parameters of own expert 0 are not contiguous"
        ):
            layer.transport.fetch(plan, homes, layer.weights, label="layer 1")


@pytest.mark.parametrize(
    ("elements", "count"),
    [(3 * 4096 * 14336, 1), (3 * 2048 * 7168, 1), (3 * 2048 * 768, 4)],
    ids=["Mixtral-8x7B", "DeepSeek-V3", "Qwen3-30B-A3B"],
)
@pytest.mark.fast
def test_gradients_that_arrive_at_once(elements: int, count: int) -> None:
    """What fits into 256 MiB, four at most, worked out by hand."""
    assert _arriving(elements, torch.float32) == count
