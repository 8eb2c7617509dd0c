"""What the busiest link carries, with and without exchange.

    python bench/links.py

First one hot expert that goes to 1 to 71 other ranks of an NVLink domain; the same over several domains; then the
guests that the planner chooses on recorded loads, step by step. Numbers are chunks: what the rank that sends or gets
most does, by the schedules that training uses (`schedule`, `hierarchy`), over what no schedule can avoid: a rank must
receive its guests, and a home must let each expert that it lends go once. The target is 1.25. No time is measured.
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

from megatron_hecate import hierarchy, schedule  # noqa: E402
from megatron_hecate.hierarchy import Crossing, Domains  # noqa: E402
from megatron_hecate.materialization import Materialization  # noqa: E402
from megatron_hecate.plan import Placement, World, plan_guests  # noqa: E402
from megatron_hecate.plan.world import H100  # noqa: E402
from megatron_hecate.schedule import Loan  # noqa: E402

ELEMENTS: int = 1_000_000  # of a chunk
TARGET: float = 1.25


def needed(loans: Sequence[Loan]) -> int:
    """The largest number of chunks that a rank must receive, or a home let go."""
    lent = Counter(home for home, _ in {(loan.home, loan.lent) for loan in loans})
    return max(*Counter(loan.host for loan in loans).values(), *lent.values())


def plainly(loans: Sequence[Loan]) -> float:
    """Chunks that the busiest rank sends, when every host gets its whole chunk from the home."""
    return max(Counter(loan.home for loan in loans).values())


def busiest(loans: Sequence[Loan], domains: Domains, *, sums: bool) -> tuple[float, float]:
    """Chunks that the busiest rank sends or receives inside its domain, and between domains."""
    build = hierarchy.reduce if sums else hierarchy.gather
    inside: Counter[tuple[str, int]] = Counter()
    between: Counter[tuple[str, int]] = Counter()
    for rank in sorted(rank for domain in domains for rank in domain):
        for leg in build(loans, rank, domains=domains, elements=ELEMENTS):
            if isinstance(leg, Crossing):
                between["out", rank] += sum(part.end - part.begin for part in leg.sends)
                between["in", rank] += sum(part.end - part.begin for part in leg.recvs)
                continue
            for pull in (pull for step in leg.steps for pull in step):
                for source in pull.sources:
                    if source.rank != rank:
                        inside["out", source.rank] += pull.end - pull.begin
                        inside["in", rank] += pull.end - pull.begin
    return tuple(max(link.values(), default=0) / ELEMENTS for link in (inside, between))


def hot(fan_out: int) -> list[Loan]:
    """One chunk from rank 0 to the next ``fan_out`` ranks."""
    return [Loan(0, 0, host, 0) for host in range(1, fan_out + 1)]


def planned(trace: Path, ranks: int, slots: int, steps: int) -> list[list[Loan]]:
    """The loans of every layer and step, with the step before as forecast."""
    load = np.load(trace)["counts"].sum(axis=2)  # [S, L, E]
    homes = Placement.initial(load.shape[2], ranks, num_slots=slots)
    world = World(node=(0,) * ranks, speeds=H100)
    found = []
    for step in range(1, min(steps + 1, len(load))):
        for layer in range(load.shape[1]):
            placement = plan_guests(load[step - 1, layer].astype(float), homes, world)
            if placement.guests:
                found.append(Materialization.of(placement, 0).loans())
    return found


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--trace", type=Path, default=ROOT / "bench" / "data" / "pysrc_e64k6_aux0.npz")
    parser.add_argument("--steps", type=int, default=40)
    options = parser.parse_args()
    print("| fan-out | home sends, plainly | busiest link, spAG | spRS | target |\n|---|---|---|---|---|")
    worst = [0.0, 0.0]
    for fan_out in range(1, schedule.MAX_RANKS):
        links = [busiest(hot(fan_out), [range(fan_out + 1)], sums=sums)[0] for sums in (False, True)]
        worst = [max(a, b) for a, b in zip(worst, links, strict=True)]
        if fan_out < 9 or fan_out in (15, 16, 31, 32, 63, 64, 71):
            print(f"| {fan_out} | {plainly(hot(fan_out)):.0f} | {links[0]:.3f} | {links[1]:.3f} | {TARGET} |")
    print(f"| 1-71, worst | 71 | {worst[0]:.3f} | {worst[1]:.3f} | {TARGET} |")

    print(
        "\nOne hot expert, a guest on every other rank; ranks of 8 GPUs a domain; between: chunks on a rank's adapter\n"
    )
    print("| domains | plainly, out of the home's domain | spAG inside | between | spRS inside | between |")
    print("|---|---|---|---|---|---|")
    for count in (2, 4, 8):
        domains = [range(8 * i, 8 * i + 8) for i in range(count)]
        loans = hot(8 * count - 1)
        cells = [f"{x:.3f}" for sums in (False, True) for x in busiest(loans, domains, sums=sums)]
        print(f"| {count} | {8 * (count - 1)} | {' | '.join(cells)} |")

    print(
        f"\nGuests of the planner on {options.trace.name}, {options.steps} steps, every layer; over the largest number"
    )
    print("of chunks that a rank must receive, or a home let go: mean and worst\n")
    print("| ranks | slots | home sends, plainly | busiest link, spAG | spRS | target |\n|---|---|---|---|---|---|")
    for ranks in (8, 16, 32, 64):
        for slots in (1, 2):
            rows = []
            for loans in planned(options.trace, ranks, slots, options.steps):
                links = [busiest(loans, [range(ranks)], sums=sums)[0] for sums in (False, True)]
                rows.append(np.array([plainly(loans), *links]) / needed(loans))
            rows = np.array(rows)
            cells = [f"{mean:.3f} / {most:.3f}" for mean, most in zip(rows.mean(axis=0), rows.max(axis=0), strict=True)]
            print(f"| {ranks} | {slots} | {' | '.join(cells)} | {TARGET} |", flush=True)


if __name__ == "__main__":
    main()
