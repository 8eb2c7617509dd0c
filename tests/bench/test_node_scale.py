"""Ranks of one GPU as a node. Oracles: machines made by hand, torch's count of FLOPs, published and recorded times.

If a part were left out or counted twice, sizes would be chosen whose step times look like a node's and are not.
"""

from __future__ import annotations

import dataclasses
import math

import node_speeds
import pytest
import torch
import torch.distributed as dist
from node_machine import H200_EIGHTH, RECORDED, Machine
from node_scale import MODELS, Shape, agrees, measure, misfits, parts, rows, scaled
from ranks import ranks
from torch.utils.flop_counter import FlopCounterMode

from megatron_hecate.plan import Link

CPU = torch.device("cpu")
fast = pytest.mark.fast
SMALL = Shape(name="small", hidden=10, ffn=7, experts=6, top_k=2, heads=2, kv_heads=1, tokens=11)
PLAIN = Machine(
    source="by hand",
    ranks=2,
    experts={"small": 1000.0},
    dense=100.0,
    memory=10.0,
    fetch=Link(5.0, 1.0),
    back=Link(4.0, 2.0),
    exchange=Link(20.0, 0.5),
    host=3.0,
)


@fast
def test_parts_by_hand() -> None:
    """An expert has 210 parameters; 22 pairs; 3 experts a rank."""
    found = parts(SMALL, PLAIN)
    assert {name: found[name] for name in ("weights", "fetch", "return", "all-to-all", "host")} == {
        "weights": 3 * 210 * (2 + 2 + 4 + 4) / 10,
        "fetch": 420 / 5 + 1,
        "return": 840 / 4 + 2,
        "all-to-all": pytest.approx(4 * (22 * 10 * 2 / 20 + 0.5)),
        "host": 3.0,
    }
    with pytest.raises(ValueError, match="6 experts do not divide among 4 ranks; use 8"):
        parts(SMALL, dataclasses.replace(PLAIN, ranks=4))
    with pytest.raises(ValueError, match="qwen3: not measured; there are small"):
        parts(MODELS["qwen3"], PLAIN)


@fast
def test_flops_as_torch_counts_them() -> None:
    experts = node_speeds._PlainExperts(2, SMALL, CPU)
    inputs = torch.randn(SMALL.pairs, SMALL.hidden, requires_grad=True)
    with FlopCounterMode(display=False) as counter:
        experts.run(inputs, [10, 12])
    assert parts(SMALL, PLAIN)["GEMM"] == counter.get_total_flops() / 1000


@fast
@pytest.mark.parametrize("count", RECORDED)
@pytest.mark.parametrize("name", MODELS)
def test_recorded_ranks_can_stand_for_a_node(name: str, count: int) -> None:
    """All ratios agree, and stock and two ways of FSSDP with two layers fit into 70 GB."""
    shape, machine = MODELS[name], RECORDED[count]
    here = scaled(shape, machine)
    assert agrees(shape, here, machine) and not misfits(shape, here, machine)
    assert here.hidden % 128 == here.ffn % 64 == here.tokens % 64 == here.heads % here.kv_heads == 0
    assert 3 * 2 * here.training_bytes < 70e9
    assert not agrees(shape, shape, machine), "the model's own sizes"
    assert {row["speeds"] for row in rows(shape, here, machine)} == {"assumed"}


@fast
def test_no_other_sizes_of_a_coarse_grid_are_better() -> None:
    """Brute force, without arrays."""
    shape, machine = MODELS["qwen3"], H200_EIGHTH

    def worst(one: Shape) -> float:
        quotients = {row["part"]: row["quotient"] for row in rows(shape, one, machine)}
        return max(abs(math.log(q)) for part, q in quotients.items() if part != "attention")

    best = scaled(shape, machine)
    others = [
        dataclasses.replace(shape, hidden=hidden, ffn=ffn, tokens=tokens)
        for hidden in range(256, 2049, 128)
        for ffn in range(128, 1537, 128)
        for tokens in range(256, 4097, 256)
    ]
    # the weight of the mean of six logarithms, each at most the worst
    assert worst(best) <= 1.1 * min(map(worst, others))


@pytest.mark.parametrize("transport", ["p2p", "nvlink"])
@ranks(2)
def test_measured_on_cpu_ranks(transport: str) -> None:
    """The same on all ranks, of the slowest; and sizes can be chosen with it."""
    machine = measure(CPU, transport=transport)
    assert machine.source.startswith("measured on 2 ranks") and machine.source.endswith(transport)
    others: list[Machine] = [machine] * 2
    dist.all_gather_object(others, machine)
    assert others[0] == others[1] == machine and machine.ranks == 2
    assert set(machine.experts) == set(MODELS)
    speeds = [*machine.experts.values(), machine.dense, machine.memory]
    speeds += [link.bandwidth for link in (machine.fetch, machine.back, machine.exchange)]
    assert all(1e6 < speed < 1e13 for speed in speeds), speeds
    here = scaled(MODELS["qwen3"], machine)
    table = rows(MODELS["qwen3"], here, machine)
    assert [row["speeds"] for row in table] == ["measured"] * 7
