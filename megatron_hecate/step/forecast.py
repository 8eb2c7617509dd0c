"""Forecast of an iteration's loads from previous iterations. Needs neither torch nor Megatron."""

from __future__ import annotations

import numpy as np

# Weight of an iteration in the measured trend, relative to the next iteration.
FORGET: float = 0.85
# Bounds of the share of the last change that is expected again. Below 0, the change is partly
# reverted.
MOST: float = 1.2
LEAST: float = -0.3


class LoadHistory:
    """Past loads and their forecast: the last iteration plus a measured share of its last change.

    Loads have a trend. Early in training an expert that gained tokens continues to gain; later most
    change is noise. The history shows which: per layer, the share ``a`` of each change that was
    found again in the next one (least squares, older changes have less weight). Let y be the square
    root of the loads, which makes the noise of counts independent of their size. Then

        forecast = (y[t] + a * (y[t] - y[t-1]))^2, scaled to the tokens of the last iteration.

    The mean of the last iterations (the Hecate paper forecasts with the mean of 5) lags behind
    every trend: on the traces in `bench/data` its error is 1.8 to 2 times as large, in the 99th
    percentile 3 to 4 times (docs/how-a-layer-decides.md).
    """

    def __init__(self) -> None:
        # Tokens of the last iteration, [L, E].
        self.last: np.ndarray | None = None
        # Square roots of the last loads, and the expected next roots, [L, E].
        self._roots: tuple[np.ndarray, ...] = ()
        self._expected: np.ndarray | None = None
        # Sums of products of successive changes, and of squared changes, [L, 1].
        self._found: np.ndarray | float = 0.0
        self._changed: np.ndarray | float = 0.0

    def append(self, load: np.ndarray) -> None:
        """Add one iteration.

        Args:
            load: tokens per layer and expert, summed over the group, [L, E].
        """
        self.last = load
        roots = np.sqrt(load.astype(np.float64))
        self._roots = (*self._roots[-2:], roots)
        if len(self._roots) == 3:
            oldest, middle, newest = self._roots
            change = middle - oldest
            next_change = newest - middle
            self._found = FORGET * self._found + (next_change * change).sum(axis=-1, keepdims=True)
            self._changed = FORGET * self._changed + (change * change).sum(axis=-1, keepdims=True)
        expected = roots
        if len(self._roots) > 1:
            changed = np.asarray(self._changed, dtype=np.float64)
            share = np.divide(self._found, changed, out=np.zeros_like(changed), where=changed > 0)
            expected = expected + np.clip(share, LEAST, MOST) * (expected - self._roots[-2])
        self._expected = np.maximum(expected, 0.0)

    def forecast(self) -> np.ndarray | None:
        """Return the expected tokens [L, E], or ``None`` before the first iteration."""
        if self._expected is None:
            return None
        expected = self._expected**2
        total = expected.sum(axis=-1, keepdims=True)
        last = self.last.sum(axis=-1, keepdims=True)
        scale = np.divide(last, total, out=np.zeros_like(total), where=total > 0)
        return expected * scale
