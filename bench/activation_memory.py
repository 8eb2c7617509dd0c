"""Measure the peak memory of a step under skewed routing, with stock Megatron and with FSSDP.

    python bench/activation_memory.py

In every layer the hottest experts are at home on rank 0. The table shows the peak of all bytes that
torch allocates during a step, on the rank with the highest peak, plus FSSDP's buffers; parameters,
main gradients and optimizer state are equal in all rows and left out. The budget is 1.5 times stock
Megatron's peak with forced-balanced routing.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from launch import again_on_ranks

# added to the router's logits of experts 0, 1 and 2, in every layer
BIAS = (4.0, 3.0, 1.0)
MODEL = dict(num_layers=4, hidden_size=128, ffn_hidden_size=256, moe_ffn_hidden_size=256)
BUDGET = 1.5


def allocations(body: Callable[[], Any]) -> list[int]:
    """List the bytes that torch's CPU allocator allocates (+) and frees (-) during ``body``."""
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profiler:
        body()
    events = profiler.profiler.kineto_results.events()
    memory = sorted(
        (event.start_ns(), index, event.nbytes())
        for index, event in enumerate(events)
        if event.name() == "[memory]"
    )
    return [nbytes for *_, nbytes in memory]


def peak(sizes: list[int]) -> int:
    """Compute the peak of the bytes allocated since the start."""
    most = alive = 0
    for size in sizes:
        alive += size
        most = max(most, alive)
    return most


def skewed(chunks: list) -> list:
    """Make the first experts of every layer hot; works before and after `fssdp`."""
    import tiny_gpt

    for layer in tiny_gpt.moe_layers(chunks):
        bias = torch.zeros(layer.config.num_moe_experts)
        bias[: len(BIAS)] = torch.tensor(BIAS)
        gating = layer.router.gating
        layer.router.gating = lambda hidden, gating=gating, bias=bias: gating(hidden) + bias
    return chunks


def watch_buffers(chunks: list) -> list[int]:
    """Record the bytes of buffers when transports allocate them.

    Returns:
        List that grows with each allocation: bytes of the buffers and of the transport's own
        memory.
    """
    import tiny_gpt

    allocated: list[int] = []
    layers = [layer for layer in tiny_gpt.moe_layers(chunks) if hasattr(layer, "fssdp")]
    for transport in {layer.fssdp.transport for layer in layers}:

        def counted(
            size: int,
            layers: Any,
            *args: Any,
            allocate: Callable = transport.allocate,
            extra: Callable = transport.extra_bytes,
        ) -> Any:
            allocated.append(size + extra(layers))
            return allocate(size, layers, *args)

        transport.allocate = counted
    return allocated


def peaks(case: Any, hook: Callable[[list], list] | None, steps: int) -> tuple[list[int], Any, int]:
    """Train and measure.

    Returns:
        Peak bytes of each step on this rank, with buffers; the run; bytes of the buffers.
    """
    import tiny_gpt

    run = tiny_gpt.train(case, steps=0, hook=hook)
    found = []
    buffers = watch_buffers(run.chunks)
    for step in range(steps):
        # Buffers of earlier steps are still allocated; the profiler records new allocations only.
        before = sum(buffers)
        found.append(before + peak(allocations(lambda step=step: run.step(step))))
    return found, run, sum(buffers)


def measure(steps: int) -> None:
    """Measure on every rank; print the table on rank 0."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    import tiny_gpt

    from megatron_hecate import HecateConfig, fssdp, layer_metrics

    fields = dict(ep=dist.get_world_size(), experts=16, seq=128, micro_batch=16, skew=0.0)
    case = tiny_gpt.Case(**fields, settings=tuple(MODEL.items()))
    balanced = {**MODEL, "moe_router_force_load_balancing": True}
    forced = tiny_gpt.Case(**fields, settings=tuple(balanced.items()))
    tiny_gpt.initialize(case)

    def ours(**settings: Any) -> Callable[[list], list]:
        hook = fssdp(HecateConfig(slots=2, speeds=tiny_gpt.FREE, **settings))
        return lambda chunks: hook(skewed(chunks))

    rows = {
        "stock, forced balance": (forced, None),
        "stock": (case, skewed),
        "FSSDP": (case, ours()),
        "FSSDP, 16 late replicas": (case, ours(late_replicas=16)),
        "FSSDP, 16 late replicas, lifetime layer": (case, ours(late_replicas=16, lifetime="layer")),
    }
    worst = {}
    lines = []
    for name, (this, hook) in rows.items():
        own, run, buffers = peaks(this, hook, steps)
        table = [None] * dist.get_world_size()
        dist.all_gather_object(table, own)
        # The job fails if any rank exceeds its memory, so the fullest rank of each step counts.
        hottest = [max(of_step) for of_step in zip(*table, strict=True)]
        worst[name] = max(hottest)
        metrics = layer_metrics(run.chunks)
        tokens = "|"
        if metrics:
            routed = max(layer.routed_tokens for layer in metrics)
            tokens = f"{routed} | {max(layer.computed_tokens for layer in metrics)}"
        cells = [_mib(hottest[0]), _mib(max(hottest[1:])), _mib(buffers), tokens]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    budget = BUDGET * worst["stock, forced balance"]
    if dist.get_rank() == 0:
        head = (
            "first step, MiB | later steps, MiB | of that buffers | largest rank load, tokens | "
            "with replicas"
        )
        print(f"| on the hottest of {dist.get_world_size()} ranks | {head} |\n" + "|---" * 6 + "|")
        print("\n".join(lines))
        over = ", ".join(name for name in rows if worst[name] > budget) or "none"
        print(
            f"\nBudget, {BUDGET} times forced balance: {_mib(budget)} MiB. "
            f"Over it in some step: {over}"
        )
    dist.barrier()
    dist.destroy_process_group()


def _mib(count: float) -> str:
    return f"{count / 2**20:.1f}"


def main() -> int:
    """Run the benchmark on CPU ranks; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=4, help="2 or 4")
    parser.add_argument("--steps", type=int, default=5, help="measured steps")
    arguments = parser.parse_args()
    if arguments.ranks not in (2, 4) or arguments.steps < 2:
        parser.error(
            f"--ranks {arguments.ranks} must be 2 or 4, --steps {arguments.steps} 2 or more"
        )
    if "RANK" in os.environ:
        measure(arguments.steps)
        return 0
    return again_on_ranks(__file__, arguments.ranks, KINETO_LOG_LEVEL="6")


if __name__ == "__main__":
    sys.exit(main())
