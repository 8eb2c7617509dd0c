"""Compute what a bounded rank load buys: the ``moe_expert_rank_capacity_factor``, and memory.

    python bench/bound.py          both tables of docs/bound.md; a minute

Balance, from the recordings in ``bench/data`` (32 sources: ranks times microbatches): each layer is
planned for the iteration, from its forecast, with the limit of a factor without padding. One copy
costs as much as a mean rank load, so that replicas exist because of the limit alone. Counted are
iterations in which any layer of any microbatch exceeds the factor, without the first one.

Memory, by arithmetic from recipes' sizes, on the first pipeline stage: what autograd keeps of a row
of MXFP8 fused experts (columnwise fp8 inputs of both GEMMs, bf16 output of the first, probability),
for all layers and microbatches in flight; and the tensors of one layer's forward and backward.
Against it stand the replicas' MXFP8 weights and bf16 gradients, by both lifetimes.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from megatron_hecate.comm.transport import LayerBuffer
from megatron_hecate.plan import CopyCost, Placement, World, largest_load, load_limit, plan_replicas
from megatron_hecate.plan.cost import worst_padding
from megatron_hecate.replicas.buffers import buffer_sizes
from megatron_hecate.step.forecast import LoadHistory

DATA = Path(__file__).parent / "data"
RECORDINGS = {"none": "pysrc_e64k6_aux0", "0.01": "pysrc_e64k6_aux1e-2"}
# ranks and slots
GROUPS = ((4, 2), (4, 4), (8, 2), (8, 4), (16, 2), (32, 2))
FACTORS = (1.15, 1.25, 1.5)
# bytes of MXFP8 per element, with scales
MXFP8 = 1 + 1 / 32
ALIGNMENT = 256
BF16 = torch.bfloat16
# name, hidden and FFN width, EP, homes of a rank, rows (tokens of a rank times top-k), layers of a
# rank, layers times microbatches in flight, the recipe's factor, GPU and host part of its stash
# (None without one)
RECIPES = (
    ("DeepSeek-V3, GB200", 7168, 2048, 64, 4, 32768, 16, 80, 1.5, (1.2, 1.0)),
    ("DeepSeek-V3, GB300", 7168, 2048, 32, 8, 32768, 31, 69.75, 1.5, (1.2, 1.0)),
    ("DeepSeek-V3, B300", 7168, 2048, 8, 32, 32768, 8, 96, 1.5, (1.2, 1.0)),
    ("Qwen3-235B, GB200", 4096, 1536, 32, 4, 32768, 12, 128, 1.5, (1.2, 1.0)),
    ("Qwen3-235B, GB300", 4096, 1536, 32, 4, 65536, 24, 104, 1.5, (1.2, 1.0)),
    ("Qwen3-30B, GB200", 2048, 768, 8, 16, 131072, 48, 96, 1.5, (1.2, 1.0)),
    ("GPT-OSS-120B, GB200", 2880, 2880, 64, 2, 65536, 36, 72, 1.5, (1.2, 1.0)),
    ("GPT-OSS-20B, B300", 2880, 2880, 4, 8, 16384, 24, 24, 5.0, None),
    ("GPT-OSS-20B, GB200", 2880, 2880, 8, 4, 4096, 24, 24, 7.0, None),
)
# largest rank load that the first table allows for, by EP, with four slots up to EP 8, else two
BALANCE = {4: 1.25, 8: 1.15, 16: 1.15, 32: 1.1, 64: 1.1}


def largest_loads(
    counts: np.ndarray, num_ranks: int, slots: int, factor: float
) -> tuple[np.ndarray, np.ndarray, float]:
    """Replay a recording.

    Args:
        counts: tokens, [T, L, 32, E].
        num_ranks: ranks; the other factor of 32 is microbatches.
        slots: replicas that a rank may hold.
        factor: ``moe_expert_rank_capacity_factor``.

    Returns:
        Largest rank load of a microbatch over its mean in each iteration after the first, [T - 1],
        of stock and with replicas; and replicas per rank and layer.
    """
    num_experts = counts.shape[3]
    homes = Placement.initial(num_experts, num_ranks, num_slots=slots)
    world, mean = World((0,) * num_ranks), counts[0, 0].sum() / num_ranks
    limit = load_limit(factor, rows=mean, experts=homes.slots_per_rank, alignment=1)
    history, placed = LoadHistory(), [homes] * counts.shape[1]
    stock, ours, replicas = [], [], []
    for step in counts:
        if (forecast := history.forecast()) is not None:
            ratios = []
            for layer, previous in enumerate(placed):
                settings = dict(cost=CopyCost(near=mean), previous=previous, limit=limit)
                plan = placed[layer] = plan_replicas(forecast[layer], homes, world, **settings)
                for load in step[layer].reshape(-1, num_ranks, num_experts).sum(axis=1):
                    over = num_ranks / load.sum()
                    both = (largest_load(load, placement) for placement in (homes, plan))
                    ratios.append([fullest * over for fullest in both])
            stock.append(max(ratio for ratio, _ in ratios))
            ours.append(max(ratio for _, ratio in ratios))
            replicas.append(np.mean([plan.num_replicas for plan in placed]) / num_ranks)
        history.append(step.sum(axis=1))
    return np.array(stock), np.array(ours), float(np.mean(replicas))


def print_balance() -> None:
    """Print which factors suffice on the recordings."""
    heads = "ranks | aux loss | slots | factor | stock: largest, over the factor"
    print(f"| {heads} | FSSDP: replicas, largest, over the factor |\n|---|---|---|---|---|---|")
    for (num_ranks, slots), (loss, name) in (
        (group, item) for group in GROUPS for item in RECORDINGS.items()
    ):
        counts = np.load(DATA / f"{name}.npz")["counts"]
        for factor in FACTORS:
            stock, ours, replicas = largest_loads(counts, num_ranks, slots, factor)
            cells = f"{stock.max():.2f}, {(stock > factor).sum()} of {len(stock)}"
            cells += f" | {replicas:.2f}, {ours.max():.2f}, {(ours > factor).sum()}"
            print(f"| {num_ranks} | {loss} | {slots} | {factor} | {cells} |", flush=True)


def print_memory() -> None:
    """Print the memory of a rank's expert buffers under recipes' factors and under ours."""
    heads = "recipe | EP | factor | saved: today, GPU + host | saved: ours, no stash | live"
    heads += (
        " | won, before replicas | replicas: iteration; layer | won, layer | won, layer, advised"
    )
    print(f"\n| {heads} |\n|---|---|---|---|---|---|---|---|---|---|")
    for name, hidden, ffn, ep, homes, rows, layers, in_flight, today, stash in RECIPES:
        saved = hidden * MXFP8 + 2 * ffn * 2 + ffn * MXFP8 + 4
        forward = 2 * hidden * 2 + 2 * hidden * MXFP8 + 2 * ffn * 2 + 2 * ffn * MXFP8
        backward = 2 * hidden * 2 + 2 * hidden * MXFP8 + saved + 4 * ffn * MXFP8
        # the combined schedule of the recipes with a stash runs a forward beside a backward
        live = forward + backward if stash else max(forward, backward)
        unit, live = (rows * size / 2**30 for size in (saved * in_flight, live))
        slots = 4 if ep <= 8 else 2
        padding = worst_padding(rows=rows, experts=homes + slots, alignment=ALIGNMENT)
        ours = BALANCE[ep] + padding
        on_gpu, on_host = stash or (today, 0.0)
        won, advised = (
            unit * (on_gpu - factor) + live * (today - factor)
            for factor in (ours, padding + (1.25 if ep <= 8 else 1.2))
        )
        elements = 3 * hidden * ffn
        buffer = LayerBuffer(
            slots, elements, BF16, homes, round(elements * 2 * MXFP8), grad_dtype=BF16
        )
        kept, shared = (
            sum(map(sum, buffer_sizes([buffer] * layers, lifetime))) / 2**30
            for lifetime in ("iteration", "layer")
        )
        cells = f"{today} → {BALANCE[ep]} + {padding:.2f} | {unit * on_gpu:.1f} + "
        cells += f"{unit * on_host:.1f} | {unit * ours:.1f}"
        cells += (
            f" | {live * today:.1f} → {live * ours:.1f} | {won:+.1f} | {kept:.1f}; {shared:.1f}"
        )
        print(f"| {name} | {ep} | {cells} | {won - shared:+.1f} | {advised - shared:+.1f} |")


if __name__ == "__main__":
    print_balance()
    print_memory()
