"""Folder with the record of a run's MoE layers: its format and its reader.

Each job writes into a subfolder of its own, named after its start, one file per pipeline stage:
``DIR/2026-11-28T115034.123+0000/stage-000.rows``. The file is a line and rows of equal size, which
are appended, one per iteration:

| part | content |
|---|---|
| line | format, version, CRC-32 of the rest; `RunInfo` and the shape of each column as JSON |
| row | the columns of one iteration, see `COLUMNS`; CRC-32 of the columns |

`run_writer.RunWriter` writes it. This module needs numpy alone, so that a run can be read without
torch and Megatron. Letters in shapes: T iterations, L layers, E experts, N ranks, S slots.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import re
import shlex
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

FORMAT: bytes = b"megatron-hecate-record"
VERSION: int = 3
# Bytes of the first line, at most.
MOST_HEADER: int = 1 << 20
# Iterations that are read, at most: of more, every n-th.
MOST_READ: int = 4096
# Type of each column's numbers. Tokens of an expert, or of a rank, are below 2^32. The columns of
# an iteration have a first axis of the stage's layers, `TIMES` have none.
COLUMNS: dict[str, str] = {
    "iteration": "<i8",
    "time": "<f8",
    "load": "<u4",
    "peak": "<u4",
    "computed_peak": "<u4",
    "home": "<i2",
    "replica": "<i2",
    "late": "<u4",
    "rank_load": "<u4",
    "crossing": "<u4",
    "window": "<f4",
    "factor": "<f8",
    "stock_factor": "<f8",
}
# Columns with one value per iteration.
TIMES = ("iteration", "time")


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunInfo:
    """Constant properties of a run, for one pipeline stage or for all.

    Args:
        mode: ``observe`` (stock training) or ``fssdp``.
        layers: names of the layers, such as ``layer 3``, [L].
        num_experts: E, number of experts of the layer with most.
        ranks: N, size of the expert-parallel group.
        node: node of each rank, [N].
        top_k: experts per token.
        slots: S, replicas that a rank can hold per layer; 0 when observing.
        shape: fields of `plan.LayerShape`; empty for loads without a run folder.
        speeds: fields of `plan.Speeds`; as ``shape``.
        job: sizes and layout of the job, see `record.job_sizes`; as ``shape``.
        lifetime: resolved setting of `HecateConfig`.
        transport: resolved setting of `HecateConfig`.
        started: start time of the job, ISO 8601 with time zone; empty in records without jobs.
    """

    mode: str
    layers: tuple[str, ...]
    num_experts: int
    ranks: int
    node: tuple[int, ...]
    top_k: int = 1
    slots: int = 0
    shape: Mapping[str, float] = dataclasses.field(default_factory=dict)
    speeds: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    job: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    lifetime: str = ""
    transport: str = ""
    started: str = ""

    @property
    def form(self) -> tuple:
        """Properties that all jobs of a run share."""
        return self.mode, self.layers, self.num_experts, self.ranks, self.slots, self.top_k


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class RunRecord:
    """Record of a run, all stages together.

    Layers are in the order of the model; iterations are ascending, and recorded by all stages.

    Args:
        info: properties of the whole run.
        stages: properties of each pipeline stage; empty for loads without a run folder.
        iteration: iteration numbers as counted by Megatron, [T] int64. A record of more than
            `MOST_READ` iterations is read with gaps.
        time: end of each iteration, [T] float64 unix seconds.
        load: tokens per expert, summed over the group, [T, L, E] int64; 0 for experts that a layer
            lacks.
        peak: tokens of the fullest rank of each microbatch, as routed, summed over microbatches,
            [T, L] int64: at least the fullest rank's of the iteration. Only the sum is kept,
            because the time of a step depends on it alone. ``None`` if not counted.
        computed_peak: the same for tokens as computed with FSSDP, [T, L] int64; ``None`` if not
            counted, as where the experts' input is padded.
        replica: experts in replica slots, [T, L, N, S] int64, -1 in empty slots; ``None`` like all
            further arrays when observing. If microbatches have plans of their own, the last one's.
        late: number of replicas fetched after the gate, [T, L] int64.
        rank_load: tokens computed by each rank, without padding, [T, L, N] int64.
        crossing: tokens computed on another node than the one they start on, [T, L] int64; ``None``
            if not counted.
        window: measured time from a layer's attention to its experts, which hides copies, [T, L]
            seconds; NaN before the first measurement.
        home: rank of each expert's home, [T, L, E] int64; ``None`` if experts stay at their
            original homes.
        factor: largest rank load of a microbatch as computed, over its mean, [T, L]: what
            ``moe_expert_rank_capacity_factor`` must be at least, without padding.
        stock_factor: the same for each expert at its original home, [T, L]; also when observing.
    """

    info: RunInfo
    stages: tuple[RunInfo, ...] = ()
    iteration: np.ndarray
    time: np.ndarray
    load: np.ndarray
    peak: np.ndarray | None = None
    computed_peak: np.ndarray | None = None
    home: np.ndarray | None = None
    replica: np.ndarray | None = None
    late: np.ndarray | None = None
    rank_load: np.ndarray | None = None
    crossing: np.ndarray | None = None
    window: np.ndarray | None = None
    factor: np.ndarray | None = None
    stock_factor: np.ndarray | None = None


def row_type(columns: Mapping[str, Sequence[int]]) -> np.dtype:
    """Return the type of a row with the given shape of each column."""
    fields = [(name, COLUMNS[name], tuple(shape)) for name, shape in columns.items()]
    return np.dtype([*fields, ("crc", "<u4")])


def header_line(info: RunInfo, columns: Mapping[str, Sequence[int]]) -> bytes:
    """Format the first line of a file.

    Args:
        info: properties of the stage.
        columns: shape of each column.
    """
    text = json.dumps({**dataclasses.asdict(info), "columns": columns}).encode()
    return b"%s %d %08x %s\n" % (FORMAT, VERSION, zlib.crc32(text), text)


def read(folder: str | Path) -> RunRecord:
    """Read the record of a run, all stages together. The run may be in progress.

    The newest job counts, and of the jobs that it continues the iterations before its first one.

    Args:
        folder: folder of the run, or of one of its jobs.

    Raises:
        ValueError: when the folder holds no record, no iteration that all stages have recorded, or
            a damaged file.
    """
    folder = Path(folder)
    jobs = [_read_job(paths) for paths in _files_by_job(folder)]
    records = [job for job in jobs if job is not None]
    if jobs and not records:
        raise ValueError(f"{folder} holds no iteration yet that all of its stages have recorded")
    if not records:
        flag = f"--moe-fssdp-record {shlex.quote(str(folder))}"
        raise ValueError(f"{folder} holds no record of a run; write one with {flag}")
    return functools.reduce(_continued, reversed(records))


def _continued(job: RunRecord, predecessor: RunRecord) -> RunRecord:
    """Return the record of ``job`` with the iterations that its ``predecessor`` had before."""
    num_kept = int(np.searchsorted(predecessor.iteration, job.iteration[0]))
    if job.info.form != predecessor.info.form or not num_kept:
        return job
    arrays: dict[str, np.ndarray | None] = {}
    for name in COLUMNS:
        parts = getattr(predecessor, name), getattr(job, name)
        is_whole = all(part is not None for part in parts)
        arrays[name] = np.concatenate([parts[0][:num_kept], parts[1]]) if is_whole else None
    return dataclasses.replace(job, **arrays)


def _files_by_job(folder: Path) -> list[list[Path]]:
    """List the files of each job of the folder by stage, the oldest job first."""
    files = sorted(folder.glob("stage-*.rows"))
    if files:
        return [files]
    # Names of a job's folder sort by its start; a further model's folder is no job's.
    jobs = [sorted(job.glob("stage-*.rows")) for job in sorted(folder.glob("*T*"))]
    return [files for files in jobs if files]


def _read_job(paths: Sequence[Path]) -> RunRecord | None:
    """Join the stages of a job; ``None`` before the first iteration that all have recorded."""
    stages = [stage for stage in map(_read_stage, paths) if stage is not None]
    if len(stages) < len(paths):
        return None
    infos, stage_rows = zip(*stages, strict=True)
    common = functools.reduce(np.intersect1d, [rows["iteration"] for rows in stage_rows])
    if not len(common):
        return None
    common = common[:: -(-len(common) // MOST_READ)]
    common_rows = [rows[np.searchsorted(rows["iteration"], common)] for rows in stage_rows]
    layers = list(itertools.chain.from_iterable(info.layers for info in infos))
    # With interleaved schedules the model's chunks alternate between stages.
    order = sorted(range(len(layers)), key=lambda index: place_in_model(layers[index]))
    experts = max(info.num_experts for info in infos)
    arrays: dict[str, np.ndarray] = {}
    for name in COLUMNS:
        if name in TIMES or not all(name in rows.dtype.names for rows in common_rows):
            continue
        parts = [rows[name] for rows in common_rows]
        if name in ("load", "home"):
            widths = [((0, 0), (0, 0), (0, experts - part.shape[2])) for part in parts]
            parts = [np.pad(part, width) for part, width in zip(parts, widths, strict=True)]
        array = np.concatenate(parts, axis=1)[:, order]
        arrays[name] = array.astype(np.float64 if array.dtype.kind == "f" else np.int64)
    return RunRecord(
        info=dataclasses.replace(
            infos[0], layers=tuple(layers[place] for place in order), num_experts=experts
        ),
        stages=infos,
        iteration=common,
        # An iteration ends when its last stage does.
        time=np.max([rows["time"] for rows in common_rows], axis=0),
        **arrays,
    )


def _read_stage(path: Path) -> tuple[RunInfo, np.ndarray] | None:
    """Read a file; ``None`` if no iteration is complete.

    Each iteration has one row, ascending. Rows that the run recorded again, after a rollback to a
    checkpoint, are dropped.
    """
    try:
        with path.open("rb") as file:
            line = file.readline(MOST_HEADER)
        if not line.endswith(b"\n"):
            return None
        info, row = _parse_header(line)
        num_rows = (path.stat().st_size - len(line)) // row.itemsize
        if not num_rows:
            return None
        rows = np.memmap(path, row, mode="r", offset=len(line), shape=(num_rows,))
        for number, values in enumerate(rows):
            if zlib.crc32(values.tobytes()[:-4]) != values["crc"]:
                raise ValueError(f"row {number} of {num_rows} is damaged; remove the file")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} cannot be read ({type(error).__name__}: {error})") from error
    iteration = rows["iteration"]
    least_later = np.minimum.accumulate(iteration[::-1])[::-1]
    is_last = np.append(iteration[:-1] < least_later[1:], True)
    return info, rows[is_last]


def _parse_header(line: bytes) -> tuple[RunInfo, np.dtype]:
    """Parse the first line of a file; return the stage's properties and the type of its rows."""
    if not line.startswith(FORMAT + b" "):
        raise ValueError("it does not begin as a record")
    _, version, crc, text = line.strip().split(b" ", 3)
    if version != b"%d" % VERSION:
        raise ValueError(
            f"version {version.decode()}, this package reads {VERSION}; read it with the release "
            "that wrote it, or record again"
        )
    if int(crc, 16) != zlib.crc32(text):
        raise ValueError("its first line is damaged")
    values = json.loads(text)
    row = row_type(values.pop("columns"))
    # JSON has lists only.
    values |= {"layers": tuple(values["layers"]), "node": tuple(values["node"])}
    return RunInfo(**values), row


def place_in_model(layer: str) -> tuple[bool, int]:
    """Return the sort key of a layer's name: multi-token prediction (MTP) last, then the number."""
    number = re.search(r"\d+$", layer)
    return layer.startswith("mtp"), int(number[0]) if number else 0
