"""Count the chunks on the busiest link, with and without exchange between receivers.

    python bench/links.py

First: one hot expert, fetched by 1 to 71 other ranks of an NVLink domain; then the same over
several domains. Figures are chunks sent or received by the busiest rank, by the schedules that
training uses (`nvlink`). The lower bound of all schedules is 1: a rank must receive its replica,
and the expert must leave its home once. The target is 1.25. No time is measured.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "bench")]

from megatron_hecate.comm.transport import Copy  # noqa: E402
from megatron_hecate.nvlink.domains import Domains, Messages, stages_of  # noqa: E402
from megatron_hecate.nvlink.program import MAX_RANKS  # noqa: E402

# elements of a chunk
ELEMENTS: int = 1_000_000
TARGET: float = 1.25


def plainly(copies: Sequence[Copy]) -> float:
    """Count the chunks that the busiest rank sends if homes send whole chunks to every replica."""
    return max(Counter(copy.home for copy in copies).values())


def busiest(copies: Sequence[Copy], domains: Domains, *, sums: bool) -> tuple[float, float]:
    """Count the chunks that the busiest rank sends or receives.

    Args:
        copies: copies of all ranks.
        domains: ranks of each NVLink domain.
        sums: whether gradients are returned, else weights fetched.

    Returns:
        Chunks inside a domain, and between domains.
    """
    inside: Counter[tuple[str, int]] = Counter()
    between: Counter[tuple[str, int]] = Counter()
    for rank in sorted(itertools.chain.from_iterable(domains)):
        for stage in stages_of(copies, rank, domains=domains, elements=ELEMENTS, sums=sums):
            if isinstance(stage, Messages):
                between["out", rank] += sum(part.end - part.begin for part, _ in stage.sends)
                between["in", rank] += sum(part.end - part.begin for part, _ in stage.receives)
                continue
            for row in stage.rows[stage.rows["rank"] != rank]:
                inside["out", int(row["rank"])] += int(row["end"] - row["begin"])
                inside["in", rank] += int(row["end"] - row["begin"])
    most_inside = max(inside.values(), default=0)
    most_between = max(between.values(), default=0)
    return most_inside / ELEMENTS, most_between / ELEMENTS


def hot(fan_out: int) -> list[Copy]:
    """List copies of one chunk from rank 0 to the next ``fan_out`` ranks."""
    return [Copy(0, 0, rank, 0) for rank in range(1, fan_out + 1)]


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.parse_args()
    one_domain()
    several_domains()


def one_domain() -> None:
    """Print the table of one hot expert in one NVLink domain."""
    print("| fan-out | home sends, plainly | busiest link, spAG | spRS | target |")
    print("|---|---|---|---|---|")
    worst = [0.0, 0.0]
    for fan_out in range(1, MAX_RANKS):
        copies = hot(fan_out)
        domains = [range(fan_out + 1)]
        links = [busiest(copies, domains, sums=sums)[0] for sums in (False, True)]
        worst = [max(pair) for pair in zip(worst, links, strict=True)]
        if fan_out < 9 or fan_out in (15, 16, 31, 32, 63, 64, 71):
            cells = f"{plainly(copies):.0f} | {links[0]:.3f} | {links[1]:.3f}"
            print(f"| {fan_out} | {cells} | {TARGET} |")
    print(f"| 1-71, worst | 71 | {worst[0]:.3f} | {worst[1]:.3f} | {TARGET} |")


def several_domains() -> None:
    """Print the table of one hot expert over several NVLink domains."""
    print(
        "\nOne hot expert, a replica on every other rank; domains of 8 GPUs; "
        "between: chunks on a rank's adapter\n"
    )
    print(
        "| domains | plainly, out of the home's domain | spAG inside | between | spRS inside "
        "| between |"
    )
    print("|---|---|---|---|---|---|")
    for count in (2, 4, 8):
        domains = [range(8 * i, 8 * i + 8) for i in range(count)]
        copies = hot(8 * count - 1)
        chunks = (*busiest(copies, domains, sums=False), *busiest(copies, domains, sums=True))
        cells = [f"{number:.3f}" for number in chunks]
        print(f"| {count} | {8 * (count - 1)} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
