"""Ranks of one GPU as a node. Oracles: machines made by hand, torch's count of FLOPs, published and recorded times.

If a part were left out or counted twice, sizes would be chosen whose step times look like a node's and are not.
"""

from __future__ import annotations

import dataclasses
import math
import os
import sys
import time

import node_machine
import node_scale
import node_speeds
import pytest
import torch
import torch.distributed as dist
from node_machine import H100_NODE, H200_EIGHTH, H200_QUARTER, RECORDED, Machine, ThreadBlocks
from node_machine import h100_node as node_of
from node_scale import MODELS, Shape, agrees, measure, misfits, parts, rows, scaled
from parts import PUBLISHED
from ranks import ranks
from torch.utils.flop_counter import FlopCounterMode

from megatron_hecate.nvlink import launch
from megatron_hecate.plan import Link
from megatron_hecate.tools.presets import Model

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

    width, tokens = 128, SMALL.tokens
    x = torch.randn(tokens, SMALL.hidden, requires_grad=True)
    into = [torch.randn(SMALL.hidden, n * width, requires_grad=True) for n in (2, 1, 1)]
    out = torch.randn(2 * width, SMALL.hidden, requires_grad=True)
    with FlopCounterMode(display=False) as counter:
        sum((x @ w).sum() for w in into).backward()
        (torch.randn(tokens, 2 * width, requires_grad=True) @ out).sum().backward()
    projections = counter.get_total_flops()
    heads = [torch.randn(2, tokens, width, requires_grad=True) for _ in range(3)]
    with FlopCounterMode(display=False) as counter:
        q, k, v = heads
        (q @ k.transpose(1, 2) @ v).sum().backward()
        # Fused kernels compute the scores again in backward.
        _ = q.detach() @ k.detach().transpose(1, 2)
    assert SMALL.attention_flops == projections + counter.get_total_flops() / 2


@fast
def test_plain_heads_stand_for_latent_attention() -> None:
    model = Model.named("deepseek-v3")
    tokens = 4096
    latent = tokens * (3 * 2 * model.attention + 3.5 * 2 * tokens * model.width)
    shape = MODELS["dsv3"]
    assert shape.tokens == shape.sequences * tokens
    assert shape.attention_flops == pytest.approx(shape.sequences * latent, rel=0.05)


@fast
@pytest.mark.parametrize(("name", "ms"), [("qwen3", 1.12), ("dsv3", 6.67), ("mixtral", 25.7)])
def test_the_node_has_the_measured_times_of_experts(name: str, ms: float) -> None:
    """16,384 pairs a rank: TransformerEngine's on an H200; NVIDIA's own kernels on H100 within a fifth."""
    shape = dataclasses.replace(MODELS[name], tokens=16384 // MODELS[name].top_k)
    seconds = parts(shape, H100_NODE)["GEMM"]
    assert seconds == pytest.approx(ms / 1e3, rel=0.01)
    full = {"qwen3": "qwen3-30b-a3b", "dsv3": "deepseek-v3", "mixtral": "mixtral-8x7b"}[name]
    (tflops,) = (row[2] for row in PUBLISHED["experts"]["rows"] if row[:2] == [full, 8])
    assert seconds == pytest.approx(18 * shape.hidden * shape.ffn * 16384 / tflops / 1e12, rel=0.2)


@fast
@pytest.mark.parametrize(
    ("count", "mib", "ms"),
    [(8, 128, 0.3943), (4, 128, 0.3336), (8, 16, 0.0724), (4, 16, 0.0643), (8, 64, 0.2128)],
)
def test_the_node_has_the_published_all_to_alls(count: int, mib: int, ms: float) -> None:
    """Those of 64 and 512 MiB were fitted; smaller ones are mostly latency."""
    shape = dataclasses.replace(MODELS["qwen3"], tokens=mib * 32)
    found = parts(shape, node_of(count))["all-to-all"]
    assert found == pytest.approx(4 * ms / 1e3, rel=0.02 if mib > 16 else 0.2)


@fast
def test_recorded_ranks_have_the_recorded_times() -> None:
    assert 10 * 2 * 8192 * 4096 * 4096 / H200_QUARTER.dense == pytest.approx(16.3e-3)
    assert H200_QUARTER.exchange.seconds(64 << 20) == pytest.approx(0.83e-3)
    assert H200_EIGHTH.exchange.bandwidth * 7 / 8 == pytest.approx(60e9)
    assert (H200_EIGHTH.fetch.bandwidth, H200_QUARTER.fetch.bandwidth) == (47e9, 94e9)
    assert H200_EIGHTH.memory * 8 == H200_QUARTER.memory * 4 == 4.3e12


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
@pytest.mark.parametrize("name", MODELS)
def test_a_node_stands_for_itself(name: str) -> None:
    odd = dataclasses.replace(MODELS[name], hidden=MODELS[name].hidden - 24, tokens=4000)
    for shape in (MODELS[name], odd):
        assert scaled(shape, H100_NODE) == shape and agrees(shape, shape, H100_NODE)
        assert {row["quotient"] for row in rows(shape, shape, H100_NODE)} == {1.0}


def _slower(machine: Machine, **times: float) -> Machine:
    """``times``: how many times slower a speed is; of links, the rate."""

    def of(name: str, by: float) -> object:
        value = getattr(machine, name)
        if name == "experts":
            return {model: rate / by for model, rate in value.items()}
        return Link(value.bandwidth / by, value.latency) if isinstance(value, Link) else value / by

    return dataclasses.replace(machine, **{name: of(name, by) for name, by in times.items()})


SPEEDS = ("experts", "dense", "memory", "fetch", "back", "exchange")


@fast
@pytest.mark.parametrize("name", MODELS)
def test_an_eighth_of_everything_takes_an_eighth_of_the_sizes(name: str) -> None:
    shape, machine = MODELS[name], _slower(H100_NODE, **dict.fromkeys(SPEEDS, 8))
    here = scaled(shape, machine)
    assert agrees(shape, here, machine)
    assert shape.hidden * shape.ffn / here.hidden / here.ffn == pytest.approx(8, rel=0.15)
    assert here.tokens == pytest.approx(shape.tokens, rel=0.15)
    assert here.hidden == pytest.approx(shape.hidden / 8, rel=0.2)


@fast
@pytest.mark.parametrize(
    ("times", "among", "why"),
    [
        (dict(back=10), {"fetch", "return"}, "sizes act on both alike"),
        (dict(memory=1 / 20), {"weights", "fetch", "return"}, "sizes act on all three alike"),
        (dict(experts=1e6), {"host"}, "no sizes are small enough"),
        (dict(fetch=1e4), {"fetch"}, "no sizes are small enough"),
    ],
)
def test_parts_that_no_sizes_can_fit(times: dict, among: set, why: str) -> None:
    shape, machine = MODELS["qwen3"], _slower(H100_NODE, **times)
    here = scaled(shape, machine)
    off = misfits(shape, here, machine)
    assert among & set(off) and not agrees(shape, here, machine), why
    table = {row["part"]: row for row in rows(shape, here, machine)}
    assert off == tuple(part for part, row in table.items() if row["verdict"] != "agrees")
    for part in off:
        ratio = table[part]["ranks_ratio"] / table[part]["node_ratio"]
        assert not 1 / 1.2 <= ratio <= 1.2 and table[part]["verdict"] == f"off by {ratio:.2f}"
    assert list(table) == list(parts(shape, machine))


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


@fast
def test_thread_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ThreadBlocks.of(4) == (4, 2, 2) and ThreadBlocks.of(8) == (2, 1, 1)
    assert ThreadBlocks.of(16) == (1, 1, 1)
    monkeypatch.setattr(launch, "_blocks_on", launch._blocks_on)
    monkeypatch.setenv("NCCL_MAX_CTAS", "3")
    ThreadBlocks.of(4).use()
    assert os.environ["NCCL_MAX_CTAS"] == "3", "the user's"
    assert launch._blocks_on(CPU) == dict(fssdp_gather=2, fssdp_reduce=2)
    monkeypatch.delenv("NCCL_MAX_CTAS")
    ThreadBlocks.of(8).use()
    assert os.environ["NCCL_MAX_CTAS"] == "2"


@fast
def test_a_line_through_two_times() -> None:
    assert node_machine.line((10, 3.0), (30, 7.0)) == Link(5.0, 1.0)
    assert node_machine.line((10, 1.0), (30, 7.0)) == Link(30 / 7, 0.0), "negative latency"
    assert node_machine.line((10, 3.0), (30, 3.0)) == Link(10.0, 0.0), "noise"


@fast
def test_the_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    command = "node_scale.py --ranks 8 --model qwen3 --tokens 8192"
    monkeypatch.setattr(sys, "argv", command.split())
    node_scale.main()
    out = capsys.readouterr().out
    assert "qwen3 on 8 ranks (assumed from measurements of one H200" in out
    assert "tokens 8192 -> " in out and "dsv3" not in out
    assert [line.split(" | ")[0] for line in out.splitlines() if line.startswith("| ")] == [
        f"| {name}" for name in ["part", "GEMM", *rows_of_all_parts()]
    ]


def rows_of_all_parts() -> list[str]:
    return ["weights", "fetch", "return", "all-to-all", "attention", "host"]


@pytest.mark.parametrize("transport", ["p2p", "nvlink"])
@ranks(2)
def test_measured_on_cpu_ranks(transport: str) -> None:
    """The same on all ranks, of the slowest; and sizes can be chosen with it."""
    rank = dist.get_rank()
    slow = node_speeds._seconds(lambda: time.sleep(0.01 + 0.03 * rank), CPU)
    assert 0.04 <= slow < 0.1
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
