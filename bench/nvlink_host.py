"""Measure the CPU time of transport nvlink for one layer: lists of copies and kernels' tables.

    python bench/nvlink_host.py

`plan_replicas` plans two slots at zero cost of copies, on loads that drift; no plan repeats the
previous plan. *Even* loads spread over all experts; a quarter of a *hot* load is for one expert,
which has replicas on most ranks. All ranks are in one NVLink domain. *Plan* is the list of copies,
*table* what the kernels of both directions read, and *description* their addresses, in one
direction; it changes only where memory moves. An expert has two tensors (SwiGLU). Eight ranks are
timed in turn, on one CPU core.

*Quotas* is the table of the kernels after the gate. *Iteration* is the sum over all layers of plan
and both tables, with the mean time of each; the planning thread takes it. *Upload* is the copy of
all tables to the memory that kernels read, once per iteration, here to host memory: the bytes, and
the time.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import defaultdict
from pathlib import Path

import numpy as np
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from megatron_hecate.comm.transport import TransferPlan  # noqa: E402
from megatron_hecate.nvlink.memory import Memory, Signals, describe  # noqa: E402
from megatron_hecate.nvlink.resident import Resident  # noqa: E402
from megatron_hecate.nvlink.tables import DomainPlan, most_numbers  # noqa: E402
from megatron_hecate.plan import CopyCost, Placement, World, plan_replicas  # noqa: E402
from megatron_hecate.routing.tables import GroupShape, HolderOrder  # noqa: E402
from megatron_hecate.step.forecast import LoadHistory  # noqa: E402

# experts and ranks
SIZES: tuple[tuple[int, int], ...] = ((64, 8), (256, 64))
# (token, expert) pairs of each source in a microbatch
PAIRS: int = 8192
# elements of the tensors of an expert of DeepSeek-V3
TENSORS: tuple[int, ...] = (2 * 7168 * 2048, 2048 * 7168)
# MoE layers of DeepSeek-V3
LAYERS: int = 58
# microseconds
TARGETS: dict[str, float] = {"table": 200, "quotas": 200, "description": 50, "upload": 100}


def placements(num_experts: int, num_ranks: int, calls: int, *, hot: bool) -> list[Placement]:
    """Plan ``calls`` iterations, with all slots filled.

    Args:
        num_experts: number of experts, E.
        num_ranks: number of ranks, R.
        calls: number of iterations.
        hot: whether one expert receives a quarter of the tokens.
    """
    rng = np.random.default_rng(0)
    world = World((0,) * num_ranks)
    homes = Placement.initial(num_experts, num_ranks, num_slots=2)
    popularity = rng.normal(0, 1, num_experts)
    history = LoadHistory()
    found: list[Placement] = []
    while len(found) < calls:
        share = np.exp(popularity + rng.normal(0, 0.3, (num_ranks, num_experts)))
        share /= share.sum(1, keepdims=True)
        share[:, num_experts // 3] += hot / 3
        history.append(rng.poisson(share * PAIRS).sum(0)[None])
        popularity += rng.normal(0, 0.1, num_experts)
        found.append(
            plan_replicas(history.forecast()[0], homes, world, cost=CopyCost(), previous=None)
        )
    return found


def measure(
    num_experts: int, num_ranks: int, calls: int, *, hot: bool
) -> tuple[dict[str, list[float]], float]:
    """Measure the CPU seconds of every call.

    Args:
        num_experts: number of experts, E.
        num_ranks: number of ranks, R.
        calls: number of iterations.
        hot: whether one expert receives a quarter of the tokens.

    Returns:
        Seconds by step: "plan", "table", "quotas", "description" and "upload"; megabytes.
    """
    domain = tuple(range(num_ranks))
    seconds = defaultdict[str, list[float]](list)
    progress = [(rank + 1) << 44 for rank in domain]
    homes = tuple((1 << 40, 1 << 41) for _ in range(num_experts // num_ranks))
    memory = Memory(homes, TENSORS, ((1 << 40, 1 << 30),) * 4, 1 << 40)
    every = num_ranks // 8
    size = 4 * most_numbers(num_ranks, 2)
    tables = Resident(LAYERS, size, torch.device("cpu"))
    world = World((0,) * num_ranks)
    shape = GroupShape(world, Placement.initial(num_experts, num_ranks, num_slots=2))
    megabytes = 0.0
    for number, placement in enumerate(placements(num_experts, num_ranks, calls, hot=hot)):
        for rank in range(number % every, num_ranks, every):
            signals = Signals(rank, progress, 16, 24, 32, timeout=1.0)
            assert len(signals.header) == 1
            start = time.thread_time()
            plan = TransferPlan.from_placement(placement, rank)
            seconds["plan"].append(time.thread_time() - start)
            start = time.thread_time()
            table = DomainPlan(plan.copies, rank, (domain,)).table
            seconds["table"].append(time.thread_time() - start)
            start = time.thread_time()
            holders = HolderOrder(placement, shape).table()
            seconds["quotas"].append(time.thread_time() - start)
            start = time.thread_time()
            describe(memory, signals, 1 << 40)
            seconds["description"].append(time.thread_time() - start)
            numbers = np.zeros((LAYERS, len(holders)), np.int32)
            start = time.thread_time()
            contents = dict.fromkeys(range(LAYERS), (number, lambda table=table: table))
            tables.write(contents)
            for row in numbers:
                row[:] = holders
            seconds["upload"].append(time.thread_time() - start)
            megabytes = (numbers.nbytes + LAYERS * size) / 1e6
    return seconds, megabytes


def main() -> int:
    """Print the table; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--calls", type=int, default=10, help="plans per size")
    arguments = parser.parse_args()
    if arguments.calls < 1:
        parser.error(f"--calls={arguments.calls} must be 1 or more")
    torch.set_num_threads(1)
    print("Median (90th percentile) of CPU time in microseconds.\n")
    columns = ("plan", *TARGETS)
    heads = " | ".join(columns)
    print(f"| experts/ranks | loads | {heads} | upload, MB | iteration, ms |\n|{'---|' * 9}")
    for num_experts, num_ranks in SIZES:
        for hot in (False, True):
            seconds, megabytes = measure(num_experts, num_ranks, arguments.calls, hot=hot)
            cells = []
            for column in columns:
                us = np.array(seconds[column]) * 1e6
                cells.append(f"{np.median(us):,.0f} ({np.percentile(us, 90):,.0f})")
            cells.append(f"{megabytes:.2f}")
            once = sum(np.mean(seconds[name]) for name in ("plan", "table", "quotas"))
            cells.append(f"{1e3 * LAYERS * once:,.1f}")
            loads = "hot" if hot else "even"
            print(f"| {num_experts}/{num_ranks} | {loads} | {' | '.join(cells)} |", flush=True)
    targets = " | ".join(f"{target:,.0f}" for target in TARGETS.values())
    print(f"| target | | | {targets} | | |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
