"""Content of the report's page as JSON: verdict, charts, pictures, rows of layers."""

from __future__ import annotations

import csv
import dataclasses
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from megatron_hecate.device.compile import CompileError
from megatron_hecate.record.analysis import Figures
from megatron_hecate.record.run_folder import read
from megatron_hecate.tools.comparison import Comparison, compare, make_job
from megatron_hecate.tools.modelled_run import ModelledRun
from megatron_hecate.tools.recorded_run import RecordedRun
from megatron_hecate.tools.report_charts import POINTS, groups_of, lines, picture, short
from megatron_hecate.tools.report_text import (
    NO_SIZES,
    decision,
    reasons,
    sentences,
    verdict_on_fssdp,
    verdict_on_stock,
)
from megatron_hecate.tools.what_if_arguments import make_parser

# most cells of a picture, over all layers and times
CELLS: int = 600_000
# most experts shown per layer
HOTTEST: int = 16
# layers named on the first screen
WORST: int = 3
# names of the columns of a layer's row
COLUMNS = (
    "imbalance as routed",
    "worst imbalance as routed",
    "imbalance as computed",
    "worst imbalance as computed",
    "replicas",
    "share of iterations without replicas",
    "late replicas",
    "ms lost per step",
    "ms won back per step",
    "decision",
)


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Run:
    """A run as the page shows it.

    Args:
        folder: folder of the run.
        figures: counted and measured figures.
        modelled: modelled times; ``None`` if sizes or speeds are unknown.
        found: comparison of FSSDP's settings, of an observed run with sizes.
        obstacle: why there are no modelled times, or no comparison; empty otherwise.
    """

    folder: Path
    figures: Figures
    modelled: ModelledRun | None
    found: Comparison | None
    obstacle: str = ""

    @classmethod
    def read(cls, folder: Path, *, show_progress: bool = False) -> Run:
        """Read a run folder.

        Args:
            folder: the folder.
            show_progress: whether to draw a progress bar on standard error.

        Raises:
            ValueError: for a folder without a record, or a record that cannot be read.
        """
        run = RecordedRun.read(folder)
        if run is None:
            # raises the error of a folder without a record
            read(folder)
            raise AssertionError(f"{folder} changed while it was read")
        figures = run.figures
        flags = make_parser("").parse_args([str(folder)])
        modelled = None
        found = None
        obstacle = ""
        if run.model is None or run.cluster is None:
            return cls(folder=folder, figures=figures, modelled=None, found=None, obstacle=NO_SIZES)
        try:
            made = make_job(flags, run, show_progress=show_progress)
            modelled = ModelledRun.of(run, made[1])
            if figures.observed:
                found = compare(flags, run, made=made, show_progress=show_progress)
        except (ValueError, CompileError, OSError) as error:
            # A machine without a compiler or cache, or a layout that cannot be simulated.
            obstacle = str(error)
        return cls(
            folder=folder, figures=figures, modelled=modelled, found=found, obstacle=obstacle
        )

    @property
    def means(self) -> dict[str, float]:
        """Means of the main figures over iterations and layers.

        Imbalance before and after, ms lost before and after, replicas per layer.
        """
        figures = self.figures
        zeros = np.zeros(len(figures.before))
        modelled = self.modelled
        values = dict(
            before=figures.waits,
            after=figures.waits_computed,
            lost=zeros if modelled is None else modelled.lost_ms,
            left=zeros if modelled is None else modelled.left_ms,
            replicas=figures.replicas.sum(axis=2),
        )
        return {name: float(value.mean()) for name, value in values.items()}


def content(run: Run, other: Run | None = None) -> dict[str, Any]:
    """Build all content of the page.

    Args:
        run: run of the page.
        other: run to compare with.
    """
    figures = run.figures
    record = figures.record
    num, layers, _ = record.load.shape
    groups = groups_of(num, POINTS)
    hottest = np.argsort(-record.load.sum(axis=0), axis=1, kind="stable")[:, :HOTTEST]  # [L, K]
    loads = [figures.before]
    waits = [figures.waits]
    if not figures.observed:
        loads.append(figures.after)
        waits.append(figures.waits_computed)
    hottest_loads = np.take_along_axis(record.load, hottest[None], axis=2)
    home = np.take_along_axis(figures.home[-1], hottest, axis=1)
    info = dataclasses.asdict(record.info)
    means = run.means
    if figures.observed:
        verdict = verdict_on_stock(run.found, run.folder, obstacle=run.obstacle)
    else:
        verdict = verdict_on_fssdp(figures, run.modelled, run.folder, obstacle=run.obstacle)
    rows = layer_rows(run)
    spread = [one[:, :, None] for one in waits]
    return {
        "info": {**info, "folder": str(run.folder), "step": short(figures.step_ms, missing=True)},
        "observed": figures.observed,
        "verdict": dataclasses.asdict(verdict),
        "parts": _parts(run),
        "words": [*sentences(figures, means), *_notes(run)],
        "mean": means,
        "iterations": [round(float(record.iteration[a:b].mean()), 1) for a, b in groups],
        "lines": lines(figures, run.modelled, groups),
        "loads": picture(record.iteration, loads, figures.before.mean(axis=2), CELLS),
        "spread": picture(record.iteration, spread, np.ones((num, layers)), layers * POINTS // 4),
        "hot": picture(record.iteration, [hottest_loads], record.load.mean(axis=2), CELLS // 4),
        "experts": {
            "number": hottest.tolist(),
            "home": home.tolist(),
            "replicas": _mean_replicas(record.replica, hottest),
        },
        "layers": rows,
        "ranks": _ranks(figures),
        "reasons": reasons(figures, {row[-1] for row in rows}),
        "worst": sorted(range(layers), key=lambda at: -rows[at][7])[:WORST],
        "compared": None if other is None else _compared(run, other),
    }


def _ranks(figures: Figures) -> list[dict[str, Any]]:
    """Return the verdict about every rank, slow or hot; empty if experts were not timed."""
    return [
        {
            "stage": stage,
            "rank": speed.rank,
            # JSON has no NaN.
            "pace": None if np.isnan(speed.pace) else round(speed.pace, 3),
            "load": None if np.isnan(speed.load) else round(speed.load, 3),
            "verdict": speed.verdict,
            "since": speed.since,
        }
        for stage, speeds in figures.rank_speeds.items()
        for speed in speeds
    ]


def _notes(run: Run) -> list[str]:
    """Return the notes of `what_if` on the record as sentences."""
    if run.found is None:
        return []
    return [f"{note[0].upper()}{note[1:]}." for note in run.found.notes]


def _parts(run: Run) -> dict[str, Any]:
    """Split the time that imbalance costs, and that FSSDP wins, into named parts.

    Returns:
        ``of``: the iterations meant; ``step``: ms of a stock step; ``rows``: name, ms lost, ms won.
        Of an observed run these are the figures of `what_if`.
    """
    if run.found is not None:
        found = run.found
        way = found.advice.considered
        rows = [
            [name, short(1e3 * lost), short(1e3 * way.parts[name]) if way else 0.0]
            for name, lost in found.forced.parts.items()
        ]
        steps = len(found.job.counts) - found.job.first
        of = f"last {steps} iterations" if steps > 1 else "last iteration"
        return {"of": of, "step": short(1e3 * found.stock.seconds), "rows": rows}
    if run.modelled is None:
        return {"of": "", "step": 0.0, "rows": []}
    rows = [
        [name, short(lost), short(won)] for name, (lost, won) in run.modelled.parts_ms().items()
    ]
    step = short(float(run.modelled.stock_ms.mean()))
    return {"of": "all iterations", "step": step, "rows": rows}


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


def layer_rows(run: Run) -> list[list[Any]]:
    """Build one row per layer, with the columns of `COLUMNS`."""
    figures = run.figures
    before = figures.waits
    after = figures.waits_computed
    replicas = figures.replicas.sum(axis=2)
    late = figures.record.late
    if late is None:
        late = np.zeros(before.shape)
    lost = won = np.zeros(before.shape)
    if run.modelled is not None:
        lost = run.modelled.lost_of_layers
        won = run.modelled.won_of_layers
    columns = [before.mean(axis=0), before.max(axis=0), after.mean(axis=0), after.max(axis=0)]
    columns += [values.mean(axis=0) for values in (replicas, replicas == 0, late, lost, won)]
    return [
        [*map(short, row), decision(figures, row)] for row in np.stack(columns, axis=1).tolist()
    ]


def _compared(run: Run, other: Run) -> dict[str, Any]:
    """Compare two runs: rows of (figure, of ``other``, of ``run``), and layers of both.

    Layers are matched by name.
    """
    rows = []
    for one in (other, run):
        means = one.means
        mode = "stock" if one.figures.observed else "FSSDP"
        rows.append(
            {
                "run": f"{one.folder} ({mode})",
                "measured step, ms": short(one.figures.step_ms, missing=True),
                "largest over mean rank load, as routed": short(means["before"]),
                "largest over mean rank load, as computed": short(means["after"]),
                "ms lost to imbalance and replicas, modelled": short(
                    means["lost"] if one.figures.observed else means["left"]
                ),
                "replicas per layer": short(means["replicas"]),
            }
        )
    named = dict(zip(other.figures.record.info.layers, layer_rows(other), strict=True))
    layers = []
    for name, row in zip(run.figures.record.info.layers, layer_rows(run), strict=True):
        if name in named:
            before = named[name]
            left = [one[7] if one[4] == 0 else short(one[7] - one[8]) for one in (before, row)]
            layers.append([name, before[2], row[2], *left])
    return {"heads": list(rows[0]), "rows": [list(row.values()) for row in rows], "layers": layers}


def as_csv(found: Mapping[str, Any]) -> str:
    """Format the rows of layers as CSV."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["layer", *COLUMNS])
    rows: Sequence[Sequence[Any]] = found["layers"]
    for name, row in zip(found["info"]["layers"], rows, strict=True):
        writer.writerow([name, *row])
    return text.getvalue()
