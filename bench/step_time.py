"""Step time of stock Megatron and of FSSDP, on 2 CPU ranks, step by step in turn.

    python bench/step_time.py

Stock and FSSDP models live in the same processes and take turns, so that a noisy machine slows both alike; the ratio is
of medians. Three routings: skewed (a bias on the router's logits makes one rank hot), forced balance
(``moe_router_force_load_balancing``: random, what published throughput tables use), and balanced with all of FSSDP's
machinery on (slots asked for, none worth using): what it costs when it cannot help.
"""

from __future__ import annotations

import argparse
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parent.parent
MODEL = dict(hidden_size=128, ffn_hidden_size=512, moe_ffn_hidden_size=512)


def measure(steps: int, warmup: int, accumulate: int) -> None:
    """Print the table; runs on every rank."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    import tiny_gpt

    from megatron_hecate import HecateConfig, fssdp

    forced = tuple({**MODEL, "moe_router_force_load_balancing": True}.items())
    sizes = dict(experts=16, seq=128, micro_batch=16, accumulate=accumulate)
    cases = {
        "skewed": tiny_gpt.Case(**sizes, skew=2.0, settings=tuple(MODEL.items())),
        "forced balance": tiny_gpt.Case(**sizes, skew=0.0, settings=forced),
    }
    tiny_gpt.initialize(cases["skewed"])
    runs, seconds = {}, {}
    for routing, case in cases.items():
        for name, hook in (("stock", None), ("FSSDP", fssdp(HecateConfig(slots=2)))):
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
        ideal = median(seconds["forced balance", "stock"])
        print("| routing | stock, s | FSSDP, s | stock/FSSDP | stock/ideal | FSSDP/ideal | guests |")
        print("|---|---|---|---|---|---|---|")
        for routing in cases:
            stock, ours = median(seconds[routing, "stock"]), median(seconds[routing, "FSSDP"])
            guests = runs[routing, "FSSDP"].guests
            print(
                f"| {routing} | {stock:.3f} | {ours:.3f} | {stock / ours:.3f} | {stock / ideal:.3f} | "
                f"{ours / ideal:.3f} | {guests} |"
            )
        print(
            "ideal: stock Megatron with forced balance. Medians of",
            steps,
            f"steps of {accumulate} microbatches, in turn, 2 ranks.",
        )
    dist.barrier()
    dist.destroy_process_group()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--accumulate", type=int, default=4, help="microbatches per step")
    arguments = parser.parse_args()
    if "RANK" in os.environ:
        measure(arguments.steps, arguments.warmup, arguments.accumulate)
        return 0
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    path = os.pathsep.join(str(ROOT / folder) for folder in ("", "tests", "examples"))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, "PYTHONWARNINGS": "ignore"}
    environment["CUDA_VISIBLE_DEVICES"] = ""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", f"--master-port={port}", __file__]
    command += [f"--{name}={value}" for name, value in vars(arguments).items()]
    return subprocess.run(command, env=environment, timeout=1800).returncode


if __name__ == "__main__":
    sys.exit(main())
