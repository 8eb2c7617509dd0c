"""Time that planning one layer takes, on one CPU core.

    python bench/planner_speed.py

Tier 1 chooses guests from the loads of the iterations before (`plan_guests`): from the forecast alone, as at the start,
and as in training, where the last plan and the errors of earlier forecasts are known (making scenarios of these counts,
where guests are single). Priced guests are planned as a layer plans them, with copies and routing that must pay: an
expert of DeepSeek-V3's size (SwiGLU of 7168 x 2048) on H100 nodes, 16 microbatches per iteration; one layer in four
looks at all numbers of guests. As in training, four layers are planned one after another, after something else (here
the loads were drawn); a layer's time is the mean of the four. After the gate, `split_quotas` gives this rank's row of
quotas from the true loads; guests and quotas are the whole plan of a layer, graph of the holders included.
`largest_load` is what the loads could be balanced to. `calibrate` (tier 2) corrects guests by one microbatch's true
loads at these prices, inside nodes, 8 late guests at most: where they are as forecast, and after a jump, when every
expert is as popular as another was.

Loads drift from iteration to iteration, so no plan repeats the one before; everything is drawn from a seed, compiled
before it is timed, and timed by the wall clock. Sizes are experts/ranks, 8 ranks per node; with 256 experts on 1,024
ranks three of four ranks are home to none. The last line times the same code without its compiler, at the smallest
size.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from megatron_hecate.observe import LoadHistory  # noqa: E402
from megatron_hecate.plan import (  # noqa: E402
    LayerShape,
    Placement,
    World,
    calibrate,
    largest_load,
    plan_guests,
    split_quotas,
)

SIZES: tuple[tuple[int, int], ...] = ((64, 8), (64, 32), (256, 64), (1024, 1024), (256, 1024))  # experts, ranks
TARGET: float = 100e-6  # seconds per call
TARGET_LARGE: float = 1e-3  # at 1,024 ranks
PAIRS: int = 8192  # (token, expert) pairs of each source in a microbatch
SHAPE: LayerShape = LayerShape.swiglu(7168, 2048, microbatches=16)
MOST_LATE: int = 8
LAYERS: int = 4  # planned together, as in `model`, and
RECONSIDER: int = 4  # as in `state`: both need Megatron
ITERATIONS_BEFORE: int = 10  # so that errors of forecasts are known; the first also compile
COLUMNS: tuple[str, ...] = (
    "plan_guests, at first",
    "plan_guests",
    "the same, priced",
    "largest_load",
    "split_quotas (own row)",
    "whole plan",
    "calibrate, nothing pays",
    "calibrate, late guests",
)


def bare(num_experts: int, num_ranks: int, num_slots: int) -> Placement:
    """Homes spread evenly, on every few ranks where there are fewer experts than ranks."""
    if num_experts >= num_ranks:
        return Placement.initial(num_experts, num_ranks, num_slots=num_slots)
    home = np.arange(num_experts) * (num_ranks // num_experts)
    table = np.full((num_ranks, 1 + num_slots), -1)
    table[home, 0] = np.arange(num_experts)
    return Placement(home=home, table=table)


def measure(num_experts: int, num_ranks: int, num_slots: int, calls: int) -> np.ndarray:
    """[8, calls] seconds, in the order of ``COLUMNS``."""
    rng = np.random.default_rng(0)
    world = World(tuple(rank // 8 for rank in range(num_ranks)))
    homes = bare(num_experts, num_ranks, num_slots)
    popularity = rng.normal(0, 1, (LAYERS, num_experts))
    taste = rng.normal(0, 0.3, (num_ranks, num_experts))  # of the sources
    once = dataclasses.replace(SHAPE, microbatches=1)
    prices = dict(copy_tokens=SHAPE.copy_tokens(world), routing_tokens=SHAPE.routing_tokens(world))
    late = dict(
        copy_tokens=once.copy_tokens(world, world.speeds.intra),
        routing_tokens=once.routing_tokens(world),
        most_late=MOST_LATE,
    )
    seconds = np.empty((len(COLUMNS), calls))
    history, free, paying = LoadHistory(), [homes] * LAYERS, [homes] * LAYERS
    known = [dict(scenarios=functools.partial(history.scenarios, i, num_experts)) for i in range(LAYERS)]
    for call in range(-ITERATIONS_BEFORE, calls):
        share = np.exp(popularity[0] + taste)
        load = rng.poisson(share / share.sum(axis=1, keepdims=True) * PAIRS).astype(np.int32)  # as layers gather it
        others = np.exp(popularity[1:])
        others = rng.poisson(others / others.sum(axis=1, keepdims=True) * PAIRS * num_ranks)
        totals = np.vstack([load.sum(axis=0), others])
        popularity += rng.normal(0, 0.1, popularity.shape)
        if history.last is None:
            history.append(totals)
            continue
        forecast = history.forecast() * SHAPE.microbatches

        def plan(i: int, last: list[Placement], **given: Any) -> Placement:
            return plan_guests(forecast[i], homes, world, previous=last[i], **known[i], **given)  # noqa: B023

        planned, free = _timed(lambda: [plan(i, free) for i in range(LAYERS)])  # noqa: B023
        row_and_graph, _ = _timed(lambda: split_quotas(load, free[0], world, only=num_ranks // 2))  # noqa: B023
        own_row, _ = _timed(lambda: split_quotas(load, free[0], world, only=num_ranks // 2))  # noqa: B023
        largest, _ = _timed(lambda: largest_load(totals[0], free[0], world))  # noqa: B023
        all_numbers = [(call + i) % RECONSIDER == 0 for i in range(LAYERS)]
        priced, paying = _timed(
            lambda: [plan(i, paying, reconsider=all_numbers[i], **prices) for i in range(LAYERS)]  # noqa: B023
        )
        kept, _ = _timed(lambda: calibrate(totals[0], free[0], world, **late))  # noqa: B023
        jumped = np.roll(totals[0], num_experts // 2 + 1)
        corrected, _ = _timed(lambda: calibrate(jumped, free[0], world, **late))  # noqa: B023
        first, _ = _timed(lambda: [plan_guests(forecast[i], homes, world) for i in range(LAYERS)])  # noqa: B023
        history.append(totals)
        if call >= 0:
            first, planned, priced = first / LAYERS, planned / LAYERS, priced / LAYERS
            seconds[:, call] = first, planned, priced, largest, own_row, planned + row_and_graph, kept, corrected
    return seconds


def _timed(function: Callable[[], Any]) -> tuple[float, Any]:
    """Seconds, and what it returned."""
    start = time.perf_counter()
    result = function()
    return time.perf_counter() - start, result


def _cpu() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return next(
        (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.processor()
    )


def _interpreted(calls: int) -> np.ndarray:
    """[8] median seconds at the smallest size, in a process in which nothing is compiled."""
    command = [sys.executable, __file__, "--reference", f"--calls={calls}"]
    environment = {**os.environ, "NUMBA_DISABLE_JIT": "1"}
    result = subprocess.run(command, env=environment, timeout=120, check=True, capture_output=True, text=True)
    return np.array([float(word) for word in result.stdout.split()])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--calls", type=int, default=200, help="calls per size; a tenth of them at 1,024 ranks")
    parser.add_argument("--reference", action="store_true", help="print medians of the smallest size, and nothing else")
    arguments = parser.parse_args()
    if arguments.calls < 1:
        parser.error(f"--calls={arguments.calls} must be 1 or more")
    if arguments.reference:
        print(*np.median(measure(*SIZES[0], 2, arguments.calls), axis=1))
        return 0
    print(
        "`python bench/planner_speed.py" + (f" --calls {arguments.calls}`" if arguments.calls != 200 else "`"), end=""
    )
    print(f" on one core of {_cpu()}. Median (90th percentile) in microseconds.\n")
    print("| experts/ranks | slots | " + " | ".join(COLUMNS) + " | target |")
    print("|---|---|" + "---|" * (len(COLUMNS) + 1))
    compiled = None
    for num_experts, num_ranks in SIZES:
        large = num_ranks >= 1024
        for num_slots in (1, 2):
            calls = max(1, arguments.calls // 10) if large else arguments.calls
            seconds = measure(num_experts, num_ranks, num_slots, calls)
            middle, slow = np.median(seconds, axis=1), np.percentile(seconds, 90, axis=1)
            cells = [f"{m * 1e6:,.0f} ({s * 1e6:,.0f})" for m, s in zip(middle, slow, strict=True)]
            target = TARGET_LARGE if large else TARGET
            print(
                f"| {num_experts}/{num_ranks} | {num_slots} | {' | '.join(cells)} | {target * 1e6:,.0f} |", flush=True
            )
            if (num_experts, num_ranks, num_slots) == (*SIZES[0], 2):
                compiled = middle
    ratios = _interpreted(max(1, arguments.calls // 20)) / compiled
    listed = ", ".join(f"{name} {ratio:,.0f}" for name, ratio in zip(COLUMNS, ratios, strict=True))
    print(f"\nTimes as long without the compiler, at {SIZES[0][0]}/{SIZES[0][1]} and 2 slots: {listed}.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
