"""Memory of a step under skewed routing, stock Megatron and FSSDP: does the hottest rank stay inside a budget?

    python bench/activation_memory.py

In every layer the hottest experts live on rank 0. Counted are all bytes that torch allocates while a step runs, at the
worst moment, on the rank where that is most, and FSSDP's buffers; parameters, main gradients and optimizer state
are the same in all rows and left out. The budget is 1.5 times what stock Megatron takes with forced-balanced routing.
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

BIAS = (4.0, 3.0, 1.0)  # on the router's logits of experts 0, 1 and 2, in every layer
MODEL = dict(num_layers=4, hidden_size=128, ffn_hidden_size=256, moe_ffn_hidden_size=256)
BUDGET = 1.5


def allocations(body: Callable[[], Any]) -> list[int]:
    """What torch's CPU allocator gave (+) and took back (-) while ``body`` ran, in bytes, in order."""
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profiler:
        body()
    events = profiler.profiler.kineto_results.events()
    memory = sorted(
        (e.start_ns(), at, e.nbytes()) for at, e in enumerate(events) if e.name() == "[memory]"
    )
    return [nbytes for *_, nbytes in memory]


def peak(sizes: list[int]) -> int:
    """Most bytes alive at once, of those that were not there at the start."""
    most = alive = 0
    for size in sizes:
        alive += size
        most = max(most, alive)
    return most


def skewed(chunks: list) -> list:
    """Make the first experts hot, the same in every layer; works before and after `fssdp`."""
    import tiny_gpt

    for layer in tiny_gpt.moe_layers(chunks):
        bias = torch.zeros(layer.config.num_moe_experts)
        bias[: len(BIAS)] = torch.tensor(BIAS)
        gating = layer.router.gating
        layer.router.gating = lambda hidden, gating=gating, bias=bias: gating(hidden) + bias
    return chunks


def watch_buffers(chunks: list) -> list[int]:
    """A list to which the bytes of buffers are added when they are allocated, with what the transport takes beside."""
    import tiny_gpt

    allocated: list[int] = []
    for transport in {
        layer.fssdp.transport for layer in tiny_gpt.moe_layers(chunks) if hasattr(layer, "fssdp")
    }:
        allocate, extra_bytes = transport.allocate, transport.extra_bytes

        def counted(
            size: int,
            layers: Any,
            *args: Any,
            allocate: Callable = allocate,
            extra: Callable = extra_bytes,
        ) -> Any:
            allocated.append(size + extra(layers))
            return allocate(size, layers, *args)

        transport.allocate = counted
    return allocated


def peaks(case: Any, hook: Callable[[list], list] | None, steps: int) -> tuple[list[int], Any, int]:
    """Peak bytes of each step on this rank, buffers included; the run; bytes of the buffers."""
    import tiny_gpt

    run = tiny_gpt.train(case, steps=0, hook=hook)
    found, buffers = [], watch_buffers(run.chunks)
    for step in range(steps):
        before = sum(buffers)
        found.append(before + peak(allocations(lambda step=step: run.step(step))))
    return found, run, sum(buffers)


def measure(steps: int) -> None:
    """Print the table; runs on every rank."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    import tiny_gpt

    from megatron_hecate import HecateConfig, fssdp
    from megatron_hecate.record.metrics import layer_metrics

    fields = dict(ep=dist.get_world_size(), experts=16, seq=128, micro_batch=16, skew=0.0)
    case = tiny_gpt.Case(**fields, settings=tuple(MODEL.items()))
    forced = tiny_gpt.Case(
        **fields, settings=tuple({**MODEL, "moe_router_force_load_balancing": True}.items())
    )
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
    worst, lines = {}, []
    for name, (this, hook) in rows.items():
        own, run, buffers = peaks(this, hook, steps)
        table = [None] * dist.get_world_size()
        dist.all_gather_object(table, own)
        hottest = [max(of_step) for of_step in zip(*table, strict=True)]
        worst[name] = max(hottest)
        metrics = layer_metrics(run.chunks)
        tokens = (
            f"{max(m.routed_tokens for m in metrics)} | {max(m.computed_tokens for m in metrics)}"
            if metrics
            else "|"
        )
        lines.append(
            f"| {name} | {_mib(hottest[0])} | {_mib(max(hottest[1:]))} | {_mib(buffers)} | {tokens} |"
        )
    budget = BUDGET * worst["stock, forced balance"]
    if dist.get_rank() == 0:
        head = "first step, MiB | later steps, MiB | of that buffers | largest rank load, tokens | with replicas"
        print(f"| on the hottest of {dist.get_world_size()} ranks | {head} |\n" + "|---" * 6 + "|")
        print("\n".join(lines))
        print(
            f"\nBudget, {BUDGET} times forced balance: {_mib(budget)} MiB. Over it in some step: ",
            end="",
        )
        print(", ".join(name for name in rows if worst[name] > budget) or "none")
    dist.barrier()
    dist.destroy_process_group()


def _mib(count: float) -> str:
    return f"{count / 2**20:.1f}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=4, help="2 or 4")
    parser.add_argument("--steps", type=int, default=5, help="steps that are measured")
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
