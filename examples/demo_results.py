"""Results of the demo's runs: the probes' records, tables, plots and the conclusion."""

from __future__ import annotations

import csv
import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from turns import STEPS

# ratio of the upper to the lower quartile of the turns above which step times are too noisy
NOISY: float = 1.25
# steps left out of the means: they have no forecast, or warm caches
WARMUP: int = 5
MIB = 2**20


@dataclasses.dataclass(frozen=True)
class Run:
    """Record of one run over all ranks: S steps, L layers.

    Args:
        loss: mean over the step's tokens, [S].
        routed: max / mean tokens per home rank, as routed, [S, L].
        computed: max / mean tokens per rank, as computed, [S, L].
        seconds: time of each step, [S].
        replica_bytes: most bytes of replicas on any rank.
        home_bytes: bytes of expert weights of a rank.
        peak_memory: largest peak memory of a rank, of its GPU or else of its process, in bytes.
    """

    loss: np.ndarray
    routed: np.ndarray
    computed: np.ndarray
    seconds: np.ndarray
    replica_bytes: int
    home_bytes: int
    peak_memory: int

    @classmethod
    def read(cls, folder: Path, ranks: int) -> Run:
        """Read the files that the probes of all ranks wrote to ``folder``."""
        lines = []
        for rank in range(ranks):
            with (folder / f"rank{rank}.jsonl").open() as file:
                lines.append([json.loads(line) for line in file])
        # The last line of each file is about the process, not about a step.
        ends = [steps.pop() for steps in lines]
        experts = _of_steps(lines, "experts").sum(axis=0)  # [S, L, E]
        # Homes are Megatron's contiguous partition of the experts.
        routed = experts.reshape(*experts.shape[:2], ranks, -1).sum(axis=3)
        computed = _of_steps(lines, "computed")  # [R, S, L]
        loss = _of_steps(lines, "loss").sum(axis=0)
        tokens = _of_steps(lines, "tokens").sum(axis=0)
        return cls(
            loss=loss / tokens,
            routed=routed.max(axis=2) / routed.mean(axis=2),
            computed=computed.max(axis=0) / computed.mean(axis=0),
            seconds=np.array([step["seconds"] for step in lines[0]]),
            replica_bytes=int(_of_steps(lines, "replica_bytes").max()),
            home_bytes=max(end["home_bytes"] for end in ends),
            peak_memory=max(end["peak_memory"] for end in ends),
        )


def _of_steps(lines: Sequence[Sequence[dict]], key: str) -> np.ndarray:
    """Collect the values of ``key`` of all ranks and steps, [R, S, ...]."""
    return np.array([[step[key] for step in steps] for steps in lines])


@dataclasses.dataclass(frozen=True)
class Gain:
    """Step time of stock Megatron divided by FSSDP's, from paired turns.

    Args:
        middle, low, high: median and quartiles of the turns' ratios.
    """

    middle: float
    low: float
    high: float

    @classmethod
    def of(cls, stock: Run, ours: Run) -> Gain:
        """Compare the median step times of each turn.

        The first turn is left out: it fills caches and has no forecast.
        """
        steps = len(stock.seconds) // STEPS * STEPS
        medians = [
            np.median(run.seconds[:steps].reshape(-1, STEPS), axis=1)[1:] for run in (stock, ours)
        ]
        low, middle, high = np.quantile(medians[0] / medians[1], (0.25, 0.5, 0.75))
        return cls(float(middle), float(low), float(high))

    @property
    def is_clear(self) -> bool:
        """Whether the turns agree; on a busy machine they may not."""
        return self.high <= NOISY * self.low

    def __str__(self) -> str:
        return f"{self.middle:.2f} (quartiles {self.low:.2f} to {self.high:.2f})"


def conclude(stock: Run, ours: Run, gain: Gain, balanced: Gain) -> str:
    """Summarize the gain in a few sentences.

    Args:
        stock: stock run with uneven routing.
        ours: the same with FSSDP.
        gain: gain with uneven routing.
        balanced: gain with balanced routing.
    """
    before = stock.computed[STEPS:].mean()
    after = ours.computed[STEPS:].mean()
    load = f"the fullest rank computed {after:.2f} instead of {before:.2f} times the mean"
    if not (gain.is_clear and balanced.is_clear):
        return (
            "The machine is too busy to compare step times: stock/FSSDP is "
            f"{gain} with uneven routing and {balanced} with balanced routing. "
            f"{load[0].upper()}{load[1:]}."
        )
    return (
        f"With uneven routing a step took {1 / gain.middle:.0%} of stock Megatron's time: {load}. "
        f"With balanced routing it took {1 / balanced.middle:.0%}."
    )


def report(stock: Run, ours: Run, resumed: Run, *, limits: tuple[float, float], out: Path) -> bool:
    """Print the tables and write the plots; returns whether both trained the same model.

    Args:
        stock: stock run with uneven routing.
        ours: the same with FSSDP.
        resumed: stock run from FSSDP's checkpoint.
        limits: largest relative differences of losses, in the first 20 steps and after the
            checkpoint.
        out: folder of ``steps.csv`` and the plots.
    """
    difference = np.abs(stock.loss - ours.loss) / stock.loss
    after = ours.loss[-len(resumed.loss) :]
    again = np.abs(resumed.loss - after) / after
    _print_losses(stock, ours, difference)
    _print_imbalance(stock, ours)
    _print_summary(stock, ours, difference, again)
    _write_steps(stock, ours, out / "steps.csv")
    plot(stock, ours, out)
    print(f"Plots, steps.csv, logs and the checkpoint are in {out}/")
    same = difference[:20].max() <= limits[0] and again.max() <= limits[1]
    if same:
        print("FSSDP trained the same model as stock Megatron.")
    else:
        print("THE RUNS DIFFER: see the table above.")
    return bool(same)


def _print_losses(stock: Run, ours: Run, difference: np.ndarray) -> None:
    """Print the losses of all steps; ``difference``: relative difference, [S]."""
    print("\n| step | loss, stock | loss, FSSDP | relative difference |\n|---|---|---|---|")
    for step, (a, b, d) in enumerate(zip(stock.loss, ours.loss, difference, strict=True), start=1):
        print(f"| {step} | {a:.6f} | {b:.6f} | {d:.1e} |")


def _print_imbalance(stock: Run, ours: Run) -> None:
    """Print the mean imbalance of every layer."""
    print("\nImbalance, mean of the steps after the fifth:")
    print("| layer | routed | computed, stock | computed, FSSDP |\n|---|---|---|---|")
    for layer in range(stock.routed.shape[1]):
        values = (ours.routed, stock.computed, ours.computed)
        means = " | ".join(f"{value[WARMUP:, layer].mean():.3f}" for value in values)
        print(f"| {layer + 1} | {means} |")


def _print_summary(stock: Run, ours: Run, difference: np.ndarray, again: np.ndarray) -> None:
    """Print times, differences and memory of both runs.

    Args:
        stock: stock run with uneven routing.
        ours: the same with FSSDP.
        difference: relative difference of the losses, [S].
        again: the same against the run that resumed from FSSDP's checkpoint.
    """
    rows = [
        ("", "stock", "FSSDP"),
        ("---", "---", "---"),
        (
            "median step time",
            f"{np.median(stock.seconds[WARMUP:]):.3f} s",
            f"{np.median(ours.seconds[WARMUP:]):.3f} s",
        ),
        (f"stock/FSSDP, of turns of {STEPS} steps", "", str(Gain.of(stock, ours))),
        ("largest relative loss difference, first 20 steps", "", f"{difference[:20].max():.1e}"),
        (f"the same, all {len(difference)} steps", "", f"{difference.max():.1e}"),
        ("expert weights of a rank", f"{stock.home_bytes / MIB:.1f} MiB", "the same"),
        (
            "replicas of a rank, weights and fp32 gradients, at most",
            "0",
            f"{ours.replica_bytes / MIB:.1f} MiB",
        ),
        (
            "peak memory of a rank; FSSDP's on a CPU with numba and with saving a checkpoint",
            f"{stock.peak_memory / MIB:.0f} MiB",
            f"{ours.peak_memory / MIB:.0f} MiB",
        ),
        (
            f"loss of the {len(again)} steps after FSSDP's checkpoint, stock against FSSDP",
            "",
            f"{again.max():.1e}",
        ),
    ]
    print("\n" + "\n".join("| " + " | ".join(row) + " |" for row in rows) + "\n")


def _write_steps(stock: Run, ours: Run, path: Path) -> None:
    """Write losses and times of all steps as CSV."""
    series = (range(1, len(stock.loss) + 1), stock.loss, ours.loss, stock.seconds, ours.seconds)
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["step", "stock_loss", "fssdp_loss", "stock_seconds", "fssdp_seconds"])
        writer.writerows(zip(*series, strict=True))


def plot(stock: Run, ours: Run, out: Path) -> None:
    """Draw ``loss.png`` (losses and their difference) and ``imbalance.png`` (layers over steps)."""
    import matplotlib

    # Agg draws into files and needs no display; the choice must precede the import of pyplot.
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    steps = np.arange(1, len(stock.loss) + 1)
    figure, (top, bottom) = plt.subplots(2, 1, figsize=(8, 6), sharex=True, height_ratios=(3, 1))
    top.plot(steps, stock.loss, color="tab:blue", linewidth=5, alpha=0.35, label="stock Megatron")
    top.plot(steps, ours.loss, color="tab:red", linewidth=1.2, label="FSSDP")
    top.set_ylabel("loss (nats per byte)")
    top.legend()
    difference = np.abs(stock.loss - ours.loss) / stock.loss
    # A logarithmic axis cannot show a difference of 0.
    bottom.semilogy(steps, np.maximum(difference, 1e-9), color="black")
    bottom.set_ylabel("relative difference")
    bottom.set_xlabel("step")
    figure.tight_layout()
    figure.savefig(out / "loss.png", dpi=120)

    layers = stock.computed.shape[1]
    figure, axes = plt.subplots(1, layers, figsize=(3.4 * layers, 3.2), sharey=True)
    for layer, axis in enumerate(axes):
        axis.plot(steps, stock.computed[:, layer], color="tab:blue", label="stock Megatron")
        axis.plot(steps, ours.computed[:, layer], color="tab:red", label="FSSDP")
        axis.set_title(f"layer {layer + 1}")
        axis.set_xlabel("step")
    axes[0].set_ylabel("max / mean tokens computed per rank")
    axes[0].legend()
    figure.tight_layout()
    figure.savefig(out / "imbalance.png", dpi=120)
