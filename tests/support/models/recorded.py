"""Makes run folders as a training run records them, of any size: skewed loads that drift, replicas of the hottest
experts on the least loaded ranks, tokens split evenly over the holders."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np

from megatron_hecate.record.run_folder import RunInfo
from megatron_hecate.record.run_writer import RunWriter

SHAPE = dict(expert_bytes=9.4e6, grad_bytes=1.9e7, token_bytes=4096, token_flops=9.4e6)
SHAPE |= dict(microbatches=4, hidden_seconds=1e-3, fetches=1, returns=1)
SPEEDS = dict(
    intra=dict(bandwidth=3.6e11, latency=5e-6),
    inter=dict(bandwidth=4.5e10, latency=1e-5),
    flops=4.4e14,
    routing=4.5e-4,
    contention=0.12,
)


@dataclasses.dataclass(frozen=True)
class Size:
    """Of a made-up run: iterations, layers, experts, ranks, slots."""

    num: int = 6
    layers: int = 3
    experts: int = 8
    ranks: int = 4
    slots: int = 2
    tokens: int = 4096  # per layer and iteration
    skew: float = 1.0


def arrays(size: Size, *, seed: int = 0, fssdp: bool = True) -> dict[str, np.ndarray]:
    """Columns of a record."""
    rng = np.random.default_rng(seed)
    drift = np.cumsum(rng.normal(0, 0.02, (size.num, size.layers, size.experts)), axis=0)
    logits = size.skew * rng.normal(0, 1, (1, size.layers, size.experts))
    logits *= np.linspace(1, 0.4, size.layers)[:, None]
    share = np.exp(logits + drift)
    load = np.rint(size.tokens * share / share.sum(axis=2, keepdims=True)).astype(np.int64)
    found: dict[str, Any] = {"iteration": np.arange(1, size.num + 1), "load": load}
    found["time"] = 1.7e9 + 0.9 * np.arange(size.num) + rng.normal(0, 0.01, size.num)
    if not fssdp:
        return found
    per_rank = size.experts // size.ranks
    replica = np.full((size.num, size.layers, size.ranks, size.slots), -1)
    rank_load = load.reshape(size.num, size.layers, size.ranks, per_rank).sum(axis=3)
    for t, layer in np.ndindex(size.num, size.layers):
        if t == 0 or layer == 1:  # no forecast yet; bypassed
            continue
        for rank in np.argsort(rank_load[t, layer])[: size.ranks // 2]:
            hottest = np.argsort(-load[t, layer])
            away = [e for e in hottest if e // per_rank != rank][: size.slots]
            replica[t, layer, rank, : len(away)] = away
        fair = np.zeros(size.ranks)
        for expert in range(size.experts):
            elsewhere = np.nonzero((replica[t, layer] == expert).any(axis=1))[0]
            holders = [expert // per_rank, *elsewhere]
            fair[holders] += load[t, layer, expert] / len(holders)
        ends = np.rint(np.cumsum(fair)).astype(np.int64)
        rank_load[t, layer] = np.diff(ends, prepend=0)
    late = (replica >= 0).any(axis=(2, 3)) * rng.integers(0, 2, (size.num, size.layers))
    window = rng.uniform(1e-4, 3e-4, (size.num, size.layers))  # seconds
    window[2::3] = np.nan  # not yet measured
    found |= {"replica": replica, "rank_load": rank_load, "late": late}
    return {**found, "window": window}


def write(
    folder: Path, size: Size, *, held: dict[str, np.ndarray], stage: int = 0, **fields: Any
) -> Path:
    """A run folder with the arrays ``held``; ``fields`` replace those of its description."""
    info: dict[str, Any] = dict(
        mode="fssdp" if "replica" in held else "observe",
        layers=tuple(f"layer {n + 1 + stage * size.layers}" for n in range(size.layers)),
        num_experts=size.experts,
        ranks=size.ranks,
        node=tuple(rank * 2 // size.ranks if size.ranks > 1 else 0 for rank in range(size.ranks)),
        top_k=2,
        slots=size.slots if "replica" in held else 0,
        shape=SHAPE,
        speeds=SPEEDS,
        lifetime="iteration",
        transport="nvlink",
        started="2026-11-24T12:00:00+00:00",
    )
    writer = RunWriter(folder, RunInfo(**{**info, **fields}), stage=stage)
    rows = {name: array for name, array in held.items() if name != "iteration"}
    for index, iteration in enumerate(held["iteration"].tolist()):
        writer.append(iteration, **{name: array[index] for name, array in rows.items()})
    writer.stop()
    return folder
