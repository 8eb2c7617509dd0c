"""Chart data of the report's page: lines over iterations, and pictures of layers and ranks."""

from __future__ import annotations

import base64
import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from megatron_hecate.tools.run import Run
from megatron_hecate.tools.step_model import Prediction

# most points of a line
POINTS: int = 1000
# largest number in a packed picture; one more marks cells without tokens
LEVELS: int = 65534

# name, colour of page.css, values [T]
_Series = tuple[str, str, np.ndarray]
# first iteration of a group, and one past its last
_Group = tuple[int, int]


def groups_of(num: int, limit: int) -> list[_Group]:
    """Split ``num`` iterations into at most ``limit`` groups of about equal length."""
    return list(itertools.pairwise(np.linspace(0, num, min(num, limit) + 1).astype(int).tolist()))


def lines(run: Run, prediction: Prediction | None, groups: Sequence[_Group]) -> dict[str, Any]:
    """Build the charts over iterations: a unit, and series of (name, colour, values)."""
    charts: dict[str, tuple[str, list[_Series]]] = {
        "imbalance": ("times the mean", _imbalance_series(run)),
    }
    if prediction is not None:
        charts["lost"] = ("ms per step", _time_series(run, prediction))
        if len(run.before) > 1:
            charts["step"] = ("ms", _step_series(run, prediction))
        if not run.observed:
            charts["copies"] = ("ms per step", _copy_series(run))
    return {
        chart: {
            "unit": unit,
            "series": [
                (name, colour, [_mean(values[a:b]) for a, b in groups])
                for name, colour, values in series
            ],
        }
        for chart, (unit, series) in charts.items()
    }


def _mean(values: np.ndarray) -> float | None:
    """Average the known values of a group; ``None`` without any."""
    numbers = values[~np.isnan(values)]
    if not len(numbers):
        return None
    return short(numbers.mean())


def _step_series(run: Run, prediction: Prediction) -> list[_Series]:
    """Build the time of a step: measured, modelled as it ran, as stock, under forced balance."""
    series = [("measured", "grey", run.steps_ms)]
    if run.observed:
        series.append(("modelled", "before", prediction.stock_ms))
    else:
        series.append(("modelled, with FSSDP", "after", prediction.run_ms))
        series.append(("modelled, stock", "before", prediction.stock_ms))
    series.append(("modelled, forced balance", "won", prediction.forced_ms))
    return series


def _imbalance_series(run: Run) -> list[_Series]:
    """Build quantiles over the layers of the fullest rank's load."""
    sides = [("routed", "before", run.waits)]
    if not run.observed:
        sides.append(("computed", "after", run.waits_computed))
    names = ("worst layer", "90 % of layers below", "median layer", "10 % of layers below")
    series = []
    for what, colour, ratios in sides:
        quantiles = np.quantile(ratios, (1.0, 0.9, 0.5, 0.1), axis=1)
        for name, values in zip(names, quantiles, strict=True):
            series.append((f"as {what}, {name}", colour, values))
    return series


def _time_series(run: Run, prediction: Prediction) -> list[_Series]:
    """Build the milliseconds per step lost to imbalance and won back."""
    lost = prediction.lost_ms
    series = [("lost, as routed", "before", lost)]
    if not run.observed:
        series += [
            ("lost, with FSSDP", "after", prediction.left_ms),
            ("won back, net", "won", lost - prediction.left_ms),
            ("what replicas cost, in both", "grey", run.of_step(run.price_ms)),
        ]
    return series


def _copy_series(run: Run) -> list[_Series]:
    """Build the milliseconds per step of copies, hidden behind compute and not."""
    copying = run.copying_ms
    return [
        ("all copies", "grey", run.of_step(copying)),
        ("hidden behind compute", "after", run.of_step(run.hidden_ms)),
        ("not hidden", "before", run.of_step(copying - run.hidden_ms)),
    ]


def picture(
    iteration: np.ndarray, parts: Sequence[np.ndarray], totals: np.ndarray, cells: int
) -> dict[str, Any]:
    """Build a picture of ratios, for groups of iterations and for the whole run.

    Args:
        iteration: numbers of the iterations, [T].
        parts: numerators, each [T, L, X], summed over a group.
        totals: denominator [T, L], summed over a group.
        cells: most cells of the picture.

    Returns:
        First and last iteration of each group, and for each part packed arrays [L, X, B] (B
        groups) and [L, X, 1] (whole run): 16 bits for a number from 0 to ``top``, little endian,
        as base64.
    """
    num, layers, rows = parts[0].shape
    groups = groups_of(num, min(POINTS // 4, max(1, cells // (layers * rows))))
    by_group = [_ratios(part, totals, groups) for part in parts]
    ratios = [_ratios(part, totals, [(0, num)]) for part in parts]
    top = max(float(np.nanmax(array, initial=1.0)) for array in by_group + ratios)
    return {
        "groups": [(int(iteration[a]), int(iteration[b - 1])) for a, b in groups],
        "top": top,
        "parts": [_pack(array, top) for array in by_group],
        "whole": [_pack(array, top) for array in ratios],
    }


def _ratios(part: np.ndarray, totals: np.ndarray, groups: Sequence[_Group]) -> np.ndarray:
    """Divide sums of ``part`` [T, L, X] over groups by sums of ``totals`` [T, L]; NaN for 0 / 0."""
    above = _group_sums(part, groups)
    below = _group_sums(totals[:, :, None], groups)
    return np.divide(above, below, out=np.full(above.shape, np.nan), where=below > 0)


def _group_sums(values: np.ndarray, groups: Sequence[_Group]) -> np.ndarray:
    """Sum ``values`` [T, L, X] over each group, [L, X, B]."""
    return np.stack([values[a:b].sum(axis=0) for a, b in groups], axis=-1)


def _pack(values: np.ndarray, top: float) -> str:
    """Encode values from 0 to ``top`` in 16 bits each, as base64."""
    scaled = np.rint(np.nan_to_num(values) * (LEVELS / top))
    levels = np.where(np.isnan(values), LEVELS + 1, scaled)
    return base64.b64encode(levels.astype("<u2").tobytes()).decode()


def short(value: float, *, is_missing: bool = False) -> float | None:
    """Round a number; ``is_missing``: NaN becomes ``None``."""
    if is_missing and math.isnan(value):
        return None
    return round(float(value), 6)
