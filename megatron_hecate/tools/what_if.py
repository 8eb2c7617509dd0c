"""Estimate whether FSSDP pays for a run.

``megatron-hecate what-if TRACE --model NAME --cluster NAME --ranks N`` runs this. Steps
are simulated from recorded loads, under forced balance, stock expert parallelism, and FSSDP as it
would plan. The assumptions are in docs/what-if.md, and the errors found against published figures
in docs/what-if-checks.md.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import json
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from megatron_hecate import files
from megatron_hecate.device.compile import CompileError
from megatron_hecate.tools.comparison import Comparison, compare
from megatron_hecate.tools.outcome import Outcome
from megatron_hecate.tools.recommendation import describe_parts, flags_of
from megatron_hecate.tools.recorded_run import RecordedRun
from megatron_hecate.tools.simulated_job import SimulatedJob
from megatron_hecate.tools.traffic import copies
from megatron_hecate.tools.what_if_arguments import check_arguments, make_parser


def _plan(job: SimulatedJob, way: Outcome) -> dict[int, list[list[float]]]:
    """Count the replicas that FSSDP plans with ``way``.

    Returns:
        By number of the layer in the trace: its most frequent replicas as [expert, rank, share of
        steps], at most one per slot.
    """
    homes, _ = job.homes(way.slots, way.lifetime, way.rehome)
    placed = job.place(homes, way.lifetime, way.transport)
    final = placed
    if way.late:
        final = job.add_late(placed, way.late)
    most = way.slots * placed[0][0].num_ranks
    plan = {}
    for number, steps in zip(job.layers, zip(*final, strict=True), strict=True):
        often: Counter[tuple[int, int]] = Counter()
        for step in steps:
            often.update(tuple(pair) for pair in np.argwhere(copies(step)).tolist())
        plan[number] = [[*pair, count / len(steps)] for pair, count in often.most_common(most)]
    return plan


def _rivals(names: str, job: SimulatedJob, slots: int) -> list[Outcome]:
    """Simulate planners of bench/rivals on the same job.

    Raises:
        ValueError: for unknown names, and where the package is not in a checkout.
    """
    bench = Path(__file__).resolve().parents[2] / "bench"
    if not (bench / "rivals").is_dir():
        raise ValueError(
            f"--rivals {names}: other systems' planners are not installed; run this in a checkout"
        )
    sys.path.append(str(bench))
    return importlib.import_module("rivals.simulated").outcomes(names.split(","), job, slots)


def describe(outcomes: Sequence[Outcome]) -> str:
    """Format the outcomes as a table; forced balance and stock are the first two."""
    heads = ("step, ms", "speed", "imbalance", "copies, MB", "waits, ms", "experts, GiB")
    wide = max(37, *(len(one.name) for one in outcomes))
    lines = [" " * wide + "".join(f"{head:>13}" for head in heads)]
    for one in outcomes:
        figures = (
            f"{one.seconds * 1e3:.1f}",
            f"{outcomes[0].seconds / one.seconds:.1%}",
            f"{one.imbalance:.3f}",
            f"{one.sent / 1e6:.1f}",
            f"{one.exposed * 1e3:.2f}",
            f"{one.memory.total / 2**30:.2f}",
        )
        added = one.memory.total / outcomes[1].memory.total - 1
        cells = "".join(f"{figure:>13}" for figure in figures)
        lines.append(f"{one.name:<{wide}}{cells} (+{added:.1%})")
    lines += [
        "",
        "speed: forced balance is 100%. copies: sent by a rank in a step. "
        "waits: time of a step spent on copies alone",
    ]
    return "\n".join(lines)


def main(argv: Sequence[str]) -> int:
    """Print the table and the recommendation; returns the exit status."""
    parser = make_parser(__doc__)
    flags = parser.parse_args(argv)
    rivals: list[Outcome] = []
    try:
        check_arguments(flags)
        run = RecordedRun.read(flags.trace)
        found = compare(flags, run, show_progress=True)
        if flags.rivals:
            slots = max((one.slots for one in found.outcomes), default=0)
            rivals = _rivals(flags.rivals, found.job, slots)
        if flags.save:
            _save(flags, found, [*found.outcomes, *rivals])
    except (ValueError, OSError, MemoryError, CompileError) as error:
        # One line, without the usage of a parser's error.
        text = str(error) or "there is not enough memory"
        parser.exit(2, f"{parser.prog}: error: {text}\n")
    steps, layers = found.job.counts[found.job.first :].shape[:2]
    print(
        f"{found.settings.header}; {steps} steps and {layers} layers of {flags.trace}\n\n"
        f"{describe([*found.outcomes, *rivals])}\n\n"
        f"{describe_parts(found.forced, found.stock, found.advice.considered)}\n\n"
        f"{found.advice.text}"
    )
    for note in found.notes:
        print(f"note: {note}")
    return 0


def _save(flags: argparse.Namespace, found: Comparison, outcomes: Sequence[Outcome]) -> None:
    """Write the comparison to ``flags.save`` as JSON; see docs/what-if.md for its keys."""
    best = found.advice.best
    saved = dict(
        recommendation=found.advice.text,
        flags=best and f"--moe-fssdp {flags_of(best)}",
        plan=best and _plan(found.job, best),
        arguments=vars(flags),
        settings=dataclasses.asdict(found.settings),
        outcomes=[dataclasses.asdict(one) for one in outcomes],
    )
    files.replace(flags.save, json.dumps(saved, default=str) + "\n")
