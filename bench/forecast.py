"""Measure the error of forecasts of the next iteration's loads, on recorded routing.

    python bench/forecast.py

Error = tokens forecast on the wrong expert / tokens, mean and 99th percentile over all steps but
the first and all layers. Baseline: the mean of 5 iterations (the Hecate paper's); the ratio is its
error over the method's.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import numpy as np

from megatron_hecate.step.forecast import LoadHistory

DATA = Path(__file__).resolve().parent / "data"


def _mean(window: int) -> Callable[[list[np.ndarray]], np.ndarray]:
    return lambda past: np.mean(past[-window:], axis=0)


def _exponential(weight: float) -> Callable[[list[np.ndarray]], np.ndarray]:
    def forecast(past: list[np.ndarray]) -> np.ndarray:
        weights = weight * (1 - weight) ** np.arange(len(past))[::-1]
        return np.tensordot(weights / weights.sum(), np.array(past), axes=1)

    return forecast


def _trend(share: float) -> Callable[[list[np.ndarray]], np.ndarray]:
    return lambda past: np.maximum(0, past[-1] + share * (past[-1] - past[max(-2, -len(past))]))


# the package's forecast
OURS = "last, plus its change as far as measured"
METHODS = {
    "mean of 5 iterations (the paper's)": _mean(5),
    "mean of 2": _mean(2),
    "exponential, weight 0.7": _exponential(0.7),
    "last iteration": _mean(1),
    "last, plus half of its change": _trend(0.5),
    "last, plus all of its change": _trend(1.0),
}


def errors(loads: np.ndarray) -> dict[str, np.ndarray]:
    """Error of every method at every step and layer; ``loads`` is [steps, L, E]."""
    found: dict[str, list[np.ndarray]] = {name: [] for name in [*METHODS, OURS]}
    history = LoadHistory()
    for step in range(1, len(loads)):
        history.append(loads[step - 1])
        # Older steps have a negligible weight in all methods.
        past = list(loads[max(0, step - 12) : step])
        forecasts = {name: method(past) for name, method in METHODS.items()}
        forecasts[OURS] = history.forecast()
        for name, forecast in forecasts.items():
            wrong = np.abs(forecast - loads[step]).sum(axis=-1) / 2
            found[name].append(wrong / loads[step].sum(axis=-1))
    return {name: np.array(values) for name, values in found.items()}


def main() -> None:
    """Print a table per recording."""
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    for path in sorted(DATA.glob("*.npz")):
        loads = np.load(path)["counts"].sum(axis=2).astype(np.float64)
        found = errors(loads)
        baseline = found["mean of 5 iterations (the paper's)"].mean()
        size = f"{len(loads)} steps, {loads.shape[1]} layers"
        print(f"\n`python bench/forecast.py`, {path.name}: {size}\n")
        print("| forecast | mean error | p99 | baseline / error |\n|---|---|---|---|")
        for name, error in found.items():
            mean = error.mean()
            p99 = np.percentile(error, 99)
            print(f"| {name} | {mean:.4f} | {p99:.4f} | {baseline / mean:.2f} |")


if __name__ == "__main__":
    main()
