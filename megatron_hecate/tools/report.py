"""``python -m megatron_hecate --report RUN_DIR [--out report.html]``: one page that says what FSSDP did, and why.

The page is one file that needs no network: a template, its data, and a small plotting library (uPlot). Numbers come
from `figures`. Iterations are averaged in groups where there are more of them than a chart can show.
"""

from __future__ import annotations

import argparse
import base64
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from megatron_hecate.plan.replicas import BALANCED
from megatron_hecate.tools import run_folder
from megatron_hecate.tools.figures import Figures

PAGE = Path(__file__).with_name("page")
POINTS: int = 1000  # of a line
CELLS: int = 600_000  # of a picture of loads, over all layers, ranks and times
HOTTEST: int = 16  # experts of a layer that are shown
LEVELS: int = 65534  # of a number in a picture; one more means that there were no tokens
MIB = 2.0**20


def write(run_dir: Path, out: Path) -> Figures:
    """Read ``run_dir``, write the page to ``out``.

    Raises:
        ValueError: for a folder without a record, or one that cannot be read.
        OSError: when ``out`` cannot be written.
    """
    headers = sorted(run_dir.glob("run-*.json"))
    record = run_folder.read(run_dir)
    figures = Figures.of(record, [json.loads(path.read_text())["layers"] for path in headers])
    page = (PAGE / "page.html").read_text()
    data = json.dumps(content(figures, run_dir), separators=(",", ":")).replace("<", "\\u003c")
    for name in ("uplot.min.css", "uplot.min.js", "uplot.LICENSE", "page.css", "page.js"):
        page = page.replace(f"/*{name}*/", (PAGE / name).read_text())
    out.write_text(page.replace("/*data*/", data))
    return figures


def content(figures: Figures, run_dir: Path | str) -> dict[str, Any]:
    """All that the page shows, as JSON: words, lines over iterations, pictures, and a row for each layer."""
    record, info = figures.record, figures.record.info
    few = _groups(len(record.iteration), POINTS)
    return {
        "mode": info.mode,
        "title": "What imbalance costs" if figures.observed else "What FSSDP did",
        "facts": _facts(figures, run_dir),
        "words": sentences(figures, run_dir),
        "cards": _cards(figures),
        "iterations": [_round(record.iteration[a:b].mean(), 1) for a, b in few],
        "lines": _lines(figures, few),
        "loads": _loads(figures),
        "spread": _spread(figures),
        "experts": _experts(figures),
        "layers": {"names": list(info.layers), "rows": _rows(figures)},
    }


def sentences(figures: Figures, run_dir: Path | str) -> list[str]:
    """What matters, in words."""
    record, info = figures.record, figures.record.info
    num, layers, experts = record.load.shape
    nodes = len(set(info.node))
    where = f"{_count(info.ranks, 'rank')} on {_count(nodes, 'node')}"
    span = f"{record.iteration[0]}" if num == 1 else f"{record.iteration[0]} to {record.iteration[-1]}"
    found = [
        f"The record holds {_count(num, 'iteration')} ({span}) of {_count(layers, 'MoE layer')} with {experts} experts "
        f"over {where}. {'FSSDP was off.' if figures.observed else 'FSSDP was on.'}"
    ]
    before, after = (figures.imbalance(load) for load in (figures.before, figures.after))
    fullest = f"As the router chose, the fullest rank had {before.mean():.2f} times the mean load"
    if figures.observed:
        found.append(f"{fullest}, and {before.max():.2f} times at worst. All other ranks wait for it in every layer.")
    else:
        found.append(
            f"{fullest}; it computed {after.mean():.3f} times the mean. At worst it was {before.max():.2f} and "
            f"{after.max():.2f} times (single layers and iterations)."
        )
    found += _times(figures)
    if figures.observed:
        found.append(f"To learn what FSSDP would win on this run: python -m megatron_hecate --what-if {run_dir}")
        return found
    replicas = figures.replicas.sum(axis=2)
    bypassed = (replicas == 0).mean()
    late = 0 if record.late is None else int(record.late.sum())
    found.append(
        f"A layer had {replicas.mean():.1f} replicas on average. In {_percent(bypassed)} of all cases it had none, "
        f"because copies did not pay or no forecast was there yet. {_count(late, 'replica')} came after the gate."
    )
    return found


def _times(figures: Figures) -> list[str]:
    """What imbalance costs a step, and what of it came back."""
    if figures.costs is None:
        return ["The record holds no sizes or speeds, so times are not known; loads are."]
    lost, left, step = figures.lost_ms.mean(), figures.left_ms.mean(), 1e3 * figures.step_seconds
    stock = step if figures.observed else step + lost - left  # what stock training would take
    share = f", {_percent(lost / stock)} of a step of {_ms(stock)}" if stock > 0 else ""  # NaN is not
    if figures.observed:
        return [f"By the cost model ranks wait {_ms(lost)} per step for the fullest one{share}."]
    still, price = figures.of_step(figures.waiting_ms(figures.after)).mean(), figures.of_step(figures.price_ms).mean()
    text = f"By the cost model ranks would have waited {_ms(lost)} per step for the fullest one{share}. "
    costs = f"{_ms(still)} of imbalance are left, and replicas cost {_ms(price)}."
    if left > lost:
        return [f"{text}FSSDP cost {_ms(left - lost)} more than it won: {costs} Use fewer slots, or switch it off."]
    won = f" ({_percent((lost - left) / lost)})" if lost else ""
    return [f"{text}FSSDP won back {_ms(lost - left)} of it{won}: {costs}"]


def _facts(figures: Figures, run_dir: Path | str) -> list[tuple[str, str]]:
    info = figures.record.info
    step = figures.step_seconds
    facts = [("run", str(run_dir)), ("started", info.started), ("top k", str(info.top_k))]
    if not figures.observed:
        facts += [("slots", str(info.slots)), ("lifetime", info.lifetime), ("transport", info.transport)]
    facts.append(("step, median", "" if np.isnan(step) else _ms(1e3 * step)))
    facts += list(info.versions.items())
    return [(name, value) for name, value in facts if value]


def _cards(figures: Figures) -> list[tuple[str, str, str]]:
    """(what, value, remark) of the figures that matter most."""
    before, after = (figures.imbalance(load).mean() for load in (figures.before, figures.after))
    cards = [("fullest rank, of the mean", f"{before:.2f}", "as the router chose")]
    if not figures.observed:
        cards = [("fullest rank, of the mean", f"{before:.2f} → {after:.3f}", "as routed → as computed")]
    if figures.costs is not None:
        lost, left = figures.lost_ms.mean(), figures.left_ms.mean()
        cards.append(("lost to imbalance", _ms(lost), "per step, as the router chose"))
        if not figures.observed:
            share = f"{_percent((lost - left) / lost)} of it" if lost else "nothing to win"
            cards.append(("won back", _ms(lost - left), share))
    if not figures.observed:
        cards.append(("replicas", f"{figures.replicas.sum(axis=2).mean():.1f}", "per layer, of all ranks"))
    return cards


def _lines(figures: Figures, groups: Sequence[tuple[int, int]]) -> list[dict[str, Any]]:
    """Charts over iterations. A series is (name, colour, values); a band is between two of them."""

    def chart(name: str, unit: str, series: list[tuple[str, str, np.ndarray]], **more: Any) -> dict[str, Any]:
        mean = [(what, colour, [_round(values[a:b].mean()) for a, b in groups]) for what, colour, values in series]
        return {"name": name, "unit": unit, "series": mean, **more}

    def quantiles(load: np.ndarray, what: str, colour: str) -> list[tuple[str, str, np.ndarray]]:
        values = np.quantile(figures.imbalance(load), (1.0, 0.9, 0.5, 0.1), axis=1)
        return [
            (f"{what}, {of}", colour, values[at])
            for at, of in enumerate(("worst layer", "90 % of layers below", "median layer", "10 % of layers below"))
        ]

    on = not figures.observed
    spread = quantiles(figures.before, "as routed", "before")
    spread += quantiles(figures.after, "as computed", "after") if on else []
    charts = [chart("imbalance", "times the mean", spread, bands=[(1, 3, "before"), (5, 7, "after")][: 1 + on])]
    if figures.costs is not None:
        lost = [("lost as the router chose", "before", figures.lost_ms)]
        if on:
            lost += [("lost with FSSDP", "after", figures.left_ms)]
            lost += [("won back", "won", figures.lost_ms - figures.left_ms)]
            hidden, copying = (figures.of_step(ms) for ms in (figures.hidden_ms, figures.copying_ms))
            shown = figures.of_step(figures.copying_ms - figures.hidden_ms)
            copies = [("all copies", "grey", copying), ("hidden behind compute", "after", hidden)]
            charts.append(chart("copies", "ms per step", [*copies, ("not hidden", "before", shown)]))
        charts.insert(0, chart("lost", "ms per step", lost))
    scale, unit = 1.0, "tokens"
    if figures.costs is not None:
        scale, unit = figures.costs.shape.token_bytes / MIB, "MiB"
    memory = [("expert inputs, as routed", "before", scale * figures.fullest_rank(figures.before))]
    if on:
        memory.append(("expert inputs, as computed", "after", scale * figures.fullest_rank(figures.after)))
        memory += [("replicas", "won", figures.replica_bytes / MIB)] if figures.costs is not None else []
    charts.append(chart("memory", unit, memory))
    return charts


def _loads(figures: Figures) -> dict[str, Any]:
    """Load of every rank over the layer's mean: of the whole run [L, N], and of groups of iterations [L, B, N]."""
    num, layers, ranks = figures.before.shape
    loads = [figures.before] if figures.observed else [figures.before, figures.after]
    groups = _groups(num, max(1, CELLS // (layers * ranks)))

    def ratios(load: np.ndarray, groups: Sequence[tuple[int, int]]) -> np.ndarray:
        total = np.stack([load[a:b].sum(axis=0) for a, b in groups], axis=1)
        return _over(total, total.mean(axis=2, keepdims=True))

    whole, parts = [[ratios(load, g) for load in loads] for g in ([(0, num)], groups)]
    top = max(np.nanmax(array, initial=1.0) for array in (*whole, *parts))
    packed = {name: [_pack(a, top) for a in arrays] for name, arrays in (("whole", whole), ("parts", parts))}
    return {"groups": _named(figures, groups), "ranks": ranks, "top": top, **packed}


def _spread(figures: Figures) -> dict[str, Any]:
    """Imbalance of every layer [L, B], mean of groups of iterations."""
    groups = _groups(len(figures.before), POINTS // 4)
    loads = [figures.before] if figures.observed else [figures.before, figures.after]
    values = [figures.imbalance(load) for load in loads]
    means = [np.stack([value[a:b].mean(axis=0) for a, b in groups], axis=1) for value in values]
    top = max(mean.max() for mean in means)
    return {"groups": _named(figures, groups), "top": top, "parts": [_pack(mean, top) for mean in means]}


def _experts(figures: Figures) -> dict[str, Any]:
    """The experts [L, K] with most tokens, and their load over the mean expert's in groups of iterations [L, K, B]."""
    load, info = figures.record.load, figures.record.info
    num, layers, experts = load.shape
    most, per_rank = min(HOTTEST, experts), experts // info.ranks
    groups = _groups(num, min(POINTS // 4, max(1, CELLS // 4 // (layers * most))))
    total = load.sum(axis=0)
    hottest = np.argsort(-total, axis=1, kind="stable")[:, :most]
    kept = np.take_along_axis(load, hottest[None], axis=2)
    mean = load.mean(axis=2)
    parts = np.stack([_over(kept[a:b].sum(axis=0), mean[a:b].sum(axis=0)[:, None]) for a, b in groups], axis=2)
    top = np.nanmax(parts, initial=1.0)
    whole = _over(np.take_along_axis(total, hottest, axis=1), total.mean(axis=1, keepdims=True))
    rows = []
    for layer in range(layers):
        replica = None if figures.record.replica is None else figures.record.replica[:, layer].reshape(num, -1)
        copies = [0.0 if replica is None else (replica == e).sum() / num for e in hottest[layer]]
        rows.append([[int(e), int(e // per_rank), _round(w), _round(c)] for e, w, c in zip(
            hottest[layer], np.nan_to_num(whole[layer]), copies, strict=True)])
    return {"groups": _named(figures, groups), "top": top, "parts": _pack(parts, top), "rows": rows}


def _rows(figures: Figures) -> list[list[Any]]:
    """Of each layer: imbalance before (mean, worst) and after, replicas, share of iterations without any, late
    replicas, ms lost and won back per step, and why."""
    before, after = (figures.imbalance(load) for load in (figures.before, figures.after))
    lost = figures.waiting_ms(figures.before).mean(axis=0)
    left = (figures.waiting_ms(figures.after) + figures.price_ms).mean(axis=0)
    replicas, late = figures.replicas.sum(axis=2), figures.record.late
    rows = []
    for at in range(before.shape[1]):
        numbers = [before[:, at].mean(), before[:, at].max(), after[:, at].mean(), after[:, at].max()]
        numbers += [replicas[:, at].mean(), (replicas[:, at] == 0).mean(), 0 if late is None else late[:, at].mean()]
        rows.append([*map(_round, [*numbers, lost[at], lost[at] - left[at]]), _why(figures, numbers, lost[at], left[at])])
    return rows


def _why(figures: Figures, numbers: Sequence[float], lost: float, left: float) -> str:
    """What was decided for a layer with these ``numbers`` of `_rows`, and for which reason."""
    balanced = numbers[0] <= BALANCED
    near = f"within {_percent(BALANCED - 1)} of the mean"
    if figures.observed:
        wait = "" if figures.costs is None else f": {_ms(lost)} per step are lost"
        return f"Balanced: the fullest rank is {near} on average." if balanced else f"Uneven{wait}."
    if not figures.record.info.slots:
        return "No slots: replicas were not allowed."
    if not numbers[4]:
        if balanced:
            return f"Balanced: the fullest rank is {near} on average, so nothing was copied."
        if figures.costs is None:
            return "Copies were judged not to pay."
        routing = 1e3 * figures.costs.world.speeds.routing * figures.costs.shape.microbatches
        if routing >= lost:
            return f"Not worth it: {_ms(lost)} per step to win, and routing to replicas alone costs {_ms(routing)}."
        return f"Not worth it: copies were judged to cost more than the {_ms(lost)} per step to win."
    text = f"{numbers[4]:.1f} replicas brought the fullest rank from {numbers[0]:.2f} to {numbers[2]:.2f} times the mean"
    if figures.costs is not None:
        text += f" and {'won' if lost >= left else 'lost'} {_ms(abs(lost - left))} per step"
    bypassed = f" Without replicas in {_percent(numbers[5])} of iterations, where none paid." if numbers[5] else ""
    return f"{text}.{bypassed}"


def _groups(num: int, most: int) -> list[tuple[int, int]]:
    """At most ``most`` groups of ``num`` iterations, in order and of about the same length: first, and one past the
    last."""
    edges = np.linspace(0, num, min(num, most) + 1).astype(int).tolist()
    return list(zip(edges, edges[1:], strict=False))


def _named(figures: Figures, groups: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """First and last iteration of each group."""
    iteration = figures.record.iteration
    return [(int(iteration[a]), int(iteration[b - 1])) for a, b in groups]


def _over(part: np.ndarray, whole: np.ndarray) -> np.ndarray:
    """Their ratio; NaN where ``whole`` is 0."""
    return np.divide(part, whole, out=np.full(part.shape, np.nan), where=whole > 0)


def _pack(values: np.ndarray, top: float) -> str:
    """``values`` from 0 to ``top`` in 16 bits each, little endian, as base64."""
    levels = np.where(np.isnan(values), LEVELS + 1, np.rint(np.nan_to_num(values) * (LEVELS / top)))
    return base64.b64encode(levels.astype("<u2").tobytes()).decode()


def _round(value: float, digits: int = 6) -> float:
    return round(float(value), digits)


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def _ms(milliseconds: float) -> str:
    if abs(milliseconds) >= 999.5:
        return f"{milliseconds / 1e3:.2f} s"
    return f"{milliseconds:.0f} ms" if abs(milliseconds) >= 99.95 else f"{milliseconds:.3g} ms"


def main(argv: Sequence[str]) -> int:
    """The command; returns its exit status."""
    parser = argparse.ArgumentParser(prog="python -m megatron_hecate --report", description=__doc__.splitlines()[0])
    parser.add_argument("run_dir", metavar="RUN_DIR", type=Path, help="folder that a run records into")
    parser.add_argument("--out", type=Path, help="the page (default: report.html in RUN_DIR)")
    arguments = parser.parse_args(argv)
    out = arguments.out or arguments.run_dir / "report.html"
    try:
        figures = write(arguments.run_dir, out)
    except (ValueError, OSError) as error:
        print(f"no report: {error}", file=sys.stderr)
        return 1
    print("\n".join([*sentences(figures, arguments.run_dir), f"The page is {out} ({out.stat().st_size / 1e6:.1f} MB)."]))
    return 0
