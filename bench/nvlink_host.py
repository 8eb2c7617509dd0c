"""Measure the CPU time of transport nvlink for one layer: schedules and programs of transfers.

    python bench/nvlink_host.py

`plan_replicas` plans two slots at zero cost of copies, on loads that drift; no plan repeats the
previous plan. *Even* loads spread over all experts; a quarter of a *hot* load is for one expert,
which has replicas on most ranks. All ranks are in one NVLink domain. *Plan* is the list of copies,
*schedule* a rank's copies in one direction, *program* the kernel's input for a transfer by this
schedule, and *again* the program of the next transfer by the same schedule, as in another
microbatch. An expert has two tensors (SwiGLU), gradients are fp32. Eight ranks are timed in turn,
on one CPU core.

*Iteration* is the sum over all layers of both schedules and both first programs, with the mean time
of each.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from collections import defaultdict
from pathlib import Path

import numpy as np
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from megatron_hecate.comm.transport import TransferPlan  # noqa: E402
from megatron_hecate.nvlink.chunks import STRIPE, ChunkTable  # noqa: E402
from megatron_hecate.nvlink.domains import stages_of  # noqa: E402
from megatron_hecate.nvlink.program import Memory, Signals, assemble, compile_programs  # noqa: E402
from megatron_hecate.plan import CopyCost, Placement, World, plan_replicas  # noqa: E402
from megatron_hecate.step.forecast import LoadHistory  # noqa: E402

# experts and ranks
SIZES: tuple[tuple[int, int], ...] = ((64, 8), (256, 64))
# (token, expert) pairs of each source in a microbatch
PAIRS: int = 8192
# elements of the tensors of an expert of DeepSeek-V3
TENSORS: tuple[int, ...] = (2 * 7168 * 2048, 2048 * 7168)
# MoE layers of DeepSeek-V3
LAYERS: int = 58
TARGETS: dict[str, float] = {"schedule": 200e-6, "program": 50e-6, "program again": 50e-6}
# computed once per layer and plan, in both directions
ONCE: tuple[str, ...] = ("schedule", "program")


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
) -> dict[tuple[str, ...], list[float]]:
    """Measure the CPU seconds of every call.

    Args:
        num_experts: number of experts, E.
        num_ranks: number of ranks, R.
        calls: number of iterations.
        hot: whether one expert receives a quarter of the tokens.

    Returns:
        Seconds by step ("plan", "schedule", "program", "program again") and direction.
    """
    domain = tuple(range(num_ranks))
    found = defaultdict[tuple[str, ...], list[float]](list)
    addresses = {rank: (rank + 1) << 44 for rank in domain}
    elements = sum(TENSORS)
    every = num_ranks // 8
    # A job has one `Signals` for all transfers, whose cached properties are computed once.
    signals = [Signals(rank, addresses, 16, 32, timeout=1.0) for rank in domain]
    for of_rank in signals:
        assert len(of_rank.header) and len(of_rank.by_rank)
    for number, placement in enumerate(placements(num_experts, num_ranks, calls, hot=hot)):
        for rank in range(number % every, num_ranks, every):
            start = time.thread_time()
            plan = TransferPlan.from_placement(placement, rank)
            found["plan",].append(time.thread_time() - start)
            # Real ranks are separate processes and cannot share this cache.
            ChunkTable.of.cache_clear()
            for direction in ("spAG", "spRS"):
                sums = direction == "spRS"
                start = time.thread_time()
                (schedule,) = stages_of(
                    plan.copies, rank, domains=(domain,), elements=elements, sums=sums
                )
                found["schedule", direction].append(time.thread_time() - start)
                dtype = torch.float32 if sums else torch.bfloat16
                chunks = torch.empty(num_experts // num_ranks, elements, dtype=dtype, device="meta")
                homes = {index: chunks[index].split(TENSORS) for index in plan.replicated}
                buffers = ((1 << 40, 1 << 30),) * (1 + STRIPE)
                for step in ("program", "program again"):
                    start = time.thread_time()
                    memory = Memory.of(homes, buffers, dtype.itemsize)
                    assemble(schedule, memory, signals[rank], begin=7)
                    found[step, direction].append(time.thread_time() - start)
    return found


def main() -> int:
    """Print the table; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--calls", type=int, default=10, help="plans per size")
    arguments = parser.parse_args()
    if arguments.calls < 1:
        parser.error(f"--calls={arguments.calls} must be 1 or more")
    print("Median (90th percentile) of CPU time in microseconds.\n")
    columns = [("plan",), *itertools.product(TARGETS, ("spAG", "spRS"))]
    heads = " | ".join(", ".join(column) for column in columns)
    print(f"| experts/ranks | loads | {heads} | iteration, ms |\n|{'---|' * 10}")
    compile_programs()
    for num_experts, num_ranks in SIZES:
        for hot in (False, True):
            seconds = measure(num_experts, num_ranks, arguments.calls, hot=hot)
            cells = []
            for column in columns:
                us = np.array(seconds[column]) * 1e6
                cells.append(f"{np.median(us):,.0f} ({np.percentile(us, 90):,.0f})")
            once = [np.mean(seconds[column]) for column in columns if column[0] in ONCE]
            cells.append(f"{1e3 * LAYERS * sum(once):,.1f}")
            loads = "hot" if hot else "even"
            print(f"| {num_experts}/{num_ranks} | {loads} | {' | '.join(cells)} |", flush=True)
    targets = [f"{TARGETS[what] * 1e6:,.0f}" for what, *_ in columns[1:]]
    print(f"| target | | | {' | '.join(targets)} | |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
