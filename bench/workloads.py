"""Run the public benchmark W0 to W7 with every planner, and check its published figures.

    python bench/workloads.py

The benchmark is NVIDIA/Megatron-LM#7488. A workload is a rule for the experts of every token row.
The first table recomputes the figures of the benchmark's README for step 0: the largest expert load
over the mean (max/mean), and the coefficient of variation (CV), of 8 experts. The README's rank
values are wrong (1.000 although the hot block is one rank), so the table adds ours. The second
replays 12 steps on 4 ranks of one node with one slot, and shows the mean imbalance of ranks that
every planner leaves. Known defects of the benchmark: W1 and W2 draw equally, W4 is not ragged, all
ranks route the same rows, and W3's published figures are stale.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from pathlib import Path

import numpy as np
import torch
from balance import replay
from cases import Case
from rivals import find_planners
from rivals.planner import Setting
from rivals.report import markdown
from shapes import swiglu

from megatron_hecate.plan import H100, World

DATA = Path(__file__).resolve().parent / "data" / "published" / "figures.json"
NAMES = (
    *("W0_balanced", "W1_hot_expert_set", "W2_hot_rank", "W3_spread_hot_experts"),
    *("W4_source_ragged", "W5_zero_expert_rank", "W6_rotating_hotspot", "W7_burst"),
)
SEED: int = 1234
RANKS: int = 4
STEPS: int = 12


def loads(name: str, num_experts: int, tokens: int, top_k: int, *, step: int = 0) -> np.ndarray:
    """Count the pairs that one rank routes to each expert in one step of workload ``name``.

    Args:
        name: name of the workload.
        num_experts: number of experts, E.
        tokens: number of token rows.
        top_k: experts per token.
        step: index of the step.

    Returns:
        Pairs of each expert, [E] int64.
    """
    every = list(range(num_experts))
    width = max(top_k, num_experts // 4)
    seed = hashlib.sha256(f"{name}|{SEED}|{step}".encode()).hexdigest()[:8]
    generator = torch.Generator().manual_seed(int(seed, 16))
    # every second expert, the pool of W3
    even = sorted({2 * i % num_experts for i in range(max(top_k, num_experts // 2))})
    # The hot block of W6 moves every three steps.
    first = (step // 3) * width % num_experts if name.startswith("W6") else 0
    hot = [(first + i) % num_experts for i in range(width)]
    count = np.zeros(num_experts, dtype=np.int64)
    for row in range(tokens):
        # W0 assigns experts in turn; all other workloads draw from a pool.
        if name.startswith("W0"):
            count[[(row * top_k + j) % num_experts for j in range(top_k)]] += 1
            continue
        pool = every
        # Three of four rows draw from the hot block.
        if name[:2] in ("W1", "W2", "W6") and row % 4:
            pool = hot
        elif name.startswith("W3") and row % 4 and len(even) >= top_k:
            pool = even
        # Half of the experts receive no tokens.
        elif name.startswith("W5"):
            pool = every[num_experts // 2 :]
        # In every fourth step half of the rows draw from the hot block.
        elif name.startswith("W7") and step % 4 == 3 and row % 2 == 0:
            pool = hot
        picked = torch.randperm(len(pool), generator=generator)[:top_k].tolist()
        count[[pool[i] for i in picked]] += 1
    return count


def recount() -> list[dict[str, str | float]]:
    """Recompute the published figures; return a row per workload and published size."""
    published = json.loads(DATA.read_text())["w0_w7"]
    rows = []
    for size, (tokens, top_k) in {"E8_T128_k2": (128, 2), "E8_T512_k4": (512, 4)}.items():
        for at, name in enumerate(NAMES):
            count = loads(name, 8, tokens, top_k)
            rank = count.reshape(RANKS, -1).sum(axis=1)
            values = (round(count.max() / count.mean(), 3), round(count.std() / count.mean(), 3))
            theirs = (published["max_over_mean"][size][name[:2]], published["cv"][size][at])
            rows.append(
                dict(
                    size=size,
                    workload=name,
                    ours=values[0],
                    theirs=theirs[0],
                    our_cv=values[1],
                    their_cv=theirs[1],
                    same="yes" if values == theirs else "**no**",
                    rank=rank.max() / rank.mean(),
                )
            )
    return rows


def planners() -> list[dict[str, str | float]]:
    """Replay all workloads with every planner.

    Returns:
        A row per planner: mean imbalance of ranks over `STEPS` steps of each workload.
    """
    world = World(node=(0,) * RANKS, speeds=H100)
    shape = swiglu(512, 1024)
    setting = Setting(8, world=world, shape=shape, slots=1)
    cases = []
    for name in NAMES:
        steps = np.array([loads(name, 8, 128, 2, step=step) for step in range(STEPS)])
        cases.append(Case(name, np.repeat(steps[:, None, None], RANKS, axis=2), setting))
    rows = []
    for name, planner in find_planners().items():
        row: dict[str, str | float] = {"planner": name}
        for case in cases:
            row[case.load[:2]] = float(replay(planner, case).figures["imbalance"].mean())
        rows.append(row)
    return rows


def main() -> None:
    """Print both tables."""
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    heads = dict(
        size="size",
        workload="workload",
        ours="max/mean",
        theirs="published",
        our_cv="CV",
        their_cv="published",
    )
    columns = {
        name: (head, "s" if name in ("size", "workload") else ".3f") for name, head in heads.items()
    }
    columns |= {"same": ("same", "s"), "rank": ("ranks, EP 4: max/mean", ".3f")}
    print(markdown(recount(), columns))
    print(
        "\nMean imbalance of ranks over 12 steps, 4 ranks, one slot; "
        "planning begins with the first step:\n"
    )
    columns = {"planner": ("planner", "s")} | {name[:2]: (name[:2], ".3f") for name in NAMES}
    print(markdown(planners(), columns))


if __name__ == "__main__":
    main()
