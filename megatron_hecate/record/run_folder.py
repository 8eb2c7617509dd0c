"""The folder in which a run records what its MoE layers did: what is in it, and how it is read.

| file | holds |
|---|---|
| ``run-{stage:03d}.json`` | `RunInfo` of the stage, and which process writes |
| ``loads-{stage:03d}-{k:05d}.npz`` | some iterations, in order: the arrays of `RunRecord` |

`run_writer.RunWriter` writes it. Needs numpy alone: a run is read where neither torch nor Megatron is.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import io
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

VERSION: int = 1
RETRIES: int = 100  # of reading a folder whose files change
ARRAYS = ("load", "home", "replica", "late", "rank_load", "crossing", "window", "copy")
Arrays = dict[str, np.ndarray]


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunInfo:
    """What does not change during a run, of one pipeline stage or of all.

    Args:
        mode: ``observe`` (stock training) or ``fssdp``.
        layers: [L] names, such as ``layer 3``.
        num_experts: E, of the layer with most.
        ranks: N, of the expert-parallel group.
        node: [N] the node of each.
        top_k: experts that a token goes to.
        slots: S, replicas that a rank can hold per layer; 0 when observing.
        shape: fields of `plan.LayerShape`; empty where they are not known.
        speeds: fields of `plan.Speeds`; empty where they are not known.
        memory: bytes of a rank of the stage: fields of `replicas.memory_estimate.ExpertMemory`; ``token``, what a token
            leaves in one expert for the backward; ``kept``, microbatches in flight, 0 where experts are recomputed.
        lifetime, transport, overlap_degree: as in `HecateConfig`, once decided.
        versions: of packages, by name.
        started: when, ISO 8601 with time zone.
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
    lifetime: str = ""
    transport: str = ""
    overlap_degree: int | None = None
    versions: Mapping[str, str] = dataclasses.field(default_factory=dict)
    started: str = ""

    @property
    def form(self) -> tuple:
        """What all segments of a stage have in common."""
        return self.mode, self.layers, self.num_experts, self.ranks, self.slots


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class RunRecord:
    """A run, all stages together: layers in the order of the model, iterations that all stages have, ascending.

    Args:
        info: of the whole run.
        iteration: [T] int64 as Megatron counts. Some are missing where the record was thinned.
        time: [T] float64 unix seconds when it ended.
        load: [T, L, E] int64 tokens per expert, over the group; 0 for experts that a layer lacks.
        replica: [T, L, N, S] int64 experts in replica slots, -1 empty; ``None`` like all that follow when observing.
            Where microbatches have plans of their own, that with most replicas.
        late: [T, L] int64 how many of them came after the gate.
        rank_load: [T, L, N] int64 tokens that each rank computed, without padding.
        crossing: [T, L] int64 tokens computed on another node than they came from; ``None`` where not counted.
        window: [T, L] float64 measured seconds from a layer's attention to its experts, which hide copies; NaN before.
        copy: [T, L] float64 measured seconds that one copy of weights takes; NaN before.
        home: [T, L, E] int64 rank of each expert's home, where homes move; else they are where Megatron built them.
    """

    info: RunInfo
    iteration: np.ndarray
    time: np.ndarray
    load: np.ndarray
    replica: np.ndarray | None = None
    late: np.ndarray | None = None
    rank_load: np.ndarray | None = None
    crossing: np.ndarray | None = None
    window: np.ndarray | None = None
    copy: np.ndarray | None = None
    home: np.ndarray | None = None


def read(folder: str | Path) -> RunRecord:
    """What a run has recorded so far, all stages together. It may be going on.

    Raises:
        ValueError: for a folder that holds no record, none of an iteration that all stages have, or a broken file.
    """
    folder = Path(folder)
    headers = read_infos(folder)
    if not headers:
        raise ValueError(
            f"{folder} holds no record of a run; write one with --moe-fssdp-record {folder}"
        )
    infos = list(headers.values())
    stages = [_read_stage(folder, int(path.stem.removeprefix("run-"))) for path in headers]
    common = functools.reduce(np.intersect1d, [stage["iteration"] for stage in stages])
    if not len(common):
        raise ValueError(
            f"{folder} holds no iteration yet that all of its {len(stages)} stages have recorded"
        )
    stages = [{k: a[np.searchsorted(s["iteration"], common)] for k, a in s.items()} for s in stages]
    layers = [name for info in infos for name in info.layers]
    order = sorted(
        range(len(layers)), key=lambda at: place_in_model(layers[at])
    )  # chunks of stages alternate
    experts = max(info.num_experts for info in infos)
    for stage in stages:
        stage["load"] = np.pad(
            stage["load"], ((0, 0), (0, 0), (0, experts - stage["load"].shape[2]))
        )
    joined: Arrays = {}
    for name in (name for name in ARRAYS if all(name in stage for stage in stages)):
        array = np.concatenate([stage[name] for stage in stages], axis=1)[:, order]
        joined[name] = array if array.dtype.kind == "f" else array.astype(np.int64)
    info = dataclasses.replace(
        infos[0], layers=tuple(layers[at] for at in order), num_experts=experts
    )
    return RunRecord(
        info=info,
        iteration=common,
        time=np.max([stage["time"] for stage in stages], axis=0),
        **joined,
    )


def _read_stage(folder: Path, stage: int) -> Arrays:
    for _ in range(RETRIES):
        with contextlib.suppress(FileNotFoundError):  # a writer that thins takes some away
            if found := [load_segment(path) for path in segments_of(folder, stage).values()]:
                return in_order(found)
            break
    raise ValueError(f"{folder} holds no iteration of stage {stage} yet (loads-{stage:03d}-*.npz)")


def in_order(segments: Sequence[Arrays]) -> Arrays:
    """Segments as one, with the arrays that all have, without iterations that a run recorded again after it went back
    to a checkpoint."""
    kept, before = [], np.iinfo(np.int64).max
    for segment in reversed(segments):
        kept.append({name: array[segment["iteration"] < before] for name, array in segment.items()})
        before = segment["iteration"].min(initial=before)
    names = [name for name in segments[0] if all(name in segment for segment in segments)]
    return {name: np.concatenate([segment[name] for segment in reversed(kept)]) for name in names}


def load_segment(path: Path) -> Arrays:
    """Its arrays, iterations first; ValueError when it is broken."""
    content = io.BytesIO(
        path.read_bytes()
    )  # a broken archive raises OSError, too, as the disk does
    try:
        with np.load(content) as archive:
            return {**archive, "iteration": archive["iteration"].astype(np.int64)}
    except Exception as error:  # zip, zlib, numpy and the tokenizer it uses have their own
        raise ValueError(
            f"{path} is broken ({type(error).__name__}: {error}); remove it to read the rest"
        ) from error


def segments_of(folder: Path, stage: int) -> dict[int, Path]:
    """Files of a stage by their number, ascending."""
    found = {
        int(path.stem.rpartition("-")[2]): path for path in folder.glob(f"loads-{stage:03d}-*.npz")
    }
    return dict(sorted(found.items()))


def read_infos(folder: Path) -> dict[Path, RunInfo]:
    """What the headers in ``folder`` say, stage by stage; none where it is no run's. ValueError for a broken one."""
    return {path: _read_info(path) for path in sorted(folder.glob("run-*.json"))}


def _read_info(path: Path) -> RunInfo:
    try:
        values = json.loads(path.read_text())
        if values["version"] != VERSION:
            raise ValueError(f"version {values['version']}, this package reads {VERSION}")
        fields = {f.name: values[f.name] for f in dataclasses.fields(RunInfo) if f.name in values}
        return RunInfo(
            **{**fields, "layers": tuple(fields["layers"]), "node": tuple(fields["node"])}
        )
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"{path} does not describe a run ({type(error).__name__}: {error})"
        ) from error


def place_in_model(layer: str) -> tuple[bool, int]:
    """By which names of layers are sorted."""
    number = re.search(r"\d+$", layer)
    return layer.startswith("mtp"), int(number[0]) if number else 0
