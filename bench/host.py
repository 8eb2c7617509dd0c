"""Measure the host time that FSSDP adds to a rank's main thread, on 2 CPU ranks.

    python bench/host.py
    python bench/host.py --experts TEGroupedMLP --homes 8
    python bench/host.py --gpu --experts TEGroupedMLP       2 ranks that share a GPU

Training of many small experts is host-bound: the GPU waits for kernel launches. Four models
alternate in the same processes: stock Megatron, FSSDP whose plans have no replicas, FSSDP with
replicas in two slots per rank, and stock Megatron with two more experts per rank, which cost the
host what two filled slots cost at least. Tensors are tiny, so that nearly all time is Python and
dispatch. Time is CPU time of the main thread, so that other programs on the machine disturb it
little. All ranks wait for the slowest one, so each model's time of a step is that of its slowest
rank, with and without FSSDP. Ratios compare the same step; the table shows their medians and
quartiles. Calls of Python and C functions are counted in five additional steps per model; the
medians hardly differ between runs. They are those of the rank with the most calls of all models: a
rank computes only the slots that it fills.

Grouped experts run TransformerEngine's Python over torch (``tests/support/cpu/te_on_cpu.py``), with
fused weight gradients. On a GPU all layers are TransformerEngine's own, backwards run in the main
thread, and waiting for the GPU takes no CPU time.
"""

from __future__ import annotations

import argparse
import ctypes
import dataclasses
import gc
import os
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from statistics import median, quantiles
from typing import Any, TypeVar

from launch import again_on_gpus, again_on_ranks

T = TypeVar("T")

EXPERTS = ("TEGroupedMLP", "SequentialMLP")
# hidden and ffn size
SIZE = 16
SIZE_ON_GPU = 64
# steps whose calls are counted
COUNTED: int = 5
# replica slots per rank
SLOTS: int = 2
# cudaDeviceScheduleBlockingSync: a thread that waits for the GPU sleeps, so CPU time excludes waits
BLOCKING_SYNC = 4
# steps; the first has no forecast, hence no replicas
WARMUP = 3
PARTS = ("forward", "backward", "rest")
HEAD = (
    "| experts | homes | microbatches | model | forward | backward | rest | step | all | ratio | "
    "calls | ratio |\n|---|---|---|---|---|---|---|---|---|---|---|---|"
)
LEGEND = """\
Microseconds per layer and microbatch, CPU time of the slowest rank's main thread: medians of
{steps} steps of {layers} layers. Rest: outside of forwards and backwards, once per iteration. Step:
the optimizer's. All: forward, backward and rest. Ratios to stock: medians and quartiles of paired
steps. Calls: of Python and C functions in forward and backward."""


def start_on_cpu() -> None:
    """Start the process group, with TransformerEngine's Python and Megatron over torch."""
    import te_on_cpu

    te_on_cpu.install()
    import torch.distributed as dist

    dist.init_process_group("gloo")
    import tiny_gpt
    from host_calls import use_plain_factories

    use_plain_factories()
    tiny_gpt.install_fused_wgrad()


def _start_on_gpu() -> None:
    """Start the process group on a GPU that all ranks share."""
    import torch

    cudart = next(Path(torch.__file__).parents[1].glob("nvidia/cu13/lib/libcudart.so.*"))
    status = ctypes.CDLL(str(cudart)).cudaSetDeviceFlags(BLOCKING_SYNC)
    assert status == 0, f"cudaSetDeviceFlags returned {status}"
    # Only the main thread is timed, so backwards must run in it.
    torch.autograd.set_multithreading_enabled(False)
    import torch.distributed as dist

    dist.init_process_group("cpu:gloo,cuda:nccl")


def tiny_case(homes: int, layers: int, *, size: int = SIZE, grouped: bool = True) -> Any:
    """Describe a model whose steps are nearly all Python and dispatch, on 2 ranks.

    Args:
        homes: home experts per rank.
        layers: MoE layers.
        size: hidden and ffn size.
        grouped: whether experts are a TEGroupedMLP, whose weight gradients are fused, not a
            SequentialMLP.
    """
    import tiny_gpt

    settings = dict(
        num_layers=layers,
        hidden_size=size,
        ffn_hidden_size=size,
        moe_ffn_hidden_size=size,
        gradient_accumulation_fusion=grouped,
    )
    return tiny_gpt.Case(
        experts=2 * homes,
        micro_batch=1,
        skew=2.0,
        settings=tuple(settings.items()),
        grouped=grouped,
    )


def gather(result: T) -> list[T]:
    """Return the results of all ranks, on all ranks."""
    import torch.distributed as dist

    found: list[T] = [result] * dist.get_world_size()
    dist.all_gather_object(found, result)
    return found


def of_busiest(calls: float, result: T) -> T:
    """Return the result of the rank with the most calls, on all ranks.

    Ranks hold different numbers of replicas.
    """
    return max(gather((calls, result)), key=lambda pair: pair[0])[1]


def measure(arguments: argparse.Namespace) -> None:
    """Measure on every rank; print the tables on rank 0."""
    import torch

    torch.set_num_threads(1)
    if arguments.gpu:
        _start_on_gpu()
    else:
        start_on_cpu()
    import tiny_gpt
    import torch.distributed as dist
    from host_calls import Phases

    tiny_gpt.initialize(tiny_gpt.Case())
    phases = Phases()
    prints = dist.get_rank() == 0
    if prints:
        print(f"Load of the machine: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores.\n\n{HEAD}")
    for experts in arguments.experts:
        for homes in arguments.homes:
            models = Models(experts, homes, arguments, phases)
            for microbatches in arguments.microbatches:
                rows = models.compare(microbatches)
                if prints:
                    for row in rows:
                        print(f"| {experts} | {homes} | {microbatches} | {row}", flush=True)
    if prints:
        print(f"\n{LEGEND.format(steps=arguments.steps, layers=arguments.layers)}")
        print(f"Load of the machine: {os.getloadavg()[0]:.1f}.")
    dist.barrier()
    dist.destroy_process_group()


class Models:
    """The models of one size.

    Args:
        experts: class name of Megatron's expert module.
        homes: home experts per rank.
        arguments: parsed command line.
        phases: timer of forwards and backwards.
    """

    def __init__(
        self, experts: str, homes: int, arguments: argparse.Namespace, phases: Any
    ) -> None:
        import tiny_gpt

        from megatron_hecate import HecateConfig, fssdp

        grouped = experts == "TEGroupedMLP"
        self.arguments = arguments
        self.phases = phases
        self.case = tiny_case(
            homes,
            arguments.layers,
            size=SIZE_ON_GPU if arguments.gpu else SIZE,
            grouped=grouped,
        )
        hooks = {
            "stock": None,
            # At the real price of copies no replica of so small an expert pays.
            "no replicas": fssdp(HecateConfig(slots=SLOTS)),
            # With free copies the planner always uses replicas.
            "replicas": fssdp(HecateConfig(slots=SLOTS, speeds=tiny_gpt.FREE)),
        }
        self.models = {name: self._build(self.case, hook) for name, hook in hooks.items()}
        larger = dataclasses.replace(self.case, experts=2 * (homes + SLOTS))
        self.models["stock, two more experts"] = self._build(larger, None)
        for step in range(WARMUP):
            for name in self.models:
                self.step(name, step, arguments.microbatches[0])
        assert self._count_replicas("no replicas") == 0
        assert self._count_replicas("replicas") >= arguments.layers

    def _build(self, case: Any, hook: Callable | None) -> tuple[list, Any]:
        import tiny_gpt

        chunks, config = tiny_gpt.build(case, hook)
        return tiny_gpt.wrap(case, chunks, config)

    def _count_replicas(self, name: str) -> int:
        import tiny_gpt

        layers = tiny_gpt.moe_layers(self.models[name][0])
        return sum(layer.fssdp.placement.num_replicas for layer in layers)

    def step(self, name: str, index: int, microbatches: int) -> Counter[str]:
        """Run one step of a model.

        Returns:
            CPU seconds of the main thread in forward, backward, rest and step.
        """
        import tiny_gpt
        import torch.distributed as dist

        chunks, optimizer = self.models[name]
        for chunk in chunks:
            chunk.zero_grad_buffer()
        optimizer.zero_grad()
        tiny_gpt.set_num_microbatches(self.case, microbatches)
        self.phases.clear()
        dist.barrier()
        begin = time.thread_time()
        tiny_gpt.run(self.case, chunks, index, num_microbatches=microbatches)
        between = time.thread_time()
        optimizer.step()
        seconds = Counter(self.phases.seconds, step=time.thread_time() - between)
        seconds["rest"] = between - begin - self.phases.seconds.total()
        return seconds

    def compare(self, microbatches: int) -> list[str]:
        """Measure all models in turn.

        Returns:
            The table rows without the first three columns.
        """
        times = self._time(microbatches)
        # Medians: in some steps a copy is timed.
        calls = {
            name: median(self.count(name, microbatches).total() for _ in range(COUNTED))
            for name in self.models
        }
        calls = of_busiest(calls["replicas"], calls)
        per_layer = microbatches * self.arguments.layers
        stock_times = [_total(step) for step in times["stock"]]
        rows = []
        for name, steps in times.items():
            totals = [_total(step) for step in steps]
            ratios = [ours / stock for ours, stock in zip(totals, stock_times, strict=True)]
            low, middle, high = quantiles(ratios)
            columns = [name]
            for part in (*PARTS, "step"):
                columns.append(f"{1e6 / per_layer * median(step[part] for step in steps):.0f}")
            columns += [
                f"{1e6 / per_layer * median(totals):.0f}",
                f"{middle:.3f} ({low:.3f} to {high:.3f})",
                f"{calls[name] / per_layer:.0f}",
                f"{calls[name] / calls['stock']:.3f}",
            ]
            rows.append(" | ".join(columns) + " |")
        return rows

    def _time(self, microbatches: int) -> dict[str, list[Counter[str]]]:
        """Time the steps of every model, on the slowest rank; the models alternate step by step."""
        times: dict[str, list[Counter[str]]] = {name: [] for name in self.models}
        # A garbage collection inside one model's step would distort its ratio.
        gc.collect()
        gc.disable()
        # Warm up again: the number of microbatches may have changed.
        for index in range(WARMUP + self.arguments.steps):
            for name in self.models:
                seconds = self.step(name, index, microbatches)
                if index >= WARMUP:
                    times[name].append(seconds)
        gc.enable()
        slowest = {}
        for name, *of_ranks in zip(
            self.models, *(of.values() for of in gather(times)), strict=True
        ):
            slowest[name] = [max(steps, key=_total) for steps in zip(*of_ranks, strict=True)]
        return slowest

    def count(self, name: str, microbatches: int) -> Counter[tuple[str, str, str]]:
        """Count the calls in forward and backward of one step, by file, function and kind."""
        self.phases.counts = True
        self.step(name, 100, microbatches)
        self.phases.counts = False
        return Counter(self.phases.calls)


def _total(step: Counter[str]) -> float:
    return sum(step[part] for part in PARTS)


def main() -> int:
    """Run the benchmark on 2 ranks; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--experts", nargs="+", choices=EXPERTS, default=EXPERTS)
    parser.add_argument(
        "--homes", nargs="+", type=int, default=(8, 32, 64), help="home experts per rank"
    )
    parser.add_argument("--microbatches", nargs="+", type=int, default=(4, 1))
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument(
        "--steps", type=int, default=12, help="timed steps per model and number of microbatches"
    )
    parser.add_argument(
        "--gpu", action="store_true", help="run on a GPU, over TransformerEngine's own kernels"
    )
    arguments = parser.parse_args()
    if "RANK" in os.environ:
        measure(arguments)
        return 0
    if arguments.gpu:
        return again_on_gpus(__file__, 2)
    return again_on_ranks(__file__, 2)


if __name__ == "__main__":
    sys.exit(main())
