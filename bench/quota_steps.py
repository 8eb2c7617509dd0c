"""Count the passes of one layer's quotas, and estimate their time on a GPU from measured passes.

    python bench/quota_steps.py
    python bench/quota_steps.py --per-node 64       one NVLink domain

The group has 64 ranks, by default on nodes of 8. Loads: the recordings in `bench/data` unchanged
(64 experts), their four layers concatenated to one layer of 256 experts, and a drawn load (256
experts, log-normal popularity that drifts). `plan_replicas` fills all slots from the forecast. The
host build, which CPU ranks run, counts the passes; the GPU's kernel makes the same passes. A *pass*
is one iteration of all threads over the ranks or the experts between two barriers.

`CYCLES` of a pass are those of an H200 (docs/gpu-results.md) for an earlier kernel, with 256
threads and teams of 4 lanes: mean of the recorded loads with at most four shared experts on every
rank; `CYCLES_MORE` is added if a rank has more. A shared expert has several holders. For that
kernel the estimate was within 12 % of the measured means. The kernel has changed since: *accepts*
are now a part of the pass *rounds*, and the constants of both are estimates. A change of the kernel
needs a new measurement.
"""

from __future__ import annotations

import argparse
import ctypes
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from loads import DATA, Trace  # noqa: E402

from megatron_hecate.device.launch import Kernels  # noqa: E402
from megatron_hecate.plan import CopyCost, Placement, World, largest_load, plan_replicas  # noqa: E402
from megatron_hecate.routing.quotas import quotas_of_all  # noqa: E402
from megatron_hecate.routing.tables import GroupShape, HolderOrder  # noqa: E402
from megatron_hecate.step.forecast import LoadHistory  # noqa: E402

RANKS = 64
PASSES = ("rounds", "levels", "raises", "pushes", "accepts", "reaches", "walked", "barriers")
# Measured: 1750, 200, 835, 1880, 2650, 600. Less 500 for a round that no longer returns tokens (240
# of 404 instructions of the pass). Less 500 for the barrier and the loads that accepting shared
# with the next round, and 800 for its second loop over holders; plus 300 for the limit of the last
# push.
CYCLES = np.array([1250, 200, 835, 1880, 1650, 600])
CYCLES_MORE = np.array([500, 0, 0, 620, 450, 200])
LANES: int = 4
# cycles outside of passes: loads of tables from the L2 cache, counting, the even start, foreign
# tokens, and one source's parts at the end
CYCLES_BESIDE: int = 22000
GHZ: float = 1.98


def recorded(name: str, *, together: bool) -> np.ndarray:
    """Read a recording; ``together``: concatenate the experts of all layers to one layer.

    Returns:
        Counts [T, L, R, E].
    """
    counts = Trace.read(DATA / f"{name}.npz").to_ranks(RANKS)
    if together:
        steps, layers, ranks, experts = counts.shape
        counts = counts.transpose(0, 2, 1, 3).reshape(steps, 1, ranks, layers * experts)
    return counts


def drawn(steps: int) -> np.ndarray:
    """Draw counts [T, 1, R, 256] with drifting popularity."""
    rng = np.random.default_rng(0)
    experts = 256
    popularity = rng.normal(0, 1, experts)
    taste = rng.normal(0, 0.3, (RANKS, experts))
    counts = []
    for _ in range(steps):
        share = np.exp(popularity + taste)
        counts.append(rng.poisson(share / share.sum(axis=1, keepdims=True) * 8192))
        popularity += rng.normal(0, 0.1, experts)
    return np.array(counts)[:, None]


def replays(
    counts: np.ndarray, world: World, *, slots: int, every: int
) -> Iterator[tuple[np.ndarray, Placement, GroupShape]]:
    """Plan every step of every layer.

    Args:
        counts: tokens per step, layer, rank and expert, [T, L, R, E].
        world: nodes of the ranks.
        slots: slots per rank.
        every: interval of yielded steps.

    Yields:
        Load [R, E], placement with the planned replicas, and shape of the group.
    """
    for layer in range(counts.shape[1]):
        homes = Placement.initial(counts.shape[3], RANKS, num_slots=slots)
        history = LoadHistory()
        placement = homes
        for step, loads in enumerate(counts[:, layer]):
            # The first step has no forecast.
            if step:
                forecast = history.forecast()
                assert forecast is not None
                placement = plan_replicas(
                    forecast[0], homes, world, cost=CopyCost(), previous=placement
                )
                if step % every == 0:
                    yield loads, placement, GroupShape.of(world, placement)
            history.append(loads.sum(axis=0)[None])


def count_passes(loads: np.ndarray, placement: Placement, shape: GroupShape) -> np.ndarray:
    """Compute the quotas of one layer on the host and count the passes.

    Returns:
        Counts in the order of ``PASSES``, [8] int64. *walked* is the sum over passes of the holders
        in the pass's longest walk.
    """
    function = Kernels(torch.device("cpu")).function("fssdp_quotas_passes")
    passes = np.zeros(len(PASSES), np.int64)
    tables = (
        shape.table(),
        HolderOrder.of(placement, shape).table(shape),
        np.ascontiguousarray(loads, np.int32),
    )
    memory = (np.empty(shape.work_size(1), np.int64), np.empty(shape.parts_size, np.int32), passes)
    function(*(ctypes.c_void_p(array.ctypes.data) for array in (*tables, *memory)))
    return passes


def microseconds(passes: np.ndarray, most_shared: int) -> float:
    """Estimate the kernel's time.

    Args:
        passes: result of `count_passes`.
        most_shared: largest number of shared experts on one rank.
    """
    cycles = CYCLES + CYCLES_MORE * ((most_shared - 1) // LANES)
    return (passes[: len(CYCLES)] @ cycles + CYCLES_BESIDE) / GHZ / 1e3


def measure(counts: np.ndarray, world: World, *, slots: int, every: int) -> str:
    """Replay one load; returns the last columns of its row."""
    passes = []
    over = []
    away = []
    took = []
    for loads, placement, shape in replays(counts, world, slots=slots, every=every):
        passes.append(count_passes(loads, placement, shape))
        widest = int(HolderOrder.of(placement, shape).table(shape)[0])
        took.append(microseconds(passes[-1], max(widest, 1)))
        tokens, order = quotas_of_all(loads, placement, shape)
        node = shape.world.node_index
        crossing = node[list(shape.source_rank)][:, None] != node[order.rank]
        away.append(100 * tokens[crossing].sum() / tokens.sum())
        largest = np.bincount(order.rank, weights=tokens.sum(axis=0)).max()
        over.append(largest / largest_load(loads.sum(axis=0), placement))
    found = np.array(passes)
    mean = found.mean(axis=0)
    barriers = found[:, -1]
    cells = [
        ", ".join(f"{value:.1f}" for value in mean[:-1]),
        f"{mean[-1]:.0f}, {np.percentile(barriers, 99):.0f}, {barriers.max()}",
        f"{np.mean(over):.5f}, {np.percentile(over, 99):.5f}",
        f"{np.mean(away):.1f}",
        f"{np.mean(took):.0f}, {np.percentile(took, 99):.0f}",
    ]
    return " | ".join(cells)


def main() -> int:
    """Print the table; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--every",
        type=int,
        default=4,
        help="interval of counted steps (%(default)s)",
    )
    parser.add_argument(
        "--per-node",
        type=int,
        default=8,
        help="ranks of a node (%(default)s)",
    )
    args = parser.parse_args()
    for name in ("every", "per_node"):
        if (value := getattr(args, name)) < 1:
            parser.error(f"--{name.replace('_', '-')}={value} must be 1 or more")
    world = World(tuple(rank // args.per_node for rank in range(RANKS)))
    names = sorted(path.stem for path in DATA.glob("*.npz"))
    cases = {f"{name}, 64": recorded(name, together=False) for name in names}
    cases |= {f"{name}, 256": recorded(name, together=True) for name in names}
    cases["drawn, 256"] = drawn(240)
    columns = ", ".join(PASSES[:-1])
    print(
        f"| load, experts | slots | {columns}: mean | barriers: mean, p99, most | "
        "load over optimum: mean, p99 | % of tokens that leave their node | us: mean, p99 |"
    )
    print("|---|---|---|---|---|---|---|")
    for name, counts in cases.items():
        for slots in (1, 2):
            print(
                f"| {name} | {slots} | {measure(counts, world, slots=slots, every=args.every)} |",
                flush=True,
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
