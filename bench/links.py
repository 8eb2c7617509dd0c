"""Count the chunks on the busiest link, with and without exchange between receivers.

    python bench/links.py

First one hot expert that goes to 1 to 71 other ranks of an NVLink domain; the same over several domains; then the
replicas that the planner chooses on recorded loads, step by step. Numbers are chunks: what the rank that sends or gets
most does, by the schedules that training uses (`comm.nvlink`), over what no schedule can avoid: a rank must receive its
replicas, and each replicated expert must leave its home once. The target is 1.25. No time is measured.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "bench")]

from megatron_hecate.comm.nvlink.domains import Domains, Messages, Stages  # noqa: E402
from megatron_hecate.comm.nvlink.schedule import MAX_RANKS  # noqa: E402
from megatron_hecate.comm.transport import Copy, TransferPlan  # noqa: E402
from megatron_hecate.plan import CopyCost, Placement, World, plan_replicas  # noqa: E402
from megatron_hecate.plan.world import H100  # noqa: E402

ELEMENTS: int = 1_000_000  # of a chunk
TARGET: float = 1.25


def needed(copies: Sequence[Copy]) -> int:
    """The largest number of chunks that a rank must receive, or that must leave a home."""
    leave = Counter(home for home, _ in {(copy.home, copy.index) for copy in copies})
    return max(*Counter(copy.rank for copy in copies).values(), *leave.values())


def plainly(copies: Sequence[Copy]) -> float:
    """Chunks that the busiest rank sends, when every rank gets its whole chunk from the home."""
    return max(Counter(copy.home for copy in copies).values())


def busiest(copies: Sequence[Copy], domains: Domains, *, sums: bool) -> tuple[float, float]:
    """Chunks that the busiest rank sends or receives inside its domain, and between domains."""
    build = Stages.of_return if sums else Stages.of_fetch
    inside: Counter[tuple[str, int]] = Counter()
    between: Counter[tuple[str, int]] = Counter()
    for rank in sorted(rank for domain in domains for rank in domain):
        for stage in build(copies, rank, domains=domains, elements=ELEMENTS):
            if isinstance(stage, Messages):
                between["out", rank] += sum(part.end - part.begin for part, _ in stage.sends)
                between["in", rank] += sum(part.end - part.begin for part, _ in stage.receives)
                continue
            for pull in (pull for step in stage.steps for pull in step):
                for source in pull.sources:
                    if source.rank != rank:
                        inside["out", source.rank] += pull.end - pull.begin
                        inside["in", rank] += pull.end - pull.begin
    most_inside, most_between = (
        max(link.values(), default=0) / ELEMENTS for link in (inside, between)
    )
    return most_inside, most_between


def hot(fan_out: int) -> list[Copy]:
    """One chunk from rank 0 to the next ``fan_out`` ranks."""
    return [Copy(0, 0, rank, 0) for rank in range(1, fan_out + 1)]


def planned(trace: Path, ranks: int, slots: int, steps: int) -> list[tuple[Copy, ...]]:
    """The copies of every layer and step, with the step before as forecast."""
    load = np.load(trace)["counts"].sum(axis=2)  # [S, L, E]
    homes = Placement.initial(load.shape[2], ranks, num_slots=slots)
    world = World(node=(0,) * ranks, speeds=H100)
    found = []
    for step in range(1, min(steps + 1, len(load))):
        for layer in range(load.shape[1]):
            placement = plan_replicas(
                load[step - 1, layer].astype(float), homes, world, cost=CopyCost()
            )
            if placement.replicas:
                found.append(TransferPlan.from_placement(placement, 0).copies)
    return found


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--trace", type=Path, default=ROOT / "bench" / "data" / "pysrc_e64k6_aux0.npz"
    )
    parser.add_argument("--steps", type=int, default=40)
    options = parser.parse_args()
    print(
        "| fan-out | home sends, plainly | busiest link, spAG | spRS | target |\n|---|---|---|---|---|"
    )
    worst = [0.0, 0.0]
    for fan_out in range(1, MAX_RANKS):
        links = [
            busiest(hot(fan_out), [range(fan_out + 1)], sums=sums)[0] for sums in (False, True)
        ]
        worst = [max(a, b) for a, b in zip(worst, links, strict=True)]
        if fan_out < 9 or fan_out in (15, 16, 31, 32, 63, 64, 71):
            print(
                f"| {fan_out} | {plainly(hot(fan_out)):.0f} | {links[0]:.3f} | {links[1]:.3f} | {TARGET} |"
            )
    print(f"| 1-71, worst | 71 | {worst[0]:.3f} | {worst[1]:.3f} | {TARGET} |")

    print(
        "\nOne hot expert, a replica on every other rank; domains of 8 GPUs; between: chunks on a rank's adapter\n"
    )
    print(
        "| domains | plainly, out of the home's domain | spAG inside | between | spRS inside | between |"
    )
    print("|---|---|---|---|---|---|")
    for count in (2, 4, 8):
        domains = [range(8 * i, 8 * i + 8) for i in range(count)]
        copies = hot(8 * count - 1)
        cells = [f"{x:.3f}" for sums in (False, True) for x in busiest(copies, domains, sums=sums)]
        print(f"| {count} | {8 * (count - 1)} | {' | '.join(cells)} |")

    print(
        f"\nReplicas of the planner on {options.trace.name}, {options.steps} steps, every layer; over the largest"
    )
    print("number of chunks that a rank must receive, or that must leave a home: mean and worst\n")
    print(
        "| ranks | slots | home sends, plainly | busiest link, spAG | spRS | target |\n|---|---|---|---|---|---|"
    )
    for ranks in (8, 16, 32, 64):
        for slots in (1, 2):
            rows = []
            for copies in planned(options.trace, ranks, slots, options.steps):
                links = [busiest(copies, [range(ranks)], sums=sums)[0] for sums in (False, True)]
                rows.append(np.array([plainly(copies), *links]) / needed(copies))
            rows = np.array(rows)
            cells = [
                f"{mean:.3f} / {most:.3f}"
                for mean, most in zip(rows.mean(axis=0), rows.max(axis=0), strict=True)
            ]
            print(f"| {ranks} | {slots} | {' | '.join(cells)} | {TARGET} |", flush=True)


if __name__ == "__main__":
    main()
