"""Check and time FSSDP inside CUDA graphs, on ranks that share one GPU, over NCCL.

    python bench/graph.py --ranks 4

| one graph holds | each replay has |
|---|---|
| layers: fetch beside a GEMM, GEMMs of all slots, return beside a GEMM | other copies and data |
| the gate: count, all ranks' loads, quotas, rerouting, its backward | other tokens and placement |
| layers of two ranks; rank 1 misses a replay | rank and layer are named, the process ends |

Replays must be bitwise right: layers as a dense reference in float64, on integers, so that no order
of sums matters; the gate as an eager run and as its kernels' host build. The loads come by an
all-gather, or the kernels exchange them, as FSSDP does inside one NVLink domain. *host us*: the
launching call. *GPU us*: work that was launched while the stream slept. *us*: from a barrier of all
ranks to the end of the work. Ratios are to eager launches.

Megatron's FullCudaGraphWrapper is left out: experts need a static budget of tokens, which only
HybridEP and NCCL EP have; `tests/training/test_full_iteration.py` emulates it.
"""

from __future__ import annotations

import argparse
import functools
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "bench")]

import rows  # noqa: E402
from gpu_clock import CYCLES_PER_SECOND, WARM, captured  # noqa: E402
from launch import again_on_gpus, python_path, torchrun  # noqa: E402
from placing import random_placement  # noqa: E402
from routing import CPU, Case  # noqa: E402

from megatron_hecate.comm.collectives import gather_rows  # noqa: E402
from megatron_hecate.comm.transport import (  # noqa: E402
    LayerBuffer,
    LoadExchange,
    TransferPlan,
    chunks_in,
)
from megatron_hecate.nvlink.transport import NVLink  # noqa: E402
from megatron_hecate.plan import Placement  # noqa: E402
from megatron_hecate.routing.quotas import Exchange  # noqa: E402
from megatron_hecate.routing.reroute import CountedTokens  # noqa: E402

DEVICE = torch.device("cuda", 0)
LAYERS: int = 4  # of a graph
TABLES: int = 58  # layers whose tables are uploaded, as many as DeepSeek-V3 has
HOMES, SLOTS = 2, 2  # of a rank
GATES: int = 16  # of a timed graph
TIMEOUT, SHORT = 20.0, 5.0  # seconds per wait; where a peer does not come
ASLEEP: float = 0.02  # seconds in which the host launches what the stream then runs
MISS = r"FSSDP: layer 0: spAG failed on rank 0 of 2 .*expected rank 1 to finish its steps"


class Sizes(NamedTuple):
    """Tokens of a rank; an expert's matrix; a square GEMM beside transfers; numbers of runs."""

    tokens: int = 512
    hidden: int = 2048
    ffn: int = 768
    beside: int = 2048
    replays: int = 50
    calls: int = 20


TINY = Sizes(tokens=8, hidden=16, ffn=24, beside=16, replays=6, calls=2)


def make_transport(timeout: float) -> NVLink:
    """Make a transport of one NVLink domain of all ranks. Collective."""
    everyone = tuple(range(dist.get_world_size()))
    domain = dist.new_group(everyone, backend="gloo")
    return NVLink(dist.group.WORLD, domain, domains=(everyone,), timeout=timeout)


class Layer:
    """Experts and replicas of one layer on this rank; the destination of sums, all in place."""

    def __init__(self, sizes: Sizes, memory: Tensor, buffer: LayerBuffer) -> None:
        shape = sizes.hidden, sizes.ffn
        self.homes = torch.empty(HOMES, *shape, dtype=buffer.dtype, device=DEVICE)
        self.sums = torch.empty(HOMES, *shape, device=DEVICE)
        self.outputs = self.homes.new_empty(SLOTS, sizes.tokens, sizes.ffn)
        self.weights = chunks_in(memory, SLOTS, buffer.elements, buffer.dtype)
        memory = memory[buffer.weight_bytes :]
        self.grads = chunks_in(memory, SLOTS, buffer.elements, buffer.grad_dtype)

    def main_grads(self, index: int) -> list[Tensor]:
        """Return the gradient to which the sum of an own expert is added."""
        return [self.sums[index]]


class Transfers:
    """Layers with replicas on all ranks, and their transport with ``timeout`` seconds per wait."""

    def __init__(self, sizes: Sizes, timeout: float) -> None:
        self.sizes, self.rank, self.ranks = sizes, dist.get_rank(), dist.get_world_size()
        self.transport = make_transport(timeout)
        self.buffer = LayerBuffer(SLOTS, sizes.hidden * sizes.ffn, torch.bfloat16, HOMES)
        size = self.buffer.weight_bytes + self.buffer.grad_bytes
        memory = self.transport.allocate(LAYERS * size, [self.buffer] * TABLES, DEVICE)
        self.layers = [Layer(sizes, part, self.buffer) for part in memory.split(size)]
        self.tokens = self.layers[0].homes.new_empty(sizes.tokens, sizes.hidden)
        self.beside = self.tokens.new_empty(3, sizes.beside, sizes.beside).normal_()
        self.homes = Placement.initial(HOMES * self.ranks, self.ranks, num_slots=SLOTS)
        self.rng, self.step = np.random.default_rng(0), 0
        self.plans: dict[str, TransferPlan] = {}

    def draw(self, like: Tensor, *key: int) -> Tensor:
        """Draw integers of this step in the shape of ``like``, the same on all ranks."""
        generator = torch.Generator(DEVICE).manual_seed(hash((self.step, *key)) % 2**62)
        drawn = torch.randint(-2, 3, like.shape, generator=generator, device=DEVICE)
        return drawn.to(like.dtype)

    def plan(self, num_slots: int | None = None) -> None:
        """Plan other copies of all layers, in ``num_slots`` slots of each rank or in some."""
        for number in range(TABLES):
            count = int(self.rng.integers(SLOTS + 1)) if num_slots is None else num_slots
            placement = random_placement(self.rng, self.homes, count)
            plan = TransferPlan.from_placement(placement, self.rank, covered=(SLOTS, HOMES))
            # The planning thread does this during the optimizer step.
            self.transport.prepare(plan)
            self.plans[f"layer {number}"] = plan

    def begin(self, num_slots: int | None = None) -> None:
        """Begin a step: plan copies, draw tokens and weights, write the tables."""
        self.step += 1
        self.plan(num_slots)
        self.tokens.copy_(self.draw(self.tokens, self.rank))
        for number, layer in enumerate(self.layers):
            for index, home in enumerate(layer.homes):
                home.copy_(self.draw(home, number, self.rank, index))
            layer.sums.fill_(1.0)
        self.transport.write(self.plans)

    def run(self) -> None:
        """Run all layers on the current stream."""
        for layer, (label, plan) in zip(self.layers, self.plans.items(), strict=False):
            homes = [[home] for home in layer.homes]
            fetch = self.transport.fetch(plan, homes, layer.weights, label=label)
            torch.mm(self.beside[0], self.beside[1], out=self.beside[2])
            fetch.wait()
            for out, weight, grad in zip(layer.outputs, layer.weights, layer.grads, strict=True):
                torch.mm(self.tokens, weight.view(layer.homes[0].shape), out=out)
                grad = grad.view(layer.homes[0].shape)
                torch.mm(self.tokens.float().t(), out.float(), out=grad)
            back = self.transport.return_gradients(plan, layer.grads, layer, label=label)
            torch.mm(self.beside[0], self.beside[1], out=self.beside[2])
            back.wait()

    def is_right(self) -> bool:
        """Return whether weights, outputs and sums of this rank are those of a dense reference."""
        results = []
        for number, (layer, plan) in enumerate(zip(self.layers, self.plans.values(), strict=False)):
            totals = torch.ones_like(layer.sums, dtype=torch.float64)
            for copy in plan.copies:
                weight = self.draw(layer.homes[0], number, copy.home, copy.index)
                tokens = self.draw(self.tokens, copy.rank).double()
                out = (tokens @ weight.double()).to(weight.dtype)
                if copy.home == self.rank:
                    totals[copy.index] += tokens.t() @ out.double()
                if copy.rank == self.rank:
                    results.append(torch.equal(layer.weights[copy.slot], weight.flatten()))
                    results.append(torch.equal(layer.outputs[copy.slot], out))
            results.append(torch.equal(layer.sums, totals.float()))
        return all(results)

    def check(self, replay: Callable[[], object]) -> bool:
        """Return whether replays are right, every fifth with a late rank, and a check can fail."""
        results = []
        for number in range(self.sizes.replays):
            self.begin()
            if number % 5 == 3 and self.rank == number % self.ranks:
                time.sleep(0.02)
            replay()
            results.append(self.is_right())
        # What the last replay left is not right for other copies.
        self.begin(SLOTS)
        return all(results) and not self.is_right()


class Gate(Case):
    """The gate of this rank, with the loads of all ranks from an all-gather."""

    def count(self, *, by_index: bool = False) -> CountedTokens:
        """Count this rank's tokens, and gather the loads of all ranks."""
        counted, group = super().count(by_index=by_index), dist.group.WORLD
        self.loads = gather_rows(counted.loads, group, what="loads", label="gate", timeout=TIMEOUT)
        return counted


class ExchangingGate(Case):
    """The gate of this rank, whose kernels send and receive the loads in peers' memory."""

    @functools.cached_property
    def exchange(self) -> LoadExchange:
        """Exchange of a transport that moves nothing else."""
        self.transport = make_transport(TIMEOUT)
        homes = self.experts // len(self.loads)
        self.transport.allocate(0, [LayerBuffer(SLOTS, 64, torch.bfloat16, homes)], DEVICE)
        exchange = self.transport.exchange_loads(self.experts, label="gate")
        assert exchange is not None
        return exchange

    def count(self, *, by_index: bool = False) -> CountedTokens:
        """Count this rank's tokens, and send them; `quotas` must follow."""
        routes = self.indices if by_index else self.map
        return CountedTokens(routes, self.kernels, exchange=self.exchange, num_experts=self.experts)

    def quotas(self) -> tuple[Tensor, Exchange]:
        """Wait for the loads of all ranks, and compute the parts and counts."""
        return self.tables.parts_and_exchange(self.exchange, self.source)


def measure(begin: Callable[[], object], run: Callable[[], object], calls: int) -> dict[str, float]:
    """Time ``run`` after ``begin``, medians in microseconds; as often on all ranks, which meet."""
    samples: dict[str, list[float]] = {"host us": [], "GPU us": [], "us": []}
    for number in range(2 * (WARM + calls)):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin()
        torch.cuda.synchronize()
        dist.barrier()
        if is_asleep := number % 2 == 0:
            torch.cuda._sleep(int(ASLEEP * CYCLES_PER_SECOND))
        start.record()
        began = time.perf_counter()
        run()
        launched = time.perf_counter()
        end.record()
        torch.cuda.synchronize()
        if is_asleep:
            samples["GPU us"].append(1e3 * start.elapsed_time(end))
        else:
            samples["host us"].append(1e6 * (launched - began))
            samples["us"].append(1e6 * (time.perf_counter() - began))
    return {name: median(values[WARM:]) for name, values in samples.items()}


def compare(table: rows.Table, about: Mapping[str, Any], times: Mapping[str, Any]) -> None:
    """Add a row per way of launching; the first is the baseline of ratios."""
    baseline = next(iter(times.values()))["us"]
    for launch, row in times.items():
        table.add(**about, launch=launch, **row, ratio=baseline / row["us"])


def run_transfers(sizes: Sizes) -> bool:
    """Check and time layers; returns whether all replays of this rank are right."""
    transfers = Transfers(sizes, TIMEOUT)
    transfers.begin(SLOTS)
    replay, _ = captured(transfers.run)
    is_right = transfers.check(replay)
    table = rows.Table(f"{LAYERS} layers, fetches and returns beside GEMMs")
    ways = {"eager": transfers.run, "graph": replay}
    for copies, slots in (("none", 0), ("all slots", SLOTS)):
        begin = functools.partial(transfers.begin, slots)
        times = {way: measure(begin, run, sizes.calls) for way, run in ways.items()}
        compare(table, {"copies": copies}, times)
    write = functools.partial(transfers.transport.write, transfers.plans)
    times = measure(lambda: transfers.plan(SLOTS), write, sizes.calls)
    rows.Table("between replays").add(upload=f"tables of {TABLES} layers", **times)
    return is_right


def run_gate(sizes: Sizes) -> bool:
    """Check and time the gate; returns whether all replays of this rank are right."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    settings: dict[str, Any] = dict(tokens=8 * sizes.tokens, source=rank)
    kinds = (Gate, ExchangingGate)
    gates = [kind((ranks, 16 * ranks), SLOTS, device=DEVICE, **settings) for kind in kinds]
    host = Case((ranks, 16 * ranks), SLOTS, device=CPU, **settings)
    captures = [captured(gate.all) for gate in gates]
    results = []
    for number in range(sizes.replays // 5):
        for case in (*gates, host):
            case.draw(greedily=number % 2 == 0)
        loads = [None] * ranks
        dist.all_gather_object(loads, host.map.sum(dim=0).tolist())
        host.loads.copy_(torch.tensor(loads))
        on_host = [value.to(DEVICE) for value in host.all()]
        for gate, (replay, static) in zip(gates, captures, strict=True):
            replay()
            for expected in (gate.all(), on_host):
                results += map(torch.equal, static, expected)
    table = rows.Table("the gate and its backward, per layer and microbatch")
    gathering, exchanging = gates
    works = {
        "count and all-gather": gathering.count,
        "gate, all-gather": gathering.all,
        "gate, loads in peers' memory": exchanging.all,
    }
    for replicas in (False, True):
        for gate in gates:
            gate.draw()
            if not replicas:
                gate.tables.place(gate.homes)
        for work, run in works.items():
            many = functools.partial(repeat, run)
            ways = {"eager": many, "graph": captured(many)[0]}
            times = {way: measure(torch.cuda.synchronize, ways[way], sizes.calls) for way in ways}
            each = {way: {k: v / GATES for k, v in row.items()} for way, row in times.items()}
            compare(table, {"work": work, "replicas": replicas}, each)
    return all(results)


def repeat(run: Callable[[], object]) -> None:
    """Run as often as a timed graph does."""
    for _ in range(GATES):
        run()


def run_rank(sizes: Sizes) -> bool:
    """Run both parts on this rank; returns whether all replays of all ranks are right."""
    ranks, properties = dist.get_world_size(), torch.cuda.get_device_properties(DEVICE)
    if dist.get_rank():
        os.environ.pop(rows.FILE, None)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    # Without MPS a rank has the whole GPU: ranks take turns, and times mean nothing.
    about = {"ranks": ranks, "multiprocessors of each": properties.multi_processor_count}
    results = []
    for replays, part in (("layers", run_transfers), ("gate", run_gate)):
        answers = [False] * ranks
        dist.all_gather_object(answers, part(sizes))
        results.append(all(answers))
        rows.Table("replays").add(of=replays, **about, are_right=results[-1])
    return all(results)


def miss_a_peer() -> None:
    """Replay on two ranks; rank 1 does not come to the last replay."""
    transfers = Transfers(TINY, SHORT)
    transfers.begin(SLOTS)
    replay, _ = captured(transfers.run)
    assert transfers.check(replay), "a replay is wrong before a peer is missing"
    if transfers.rank == 1:
        time.sleep(10 * SHORT)
    else:
        replay()
        torch.cuda.synchronize()


def is_peer_named() -> bool:
    """Run `miss_a_peer` without MPS, which ends all ranks of a GPU where one fails."""
    settings = {"TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1", "PYTHONPATH": python_path()}
    command = [*torchrun(2), __file__, "--missing"]
    environment = {**os.environ, **settings}
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, env=environment)
    named = re.search(MISS, done.stderr)
    said = named[0] if named else done.stderr[-2000:]
    holds = named is not None and done.returncode != 0
    table = rows.Table("a missing peer in a replay")
    table.add(timeout_s=SHORT, status=done.returncode, said=said, is_named=holds)
    return holds


def main() -> int:
    """Run the benchmark, or its part on a rank; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=4, help="ranks of the GPU (%(default)s)")
    parser.add_argument("--tiny", action="store_true", help="2 ranks, small sizes; no times")
    parser.add_argument("--missing", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if "RANK" not in os.environ:
        status = again_on_gpus(__file__, 2 if arguments.tiny else arguments.ranks)
        holds = is_peer_named() and not status
        print(f"\nverdicts: {'all true' if holds else 'one is false'}")
        return int(not holds)
    backend = "gloo" if arguments.missing else "cpu:gloo,cuda:nccl"
    dist.init_process_group(backend, timeout=timedelta(seconds=60))
    # A sum of integers is exact, unless parts of it are rounded to bf16.
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    if arguments.missing:
        miss_a_peer()
        return 0
    holds = run_rank(TINY if arguments.tiny else Sizes())
    dist.destroy_process_group()
    return int(not holds)


if __name__ == "__main__":
    sys.exit(main())
