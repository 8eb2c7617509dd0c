"""Compare imbalance, traffic and modelled step time of all planners on many loads.

Loads are recorded or synthetic.

    python bench/balance.py           all loads, 8 to 64 ranks, all planners; minutes
    python bench/balance.py --trace FILE.npz --ranks 32 --slots 2

The benchmark replays a load step by step, every layer on its own, from the first step, which no
planner can forecast (`hecate-unpriced` fills its slots even then, all other planners start without
replicas; `--skip 1` leaves that step out). Figures are means over steps and layers unless named
otherwise; only the columns marked * depend on the machine. Rivals are our own implementations of
published descriptions (`bench/rivals/`), so their figures are not their authors'.

| column | meaning |
|---|---|
| imbalance | max / mean rank load; `moe_expert_rank_capacity_factor` must be its maximum |
| copies, late | weights of experts received per rank, layer and step, before and after the gate |
| most extra experts | experts on the fullest rank beyond its even share: memory |
| GB | sent per layer and step by all ranks together: weights, gradients, optimizer state |
| tokens crossing | share of (token, expert) pairs computed on another node than their own |
| step time | modelled time of the layer with the compute around it, forced balance = 1 |
| place us, split us | median time per layer before and after the gate |

Copies are arrivals. eplb keeps received experts, so only new experts count. laer restores all its
experts in every step, so all of its experts count. A late copy may take the slot of an earlier one;
both count. Planning time is not part of the step time; our planner is compiled, the rivals use
numpy.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from cases import SYNTHETIC_STEPS, Case, cases
from loads import synthetic_names
from rivals import find_planners
from rivals.planner import Planner
from rivals.report import COLUMNS, Row, markdown
from rivals.score import Score, check_plan, score

LEGEND: str = """
* on this machine; all other columns are the same everywhere
imbalance: max / mean rank load, over all steps and layers; 1 is perfect
copies, late: weights received per rank, layer and step. eplb: new replicas only; laer: all experts
step time: modelled, forced balance = 1; planning (place us, split us) is not part of it"""


@dataclasses.dataclass(frozen=True, eq=False)
class Result:
    """Figures of one planner on one load.

    Args:
        figures: an array [T, L] for every field of `Score`.
        place_us, split_us: median planning times before and after the gate, in microseconds.
    """

    figures: dict[str, np.ndarray]
    place_us: float
    split_us: float

    def row(self, case: Case, planner: type[Planner], *, skip: int, forced_seconds: float) -> Row:
        """Summarize the steps after the first ``skip`` as one row of the table."""
        counted = {name: value[skip:] for name, value in self.figures.items()}
        imbalance = counted["imbalance"]
        averaged = ("copies", "late", "intra_gb", "inter_gb", "crossing")
        return dict(
            load=case.load,
            ranks=case.setting.num_ranks,
            planner=planner.name,
            when=planner.when,
            imbalance_mean=float(imbalance.mean()),
            imbalance_p95=float(np.percentile(imbalance, 95)),
            imbalance_p99=float(np.percentile(imbalance, 99)),
            imbalance_max=float(imbalance.max()),
            **{name: float(counted[name].mean()) for name in averaged},
            extra=int(counted["extra"].max()),
            time=float(counted["seconds"].sum() / forced_seconds),
            place_us=self.place_us,
            split_us=self.split_us,
        )


def replay(
    planner: type[Planner], case: Case, *, record: Callable[..., None] | None = None
) -> Result:
    """Plan every step and layer of a load with one planner; check and score every plan.

    ``record`` is called with placements before and after the gate and quotas, for every step and,
    within it, every layer.
    """
    steps, layers, _, _ = case.counts.shape
    setting = case.setting
    plans = [planner(setting) for _ in range(layers)]
    history: list[list[np.ndarray]] = [[] for _ in range(layers)]
    scores: list[Score] = []
    place_s: list[float] = []
    split_s: list[float] = []
    for t in range(steps):
        for layer, plan in enumerate(plans):
            start = time.perf_counter()
            placed = plan.place(history[layer])
            place_s.append(time.perf_counter() - start)
            # Not timed: only forced balance changes the load, and it has no cost in a real job.
            load = plan.gate(case.counts[t, layer])
            start = time.perf_counter()
            final = plan.correct(load, placed)
            quotas = plan.split(load, final)
            split_s.append(time.perf_counter() - start)
            check_plan(quotas, final, load)
            scores.append(score(quotas, final, plan.moves(placed, final), setting))
            if record:
                record(placed, final, quotas)
            # Appended after the plan: a planner's history has only earlier steps.
            history[layer].append(case.counts[t, layer])
    figures = {}
    for field in dataclasses.fields(Score):
        values = [getattr(result, field.name) for result in scores]
        figures[field.name] = np.reshape(values, (steps, layers))
    return Result(figures, float(np.median(place_s)) * 1e6, float(np.median(split_s)) * 1e6)


def compare(case: Case, planners: Sequence[type[Planner]], *, skip: int) -> list[Row]:
    """Replay a load with every planner.

    Args:
        case: load and group.
        planners: planners to compare.
        skip: first steps that are replayed, but not counted.

    Returns:
        One row per planner.
    """
    # The baseline of the column "step time".
    forced = replay(find_planners()["forced"], case)
    forced_seconds = float(forced.figures["seconds"][skip:].sum())
    rows = []
    for planner in planners:
        start = time.perf_counter()
        result = replay(planner, case)
        rows.append(result.row(case, planner, skip=skip, forced_seconds=forced_seconds))
        seconds = time.perf_counter() - start
        about = f"{case.load}, {case.setting.num_ranks} ranks, {planner.name}"
        print(f"{about}: {seconds:.1f} s", file=sys.stderr)
    return rows


def _planners(names: str) -> list[type[Planner]]:
    found = find_planners()
    if names == "all":
        wanted = list(found)
    else:
        wanted = list(dict.fromkeys(names.split(",")))
    if unknown := [name for name in wanted if name not in found]:
        raise ValueError(f"no planner is named {', '.join(unknown)}; there are {', '.join(found)}")
    return [found[name] for name in wanted]


def number(text: str) -> float:
    """Parse a finite float; argparse shows this function's name for invalid text."""
    if not math.isfinite(value := float(text)):
        raise argparse.ArgumentTypeError(f"{text} is not finite")
    return value


def _parser() -> argparse.ArgumentParser:
    """Build the command line's parser."""
    parser = argparse.ArgumentParser(
        usage="%(prog)s [--help] [options]",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--trace", action="append", metavar="FILE.npz", help="a recorded load; may be repeated")
    # argparse formats its help with %, and some names contain it.
    loads = ", ".join(synthetic_names()).replace("%", "%%")
    add("--load", metavar="NAME,...", help=f"synthetic loads: {loads}")
    add("--ranks", default="8,16,32,64", metavar="R,...", help="group sizes (%(default)s)")
    add(
        "--per-node",
        type=int,
        default=8,
        help="ranks per node (%(default)s); a smaller group is one node",
    )
    add("--slots", type=int, default=2, help="copies a rank may host (%(default)s)")
    add(
        "--planner",
        default="all",
        metavar="NAME,...",
        help=f"all (the default), or of {', '.join(find_planners())}",
    )
    add(
        "--steps",
        type=int,
        help=f"first steps only (all of a recording, {SYNTHETIC_STEPS} of synthetic loads)",
    )
    add(
        "--skip",
        type=int,
        default=0,
        help="replay, but do not count, the first steps (%(default)s)",
    )
    _add_layer_options(parser)
    return parser


def _add_layer_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the priced layer."""
    shape = parser.add_argument_group("the priced layer (default: Qwen3-30B-A3B on H100)")
    add = shape.add_argument
    add("--hidden", type=int, default=2048, help="hidden size (%(default)s)")
    add("--ffn", type=int, default=768, help="an expert's ffn size (%(default)s)")
    add("--pairs", type=number, default=16384, help="pairs per rank and microbatch (%(default)s)")
    add("--microbatches", type=int, default=1, help="microbatches per iteration (%(default)s)")
    # Default: attention of 4,096 tokens, 0.16 TFLOP of projections and 0.14 of causal scores at
    # 45 % of 989 TFLOP/s.
    add("--hidden-us", type=number, default=650, help="compute before the layer (%(default)s)")
    add("--transport", choices=("nvlink", "p2p"), default="nvlink", help="of copies (%(default)s)")
    add("--measured", type=Path, metavar="FILE", help="links and speed from a measurement file")


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse and validate the command line; adds ``planners`` and ``cases``."""
    parser = _parser()
    args = parser.parse_args(argv)
    for name in ("per_node", "hidden", "ffn", "pairs", "microbatches", "steps"):
        value = getattr(args, name)
        if value is not None and value < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1, got {value}")
    for name in ("slots", "skip", "hidden_us"):
        value = getattr(args, name)
        if value < 0:
            parser.error(f"--{name.replace('_', '-')} must not be negative, got {value}")
    try:
        # Group sizes without duplicates, in the given order.
        args.ranks = list(dict.fromkeys(int(size) for size in args.ranks.split(",")))
        assert min(args.ranks) > 0
    except (ValueError, AssertionError):
        parser.error(f"--ranks takes numbers of ranks, as in 8,16,32, got {args.ranks!r}")
    try:
        args.planners = _planners(args.planner)
        args.cases = list(cases(args))
    except ValueError as error:
        parser.error(str(error))
    return args


def main(argv: Sequence[str] | None = None) -> list[Row]:
    """Run the benchmark; returns the rows."""
    args = _arguments(argv)
    rows: list[Row] = []
    for case in args.cases:
        rows += compare(case, args.planners, skip=args.skip)
    print(markdown(rows, COLUMNS))
    print(LEGEND)
    return rows


if __name__ == "__main__":
    main()
