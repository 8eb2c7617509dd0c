"""Folder with the record of a run's MoE layers: its format and its reader.

| file | content |
|---|---|
| ``run-{stage:03d}.json`` | `RunInfo` of the stage |
| ``run-{stage:03d}.lock`` | identity of the process that writes, which locks it |
| ``loads-{stage:03d}-{k:05d}.npz`` | some iterations, in order: the arrays of `RunRecord` |

`run_writer.RunWriter` writes the folder, `run_schema` checks what is read. This module needs numpy
alone, so that a run can be read without torch and Megatron.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import functools
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from megatron_hecate.files import describe, parse_json, read_file
from megatron_hecate.record.run_schema import (
    SEGMENT,
    Arrays,
    check_header,
    check_segment,
    parse_arrays,
)

# Attempts to read a folder whose files change.
RETRIES: int = 100
# Names of the files of a kind, with the stage and the number of a segment.
NAMES = {"run": "run-{:03d}.json", "loads": "loads-{:03d}-{:05d}.npz", "lock": "run-{:03d}.lock"}


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
        shape: fields of `plan.LayerShape`; empty if unknown.
        speeds: fields of `plan.Speeds`; empty if unknown.
        memory: memory of a rank of the stage, bytes: fields of
            `replicas.memory_estimate.ExpertMemory`; ``token``, activations of a token in one expert
            that last until the backward; ``kept``, microbatches in flight, 0 if experts are
            recomputed. Empty if unknown.
        job: sizes and layout of the job, `megatron.job_sizes.job_sizes`; empty if unknown.
        lifetime: resolved setting of `HecateConfig`.
        transport: resolved setting of `HecateConfig`.
        overlap_degree: resolved setting of `HecateConfig`.
        versions: versions of packages, by name.
        started: start time of the job, ISO 8601 with time zone.
        run: ``started`` of the job that began the record, which later ones may have continued;
            the same in all stages. Empty in records of earlier versions.
        first: first iteration of the record; -1 if unknown.
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
    memory: Mapping[str, float] = dataclasses.field(default_factory=dict)
    job: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    lifetime: str = ""
    transport: str = ""
    overlap_degree: int | None = None
    versions: Mapping[str, str] = dataclasses.field(default_factory=dict)
    started: str = ""
    run: str = ""
    first: int = -1

    @property
    def form(self) -> tuple:
        """Properties that all segments of a stage share."""
        return self.layers, self.num_experts, *self.group

    def is_beside(self, other: RunInfo) -> bool:
        """Return whether two stages may be of one run."""
        # Layers of a hybrid model's multi-token prediction have the names of the decoder's.
        has_same_layers = bool({*self.layers} & {*other.layers})
        is_same_run = self.run == other.run != ""
        return self.group == other.group and (is_same_run or not has_same_layers)

    @property
    def group(self) -> tuple:
        """Properties that all stages of a run share."""
        return self.mode, self.ranks, self.slots, self.top_k


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class RunRecord:
    """Record of a run, all stages together.

    Layers are in the order of the model; iterations are ascending, and recorded by all stages.

    Args:
        info: properties of the whole run.
        iteration: iteration numbers as counted by Megatron, [T] int64. A thinned record has gaps.
        time: end of each iteration, [T] float64 unix seconds.
        load: tokens per expert, summed over the group, [T, L, E] int64; 0 for experts that a layer
            lacks.
        peak: tokens of the fullest rank of each microbatch, as routed, summed over microbatches,
            [T, L] int64: at least the fullest rank's of the iteration. Only the sum is kept,
            because the time of a step depends on it alone. ``None`` if not counted.
        computed_peak: the same for tokens as computed with FSSDP, [T, L] int64; ``None`` if not
            counted, as where the experts' input is padded.
        replica: experts in replica slots, [T, L, N, S] int64, -1 in empty slots; ``None`` like all
            further arrays when observing. If microbatches have plans of their own, the plan with
            most replicas.
        late: number of replicas fetched after the gate, [T, L] int64.
        rank_load: tokens computed by each rank, without padding, [T, L, N] int64.
        crossing: tokens computed on another node than the one they start on, [T, L] int64; ``None``
            if not counted.
        window: measured time from a layer's attention to its experts, which hides copies, [T, L]
            float64 seconds; NaN before the first measurement.
        timed_ns: measured time of each rank's forwards of experts, [T, L, N] int64 nanoseconds; 0
            for layers that were not timed in an iteration. ``None`` if not measured.
        timed_tokens: tokens computed in that time, [T, L, N] int64.
        copy: measured time of one copy of weights, [T, L] float64 seconds; NaN before the first
            measurement.
        home: rank of each expert's home, [T, L, E] int64; ``None`` if experts stay at their
            original homes.
    """

    info: RunInfo
    iteration: np.ndarray
    time: np.ndarray
    load: np.ndarray
    peak: np.ndarray | None = None
    replica: np.ndarray | None = None
    late: np.ndarray | None = None
    rank_load: np.ndarray | None = None
    crossing: np.ndarray | None = None
    window: np.ndarray | None = None
    copy: np.ndarray | None = None
    timed_ns: np.ndarray | None = None
    timed_tokens: np.ndarray | None = None
    home: np.ndarray | None = None
    computed_peak: np.ndarray | None = None


def read(folder: str | Path) -> RunRecord:
    """Read the record of a run, all stages together. The run may be in progress.

    Args:
        folder: folder of the run.

    Raises:
        ValueError: when the folder holds no record, no iteration that all stages have recorded, or
            a broken file.
    """
    folder = Path(folder)
    headers = read_infos(folder)
    if not headers:
        flag = f"--moe-fssdp-record {shlex.quote(str(folder))}"
        raise ValueError(f"{folder} holds no record of a run; write one with {flag}")
    if len(runs := {info.run for info in headers.values()}) > 1:
        raise ValueError(
            f"the stages in {folder} are of different runs, begun at {', '.join(sorted(runs))}: a "
            "job has begun again, and not all of its stages have recorded an iteration yet"
        )
    stages = [
        _read_stage(folder, int(path.stem.removeprefix("run-")), info)
        for path, info in headers.items()
    ]
    common = functools.reduce(np.intersect1d, [stage["iteration"] for stage in stages])
    if not len(common):
        raise ValueError(
            f"{folder} holds no iteration yet that all of its {len(stages)} stages have recorded"
        )
    return _join_stages(list(headers.values()), stages, common)


def _join_stages(
    infos: Sequence[RunInfo], stages: Sequence[Arrays], common: np.ndarray
) -> RunRecord:
    """Join the stages of a run into one record.

    Args:
        infos: headers of the stages.
        stages: arrays of the stages, iterations first.
        common: numbers of the iterations that all stages have, ascending.
    """
    stages = [_select(stage, common) for stage in stages]
    layers: list[str] = []
    for info in infos:
        layers += info.layers
    # With interleaved schedules the model's chunks alternate between stages.
    order = sorted(range(len(layers)), key=lambda index: place_in_model(layers[index]))
    experts = max(info.num_experts for info in infos)
    for stage in stages:
        num_missing = experts - stage["load"].shape[2]
        for name in stage.keys() & {"load", "home"}:
            stage[name] = np.pad(stage[name], ((0, 0), (0, 0), (0, num_missing)))
    arrays: Arrays = {}
    for name in SEGMENT.keys() - {"iteration", "every", "time"}:
        if all(name in stage for stage in stages):
            array = np.concatenate([stage[name] for stage in stages], axis=1)[:, order]
            # Files hold the smallest dtypes.
            arrays[name] = array if array.dtype.kind == "f" else array.astype(np.int64)
    info = dataclasses.replace(
        infos[0],
        layers=tuple(layers[place] for place in order),
        num_experts=experts,
    )
    # An iteration ends when its last stage does.
    time = np.max([stage["time"] for stage in stages], axis=0)
    return RunRecord(info=info, iteration=common, time=time, **arrays)


def _select(stage: Arrays, iterations: np.ndarray) -> Arrays:
    """Return the rows of the given ``iterations``, which the stage must have."""
    rows = np.searchsorted(stage["iteration"], iterations)
    return {name: array[rows] for name, array in stage.items()}


def _read_stage(folder: Path, stage: int, info: RunInfo) -> Arrays:
    reason = f"loads-{stage:03d}-*.npz"
    for _ in range(RETRIES):
        # A writer that merges segments removes files between the listing and the read.
        try:
            segments = [load_segment(path, info) for path in segments_of(folder, stage).values()]
        except FileNotFoundError as error:
            reason = describe(error)
            continue
        if segments:
            return in_order(segments)
        break
    raise ValueError(f"{folder} holds no iteration of stage {stage} yet ({reason})")


def in_order(segments: Sequence[Arrays]) -> Arrays:
    """Concatenate segments.

    Iterations that the run recorded again after a rollback to a checkpoint are dropped from the
    earlier segments. Only arrays that all segments have are kept.
    """
    # From the newest segment back: each one ends before the first iteration of its successors.
    results: list[Arrays] = []
    last = np.iinfo(np.int64).max
    for segment in reversed(segments):
        results.append(
            {name: array[segment["iteration"] < last] for name, array in segment.items()}
        )
        last = segment["iteration"].min(initial=last)
    results.reverse()
    names = [name for name in segments[0] if all(name in segment for segment in segments)]
    return {name: np.concatenate([segment[name] for segment in results]) for name in names}


def load_segment(path: Path, info: RunInfo) -> Arrays:
    """Read and check the arrays of a segment, iterations first.

    Args:
        path: file of the segment.
        info: header of its stage.

    Raises:
        FileNotFoundError: if there is no such file.
        ValueError: when the file is broken, or does not fit its header.
    """
    data = read_file(path)
    try:
        arrays = parse_arrays(data)
        check_segment(arrays, info)
    except ValueError as error:
        header = NAMES["run"].format(int(path.stem.split("-")[1]))
        raise ValueError(
            f"{path} is broken ({describe(error)}), or its header {header} is; remove it to read "
            "the rest"
        ) from error
    arrays["iteration"] = arrays["iteration"].astype(np.int64)
    return {name: arrays[name] for name in SEGMENT if name in arrays}


def segments_of(folder: Path, stage: int) -> dict[int, Path]:
    """Return the segment files of a stage by number, ascending."""
    files = _files(folder, "loads")
    return {numbers[1]: path for numbers, path in files if numbers[0] == stage}


def list_headers(folder: Path) -> list[Path]:
    """List the headers of all stages, ascending."""
    return [path for _, path in _files(folder, "run")]


def read_infos(folder: Path) -> dict[Path, RunInfo]:
    """Read the headers of all stages, by path, ascending; empty if ``folder`` holds no run.

    Raises:
        ValueError: when a header is broken, contradicts another one, or misses.
    """
    # Segments first: a writer begins with the header.
    segments = _files(folder, "loads")
    headers = {stage: path for (stage,), path in _files(folder, "run")}
    for (stage, _), path in segments:
        if stage not in headers:
            raise ValueError(f"{path} has no header {NAMES['run'].format(stage)}; remove it")
    infos: dict[Path, RunInfo] = {}
    for path in headers.values():
        info = read_info(path)
        for first_path, first_info in infos.items():
            if not info.is_beside(first_info):
                raise ValueError(
                    f"{path} does not describe a further stage of the run of {first_path}"
                )
        infos[path] = info
    return infos


def _files(folder: Path, kind: str) -> list[tuple[tuple[int, ...], Path]]:
    """List the files of a kind in `NAMES` with the numbers in their names, ascending.

    Other files may have similar names, such as a user's ``run-arguments.json``.

    Raises:
        ValueError: for a folder that cannot be read.
    """
    try:
        names = [path.name for path in folder.iterdir()]
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise ValueError(f"{folder} cannot be read ({describe(error)})") from error
    files: list[tuple[tuple[int, ...], Path]] = []
    for name in fnmatch.filter(names, re.sub("{.*}", "*", NAMES[kind])):
        numbers = tuple(map(int, re.findall("[0-9]{3,9}", name)))
        if len(numbers) == NAMES[kind].count("{") and NAMES[kind].format(*numbers) == name:
            files.append((numbers, folder / name))
    return sorted(files)


def read_info(path: Path) -> RunInfo:
    """Read and check the header of a stage.

    Raises:
        FileNotFoundError: if there is no such file.
        ValueError: when it is broken.
    """
    data = read_file(path)
    try:
        values = parse_json(data)
        check_header(values)
    except ValueError as error:
        raise ValueError(f"{path} does not describe a run ({describe(error)})") from error
    fields = {f.name: values[f.name] for f in dataclasses.fields(RunInfo) if f.name in values}
    # JSON has lists only.
    return RunInfo(**{**fields, "layers": tuple(fields["layers"]), "node": tuple(fields["node"])})


def place_in_model(layer: str) -> tuple[bool, int]:
    """Return the sort key of a layer's name: multi-token prediction (MTP) last, then the number."""
    number = re.search(r"\d+$", layer)
    return layer.startswith("mtp"), int(number[0]) if number else 0
