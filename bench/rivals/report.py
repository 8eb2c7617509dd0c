"""Table, CSV and plots of the benchmark's rows, and the dump of its plans."""

from __future__ import annotations

import csv
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from megatron_hecate.plan import Placement, Quotas

Row = dict[str, str | int | float]

# column of the CSV -> (heading in the table, format)
COLUMNS: dict[str, tuple[str, str]] = {
    "load": ("load", "s"),
    "ranks": ("ranks", "d"),
    "planner": ("planner", "s"),
    "when": ("plans", "s"),
    "imbalance_mean": ("imbalance mean", ".3f"),
    "imbalance_p95": ("p95", ".3f"),
    "imbalance_p99": ("p99", ".3f"),
    "copies": ("copies/rank", ".2f"),
    "late": ("late/rank", ".2f"),
    "extra": ("most extra experts", "d"),
    "intra_gb": ("GB in nodes", ".2f"),
    "inter_gb": ("GB between", ".2f"),
    "crossing": ("tokens crossing", ".1%"),
    "time": ("step time", ".3f"),
    "place_us": ("place us*", ".0f"),
    "split_us": ("split us*", ".0f"),
}
CURVE: dict[str, tuple[str, str]] = {
    "load": ("load", "s"),
    "ranks": ("ranks", "d"),
    "planner": ("planner", "s"),
    "allowed": ("copies/rank allowed", ".2f"),
    "copies": ("copies/rank used", ".2f"),
    "imbalance_mean": ("imbalance mean", ".3f"),
    "imbalance_p99": ("p99", ".3f"),
}


def markdown(rows: Sequence[Row], columns: dict[str, tuple[str, str]]) -> str:
    """A table with one line per row."""
    lines = [[heading for heading, _ in columns.values()]]
    lines += [[format(row[name], spec) for name, (_, spec) in columns.items()] for row in rows]
    left = [spec == "s" for _, spec in columns.values()]
    width = [max(len(line[i]) for line in lines) for i in range(len(left))]
    rule = ["-" * w if is_left else "-" * (w - 1) + ":" for w, is_left in zip(width, left, strict=True)]
    return "\n".join(
        "| "
        + " | ".join(f"{cell:<{w}}" if f else f"{cell:>{w}}" for cell, w, f in zip(line, width, left, strict=True))
        + " |"
        for line in [lines[0], rule, *lines[1:]]
    )


def write_csv(path: Path, rows: Sequence[Row], columns: dict[str, tuple[str, str]]) -> None:
    """Every row with full precision."""
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(columns), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def plot_rows(folder: Path, rows: Sequence[Row]) -> None:
    """Per load one PNG: imbalance and step time over group size, a line per planner."""
    plt = load_pyplot()
    for load in dict.fromkeys(row["load"] for row in rows):
        figure, axes = plt.subplots(1, 2, figsize=(12, 5))
        for number, planner in enumerate(dict.fromkeys(row["planner"] for row in rows)):
            mine = [row for row in rows if row["load"] == load and row["planner"] == planner]
            style = dict(marker="os^vD"[number % 5], color=f"C{number % 10}", linestyle="-" if number < 10 else "--")
            for axis, column in zip(axes, ("imbalance_mean", "time"), strict=True):
                axis.plot([row["ranks"] for row in mine], [row[column] for row in mine], label=planner, **style)
        for axis, title in zip(axes, ("imbalance left (mean)", "modelled step time, forced balance = 1"), strict=True):
            axis.set(title=f"{load}: {title}", xlabel="ranks", xscale="log", yscale="log")
            axis.set_xticks(ticks := sorted({int(row["ranks"]) for row in rows}), labels=map(str, ticks))
            axis.set_xticks([], minor=True)
            axis.yaxis.set_major_formatter("{x:.2f}")
            axis.yaxis.set_minor_formatter("{x:.2f}")
        axes[1].legend(loc="upper left", bbox_to_anchor=(1, 1), fontsize="small")
        _save(figure, folder / f"{load}.png", plt)


def plot_curve(folder: Path, rows: Sequence[Row]) -> None:
    """Per load one PNG: imbalance left over copies per rank."""
    plt = load_pyplot()
    for load in dict.fromkeys(row["load"] for row in rows):
        figure, axis = plt.subplots(figsize=(7, 5))
        cases = dict.fromkeys((row["planner"], row["ranks"]) for row in rows if row["load"] == load)
        planners = list(dict.fromkeys(planner for planner, _ in cases))
        sizes = sorted({ranks for _, ranks in cases})
        for planner, ranks in cases:
            mine = [row for row in rows if (row["load"], row["planner"], row["ranks"]) == (load, planner, ranks)]
            style = dict(color=f"C{sizes.index(ranks)}", linestyle=["-", "--", ":"][planners.index(planner) % 3])
            x, y = [row["copies"] for row in mine], [row["imbalance_mean"] for row in mine]
            axis.plot(x, y, marker=".", label=f"{planner}, {ranks} ranks", **style)
        axis.set(title=f"{load}: imbalance left (mean)", xlabel="copies per rank", yscale="log")
        axis.yaxis.set_major_formatter("{x:.2f}")
        axis.yaxis.set_minor_formatter("{x:.2f}")
        axis.legend(fontsize="small")
        _save(figure, folder / f"{load}-curve.png", plt)


def load_pyplot() -> Any:
    """matplotlib's pyplot, drawing to files; ValueError where there is none."""
    try:
        import matplotlib
    except ImportError as error:
        raise ValueError("--plot needs matplotlib: pip install matplotlib") from error
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt


def _save(figure: Any, path: Path, plt: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120, bbox_inches="tight")
    plt.close(figure)


class Dump:
    """An .npz of plans, written piece by piece: the quotas of one planner alone may be larger than memory.

    Per planner p: ``p/home [T, L, E]``, ``p/holders [T, L, E, R]`` as tokens were routed, ``p/placed [T, L, E, R]`` as
    they were before the gate, ``p/quota [T, L, R, E, R]`` tokens of rank r for expert e that go to rank d. Besides
    them ``load [T, L, R, E]`` and ``node [R]``. (Under forced balance quotas sum to loads of its own.)
    """

    def __init__(self, path: Path, *, load: np.ndarray, node: Sequence[int]) -> None:
        self._zip = zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=1)
        self._count = np.min_scalar_type(int(load.sum(axis=-1).max()))  # no quota exceeds a source's tokens
        self._shape = load.shape  # [T, L, R, E]
        self._write("load", load.astype(self._count))
        self._write("node", np.asarray(node))

    def __enter__(self) -> Dump:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        self._zip.close()

    @contextmanager
    def planner(self, name: str) -> Iterator[Callable[..., None]]:
        """Take ``add(placed, final, quotas)`` for every step and, within it, every layer."""
        steps, layers, num_ranks, num_experts = self._shape
        home, placed, holders = [], [], []
        with self._zip.open(f"{name}/quota.npy", "w", force_zip64=True) as member:
            shape = (steps, layers, num_ranks, num_experts, num_ranks)
            descr = np.lib.format.dtype_to_descr(self._count)
            np.lib.format.write_array_header_1_0(member, dict(descr=descr, fortran_order=False, shape=shape))

            def add(before: Placement, after: Placement, quotas: Quotas) -> None:
                home.append(after.home)
                placed.append(before.holders)
                holders.append(after.holders)
                dense = np.zeros(shape[2:], dtype=self._count)
                dense[:, quotas.expert, quotas.rank] = quotas.tokens
                member.write(dense.tobytes())

            yield add
        assert len(home) == steps * layers, (len(home), self._shape)
        self._write(f"{name}/home", np.reshape(home, (steps, layers, num_experts)).astype(np.int32))
        for key, value in (("placed", placed), ("holders", holders)):
            self._write(f"{name}/{key}", np.reshape(value, (steps, layers, num_experts, num_ranks)))

    def _write(self, name: str, array: np.ndarray) -> None:
        with self._zip.open(f"{name}.npy", "w", force_zip64=True) as member:
            np.lib.format.write_array(member, array, allow_pickle=False)
