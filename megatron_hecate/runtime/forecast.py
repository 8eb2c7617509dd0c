"""The forecast of an iteration's loads, from those of the iterations before. Needs neither torch nor Megatron."""

from __future__ import annotations

import copy
from collections import deque

import numpy as np

FORGET: float = 0.85  # weight of an iteration in the measured trend, relative to the one after it
MOST: float = 1.2  # of the last change that may be expected to happen again; below 0, part of it is taken back
LEAST: float = -0.3


class LoadHistory:
    """Past loads, and the forecast: the last iteration, plus as much of its change as was found again so far.

    Loads have a trend. Early in training an expert that gained tokens goes on gaining; later most change is noise. Both
    are seen in the past: per layer, the share ``a`` of each change that was found again in the next one (least squares,
    older changes count less). With y the square root of the loads, which makes the noise of counts alike for all sizes,

        forecast = (y[t] + a * (y[t] - y[t-1]))^2, scaled to the tokens of the last iteration.

    The mean of the last iterations (the Hecate paper forecasts by that of 5) lags behind every trend: on the traces in
    `bench/data` its error is 1.8 to 2 times as large, in the 99th percentile 3 to 4 times (`bench/forecast.py`).
    """

    def __init__(self) -> None:
        self.last: np.ndarray | None = None  # [L, E] tokens of the last iteration
        self._roots: deque[np.ndarray] = deque(maxlen=3)  # [L, E] square roots of loads
        self._expected: np.ndarray | None = None  # [L, E] the next of them
        self._found: np.ndarray | float = 0.0  # [L, 1] sums of products of neighbouring changes
        self._changed: np.ndarray | float = 0.0  # and of squares

    def copy(self) -> LoadHistory:
        """A history that goes on by itself."""
        other = copy.copy(self)
        # the arrays are never written to
        other._roots = self._roots.copy()
        return other

    def append(self, load: np.ndarray) -> None:
        """Add one iteration: ``load`` is [L, E] tokens per layer and expert, over the whole group."""
        self.last = load
        roots = np.sqrt(load.astype(np.float64))
        self._roots.append(roots)
        if len(self._roots) == 3:
            oldest, middle, newest = self._roots
            change, next_change = middle - oldest, newest - middle
            self._found = FORGET * self._found + (next_change * change).sum(axis=-1, keepdims=True)
            self._changed = FORGET * self._changed + (change * change).sum(axis=-1, keepdims=True)
        expected = roots
        if len(self._roots) > 1:
            changed = np.asarray(self._changed, dtype=np.float64)
            share = np.divide(self._found, changed, out=np.zeros_like(changed), where=changed > 0)
            expected = expected + np.clip(share, LEAST, MOST) * (expected - self._roots[-2])
        self._expected = np.maximum(expected, 0.0)

    def forecast(self) -> np.ndarray | None:
        """[L, E] expected tokens, or ``None`` before the first iteration."""
        if self._expected is None:
            return None
        expected = self._expected**2
        total = expected.sum(axis=-1, keepdims=True)
        last = self.last.sum(axis=-1, keepdims=True)
        return expected * np.divide(last, total, out=np.zeros_like(total), where=total > 0)
