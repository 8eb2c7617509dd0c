"""Step time of stock Megatron and of FSSDP, on CPU ranks, step by step in turn.

    python bench/step_time.py [--ranks 8]       no more ranks than cores, or all wait for the cores
    python bench/step_time.py --break-even      from which imbalance on replicas pay, and what FSSDP decides

Stock and FSSDP models live in the same processes and take turns, so that a noisy machine slows both alike; the ratio is
of medians. Three routings: skewed (a bias on the router's logits makes one rank hot), forced balance
(``moe_router_force_load_balancing``: random, what published throughput tables use), and balanced with all of FSSDP's
machinery on (slots asked for, none worth using): what it costs when it cannot help.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from statistics import median
from typing import Any

from launch import again_on_ranks

SKEWS = (0.1, 0.25, 0.5, 1.0)  # added to the logits of a hot expert, and half of it to the next
MODEL = dict(hidden_size=128, ffn_hidden_size=512, moe_ffn_hidden_size=512)


def measure(steps: int, warmup: int, accumulate: int, break_even: bool) -> None:
    """Print the table; runs on every rank."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    import tiny_gpt

    from megatron_hecate import HecateConfig, fssdp

    forced = tuple({**MODEL, "moe_router_force_load_balancing": True}.items())
    sizes = dict(experts=16, seq=128, micro_batch=16, accumulate=accumulate)
    skews = {f"skewed by {skew}": skew for skew in SKEWS} if break_even else {"skewed": 2.0}
    cases = {
        routing: tiny_gpt.Case(**sizes, skew=skew, settings=tuple(MODEL.items()))
        for routing, skew in skews.items()
    }
    cases["forced balance"] = tiny_gpt.Case(**sizes, skew=0.0, settings=forced)
    tiny_gpt.initialize(cases["forced balance"])
    hooks = {"stock": None, "FSSDP": fssdp(HecateConfig(slots=2))}
    if break_even:  # at speeds that make copies free, replicas are always used
        hooks["always"] = fssdp(HecateConfig(slots=2, speeds=tiny_gpt.FREE))
    runs, seconds = {}, {}
    for routing, case in cases.items():
        for name, hook in hooks.items():
            runs[routing, name] = tiny_gpt.train(case, steps=0, hook=hook)
            seconds[routing, name] = []
    for step in range(warmup + steps):
        for key, run in runs.items():
            dist.barrier()
            start = time.perf_counter()
            run.step(step)
            dist.barrier()
            if step >= warmup:
                seconds[key].append(time.perf_counter() - start)
        if dist.get_rank() == 0:
            print(f"step {step + 1}/{warmup + steps}", file=sys.stderr, flush=True)
    if dist.get_rank() == 0:
        report(
            runs,
            {key: median(times) for key, times in seconds.items()},
            list(cases),
            break_even=break_even,
        )
        print(
            f"\nMedians of {steps} steps of {accumulate} microbatches, in turn, {dist.get_world_size()} ranks."
        )
    dist.barrier()
    dist.destroy_process_group()


def report(
    runs: dict[tuple[str, str], Any],
    seconds: dict[tuple[str, str], float],
    routings: list[str],
    *,
    break_even: bool,
) -> None:
    """Print one of the two tables."""
    from megatron_hecate.record.metrics import layer_metrics

    if break_even:
        print(
            "| routing | imbalance of the layers | stock, s | stock/always | stock/FSSDP | layers bypassed |"
        )
        print("|---|---|---|---|---|---|")
        for routing in routings:
            metrics = layer_metrics(runs[routing, "FSSDP"].chunks)
            stock = seconds[routing, "stock"]
            print(
                f"| {routing} | {', '.join(f'{m.routed:.2f}' for m in metrics)} | {stock:.3f} | "
                f"{stock / seconds[routing, 'always']:.3f} | {stock / seconds[routing, 'FSSDP']:.3f} | "
                f"{sum(m.bypassed for m in metrics)} of {len(metrics)} |"
            )
        return
    ideal = seconds["forced balance", "stock"]
    print("| routing | stock, s | FSSDP, s | stock/FSSDP | stock/ideal | FSSDP/ideal | replicas |")
    print("|---|---|---|---|---|---|---|")
    for routing in routings:
        stock, ours = seconds[routing, "stock"], seconds[routing, "FSSDP"]
        replicas = runs[routing, "FSSDP"].replicas
        print(
            f"| {routing} | {stock:.3f} | {ours:.3f} | {stock / ours:.3f} | {stock / ideal:.3f} | {ours / ideal:.3f} | "
            f"{replicas} |"
        )
    print("\nideal: stock Megatron with forced balance")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--accumulate", type=int, default=4, help="microbatches per step")
    parser.add_argument(
        "--break-even",
        action="store_true",
        help="several skews; replicas always, and where they pay",
    )
    arguments = parser.parse_args()
    if "RANK" in os.environ:
        measure(arguments.steps, arguments.warmup, arguments.accumulate, arguments.break_even)
        return 0
    return again_on_ranks(__file__, arguments.ranks)


if __name__ == "__main__":
    sys.exit(main())
