"""Loads from files that Megatron itself writes, as a `RunRecord`: those of ``--moe-routing-trace-path``, and of
``--save-tokens-per-expert-interval`` (``tokens_per_expert`` in the checkpoint folder)."""

from __future__ import annotations

import json
import re
from collections import Counter, defaultdict
from pathlib import Path

import numpy as np

from megatron_hecate.tools import run_folder
from megatron_hecate.tools.run_folder import RunInfo, RunRecord, place_in_model


def read_any(folder: str | Path, *, num_experts: int | None = None) -> RunRecord:
    """A run's own record, or else what Megatron wrote, which may not name the last of ``num_experts``.

    Raises:
        ValueError: for a folder that holds neither, or a file that cannot be read.
    """
    if any(Path(folder).glob("run-*.json")):
        return run_folder.read(folder)
    try:
        return read_megatron(folder, num_experts=num_experts)
    except (KeyError, TypeError, IndexError) as error:
        raise ValueError(f"{folder} holds .jsonl files that Megatron did not write ({error!r})") from error


def read_megatron(folder: str | Path, *, ranks: int | None = None, num_experts: int | None = None) -> RunRecord:
    """Read what all ranks wrote. Loads are sums over all of them. Megatron numbers the layers of each pipeline stage
    from 0, and writes a recomputed forward twice: read runs without either, or the files of one stage's ranks.

    Args:
        folder: of the files.
        ranks: N of the expert-parallel group; ``None`` takes all ranks that wrote.
        num_experts: E; ``None`` takes the highest that got a token, or all that ranks hold.

    Raises:
        ValueError: for a folder without such files, without an iteration that has all layers, or with more experts.
    """
    traces = sorted(Path(folder).glob("router_trace_rank*.jsonl"))
    files = traces or sorted(Path(folder).rglob("rank*.jsonl"))
    ranks = ranks or len(files)
    loads: defaultdict[int, defaultdict[str, Counter]] = defaultdict(lambda: defaultdict(Counter))
    top_k = 1
    for path in files:
        rank = int(re.findall(r"\d+", path.stem)[-1])
        for line in path.read_text().splitlines(keepends=True):
            if not line.endswith("\n"):
                continue  # being written
            record = json.loads(line)
            name = f"layer {record['layer'] + 1}"
            if "mtp_idx" in record:
                name = f"mtp {record['mtp_idx'] + 1} {name}"
            if traces:  # steps are counted from 0 there
                loads[record["step"] + 1][name].update(np.ravel(record["top_indices"]).tolist())
                top_k = record["topk"]
            else:
                of_rank = np.sum(record["tpe"], axis=0).tolist()
                first = rank % ranks * len(of_rank)
                loads[record["iter"]][name].update({first + i: tokens for i, tokens in enumerate(of_rank)})
    layers = sorted({name for of_layers in loads.values() for name in of_layers}, key=place_in_model)
    iterations = sorted(iteration for iteration, of_layers in loads.items() if len(of_layers) == len(layers))
    if not iterations:
        raise ValueError(
            f"{folder} holds no record of a run (--moe-fssdp-record {folder} writes one), nor files of Megatron "
            "(--moe-routing-trace-path, --save-tokens-per-expert-interval) with an iteration of all layers"
        )
    counted = [[loads[iteration][name] for name in layers] for iteration in iterations]
    experts = 1 + max(expert for of_layers in counted for counts in of_layers for expert in counts)
    if num_experts and experts > num_experts:
        raise ValueError(f"{folder} has tokens for expert {experts - 1}, and num_experts is {num_experts}")
    experts = num_experts or experts
    experts = -(-experts // ranks) * ranks
    return RunRecord(
        info=RunInfo(
            mode="observe",
            layers=tuple(layers),
            num_experts=experts,
            ranks=ranks,
            node=(0,) * ranks,
            top_k=top_k,
        ),
        iteration=np.array(iterations),
        time=np.full(len(iterations), np.nan),
        load=np.array([[[counts[e] for e in range(experts)] for counts in of_layers] for of_layers in counted]),
    )
