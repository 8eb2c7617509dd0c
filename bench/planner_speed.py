"""Time the planning of one layer on one CPU core.

    python bench/planner_speed.py

`plan_replicas` chooses replicas from the forecast: *free* replicas, which fill the slots, and
*priced* replicas as in a real job (an expert of DeepSeek-V3's size, SwiGLU of 7168 x 2048, on H100
nodes, 16 microbatches per iteration, no copy hidden). `largest_load` computes the balance that the
true loads allow. `add_late_replicas` corrects a plan by one microbatch's true loads, inside nodes,
with at most 8 late replicas: once with loads near the forecast, and once after a permutation of the
experts' popularity. `place and quotas` writes the tables of a placement and computes one rank's
quotas, by the host build of the kernels.

Loads change from iteration to iteration, so no plan repeats the previous plan. All loads are drawn
from a seed. Code is compiled before it is timed, by the wall clock. Sizes are experts/ranks, 8
ranks per node; with 256 experts on 1,024 ranks three of four ranks have no home experts.
"""

from __future__ import annotations

import argparse
import dataclasses
import platform
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from shapes import swiglu  # noqa: E402

from megatron_hecate.device.launch import Kernels  # noqa: E402
from megatron_hecate.plan import (  # noqa: E402
    CopyCost,
    LayerShape,
    Placement,
    World,
    add_late_replicas,
    largest_load,
    plan_replicas,
)
from megatron_hecate.routing.quotas import QuotaTables  # noqa: E402
from megatron_hecate.routing.tables import GroupShape  # noqa: E402
from megatron_hecate.step.forecast import LoadHistory  # noqa: E402

# experts and ranks
SIZES: tuple[tuple[int, int], ...] = ((64, 8), (64, 32), (256, 64), (1024, 1024), (256, 1024))
# seconds to plan a layer, by ranks
TARGETS: dict[int, float] = {64: 400e-6, 1024: 4e-3}
# (token, expert) pairs of each source in a microbatch
PAIRS: int = 8192
SHAPE: LayerShape = swiglu(7168, 2048, microbatches=16)
MOST_LATE: int = 8
# untimed first iterations
WARM_UP: int = 3
COLUMNS: tuple[str, ...] = (
    "plan_replicas, free",
    "plan_replicas, priced",
    "largest_load",
    "add_late_replicas, nothing pays",
    "add_late_replicas, after a jump",
    "place and quotas",
)


def homes_of(num_experts: int, num_ranks: int, num_slots: int) -> Placement:
    """Assign homes evenly; with fewer experts than ranks, one at regular intervals."""
    if num_experts >= num_ranks:
        return Placement.initial(num_experts, num_ranks, num_slots=num_slots)
    home = np.arange(num_experts) * (num_ranks // num_experts)
    table = np.full((num_ranks, 1 + num_slots), -1)
    table[home, 0] = np.arange(num_experts)
    return Placement(home=home, table=table)


def measure(num_experts: int, num_ranks: int, num_slots: int, calls: int) -> np.ndarray:
    """Time all calls.

    Args:
        num_experts: number of experts, E.
        num_ranks: number of ranks, R.
        num_slots: slots per rank, S.
        calls: timed iterations.

    Returns:
        Seconds in the order of ``COLUMNS``, [6, calls].
    """
    rng = np.random.default_rng(0)
    world = World(tuple(rank // 8 for rank in range(num_ranks)))
    homes = homes_of(num_experts, num_ranks, num_slots)
    popularity = rng.normal(0, 1, num_experts)
    # deviation of each source's popularity
    taste = rng.normal(0, 0.3, (num_ranks, num_experts))
    cost = SHAPE.copy_cost(world)
    late = dict(
        cost=dataclasses.replace(SHAPE, microbatches=1).copy_cost(world),
        max_copies=MOST_LATE,
        across_nodes=False,
    )
    host = torch.device("cpu")
    tables = QuotaTables(GroupShape(world, homes), host, Kernels(host))
    history = LoadHistory()
    free = priced = None
    seconds = np.empty((len(COLUMNS), calls))
    for call in range(-WARM_UP, calls):
        share = np.exp(popularity + taste)
        share /= share.sum(axis=1, keepdims=True)
        # int32, as layers gather it
        load = rng.poisson(share * PAIRS).astype(np.int32)
        total = load.sum(axis=0, dtype=np.int64)
        popularity += rng.normal(0, 0.1, num_experts)
        if history.last is not None:
            forecast = history.forecast()[0] * SHAPE.microbatches
            free_s, free = _timed(
                lambda: plan_replicas(forecast, homes, world, cost=CopyCost(), previous=free)  # noqa: B023
            )
            priced_s, priced = _timed(
                lambda: plan_replicas(forecast, homes, world, cost=cost, previous=priced)  # noqa: B023
            )
            largest_s, _ = _timed(lambda: largest_load(total, free))  # noqa: B023
            kept_s, _ = _timed(lambda: add_late_replicas(total, free, world, **late))  # noqa: B023
            jumped = np.roll(total, num_experts // 2 + 1)
            late_s, _ = _timed(lambda: add_late_replicas(jumped, free, world, **late))  # noqa: B023
            counts = torch.from_numpy(load)
            row_s, _ = _timed(lambda: _parts(tables, free, counts))  # noqa: B023
            if call >= 0:
                seconds[:, call] = free_s, priced_s, largest_s, kept_s, late_s, row_s
        history.append(total[None])
    return seconds


def _parts(tables: QuotaTables, placement: Placement, loads: torch.Tensor) -> None:
    tables.place(placement)
    tables.parts(loads, len(loads) // 2)


def _timed(function: Callable[[], Any]) -> tuple[float, Any]:
    """Call ``function``; returns seconds and the result."""
    start = time.perf_counter()
    result = function()
    return time.perf_counter() - start, result


def _cpu() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    for line in lines:
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor()


def main() -> int:
    """Print the table; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--calls", type=int, default=100, help="calls per size; a tenth at 1,024 ranks"
    )
    arguments = parser.parse_args()
    if arguments.calls < 1:
        parser.error(f"--calls={arguments.calls} must be 1 or more")
    torch.set_num_threads(1)
    print(f"`python bench/planner_speed.py --calls {arguments.calls}` on one core of {_cpu()}.")
    print("Median (90th percentile) in microseconds; the target is for plan_replicas.\n")
    print("| experts/ranks | slots | " + " | ".join(COLUMNS) + " | target |")
    print("|---|---|" + "---|" * (len(COLUMNS) + 1))
    for num_experts, num_ranks in SIZES:
        for num_slots in (1, 2):
            calls = max(1, arguments.calls // 10) if num_ranks >= 1024 else arguments.calls
            seconds = measure(num_experts, num_ranks, num_slots, calls)
            middle = np.median(seconds, axis=1)
            slow = np.percentile(seconds, 90, axis=1)
            cells = [f"{m * 1e6:,.0f} ({s * 1e6:,.0f})" for m, s in zip(middle, slow, strict=True)]
            target = f"{TARGETS[num_ranks] * 1e6:,.0f}" if num_ranks in TARGETS else ""
            print(
                f"| {num_experts}/{num_ranks} | {num_slots} | {' | '.join(cells)} | {target} |",
                flush=True,
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
