"""Read expert loads from Megatron's own files as a `RunRecord`.

Two kinds of files are read: traces of ``--moe-routing-trace-path``, and the folder
``tokens_per_expert`` that ``--save-tokens-per-expert-interval`` writes to the checkpoint folder.
"""

from __future__ import annotations

import dataclasses
import json
import re
import shlex
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from megatron_hecate.record import run_folder
from megatron_hecate.record.run_folder import RunInfo, RunRecord, place_in_model

# MTP head (-1 in the decoder) and the layer's number on its pipeline stage
_Layer = tuple[int, int]
# file index, iteration, layer
_Key = tuple[int, int, _Layer]
# Token counts per expert, one array [E] per microbatch in a trace. Files of tokens per expert
# give two arrays: the sum of the even and the sum of the odd microbatches.
_Held = Mapping[_Key, list[np.ndarray]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Files:
    """Parsed files of all ranks.

    Args:
        paths: files in the order of ranks.
        held: token counts by file, iteration and layer.
        traces: true for router traces, whose expert numbers are global; otherwise a file
            counts the local experts of its rank.
        top_k: experts per token; 1 where the files do not name it.
    """

    paths: Sequence[Path]
    held: _Held
    traces: bool
    top_k: int


def read_any(
    folder: str | Path, *, num_experts: int | None = None, stages: int | None = None
) -> RunRecord:
    """Read a run's own record, or else Megatron's files as `read_megatron` does.

    Raises:
        ValueError: for a folder that holds neither, or a file that cannot be read.
    """
    if not any(Path(folder).glob("run-*.json")):
        return read_megatron(folder, num_experts=num_experts, stages=stages)
    if stages is not None:
        raise ValueError(f"{folder} names its own pipeline stages; leave stages={stages} out")
    return run_folder.read(folder)


def read_megatron(
    folder: str | Path,
    *,
    ranks: int | None = None,
    num_experts: int | None = None,
    stages: int | None = None,
) -> RunRecord:
    """Read the files of all ranks; loads are sums over the ranks.

    Megatron numbers the layers of every pipeline stage from 0, and also the layers of every
    virtual stage; it writes a recomputed forward twice. Read runs without virtual stages and
    without recomputed routers.

    Args:
        folder: directory with the files.
        ranks: size of the expert-parallel group. ``None``: all ranks of a stage with a trace; for
            tokens per expert the smallest group size for which all groups hold the same number
            of tokens in every microbatch.
        num_experts: number of experts E. ``None``: the highest expert with a token in a trace,
            or the experts of all ranks of a group.
        stages: number of pipeline stages, all with experts in their last layer. ``None``: one,
            unless the files show several, which is refused.

    Raises:
        ValueError: for a folder without such files, without an iteration that has all layers,
            with more experts, or with more pipeline stages.
    """
    files = _parse_files(Path(folder))
    held = files.held
    if not held:
        raise _nothing_in(folder)
    num_files = len(files.paths)
    per_stage = max(1, num_files // max(stages or 1, 1))
    # `group`: files that together count one set of experts.
    if files.traces:
        ranks = ranks or per_stage
        group = 1
    else:
        ranks = ranks or _group_size(held, per_stage)
        group = ranks
    if (stages is not None and stages < 1) or num_files % ((stages or 1) * group):
        raise ValueError(
            f"{folder} holds files of {num_files} ranks, "
            f"not of stages={stages} with groups of {group}"
        )
    experts = max(len(row) for row in _rows(held)) * group
    if num_experts and experts > num_experts:
        raise ValueError(
            f"{folder} has tokens for expert {experts - 1}, and num_experts is {num_experts}"
        )
    # Every rank of the group owns the same number of experts.
    experts = -(-(num_experts or experts) // ranks) * ranks
    _number_globally(files, experts, ranks)
    _refuse_mixed_stages(files, folder, per_stage=per_stage, group=group, stages=stages)
    loads = _loads_by_layer(files, per_stage)
    record = _record_of(loads, experts=experts, ranks=ranks, top_k=files.top_k)
    if not len(record.iteration):
        raise _nothing_in(folder)
    return record


def _record_of(
    loads: Mapping[int, Mapping[str, np.ndarray]], *, experts: int, ranks: int, top_k: int
) -> RunRecord:
    """Build a record of the iterations that have all layers.

    Args:
        loads: tokens per expert [E], by iteration and by name of the layer.
        experts: number of experts E.
        ranks: size of the expert-parallel group.
        top_k: experts per token.
    """
    names = sorted(set().union(*loads.values()), key=place_in_model)
    iterations = sorted(at for at, by_name in loads.items() if len(by_name) == len(names))
    info = RunInfo(
        mode="observe",
        layers=tuple(names),
        num_experts=experts,
        ranks=ranks,
        # The files do not name nodes.
        node=(0,) * ranks,
        top_k=top_k,
    )
    return RunRecord(
        info=info,
        iteration=np.array(iterations),
        time=np.full(len(iterations), np.nan),
        load=np.array([[loads[at][name] for name in names] for at in iterations]),
    )


def _nothing_in(folder: str | Path) -> ValueError:
    return ValueError(
        f"{folder} holds no record of a run (--moe-fssdp-record {shlex.quote(str(folder))} "
        "writes one), "
        "nor files of Megatron (--moe-routing-trace-path, --save-tokens-per-expert-interval) "
        "with an iteration of all layers"
    )


def _rows(held: _Held) -> Iterable[np.ndarray]:
    """Iterate over all arrays of token counts."""
    for rows in held.values():
        yield from rows


def _parse_files(folder: Path) -> _Files:
    """Parse all lines of all files under ``folder``; router traces take precedence."""
    traces = list(folder.glob("router_trace_rank[0-9]*.jsonl"))
    candidates = traces or folder.rglob("rank[0-9]*.jsonl")
    # A rank without experts leaves an empty file.
    paths = [path for path in candidates if path.stat().st_size]
    # By number, since names of 10 and more ranks do not sort as numbers do.
    paths.sort(key=lambda path: int(re.findall(r"\d+", path.stem)[-1]))
    held: defaultdict[_Key, list[np.ndarray]] = defaultdict(list)
    top_k = 1
    for at, path in enumerate(paths):
        for number, line in enumerate(path.read_bytes().splitlines(keepends=True), 1):
            # The last line of a running job may be incomplete.
            if not line.endswith(b"\n"):
                continue
            try:
                record = json.loads(line)
                layer = int(record.get("mtp_idx", -1)), int(record["layer"])
                if traces:
                    # Megatron's tracer counts steps from 0, its training loop from 1.
                    held[at, record["step"] + 1, layer].append(_traced(record))
                    top_k = record["topk"]
                else:
                    # A run that resumes from a checkpoint appends the iterations that it trains
                    # again to the same file: the later line replaces the earlier one.
                    held[at, record["iter"], layer] = _even_and_odd(record)
            except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
                raise ValueError(
                    f"{path}, line {number}, was not written by Megatron ({error!r})"
                ) from error
    return _Files(paths=paths, held=held, traces=bool(traces), top_k=top_k)


def _traced(record: Mapping[str, Any]) -> np.ndarray:
    """Count the tokens per expert of one line of a trace."""
    return np.bincount(np.ravel(record["top_indices"]))


def _even_and_odd(record: Mapping[str, Any]) -> list[np.ndarray]:
    """Sum the tokens per expert of a line over its even and over its odd microbatches."""
    rows = np.array(record["tpe"], dtype=np.int64).reshape(len(record["tpe"]), -1)
    return [rows[0::2].sum(axis=0), rows[1::2].sum(axis=0)]


def _number_globally(files: _Files, experts: int, ranks: int) -> None:
    """Pad all rows in place to ``experts`` counts, at the offset of the file's local experts."""
    for (at, *_), rows in files.held.items():
        first = 0
        if not files.traces:
            first = at % ranks * len(rows[0])
        rows[:] = [np.pad(row, (first, experts - first - len(row))) for row in rows]


def _layers_of_files(files: _Files) -> list[set[_Layer]]:
    """Collect the layers of each file."""
    layers: list[set[_Layer]] = [set() for _ in files.paths]
    for at, _, layer in files.held:
        layers[at].add(layer)
    return layers


def _refuse_mixed_stages(
    files: _Files, folder: str | Path, *, per_stage: int, group: int, stages: int | None
) -> None:
    """Raise ValueError if files of one stage seem to hold layers of several stages.

    Args:
        files: files of all stages.
        folder: directory for the message.
        per_stage: number of files per stage.
        group: number of files that together count one set of experts.
        stages: number of stages that the user named; the routers are compared only without it.
    """
    layers = _layers_of_files(files)
    evidence = ""
    for at, own in enumerate(layers):
        first = at - at % per_stage
        if own != layers[first]:
            pair = [f"{files.paths[n].name} has {len(layers[n])} layers" for n in (at, first)]
            evidence = ", ".join(pair)
            break
    if not evidence and stages is None:
        evidence = _other_routers(files.held, group, per_stage)
    if evidence:
        raise ValueError(
            f"{folder} holds files of several pipeline stages, whose layers Megatron numbers "
            f"from 0 each: {evidence}. Name the number of stages (--stages, or stages=; 1 if "
            "that is wrong), or read the files of one stage's ranks"
        )


def _loads_by_layer(files: _Files, per_stage: int) -> Mapping[int, dict[str, np.ndarray]]:
    """Sum the loads [E] of all files, by iteration and by the layer's name in the whole model."""
    layers = _layers_of_files(files)
    # Layers before each stage: the last decoder layer of every stage has experts.
    before = [0]
    for of_stage in layers[::per_stage]:
        before.append(before[-1] + 1 + max((number for _, number in of_stage), default=0))
    loads: defaultdict[int, dict[str, np.ndarray]] = defaultdict(dict)
    for (at, iteration, (head, number)), rows in files.held.items():
        if head < 0:
            name = f"layer {before[at // per_stage] + number + 1}"
        else:
            name = f"mtp {head + 1} layer {number + 1}"
        loads[iteration][name] = loads[iteration].get(name, 0) + np.sum(rows, axis=0)
    return loads


def _group_size(held: _Held, per_stage: int) -> int:
    """Infer the size of the expert-parallel group from files of tokens per expert.

    All groups process equally many tokens: the size is the smallest divisor of ``per_stage`` for
    which consecutive groups of files hold the same number of tokens in every microbatch. Where
    every single file does, as with forced balance, that proves nothing, and all files of a stage
    count as one group.
    """
    everywhere = {key[1:] for key in held if all((at, *key[1:]) in held for at in range(per_stage))}
    keys = sorted(everywhere)
    tokens = np.array([_totals(held, at, keys) for at in range(per_stage)])
    sizes = [size for size in range(1, per_stage + 1) if per_stage % size == 0]
    equal = [size for size in sizes if _groups_hold_equally(tokens, size)]
    if 1 in equal:
        return per_stage
    return equal[0]


def _totals(held: _Held, at: int, keys: Sequence[tuple[int, _Layer]]) -> list[np.integer]:
    """Return the token totals of all rows of file ``at``, in the order of ``keys``."""
    totals = []
    for key in keys:
        totals += [row.sum() for row in held[at, *key]]
    return totals


def _groups_hold_equally(tokens: np.ndarray, size: int) -> bool:
    """Check that groups of ``size`` files have equal totals; ``tokens``: [files, rows]."""
    per_group = tokens.reshape(-1, size, tokens.shape[1]).sum(axis=1)
    return not np.ptp(per_group, axis=0).any()


def _other_routers(held: _Held, group: int, num_files: int) -> str:
    """Find files whose routers differ although their layers have the same numbers.

    Such files are of different pipeline stages: in consecutive blocks of groups, preferred experts
    correlate between two halves of the microbatches inside a block, but not across blocks.

    Args:
        held: counts by layer and file.
        group: number of files that together count one set of experts.
        num_files: number of files to compare.

    Returns:
        A description of the blocks. Empty where there are none, or where routing is too even to
        show a difference.
    """
    layers = sorted({layer for *_, layer in held})
    num_groups = num_files // group
    num_experts = len(next(iter(held.values()))[0])
    halves = np.zeros((2, num_groups, len(layers), num_experts))
    for (at, iteration, layer), rows in held.items():
        for number, row in enumerate(rows, iteration):
            halves[number % 2, at // group, layers.index(layer)] += row
    # Experts without any token only pad the ranks; their zeros would correlate.
    halves = halves[..., halves.any(axis=(0, 1, 2))]
    halves -= halves.mean(axis=3, keepdims=True)
    first, second = halves.reshape(2, num_groups, -1)
    length = np.outer(np.linalg.norm(first, axis=1), np.linalg.norm(second, axis=1))
    correlation = np.divide(first @ second.T, length, out=np.zeros_like(length), where=length > 0)
    for blocks in range(2, num_groups + 1):
        if num_groups % blocks:
            continue
        block = np.arange(num_groups) * blocks // num_groups
        inside = block[:, None] == block
        within = correlation[inside].mean()
        across = correlation[~inside].mean()
        if within > 0.5 and across < within / 2:
            return (
                f"in {blocks} blocks of files routers choose other experts "
                f"(correlation {across:.2f})"
            )
    return ""
