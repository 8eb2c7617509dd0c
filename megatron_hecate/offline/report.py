"""``python -m megatron_hecate --report RUN_DIR [--out report.html]``: one page that says what FSSDP did, and why.

The page is one file that needs no network: a template, its data, and a small plotting library (uPlot). Numbers come
from `figures`. Iterations are averaged in groups where there are more of them than a chart can show.
"""

from __future__ import annotations

import argparse
import base64
import dataclasses
import itertools
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from megatron_hecate import trace
from megatron_hecate.offline.megatron_files import read_any
from megatron_hecate.plan.replicas import BALANCED
from megatron_hecate.record.analysis import Figures
from megatron_hecate.record.run_folder import read_infos

PAGE = Path(__file__).with_name("page")
POINTS: int = 1000  # of a line
CELLS: int = 600_000  # of a picture, over all layers and times
HOTTEST: int = 16  # experts of a layer that are shown
LEVELS: int = 65534  # of a number in a picture; one more means that there were no tokens
MIB = 2.0**20


def main(argv: Sequence[str]) -> int:
    """The command; returns its exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m megatron_hecate --report", description=__doc__.splitlines()[0]
    )
    parser.add_argument(
        "run_dir", metavar="RUN_DIR", type=Path, help="folder that a run records into"
    )
    parser.add_argument("--out", type=Path, help="the page (default: report.html in RUN_DIR)")
    parser.add_argument(
        "--stages", type=int, help="pipeline stages, where Megatron's own files are read"
    )
    arguments = parser.parse_args(argv)
    folder, out = arguments.run_dir, arguments.out or arguments.run_dir / "report.html"
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
    """Read the record in ``folder``, write the page to ``out``; returns its summary. ``stages`` as in `read_megatron`.

    Raises:
        ValueError: for a folder without a record, or one that cannot be read.
        OSError: when ``out`` cannot be written.
    """
    infos = read_infos(folder)
    found = _content(Figures(read_any(folder, stages=stages), [*infos.values()]), folder)
    page = (PAGE / "page.html").read_text()
    for name in ("uplot.min.css", "uplot.min.js", "uplot.LICENSE", "page.css", "page.js"):
        page = page.replace(f"/*{name}*/", (PAGE / name).read_text())
    data = json.dumps(found, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    out.write_text(page.replace("/*data*/", data))
    return found["words"]


def _content(figures: Figures, folder: Path) -> dict[str, Any]:
    """All that the page shows, as JSON: words, lines over iterations, pictures, and a row for each layer."""
    record, (num, layers, _) = figures.record, figures.record.load.shape
    few = _groups(num, POINTS)
    total = record.load.sum(axis=0)
    hottest = np.argsort(-total, axis=1, kind="stable")[:, :HOTTEST]  # [L, K]
    loads = [figures.before] if figures.observed else [figures.before, figures.after]
    spread = [figures.imbalance(load)[:, :, None] for load in loads]
    of_hottest = np.take_along_axis(record.load, hottest[None], axis=2)
    home = np.take_along_axis(figures.home[-1], hottest, axis=1)
    replica = None if record.replica is None else record.replica.reshape(num, layers, -1)
    copies = [
        [
            0.0 if replica is None else float((replica[:, layer] == e).sum() / num)
            for e in hottest[layer]
        ]
        for layer in range(layers)
    ]
    return {
        "info": {
            **dataclasses.asdict(record.info),
            "folder": str(folder),
            "step": _ms(figures.step_ms),
        },
        "observed": figures.observed,
        "words": _sentences(figures, folder),
        "mean": _means(figures),
        "iterations": [round(float(record.iteration[a:b].mean()), 1) for a, b in few],
        "lines": _lines(figures, few),
        "loads": _picture(record.iteration, loads, figures.before.mean(axis=2), CELLS),
        "spread": _picture(record.iteration, spread, np.ones((num, layers)), layers * POINTS // 4),
        "hot": _picture(record.iteration, [of_hottest], record.load.mean(axis=2), CELLS // 4),
        "experts": {
            "number": hottest.tolist(),
            "home": home.tolist(),
            "replicas": copies,
        },
        "layers": _rows(figures),
    }


def _sentences(figures: Figures, folder: Path) -> list[str]:
    """What matters, in words."""
    record, mean = figures.record, _means(figures)
    num, layers, experts = record.load.shape
    first, last = record.iteration[[0, -1]]
    found = [
        f"The record holds {_count(num, 'iteration')} ({first} to {last}) of {_count(layers, 'MoE layer')} with "
        f"{experts} experts over {_count(record.info.ranks, 'rank')} on {_count(len(set(record.info.node)), 'node')}. "
        f"FSSDP was {'off' if figures.observed else 'on'}.",
        f"As the router chose, the fullest rank had {mean['before']:.2f} times the mean load, and "
        f"{figures.imbalance(figures.before).max():.2f} times at worst (a single layer and iteration); all others wait "
        "for it.",
    ]
    if not figures.observed:
        worst = figures.imbalance(figures.after).max()
        found[1] += (
            f" With FSSDP it computed {mean['after']:.3f} times the mean, and {worst:.2f} times at worst."
        )
        if moves := figures.moves:
            found[1] += (
                f" Experts changed homes {_count(moves, 'time')}; the time of moving is in no figure here."
            )
    found.append(_times(figures, mean))
    if figures.observed:
        step = f" --step-ms {figures.step_ms:.0f}" if figures.step_ms > 0 else ""  # NaN is not
        return [
            *found,
            f"To learn what FSSDP would win on this run: python -m megatron_hecate --what-if {folder} --model NAME "
            f"--cluster NAME{step} (--what-if --help lists names; of several pipeline stages, name --pp)",
        ]
    bypassed = (figures.replicas.sum(axis=2) == 0).mean()
    late = 0 if record.late is None else int(record.late.sum())
    text = f"A layer had {mean['replicas']:.1f} replicas on average; {_count(late, 'replica')} came after the gate."
    if bypassed and record.info.slots:
        text += f" In {_percent(bypassed)} of all cases it had none: copies did not pay, or there was no forecast yet."
    return [*found, text]


def _times(figures: Figures, mean: dict[str, float]) -> str:
    """What imbalance costs a step, and what of it came back."""
    if figures.costs is None:
        return "The record holds no sizes or no speeds, so times are not known; loads are."
    lost, won = mean["lost"], mean["lost"] - mean["left"]
    stock = figures.step_ms + won  # what stock training would take
    share = (
        f", {_percent(lost / stock)} of the {_ms(stock)} that a step" if stock > 0 else ""
    )  # NaN is not
    share += (
        (" took" if figures.observed else " would have taken without FSSDP, by the same model")
        if share
        else ""
    )
    text = f"By the cost model ranks {'wait' if figures.observed else 'would have waited'} {_ms(lost)} per step{share}."
    if figures.observed:
        return text
    price = figures.of_step(figures.price_ms).mean()
    if won < 0:
        return f"{text} FSSDP cost {_ms(-won)} more than it won: replicas took {_ms(price)}. Use fewer slots, or none."
    part = f", {_percent(won / lost)}" if lost else ""
    return f"{text} FSSDP won back {_ms(won)} of that{part}; what replicas cost, {_ms(price)}, is taken off."


def _means(figures: Figures) -> dict[str, float]:
    """Over iterations (and layers): imbalance before and after, ms lost before and after, replicas of a layer."""
    before, after = (figures.imbalance(load) for load in (figures.before, figures.after))
    replicas = figures.replicas.sum(axis=2)
    values = dict(
        before=before, after=after, lost=figures.lost_ms, left=figures.left_ms, replicas=replicas
    )
    return {name: float(value.mean()) for name, value in values.items()}


def _lines(figures: Figures, groups: Sequence[tuple[int, int]]) -> dict[str, Any]:
    """Charts over iterations: a unit, and series of (name, colour, values)."""
    on, known = not figures.observed, figures.costs is not None
    spread = []
    for what, colour, load in [
        ("routed", "before", figures.before),
        ("computed", "after", figures.after),
    ][: 1 + on]:
        quantiles = np.quantile(figures.imbalance(load), (1.0, 0.9, 0.5, 0.1), axis=1)
        names = ("worst layer", "90 % of layers below", "median layer", "10 % of layers below")
        spread += [
            (f"as {what}, {name}", colour, of) for name, of in zip(names, quantiles, strict=True)
        ]
    lost, copying = figures.lost_ms, figures.copying_ms
    time = [("lost, as routed", "before", lost)]
    if on:
        time += [
            ("lost, with FSSDP", "after", figures.left_ms),
            ("won back, net", "won", lost - figures.left_ms),
        ]
        time += [("what replicas cost, in both", "grey", figures.of_step(figures.price_ms))]
    copies = [
        ("all copies", "grey", figures.of_step(copying)),
        ("hidden behind compute", "after", figures.of_step(figures.hidden_ms)),
        ("not hidden", "before", figures.of_step(copying - figures.hidden_ms)),
    ]
    charts = {"imbalance": ("times the mean", spread), "memory": _memory(figures)}
    charts |= {"lost": ("ms per step", time)} if known else {}
    charts |= {"copies": ("ms per step", copies)} if known and on else {}
    return {
        name: {
            "unit": unit,
            "series": [(*key, [_short(of[a:b].mean()) for a, b in groups]) for *key, of in series],
        }
        for name, (unit, series) in charts.items()
    }


def _memory(figures: Figures) -> tuple[str, list[tuple[str, str, np.ndarray]]]:
    """The chart of memory: its unit and series."""
    sides = [("stock", "before", figures.before), ("FSSDP", "after", figures.after)][
        : 2 - figures.observed
    ]
    if not all(info.memory for info in figures.stages or [figures.record.info]):
        return "tokens", [
            (f"{what}, experts' inputs", colour, figures.memory(load))
            for what, colour, load in sides
        ]
    homes, replicas = (
        ("weights", "grads", "optimizer"),
        ("replica_weights", "replica_grads", "transport"),
    )
    parts = [
        (f"{what}, all", colour, load, homes + replicas * (what != "stock"))
        for what, colour, load in sides
    ]
    parts += [("homes: weights, gradients, optimizer", "grey", 0 * figures.before, homes)]
    parts += [("replicas: buffers for all slots", "won", 0 * figures.before, replicas)] * (
        not figures.observed
    )
    parts += [(f"{what}, activations of experts", colour, load, ()) for what, colour, load in sides]
    return "MiB", [
        (name, colour, figures.memory(load, *names) / MIB) for name, colour, load, names in parts
    ]


def _picture(
    iteration: np.ndarray, parts: Sequence[np.ndarray], over: np.ndarray, cells: int
) -> dict[str, Any]:
    """``parts`` [T, L, X], summed over groups of iterations and of all, divided by ``over`` [T, L] likewise.

    Returns:
        The groups' first and last iterations, and of each part [L, X, B] and [L, X, 1], packed: 16 bits for a number
        from 0 to ``top``, little endian, as base64.
    """
    num, layers, rows = parts[0].shape
    groups = _groups(num, min(POINTS // 4, max(1, cells // (layers * rows))))

    def ratios(part: np.ndarray, groups: Sequence[tuple[int, int]]) -> np.ndarray:
        above, below = (
            np.stack([x[a:b].sum(axis=0) for a, b in groups], axis=-1)
            for x in (part, over[:, :, None])
        )
        return np.divide(above, below, out=np.full(above.shape, np.nan), where=below > 0)

    found = {
        "parts": [ratios(p, groups) for p in parts],
        "whole": [ratios(p, [(0, num)]) for p in parts],
    }
    top = max(float(np.nanmax(array, initial=1.0)) for arrays in found.values() for array in arrays)

    def pack(values: np.ndarray) -> str:
        levels = np.where(
            np.isnan(values), LEVELS + 1, np.rint(np.nan_to_num(values) * (LEVELS / top))
        )
        return base64.b64encode(levels.astype("<u2").tobytes()).decode()

    named = [(int(iteration[a]), int(iteration[b - 1])) for a, b in groups]
    return {
        "groups": named,
        "top": top,
        **{name: [*map(pack, arrays)] for name, arrays in found.items()},
    }


def _rows(figures: Figures) -> list[list[Any]]:
    """Of each layer: imbalance before (mean, worst) and after, replicas, share of iterations without any, late
    replicas, ms lost and won back per step, and why."""
    before, after = (figures.imbalance(load) for load in (figures.before, figures.after))
    replicas = figures.replicas.sum(axis=2)
    late = np.zeros(before.shape) if figures.record.late is None else figures.record.late
    lost = figures.waiting_ms(figures.before)
    won = lost - figures.waiting_ms(figures.after) - figures.price_ms
    columns = [before.mean(axis=0), before.max(axis=0), after.mean(axis=0), after.max(axis=0)]
    columns += [of.mean(axis=0) for of in (replicas, replicas == 0, late, lost, won)]
    return [[*map(_short, row), _why(figures, row)] for row in np.stack(columns, axis=1).tolist()]


def _why(figures: Figures, row: Sequence[float]) -> str:
    """What was decided for a layer, and for which reason."""
    before, _, after, _, replicas, without, _, lost, won = row
    costs, slots = figures.costs, figures.record.info.slots
    wait = "" if costs is None else f": {_ms(lost)} per step are lost"
    if not replicas:
        if before <= BALANCED:
            return f"Balanced: the fullest rank is within {_percent(BALANCED - 1)} of the mean. There is little to win."
        if figures.observed or not slots:
            return f"Uneven{wait}. {'FSSDP was off' if figures.observed else 'There were no slots for replicas'}."
        if costs is not None and costs.routing_ms >= lost:
            return f"Not worth it: {_ms(lost)} to win, but routing to replicas alone takes {_ms(costs.routing_ms)}."
        return f"Copies were judged not to pay{wait}."
    text = f"{replicas:.1f} replicas brought the fullest rank from {before:.2f} to {after:.2f} times the mean"
    text += (
        "" if costs is None else f" and {'won' if won >= 0 else 'lost'} {_ms(abs(won))} per step"
    )
    return (
        f"{text}. In {_percent(without)} of iterations there was none." if without else f"{text}."
    )


def _groups(num: int, most: int) -> list[tuple[int, int]]:
    """At most ``most`` groups of ``num`` iterations, of about the same length: the first, and one past the last."""
    return list(itertools.pairwise(np.linspace(0, num, min(num, most) + 1).astype(int).tolist()))


def _short(value: float) -> float:
    return round(float(value), 6)


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def _ms(milliseconds: float) -> str:
    if 0 < abs(milliseconds) < 1e-3:
        return "less than 0.001 ms"
    if abs(milliseconds) >= 999.5:
        return f"{milliseconds / 1e3:.2f} s"
    return f"{milliseconds:.0f} ms" if abs(milliseconds) >= 99.5 else f"{milliseconds:.3g} ms"
