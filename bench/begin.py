"""Measure the host time before the first kernels of an iteration, on 2 CPU ranks.

    python bench/begin.py
    python bench/begin.py --layers 24 --homes 64

At the beginning of an iteration FSSDP ends the last one for all layers, and plans and fetches the
first layer's replicas before the embedding. A GPU has nothing to do meanwhile. Further layers are
fetched before the first attentions. Two models alternate in the same processes: stock Megatron, and
FSSDP with replicas in two slots per rank. Tensors are tiny, with one microbatch. Times are CPU
times of the slowest rank's main thread, which the steps in between have left with cold caches.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
import time
from statistics import quantiles
from typing import Any

from host import SLOTS, WARMUP, gather, start_on_cpu, tiny_case
from launch import again_on_ranks

# Layers before whose attention the time is measured.
ATTENTIONS: int = 3
HEAD = (
    "| homes | model | before the embedding | "
    + " | ".join(f"before attention {layer}" for layer in range(1, ATTENTIONS + 1))
    + " |\n|---|---|"
    + "---|" * (1 + ATTENTIONS)
)
LEGEND = """\
Microseconds of CPU time of the slowest rank's main thread, medians of {steps} iterations of
{layers} layers, with quartiles before the embedding. Before an attention: hooks of its module."""


class Stopwatch:
    """Thread times in the forward of a model chunk, by hooks around those of FSSDP.

    Args:
        model: Megatron's GPTModel, after the conversion.
    """

    def __init__(self, model: Any) -> None:
        self._begun = 0.0
        # Seconds before the embedding, and before each of the first attentions.
        self.seconds: list[float] = []
        model.register_forward_pre_hook(self._begin_forward, prepend=True)
        model.embedding.register_forward_pre_hook(self._end)
        for layer in model.decoder.layers[:ATTENTIONS]:
            layer.self_attention.register_forward_pre_hook(self._begin, prepend=True)
            layer.self_attention.register_forward_pre_hook(self._end)

    def _begin_forward(self, *_: Any) -> None:
        self.seconds = []
        self._begin()

    def _begin(self, *_: Any) -> None:
        self._begun = time.thread_time()

    def _end(self, *_: Any) -> None:
        self.seconds.append(time.thread_time() - self._begun)


class Model:
    """A model whose steps are timed.

    Args:
        case: layout and sizes.
        hook: FSSDP's hook; ``None`` for stock Megatron.
    """

    def __init__(self, case: Any, hook: Any) -> None:
        import tiny_gpt
        from megatron.core.utils import get_attr_wrapped_model

        self._case = case
        chunks, config = tiny_gpt.build(case, hook)
        self.chunks, self._optimizer = tiny_gpt.wrap(case, chunks, config)
        model = get_attr_wrapped_model(self.chunks[0], "decoder", return_model_obj=True)
        self._stopwatch = Stopwatch(model)

    def step(self, index: int) -> list[float]:
        """Train one iteration; return the stopwatch's seconds."""
        import tiny_gpt
        import torch.distributed as dist

        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self._optimizer.zero_grad()
        dist.barrier()
        tiny_gpt.run(self._case, self.chunks, index, num_microbatches=1)
        self._optimizer.step()
        return self._stopwatch.seconds


def compare(homes: int, arguments: argparse.Namespace) -> list[str]:
    """Measure both models in turn; return the table rows."""
    import tiny_gpt

    from megatron_hecate import HecateConfig, fssdp

    case = tiny_case(homes, arguments.layers)
    tiny_gpt.set_num_microbatches(case, 1)
    # With free copies the planner always uses replicas.
    hook = fssdp(HecateConfig(slots=SLOTS, speeds=tiny_gpt.FREE))
    models = {"stock": Model(case, None), "FSSDP": Model(case, hook)}
    times: dict[str, list[list[float]]] = {name: [] for name in models}
    gc.disable()
    for index in range(WARMUP + arguments.steps):
        for name, model in models.items():
            seconds = model.step(index)
            if index >= WARMUP:
                times[name].append(seconds)
        gc.collect()
    gc.enable()
    layers = tiny_gpt.moe_layers(models["FSSDP"].chunks)
    assert sum(layer.fssdp.placement.num_replicas for layer in layers) >= len(layers)
    slowest = gather(times)
    rows = []
    for name in models:
        # By iteration, the slowest rank's time of each column.
        columns = [
            [1e6 * max(column) for column in zip(*ranks, strict=True)]
            for ranks in zip(*(of_rank[name] for of_rank in slowest), strict=True)
        ]
        cells = []
        for place, column in enumerate(zip(*columns, strict=True)):
            low, middle, high = quantiles(column)
            spread = "" if place else f" ({low:.0f} to {high:.0f})"
            cells.append(f"{middle:.0f}{spread}")
        rows.append(f"| {homes} | {name} | " + " | ".join(cells) + " |")
    return rows


def measure(arguments: argparse.Namespace) -> None:
    """Measure on every rank; print the table on rank 0."""
    import torch

    torch.set_num_threads(1)
    start_on_cpu()
    import tiny_gpt
    import torch.distributed as dist

    tiny_gpt.initialize(tiny_gpt.Case())
    prints = dist.get_rank() == 0
    if prints:
        print(f"Load of the machine: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores.\n\n{HEAD}")
    for homes in arguments.homes:
        rows = compare(homes, arguments)
        if prints:
            print("\n".join(rows), flush=True)
    if prints:
        print(f"\n{LEGEND.format(steps=arguments.steps, layers=arguments.layers)}")
    dist.barrier()
    dist.destroy_process_group()


def main() -> int:
    """Run the benchmark on 2 ranks; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--homes", nargs="+", type=int, default=(4, 32), help="home experts per rank"
    )
    parser.add_argument("--layers", type=int, default=60)
    parser.add_argument("--steps", type=int, default=20, help="timed iterations per model")
    arguments = parser.parse_args()
    if "RANK" in os.environ:
        measure(arguments)
        return 0
    return again_on_ranks(__file__, 2)


if __name__ == "__main__":
    sys.exit(main())
