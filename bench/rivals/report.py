"""Table and CSV of the benchmark's rows, and the dump of its plans."""

from __future__ import annotations

import csv
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType

import numpy as np

from megatron_hecate.plan import Placement
from rivals.split import Quotas

Row = dict[str, str | int | float]

# keys: columns of the CSV; values: heading in the table, and format
COLUMNS: dict[str, tuple[str, str]] = {
    "load": ("load", "s"),
    "ranks": ("ranks", "d"),
    "planner": ("planner", "s"),
    "when": ("plans", "s"),
    "imbalance_mean": ("imbalance mean", ".3f"),
    "imbalance_p95": ("p95", ".3f"),
    "imbalance_p99": ("p99", ".3f"),
    "imbalance_max": ("max", ".3f"),
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


def markdown(rows: Sequence[Row], columns: dict[str, tuple[str, str]]) -> str:
    """Format an aligned Markdown table with one line per row."""
    lines = [[heading for heading, _ in columns.values()]]
    lines += [[format(row[name], spec) for name, (_, spec) in columns.items()] for row in rows]
    left = [spec == "s" for _, spec in columns.values()]
    rule = []
    aligned = []
    for index, is_left in enumerate(left):
        width = max(len(line[index]) for line in lines)
        rule.append("-" * width if is_left else "-" * (width - 1) + ":")
        aligned.append(f"<{width}" if is_left else f">{width}")
    formatted = []
    for line in [lines[0], rule, *lines[1:]]:
        cells = [format(cell, spec) for cell, spec in zip(line, aligned, strict=True)]
        formatted.append(f"| {' | '.join(cells)} |")
    return "\n".join(formatted)


def write_csv(path: Path, rows: Sequence[Row], columns: dict[str, tuple[str, str]]) -> None:
    """Write all rows with full precision."""
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(columns), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


class Dump:
    """An .npz of plans, written piece by piece: one planner's quotas may be larger than memory.

    It holds ``load [T, L, R, E]`` and ``node [R]``, and per planner p: ``p/home [T, L, E]``,
    ``p/holders [T, L, E, R]`` after the gate, ``p/placed [T, L, E, R]`` before the gate, and
    ``p/quota [T, L, R, E, R]``, tokens of rank r for expert e that rank d computes. (Under forced
    balance the quotas sum to the balanced load, not to ``load``.)

    Args:
        path: path of the .npz.
        load: tokens per step, layer, rank and expert, [T, L, R, E].
        node: node of every rank, [R].
    """

    def __init__(self, path: Path, *, load: np.ndarray, node: Sequence[int]) -> None:
        self._zip = zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=1)
        # No quota exceeds a source's tokens.
        self._count = np.min_scalar_type(int(load.sum(axis=-1).max()))
        # [T, L, R, E]
        self._shape = load.shape
        self._write("load", load.astype(self._count))
        self._write("node", np.asarray(node))

    def __enter__(self) -> Dump:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: object, trace: TracebackType | None
    ) -> None:
        self._zip.close()

    @contextmanager
    def planner(self, name: str) -> Iterator[Callable[..., None]]:
        """Open the entries of a planner.

        Yields:
            ``add(placed, final, quotas)``, to be called for every step and, within it, every layer.
        """
        steps, layers, num_ranks, num_experts = self._shape
        home = []
        placed = []
        holders = []
        with self._zip.open(f"{name}/quota.npy", "w", force_zip64=True) as member:
            shape = (steps, layers, num_ranks, num_experts, num_ranks)
            descr = np.lib.format.dtype_to_descr(self._count)
            np.lib.format.write_array_header_1_0(
                member, dict(descr=descr, fortran_order=False, shape=shape)
            )

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
