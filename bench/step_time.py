"""Measure the step time of stock Megatron and of FSSDP on CPU ranks, in alternating steps.

    python bench/step_time.py [--ranks 8]       at most one rank per core, else ranks wait for cores

Stock and FSSDP models alternate in the same processes, so that noise of the machine affects both
equally; the ratio is of medians. Two routings: skewed (a bias on the router's logits makes one rank
hot), and forced balance (``moe_router_force_load_balancing``: random, as in published throughput
tables). Under forced balance FSSDP has slots but no replica pays, so its ratio is FSSDP's overhead.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from statistics import median
from typing import Any

from launch import again_on_ranks

MODEL = dict(hidden_size=128, ffn_hidden_size=512, moe_ffn_hidden_size=512)


def measure(*, steps: int, warmup: int, accumulate: int) -> None:
    """Measure on every rank; print the table on rank 0.

    Args:
        steps: timed steps of each model.
        warmup: untimed steps of each model.
        accumulate: microbatches per step.
    """
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    import tiny_gpt

    from megatron_hecate import HecateConfig, fssdp

    forced = tuple({**MODEL, "moe_router_force_load_balancing": True}.items())
    sizes = dict(experts=16, seq=128, micro_batch=16, accumulate=accumulate)
    # The hot expert's logits get 2, and the next one's half of it.
    skewed = tiny_gpt.Case(**sizes, skew=2.0, settings=tuple(MODEL.items()))
    cases = {"skewed": skewed}
    cases["forced balance"] = tiny_gpt.Case(**sizes, skew=0.0, settings=forced)
    # All cases have equal parallel and batch sizes, so one initialization serves all cases.
    tiny_gpt.initialize(cases["forced balance"])
    hooks = {"stock": None, "FSSDP": fssdp(HecateConfig(slots=2))}
    runs = {}
    seconds = {}
    for routing, case in cases.items():
        for name, hook in hooks.items():
            runs[routing, name] = tiny_gpt.train(case, steps=0, hook=hook)
            seconds[routing, name] = []
    for step in range(warmup + steps):
        for key, run in runs.items():
            # Barriers on both sides: a step lasts until the slowest rank has finished.
            dist.barrier()
            start = time.perf_counter()
            run.step(step)
            dist.barrier()
            if step >= warmup:
                seconds[key].append(time.perf_counter() - start)
        if dist.get_rank() == 0:
            print(f"step {step + 1}/{warmup + steps}", file=sys.stderr, flush=True)
    if dist.get_rank() == 0:
        medians = {key: median(times) for key, times in seconds.items()}
        report(runs, medians, list(cases))
        print(
            f"\nMedians of {steps} steps of {accumulate} microbatches, in turn, "
            f"{dist.get_world_size()} ranks."
        )
    dist.barrier()
    dist.destroy_process_group()


def report(
    runs: dict[tuple[str, str], Any], seconds: dict[tuple[str, str], float], routings: list[str]
) -> None:
    """Print the table.

    Args:
        runs: trained models by routing and name.
        seconds: median step times by routing and name.
        routings: routings, in the order of the rows.
    """
    ideal = seconds["forced balance", "stock"]
    print("| routing | stock, s | FSSDP, s | stock/FSSDP | stock/ideal | FSSDP/ideal | replicas |")
    print("|---|---|---|---|---|---|---|")
    for routing in routings:
        stock = seconds[routing, "stock"]
        ours = seconds[routing, "FSSDP"]
        replicas = runs[routing, "FSSDP"].replicas
        print(
            f"| {routing} | {stock:.3f} | {ours:.3f} | {stock / ours:.3f} | {stock / ideal:.3f} | "
            f"{ours / ideal:.3f} | {replicas} |"
        )
    print("\nideal: stock Megatron with forced balance")


def main() -> int:
    """Run the benchmark on CPU ranks; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--accumulate", type=int, default=4, help="microbatches per step")
    arguments = parser.parse_args()
    if "RANK" in os.environ:
        measure(
            steps=arguments.steps,
            warmup=arguments.warmup,
            accumulate=arguments.accumulate,
        )
        return 0
    return again_on_ranks(__file__, arguments.ranks)


if __name__ == "__main__":
    sys.exit(main())
