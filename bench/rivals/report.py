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

# column of the CSV -> (heading in the table, format)
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
    """A table with one line per row."""
    lines = [[heading for heading, _ in columns.values()]]
    lines += [[format(row[name], spec) for name, (_, spec) in columns.items()] for row in rows]
    left = [spec == "s" for _, spec in columns.values()]
    width = [max(len(line[i]) for line in lines) for i in range(len(left))]
    rule = [
        "-" * w if is_left else "-" * (w - 1) + ":" for w, is_left in zip(width, left, strict=True)
    ]
    return "\n".join(
        "| "
        + " | ".join(
            f"{cell:<{w}}" if f else f"{cell:>{w}}"
            for cell, w, f in zip(line, width, left, strict=True)
        )
        + " |"
        for line in [lines[0], rule, *lines[1:]]
    )


def write_csv(path: Path, rows: Sequence[Row], columns: dict[str, tuple[str, str]]) -> None:
    """Every row with full precision."""
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(columns), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


class Dump:
    """An .npz of plans, written piece by piece: the quotas of one planner alone may be larger than memory.

    Per planner p: ``p/home [T, L, E]``, ``p/holders [T, L, E, R]`` as tokens were routed, ``p/placed [T, L, E, R]`` as
    they were before the gate, ``p/quota [T, L, R, E, R]`` tokens of rank r for expert e that go to rank d. Besides
    them ``load [T, L, R, E]`` and ``node [R]``. (Under forced balance quotas sum to loads of its own.)
    """

    def __init__(self, path: Path, *, load: np.ndarray, node: Sequence[int]) -> None:
        self._zip = zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=1)
        self._count = np.min_scalar_type(
            int(load.sum(axis=-1).max())
        )  # no quota exceeds a source's tokens
        self._shape = load.shape  # [T, L, R, E]
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
        """Take ``add(placed, final, quotas)`` for every step and, within it, every layer."""
        steps, layers, num_ranks, num_experts = self._shape
        home, placed, holders = [], [], []
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
