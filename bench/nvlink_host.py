"""CPU time of transport nvlink for one layer: schedules of a plan, and programs of a transfer, on one CPU core.

    python bench/nvlink_host.py

Plans are those of `plan_replicas` for two slots, where copies cost nothing, on loads that drift; no plan repeats the
one before. *Even* loads spread over all experts; of *hot* ones a quarter goes to one expert, with replicas on most
ranks. All ranks are in one NVLink domain. *Plan* is the list of copies, *schedule* what a rank does in one
direction, *program* what it writes for a transfer by its schedule, *again* for the next one by the same, as in another
microbatch: an expert has two tensors (SwiGLU), gradients are fp32. Eight ranks are timed in turn.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from megatron_hecate.comm.nvlink import schedule as schedule_module  # noqa: E402
from megatron_hecate.comm.nvlink.domains import Stages  # noqa: E402
from megatron_hecate.comm.nvlink.places import Place  # noqa: E402
from megatron_hecate.comm.nvlink.program import Extent, Signals  # noqa: E402
from megatron_hecate.comm.nvlink.program_cache import Memory, Programs  # noqa: E402
from megatron_hecate.comm.transport import TransferPlan  # noqa: E402
from megatron_hecate.plan import CopyCost, Placement, World, plan_replicas  # noqa: E402
from megatron_hecate.runtime.forecast import LoadHistory  # noqa: E402

SIZES: tuple[tuple[int, int], ...] = ((64, 8), (256, 64))  # experts, ranks
PAIRS: int = 8192  # (token, expert) pairs of each source in a microbatch
TENSORS: tuple[int, ...] = (2 * 7168 * 2048, 2048 * 7168)  # elements of an expert's, DeepSeek-V3
TARGETS: dict[str, float] = {"schedule": 200e-6, "program": 50e-6, "program again": 50e-6}


def placements(num_experts: int, num_ranks: int, calls: int, *, hot: bool) -> list[Placement]:
    """Of so many iterations, with all slots filled."""
    rng = np.random.default_rng(0)
    world, homes = World((0,) * num_ranks), Placement.initial(num_experts, num_ranks, num_slots=2)
    popularity, history, found = rng.normal(0, 1, num_experts), LoadHistory(), list[Placement]()
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


MEMORIES: tuple[str, ...] = ("parameters", "send", "slot", "grad", "partial", "main_grad")


def _own(place: Place) -> list[Extent]:
    """This rank's tensors in a place: of experts one by one, of buffers one for all."""
    begin = (MEMORIES.index(place.memory) << 40) + place.index * 4 * sum(TENSORS)
    sizes = TENSORS if place.memory in ("parameters", "main_grad") else (sum(TENSORS),)
    return [(begin + 4 * sum(sizes[:i]), size) for i, size in enumerate(sizes)]


def measure(
    num_experts: int, num_ranks: int, calls: int, *, hot: bool
) -> dict[tuple[str, ...], list[float]]:
    """CPU seconds of every call, by what is made and by direction."""
    domain, found = tuple(range(num_ranks)), defaultdict[tuple[str, ...], list[float]](list)
    apart = {rank: (rank + 1) << 44 for rank in domain}
    elements, every = sum(TENSORS), num_ranks // 8
    where: dict[str, Any] = dict(progress_at=apart, arrived=16, failure=32, timeout=1.0)
    signals = {rank: Signals(rank=rank, **where) for rank in domain}
    builds = {"spAG": Stages.of_fetch, "spRS": Stages.of_return}
    for number, placement in enumerate(placements(num_experts, num_ranks, calls, hot=hot)):
        for rank in range(number % every, num_ranks, every):
            start = time.thread_time()
            copies = TransferPlan.from_placement(placement, rank).copies
            found["plan",].append(time.thread_time() - start)
            schedule_module._Chunks.of.cache_clear()  # a rank has no use of what others have worked out
            programs = Programs(signals[rank])
            for direction, build in builds.items():
                sums = direction == "spRS"
                start = time.thread_time()
                (schedule,) = build(copies, rank, domains=(domain,), elements=elements)
                found["schedule", direction].append(time.thread_time() - start)
                how: dict[str, Any] = dict(itemsize=4 if sums else 2, sums=sums, begin=7)
                for what in ("program", "program again"):
                    start = time.thread_time()
                    programs.make(schedule, Memory(_own, rank=rank, apart=apart), **how).relocate(
                        1 << 20
                    )
                    found[what, direction].append(time.thread_time() - start)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--calls", type=int, default=10, help="plans per size")
    arguments = parser.parse_args()
    if arguments.calls < 1:
        parser.error(f"--calls={arguments.calls} must be 1 or more")
    print("Median (90th percentile) of CPU time in microseconds.\n")
    columns = [
        ("plan",),
        *((what, direction) for what in TARGETS for direction in ("spAG", "spRS")),
    ]
    print(
        f"| experts/ranks | loads | {' | '.join(', '.join(column) for column in columns)} |\n|{'---|' * 9}"
    )
    for num_experts, num_ranks in SIZES:
        for hot in (False, True):
            seconds = measure(num_experts, num_ranks, arguments.calls, hot=hot)
            cells = [
                f"{np.median(seconds[c]) * 1e6:,.0f} ({np.percentile(seconds[c], 90) * 1e6:,.0f})"
                for c in columns
            ]
            print(
                f"| {num_experts}/{num_ranks} | {'hot' if hot else 'even'} | {' | '.join(cells)} |",
                flush=True,
            )
    targets = [f"{TARGETS[what] * 1e6:,.0f}" for what, *_ in columns[1:]]
    print(f"| target | | | {' | '.join(targets)} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
