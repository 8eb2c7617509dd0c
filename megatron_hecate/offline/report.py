"""``megatron-hecate report RUN_DIR [--out report.html]``: page about a recorded run.

The page is one file that needs no network: a template, its data, and a small plotting library
(uPlot). Numbers are from `analysis`. Iterations are averaged in groups where a chart has fewer
points than the run has iterations.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from megatron_hecate import trace
from megatron_hecate.offline.megatron_files import read_any
from megatron_hecate.offline.report_charts import POINTS, groups_of, lines, picture, short
from megatron_hecate.plan.replicas import BALANCED
from megatron_hecate.record.analysis import Figures
from megatron_hecate.record.run_folder import read_infos

PAGE = Path(__file__).with_name("page")
# files that replace their names in the template
PARTS = ("uplot.min.css", "uplot.min.js", "uplot.LICENSE", "page.css", "charts.js", "page.js")
# most cells of a picture, over all layers and times
CELLS: int = 600_000
# most experts shown per layer
HOTTEST: int = 16


def make_parser() -> argparse.ArgumentParser:
    """Build the parser of the command."""
    parser = argparse.ArgumentParser(
        prog="megatron-hecate report", description="Write a page about a recorded run."
    )
    parser.add_argument("run_dir", metavar="RUN_DIR", type=Path, help="folder of a recorded run")
    parser.add_argument("--out", type=Path, help="the page (default: report.html in RUN_DIR)")
    parser.add_argument(
        "--stages", type=int, help="number of pipeline stages, for Megatron's own files"
    )
    return parser


def main(argv: Sequence[str]) -> int:
    """Run the command; returns its exit status."""
    arguments = make_parser().parse_args(argv)
    folder = arguments.run_dir
    out = arguments.out or folder / "report.html"
    try:
        if (merged := trace.merge(folder)) is not None:
            print(f"The trace of all ranks is {merged}: open it in ui.perfetto.dev.")
        print("\n".join(write(folder, out, arguments.stages)))
        print(f"The page is {out} ({out.stat().st_size / 1e6:.1f} MB).")
    except (ValueError, OSError) as error:
        print(f"no report: {error}", file=sys.stderr)
        return 1
    return 0


def write(folder: Path, out: Path, stages: int | None = None) -> list[str]:
    """Write the page about the record in ``folder`` to ``out``; returns the page's summary.

    Args:
        folder: run folder, or a folder of Megatron's own files.
        out: path of the page.
        stages: number of pipeline stages, see `read_megatron`.

    Raises:
        ValueError: for a folder without a record, or a record that cannot be read.
        OSError: when ``out`` cannot be written.
    """
    infos = read_infos(folder)
    found = _content(Figures(read_any(folder, stages=stages), [*infos.values()]), folder)
    page = (PAGE / "page.html").read_text()
    for name in PARTS:
        page = page.replace(f"/*{name}*/", (PAGE / name).read_text())
    # "<" is escaped so that no name in the data can close the script element.
    data = json.dumps(found, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    out.write_text(page.replace("/*data*/", data))
    return found["words"]


def _content(figures: Figures, folder: Path) -> dict[str, Any]:
    """Build all content of the page as JSON: sentences, line charts, pictures, rows of layers."""
    record = figures.record
    num, layers, _ = record.load.shape
    groups = groups_of(num, POINTS)
    hottest = np.argsort(-record.load.sum(axis=0), axis=1, kind="stable")[:, :HOTTEST]  # [L, K]
    loads = [figures.before]
    if not figures.observed:
        loads.append(figures.after)
    spread = [figures.imbalance(load)[:, :, None] for load in loads]
    hottest_loads = np.take_along_axis(record.load, hottest[None], axis=2)
    home = np.take_along_axis(figures.home[-1], hottest, axis=1)
    info = dataclasses.asdict(record.info)
    return {
        "info": {**info, "folder": str(folder), "step": _ms(figures.step_ms)},
        "observed": figures.observed,
        "words": _sentences(figures, folder),
        "mean": _means(figures),
        "iterations": [round(float(record.iteration[a:b].mean()), 1) for a, b in groups],
        "lines": lines(figures, groups),
        "loads": picture(record.iteration, loads, figures.before.mean(axis=2), CELLS),
        "spread": picture(record.iteration, spread, np.ones((num, layers)), layers * POINTS // 4),
        "hot": picture(record.iteration, [hottest_loads], record.load.mean(axis=2), CELLS // 4),
        "experts": {
            "number": hottest.tolist(),
            "home": home.tolist(),
            "replicas": _mean_replicas(record.replica, hottest),
        },
        "layers": _rows(figures),
    }


def _mean_replicas(replica: np.ndarray | None, hottest: np.ndarray) -> list[list[float]]:
    """Average the number of replicas of the hottest experts over iterations, [L, K].

    Args:
        replica: experts in all slots, [T, L, N, S]; ``None`` if FSSDP was off.
        hottest: experts of each layer, [L, K].
    """
    if replica is None:
        return [[0.0] * len(experts) for experts in hottest]
    num, layers = replica.shape[:2]
    slots = replica.reshape(num, layers, -1)
    return [
        [float((slots[:, layer] == expert).sum() / num) for expert in experts]
        for layer, experts in enumerate(hottest)
    ]


def _sentences(figures: Figures, folder: Path) -> list[str]:
    """Summarize the run in a few sentences."""
    record = figures.record
    mean = _means(figures)
    num, layers, experts = record.load.shape
    first, last = record.iteration[[0, -1]]
    nodes = len(set(record.info.node))
    about = (
        f"The record holds {_count(num, 'iteration')} ({first} to {last}) of "
        f"{_count(layers, 'MoE layer')} with {experts} experts over "
        f"{_count(record.info.ranks, 'rank')} on {_count(nodes, 'node')}. "
        f"FSSDP was {'off' if figures.observed else 'on'}."
    )
    sentences = [about, _imbalance_text(figures, mean), _time_text(figures, mean)]
    if figures.observed:
        sentences.append(_what_if_hint(figures, folder))
    else:
        sentences.append(_copies_text(figures))
    return sentences


def _imbalance_text(figures: Figures, mean: Mapping[str, float]) -> str:
    """State the imbalance as routed and, with FSSDP, as computed."""
    worst = figures.imbalance(figures.before).max()
    text = (
        f"As routed, the fullest rank had {mean['before']:.2f} times the mean load, and "
        f"{worst:.2f} times at worst (one layer in one iteration); all other ranks wait for it."
    )
    if figures.observed:
        return text
    worst = figures.imbalance(figures.after).max()
    text += (
        f" With FSSDP the fullest rank computed {mean['after']:.3f} times the mean, "
        f"and {worst:.2f} times at worst."
    )
    if moves := figures.moves:
        text += (
            f" Experts changed homes {_count(moves, 'time')}; "
            "the figures do not include the time of these moves."
        )
    return text


def _what_if_hint(figures: Figures, folder: Path) -> str:
    """Name the command that estimates the gain of FSSDP on an observed run."""
    # The time of a step is NaN for a single iteration, and NaN > 0 is false.
    step = ""
    if figures.step_ms > 0:
        step = f" --step-ms {figures.step_ms:.0f}"
    return (
        "To estimate what FSSDP would win on this run: "
        f"python -m megatron_hecate --what-if {folder} --model NAME --cluster NAME{step} "
        "(--what-if --help lists names; with several pipeline stages, add --pp)"
    )


def _copies_text(figures: Figures) -> str:
    """State the number of replicas, of late replicas, and the share of layers without any."""
    record = figures.record
    replicas = figures.replicas.sum(axis=2)
    late = 0 if record.late is None else int(record.late.sum())
    text = (
        f"A layer had {replicas.mean():.1f} replicas on average; "
        f"in all, layers fetched {_count(late, 'replica')} after the gate."
    )
    bypassed = (replicas == 0).mean()
    if bypassed and record.info.slots:
        text += (
            f" In {_percent(bypassed)} of all cases a layer had none: "
            "copies did not pay, or there was no forecast yet."
        )
    return text


def _time_text(figures: Figures, mean: Mapping[str, float]) -> str:
    """State the time per step lost to imbalance and, with FSSDP, how much of it was won back."""
    if figures.costs is None:
        return (
            "The record holds no sizes or no speeds, so times are not known; "
            "the page shows loads alone."
        )
    lost = mean["lost"]
    won = lost - mean["left"]
    # The time of a step is NaN for a single iteration, and NaN > 0 is false.
    stock_step = figures.step_ms + won
    share = ""
    if stock_step > 0:
        share = f", {_percent(lost / stock_step)} of the {_ms(stock_step)} that a step"
        if figures.observed:
            share += " took"
        else:
            share += " would have taken without FSSDP, by the same model"
    if figures.observed:
        return f"By the cost model ranks wait {_ms(lost)} per step{share}."
    text = f"By the cost model ranks would have waited {_ms(lost)} per step{share}."
    price = _ms(figures.of_step(figures.price_ms).mean())
    if won < 0:
        return (
            f"{text} FSSDP cost {_ms(-won)} more than it won: replicas took {price}. "
            "Use fewer slots, or none."
        )
    part = ""
    if lost:
        part = f", {_percent(won / lost)}"
    return f"{text} FSSDP won back {_ms(won)} of that{part}, net of the replicas' cost of {price}."


def _means(figures: Figures) -> dict[str, float]:
    """Average the main figures over iterations and layers.

    Returns:
        Imbalance before and after, ms lost before and after, replicas per layer.
    """
    values = dict(
        before=figures.imbalance(figures.before),
        after=figures.imbalance(figures.after),
        lost=figures.lost_ms,
        left=figures.left_ms,
        replicas=figures.replicas.sum(axis=2),
    )
    return {name: float(value.mean()) for name, value in values.items()}


def _rows(figures: Figures) -> list[list[Any]]:
    """Build one row per layer.

    Returns:
        Imbalance before (mean, worst) and after (mean, worst), replicas, share of iterations
        without replicas, late replicas, ms per step lost and won back, and the reason.
    """
    before = figures.imbalance(figures.before)
    after = figures.imbalance(figures.after)
    replicas = figures.replicas.sum(axis=2)
    late = figures.record.late
    if late is None:
        late = np.zeros(before.shape)
    lost = figures.waiting_ms(figures.before)
    won = lost - figures.waiting_ms(figures.after) - figures.price_ms
    columns = [before.mean(axis=0), before.max(axis=0), after.mean(axis=0), after.max(axis=0)]
    columns += [values.mean(axis=0) for values in (replicas, replicas == 0, late, lost, won)]
    return [[*map(short, row), _why(figures, row)] for row in np.stack(columns, axis=1).tolist()]


def _why(figures: Figures, row: Sequence[float]) -> str:
    """State the decision for a layer and its reason; ``row``: the layer's numbers of `_rows`."""
    before, _, after, _, replicas, without, _, lost, won = row
    if not replicas:
        return _why_none(figures, before, lost)
    text = (
        f"{replicas:.1f} replicas brought the fullest rank from {before:.2f} to {after:.2f} "
        "times the mean"
    )
    if figures.costs is not None:
        verb = "won" if won >= 0 else "lost"
        text += f" and {verb} {_ms(abs(won))} per step"
    if without:
        return f"{text}. In {_percent(without)} of iterations there was none."
    return f"{text}."


def _why_none(figures: Figures, before: float, lost: float) -> str:
    """State why a layer had no replicas.

    Args:
        figures: figures of the run.
        before: mean imbalance as routed.
        lost: milliseconds per step lost to imbalance.
    """
    if before <= BALANCED:
        return (
            f"Balanced: the fullest rank is within {_percent(BALANCED - 1)} of the mean. "
            "There is little to win."
        )
    costs = figures.costs
    wait = ""
    if costs is not None:
        wait = f": {_ms(lost)} per step are lost"
    if figures.observed:
        return f"Uneven{wait}. FSSDP was off."
    if not figures.record.info.slots:
        return f"Uneven{wait}. There were no slots for replicas."
    if costs is not None and costs.routing_ms >= lost:
        return (
            f"Not worth it: {_ms(lost)} to win, "
            f"but routing to replicas alone takes {_ms(costs.routing_ms)}."
        )
    return f"By the cost model copies would not pay{wait}."


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def _ms(milliseconds: float) -> str:
    """Format milliseconds with three digits; from 1 s on, in seconds."""
    if 0 < abs(milliseconds) < 1e-3:
        return "less than 0.001 ms"
    if abs(milliseconds) >= 999.5:
        return f"{milliseconds / 1e3:.2f} s"
    if abs(milliseconds) >= 99.5:
        return f"{milliseconds:.0f} ms"
    return f"{milliseconds:.3g} ms"
