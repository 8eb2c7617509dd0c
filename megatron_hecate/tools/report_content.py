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
from megatron_hecate.tools.comparison import Comparison, compare
from megatron_hecate.tools.job_settings import JobSettings
from megatron_hecate.tools.report_charts import POINTS, groups_of, lines, picture, short
from megatron_hecate.tools.report_text import (
    decision,
    reasons,
    sentences,
    verdict_on_fssdp,
    verdict_on_stock,
)
from megatron_hecate.tools.run import Run
from megatron_hecate.tools.step_model import Prediction
from megatron_hecate.tools.what_if import make_parser
from megatron_hecate.tools.work import Group

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
class Report:
    """A run as the page shows it.

    Args:
        folder: folder of the run.
        run: the recorded run.
        prediction: modelled times; ``None`` if sizes or speeds are unknown.
        comparison: comparison of FSSDP's settings, of an observed run with sizes.
        obstacle: why there are no modelled times, or no comparison; empty otherwise.
    """

    folder: Path
    run: Run
    prediction: Prediction | None = None
    comparison: Comparison | None = None
    obstacle: str = ""

    @classmethod
    def read(cls, folder: Path) -> Report:
        """Read a run folder.

        Raises:
            ValueError: for a folder without a record, or a record that cannot be read.
        """
        run = Run.read(folder)
        if not run.info.speeds:
            raise ValueError(f"{folder} holds no sizes and speeds; use megatron-hecate what-if")
        flags = make_parser("").parse_args([str(folder)])
        prediction = comparison = None
        obstacle = ""
        try:
            if run.observed:
                comparison = compare(flags, run)
                prediction = predict_run(comparison.settings, run)
            else:
                prediction = predict_run(JobSettings.resolve(flags, run), run)
        except (ValueError, CompileError, OSError) as error:
            # A machine without a compiler or cache, or a layout that cannot be predicted.
            obstacle = str(error)
        return cls(
            folder=folder,
            run=run,
            prediction=prediction,
            comparison=comparison,
            obstacle=obstacle,
        )

    @property
    def means(self) -> dict[str, float]:
        """Means of the main figures over iterations and layers.

        Imbalance before and after, ms lost before and after, replicas per layer.
        """
        prediction = self.prediction
        values: dict[str, Any] = dict(
            before=self.run.waits,
            after=self.run.waits_computed,
            lost=0.0 if prediction is None else prediction.lost_ms,
            left=0.0 if prediction is None else prediction.left_ms,
            replicas=self.run.replicas.sum(axis=2),
        )
        return {name: float(np.mean(value)) for name, value in values.items()}


def predict_run(settings: JobSettings, run: Run) -> Prediction:
    """Predict the steps of all recorded iterations, scaled to the measured time of a step.

    Args:
        settings: settings of the job, of the record alone.
        run: record of the job, with sizes and speeds.

    Raises:
        ValueError: if the modelled experts and all-to-alls take longer than the measured step.
    """
    group = Group(world=run.world, shape=run.shape, once=settings.once)
    mean = run.before.mean(axis=2, keepdims=True)
    stock = group.work_of_ranks(run.before, fullest=run.fullest)
    computed = group.work_of_ranks(
        run.after, fullest=run.fullest_computed, crossing=run.record.crossing
    )
    computed = dataclasses.replace(computed, price=run.price_ms / 1e3)
    model = settings.step_model(run, np.arange(len(run.info.layers)))
    is_measured = settings.step_ms is not None or not run.observed
    if is_measured and run.step_ms > 0:
        try:
            # with FSSDP the measured step is that of the loads as computed
            model = model.fitted(computed, run.step_ms / 1e3)
        except ValueError as error:
            raise ValueError(
                f"by the record's speeds, experts and all-to-alls alone take {error} ms of a step, "
                f"but a step took {run.step_ms:.1f} ms: train with --moe-fssdp-speeds FILE, "
                "which megatron-hecate measure has written on that machine"
            ) from error
    return Prediction(
        model=model,
        forced=group.work_of_ranks(np.broadcast_to(mean, run.before.shape)),
        stock=stock,
        run=computed,
    )


def page_content(report: Report, baseline: Report | None = None) -> dict[str, Any]:
    """Build all content of the page.

    Args:
        report: run of the page.
        baseline: run to compare with.
    """
    run = report.run
    record = run.record
    num, layers, _ = record.load.shape
    groups = groups_of(num, POINTS)
    hottest = np.argsort(-record.load.sum(axis=0), axis=1, kind="stable")[:, :HOTTEST]  # [L, K]
    loads = [run.before]
    waits = [run.waits]
    if not run.observed:
        loads.append(run.after)
        waits.append(run.waits_computed)
    hottest_loads = np.take_along_axis(record.load, hottest[None], axis=2)
    home = np.take_along_axis(run.home[-1], hottest, axis=1)
    info = dataclasses.asdict(record.info)
    means = report.means
    if run.observed:
        verdict = verdict_on_stock(report.comparison, report.folder, obstacle=report.obstacle)
    else:
        verdict = verdict_on_fssdp(report.prediction, report.folder, obstacle=report.obstacle)
    rows = layer_rows(report)
    spread = [one[:, :, None] for one in waits]
    return {
        "info": {**info, "folder": str(report.folder), "step": short(run.step_ms, is_missing=True)},
        "observed": run.observed,
        "verdict": dataclasses.asdict(verdict),
        "parts": _parts(report),
        "words": [*sentences(run, means), *_notes(report)],
        "mean": means,
        "iterations": [round(float(record.iteration[a:b].mean()), 1) for a, b in groups],
        "lines": lines(run, report.prediction, groups),
        "loads": picture(record.iteration, loads, run.before.mean(axis=2), CELLS),
        "spread": picture(record.iteration, spread, np.ones((num, layers)), layers * POINTS // 4),
        "hot": picture(record.iteration, [hottest_loads], record.load.mean(axis=2), CELLS // 4),
        "experts": {
            "number": hottest.tolist(),
            "home": home.tolist(),
            "replicas": _mean_replicas(record.replica, hottest),
        },
        "layers": rows,
        "reasons": reasons(run, {row[-1] for row in rows}),
        "worst": sorted(range(layers), key=lambda at: -rows[at][7])[:WORST],
        "compared": None if baseline is None else _compared(report, baseline),
    }


def _notes(report: Report) -> list[str]:
    """Return the notes of `what_if` on the record as sentences."""
    notes = [] if report.comparison is None else report.comparison.notes
    return [f"{note[0].upper()}{note[1:]}." for note in notes]


def _parts(report: Report) -> dict[str, Any]:
    """Split the time that imbalance costs, and that FSSDP wins, into named parts.

    Returns:
        ``of``: the iterations meant; ``step``: ms of a stock step; ``rows``: name, ms lost, ms won.
        Of an observed run these are the figures of `what_if`.
    """
    comparison = report.comparison
    if comparison is not None:
        setup = comparison.advice.considered
        rows = [
            [name, short(1e3 * lost), short(1e3 * setup.parts[name]) if setup else 0.0]
            for name, lost in comparison.outcomes[0].parts.items()
        ]
        steps = len(comparison.replay.loads)
        iterations = f"last {steps} iterations" if steps > 1 else "last iteration"
        return {"of": iterations, "step": short(1e3 * comparison.stock.seconds), "rows": rows}
    prediction = report.prediction
    if prediction is None:
        return {"of": "", "step": 0.0, "rows": []}
    rows = [[name, *map(short, parts)] for name, parts in prediction.parts_ms().items()]
    step = short(float(prediction.stock_ms.mean()))
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


def layer_rows(report: Report) -> list[list[Any]]:
    """Build one row per layer, with the columns of `COLUMNS`."""
    run = report.run
    waits, waits_computed = run.waits, run.waits_computed
    replicas = run.replicas.sum(axis=2)
    none = np.zeros(waits.shape)
    late = none if run.record.late is None else run.record.late
    lost = won = none
    if report.prediction is not None:
        lost = report.prediction.lost_of_layers
        won = report.prediction.won_of_layers
    columns = [
        waits.mean(axis=0),
        waits.max(axis=0),
        waits_computed.mean(axis=0),
        waits_computed.max(axis=0),
    ]
    columns += [values.mean(axis=0) for values in (replicas, replicas == 0, late, lost, won)]
    rows = np.stack(columns, axis=1).tolist()
    return [[*map(short, row), decision(run, row)] for row in rows]


def _compared(report: Report, baseline: Report) -> dict[str, Any]:
    """Compare two runs: rows of (figure, of ``baseline``, of ``report``), and layers of both.

    Layers are matched by name.
    """
    rows = []
    for one in (baseline, report):
        means = one.means
        observed = one.run.observed
        rows.append(
            {
                "run": f"{one.folder} ({'stock' if observed else 'FSSDP'})",
                "measured step, ms": short(one.run.step_ms, is_missing=True),
                "largest over mean rank load, as routed": short(means["before"]),
                "largest over mean rank load, as computed": short(means["after"]),
                "ms lost to imbalance and replicas, modelled": short(
                    means["lost"] if observed else means["left"]
                ),
                "replicas per layer": short(means["replicas"]),
            }
        )
    named = dict(zip(baseline.run.info.layers, layer_rows(baseline), strict=True))
    layers = []
    for name, row in zip(report.run.info.layers, layer_rows(report), strict=True):
        if name in named:
            old_row = named[name]
            lost = [one[7] if one[4] == 0 else short(one[7] - one[8]) for one in (old_row, row)]
            layers.append([name, old_row[2], row[2], *lost])
    return {"heads": list(rows[0]), "rows": [list(row.values()) for row in rows], "layers": layers}


def as_csv(content: Mapping[str, Any]) -> str:
    """Format the rows of layers as CSV."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["layer", *COLUMNS])
    rows: Sequence[Sequence[Any]] = content["layers"]
    for name, row in zip(content["info"]["layers"], rows, strict=True):
        writer.writerow([name, *row])
    return text.getvalue()
