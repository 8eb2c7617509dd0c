"""Count the passes that the quotas of one layer make, and estimate their time on a GPU from measured passes.

    python bench/quota_steps.py

64 ranks on nodes of 8. Loads: the recordings in `bench/data` as they are (64 experts), their four layers side by side
as one layer of 256 experts, and drawn ones (256 experts, log-normal popularity that drifts). Replicas are those that
`plan_replicas` puts into all slots from the forecast. Counted on the host, by the build that CPU ranks run; the GPU's
kernel makes the same passes. Between two barriers, all threads make one *pass* over the ranks or the experts.

`CYCLES` of a pass were measured on an H200 (docs/gpu-results.md), for 256 threads and teams of 4 lanes: mean of the
recorded loads where no rank has more than four holders of experts with several, and `CYCLES_MORE` above that where some
rank has. The estimate is within 12 % of the measured means. A change of the kernel needs a new measurement.
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
from megatron_hecate.runtime.forecast import LoadHistory  # noqa: E402

RANKS, PER_NODE = 64, 8
PASSES = ("rounds", "levels", "raises", "pushes", "accepts", "reaches", "walked", "barriers")
CYCLES = np.array([1750, 200, 835, 1880, 2650, 600])
CYCLES_MORE = np.array([500, 0, 0, 620, 450, 200])
LANES: int = 4
# Tables from the second-level cache, counting, the even start, foreign tokens, and one source's parts at the end.
CYCLES_BESIDE: int = 22000
GHZ: float = 1.98


def recorded(name: str, *, together: bool) -> np.ndarray:
    """[T, L, R, E] counts; ``together``: one layer of all layers' experts."""
    counts = Trace.read(DATA / f"{name}.npz").to_ranks(RANKS)
    if together:
        steps, layers, ranks, experts = counts.shape
        counts = counts.transpose(0, 2, 1, 3).reshape(steps, 1, ranks, layers * experts)
    return counts


def drawn(steps: int) -> np.ndarray:
    """[T, 1, R, 256] counts."""
    rng, experts = np.random.default_rng(0), 256
    popularity, taste = rng.normal(0, 1, experts), rng.normal(0, 0.3, (RANKS, experts))
    counts = []
    for _ in range(steps):
        share = np.exp(popularity + taste)
        counts.append(rng.poisson(share / share.sum(axis=1, keepdims=True) * 8192))
        popularity += rng.normal(0, 0.1, experts)
    return np.array(counts)[:, None]


def replays(
    counts: np.ndarray, slots: int, every: int
) -> Iterator[tuple[np.ndarray, Placement, GroupShape]]:
    """Loads [R, E], the replicas planned for them, and the group; every so many steps of every layer."""
    world = World(tuple(rank // PER_NODE for rank in range(RANKS)))
    for layer in range(counts.shape[1]):
        homes = Placement.initial(counts.shape[3], RANKS, num_slots=slots)
        history, placement = LoadHistory(), homes
        for step, loads in enumerate(counts[:, layer]):
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
    """[8] int64, in the order of ``PASSES``; walked: holders of the longest walk of each pass, together."""
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
        passes: as of `count_passes`.
        most_shared: the most holders of one rank whose experts have further ones.
    """
    cycles = CYCLES + CYCLES_MORE * ((most_shared - 1) // LANES)
    return (passes[: len(CYCLES)] @ cycles + CYCLES_BESIDE) / GHZ / 1e3


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--every",
        type=int,
        default=4,
        help="steps from one that is counted to the next (%(default)s)",
    )
    every = parser.parse_args().every
    if every < 1:
        parser.error(f"--every={every} must be 1 or more")
    names = sorted(path.stem for path in DATA.glob("*.npz"))
    cases = {f"{name}, 64": recorded(name, together=False) for name in names}
    cases |= {f"{name}, 256": recorded(name, together=True) for name in names}
    cases["drawn, 256"] = drawn(240)
    columns = ", ".join(PASSES[:-1])
    print(
        f"| load, experts | slots | {columns}: mean | barriers: mean, p99, most | load over optimum: mean, p99 | "
        "us: mean, p99 |"
    )
    print("|---|---|---|---|---|---|")
    for name, counts in cases.items():
        for slots in (1, 2):
            passes, over, took = [], [], []
            for loads, placement, shape in replays(counts, slots, every):
                passes.append(count_passes(loads, placement, shape))
                widest = int(HolderOrder.of(placement, shape).table(shape)[0])
                took.append(microseconds(passes[-1], max(widest, 1)))
                tokens, order = quotas_of_all(loads, placement, shape)
                largest = np.bincount(order.rank, weights=tokens.sum(axis=0)).max()
                over.append(largest / largest_load(loads.sum(axis=0), placement))
            found = np.array(passes)
            mean, barriers = found.mean(axis=0), found[:, -1]
            print(
                f"| {name} | {slots} | {', '.join(f'{value:.1f}' for value in mean[:-1])} | {mean[-1]:.0f}, "
                f"{np.percentile(barriers, 99):.0f}, {barriers.max()} | {np.mean(over):.5f}, "
                f"{np.percentile(over, 99):.5f} | {np.mean(took):.0f}, {np.percentile(took, 99):.0f} |",
                flush=True,
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
