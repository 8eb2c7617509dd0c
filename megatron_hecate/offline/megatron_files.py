"""Loads from files that Megatron itself writes, as a `RunRecord`: those of ``--moe-routing-trace-path``, and of
``--save-tokens-per-expert-interval`` (``tokens_per_expert`` in the checkpoint folder)."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from megatron_hecate.record import run_folder
from megatron_hecate.record.run_folder import RunInfo, RunRecord, place_in_model

# by file, iteration and layer (head of MTP or -1, number): [E] tokens of some microbatches, of the others, ...
_Held = Mapping[tuple[int, int, tuple[int, int]], list[np.ndarray]]


def read_any(
    folder: str | Path, *, num_experts: int | None = None, stages: int | None = None
) -> RunRecord:
    """A run's own record, or else what Megatron wrote, as `read_megatron` reads it.

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
    """Read what all ranks wrote. Loads are sums over all of them. Megatron numbers the layers of every pipeline stage
    from 0, and those of its virtual stages alike; it writes a recomputed forward twice. Read runs without either.

    Args:
        folder: of the files.
        ranks: N of the expert-parallel group; ``None`` takes all ranks of a stage that wrote, or, from tokens per
            expert, the fewest that have as many together as those that follow, in every microbatch.
        num_experts: E; ``None`` takes the highest that got a token, or all that ranks hold.
        stages: of the pipeline, all with experts in their last layer; ``None``: one, unless the files show more.

    Raises:
        ValueError: for a folder without such files, without an iteration that has all layers, with more experts, or
            with more pipeline stages.
    """
    traces = list(Path(folder).glob("router_trace_rank[0-9]*.jsonl"))
    files = [
        path for path in traces or Path(folder).rglob("rank[0-9]*.jsonl") if path.stat().st_size
    ]  # else without experts
    files.sort(key=lambda path: int(re.findall(r"\d+", path.stem)[-1]))
    held: defaultdict[tuple[int, int, tuple[int, int]], list[np.ndarray]] = defaultdict(list)
    top_k = 1
    for at, path in enumerate(files):
        for number, line in enumerate(path.read_bytes().splitlines(keepends=True), 1):
            if not line.endswith(b"\n"):
                continue  # being written
            try:
                record = json.loads(line)
                layer = int(record.get("mtp_idx", -1)), int(record["layer"])
                if traces:  # steps are counted from 0 there
                    held[at, record["step"] + 1, layer].append(
                        np.bincount(np.ravel(record["top_indices"]))
                    )
                    top_k = record["topk"]
                else:  # an iteration that is trained again has a second line
                    rows = np.array(record["tpe"], dtype=np.int64).reshape(len(record["tpe"]), -1)
                    held[at, record["iter"], layer] = [
                        rows[0::2].sum(axis=0),
                        rows[1::2].sum(axis=0),
                    ]
            except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
                raise ValueError(
                    f"{path}, line {number}, was not written by Megatron ({error!r})"
                ) from error
    nothing = ValueError(
        f"{folder} holds no record of a run (--moe-fssdp-record {folder} writes one), nor files of Megatron "
        "(--moe-routing-trace-path, --save-tokens-per-expert-interval) with an iteration of all layers"
    )
    if not held:
        raise nothing
    num = max(1, len(files) // max(stages or 1, 1))  # of a stage
    layers = [{layer for file, _, layer in held if file == at} for at in range(len(files))]
    ranks = ranks or (num if traces else _group_size(held, num))
    size = 1 if traces else ranks
    if (stages is not None and stages < 1) or len(files) % ((stages or 1) * size):
        raise ValueError(
            f"{folder} holds files of {len(files)} ranks, not of stages={stages} with groups of {size}"
        )
    experts = max(len(row) for rows in held.values() for row in rows) * size
    if num_experts and experts > num_experts:
        raise ValueError(
            f"{folder} has tokens for expert {experts - 1}, and num_experts is {num_experts}"
        )
    experts = -(-(num_experts or experts) // ranks) * ranks
    for (at, *_), rows in held.items():
        first = 0 if traces else at % ranks * len(rows[0])
        rows[:] = [np.pad(row, (first, experts - first - len(row))) for row in rows]
    others = [
        (at, at - at % num) for at in range(len(files)) if layers[at] != layers[at - at % num]
    ]
    other = (
        ", ".join(f"{files[at].name} has {len(layers[at])} layers" for at in others[0])
        if others
        else ""
    )
    if other or (stages is None and (other := _other_routers(held, size, num))):
        raise ValueError(
            f"{folder} holds files of several pipeline stages, whose layers Megatron numbers from 0 each: {other}. Say "
            "how many there are (--stages, or stages=; 1 if that is wrong), or read the files of one stage's ranks"
        )
    offset = np.cumsum(
        [0, *(1 + max((number for _, number in of), default=0) for of in layers[::num])]
    )
    loads: defaultdict[int, dict[str, np.ndarray]] = defaultdict(dict)
    for (at, iteration, (head, number)), rows in held.items():
        name = (
            f"layer {offset[at // num] + number + 1}"
            if head < 0
            else f"mtp {head + 1} layer {number + 1}"
        )
        loads[iteration][name] = loads[iteration].get(name, 0) + np.sum(rows, axis=0)
    names = sorted({name for of_layers in loads.values() for name in of_layers}, key=place_in_model)
    iterations = sorted(
        iteration for iteration, of_layers in loads.items() if len(of_layers) == len(names)
    )
    if not iterations:
        raise nothing
    node = (0,) * ranks
    return RunRecord(
        info=RunInfo(
            mode="observe",
            layers=tuple(names),
            num_experts=experts,
            ranks=ranks,
            node=node,
            top_k=top_k,
        ),
        iteration=np.array(iterations),
        time=np.full(len(iterations), np.nan),
        load=np.array([[loads[iteration][name] for name in names] for iteration in iterations]),
    )


def _group_size(held: _Held, num: int) -> int:
    """Ranks of the expert-parallel group: the fewest of ``num`` that hold as many tokens together as those that follow,
    in every microbatch. Where each rank holds as many, as with forced balance, that says nothing."""
    where = {key[1:] for key in held if all((at, *key[1:]) in held for at in range(num))}
    tokens = np.array(
        [[row.sum() for key in sorted(where) for row in held[at, *key]] for at in range(num)]
    )
    sizes = [size for size in range(1, num + 1) if num % size == 0]
    alike = [
        size
        for size in sizes
        if not np.ptp(tokens.reshape(-1, size, tokens.shape[1]).sum(axis=1), axis=0).any()
    ]
    return num if 1 in alike else alike[0]


def _other_routers(held: _Held, size: int, num: int) -> str:
    """Which files are of other layers than the first ones, though they name the same: of all groups of ``size`` files,
    blocks choose experts alike in two halves of their microbatches, but not like other blocks. Empty where none is, or
    where routing is too even to tell."""
    layers = sorted({layer for *_, layer in held})
    halves = np.zeros((2, num // size, len(layers), len(next(iter(held.values()))[0])))
    for (at, iteration, layer), rows in held.items():
        for number, row in enumerate(rows, iteration):
            halves[number % 2, at // size, layers.index(layer)] += row
    halves = halves[..., halves.any(axis=(0, 1, 2))]  # some are only there to fill ranks
    halves -= halves.mean(axis=3, keepdims=True)
    first, second = halves.reshape(2, num // size, -1)
    length = np.outer(np.linalg.norm(first, axis=1), np.linalg.norm(second, axis=1))
    alike = np.divide(first @ second.T, length, out=np.zeros_like(length), where=length > 0)
    for blocks in (number for number in range(2, num // size + 1) if num // size % number == 0):
        block = np.arange(num // size) * blocks // (num // size)
        inside = block[:, None] == block
        if alike[inside].mean() > 0.5 and alike[~inside].mean() < alike[inside].mean() / 2:
            return f"in {blocks} blocks of files routers choose other experts (correlation {alike[~inside].mean():.2f})"
    return ""
