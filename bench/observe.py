"""Measure the cost of observing: step time with and without it, on 2 CPU ranks.

    python bench/observe.py

One model trains, and is observed in one of three steps, in random order, so that noise affects all
steps equally: the other two show the noise. Wall time is the slower rank's; CPU time is summed over
all threads of both ranks. The last line is the time that observing adds, measured alone: the noise
hides it in the table.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import tempfile
import time

import numpy as np
from launch import again_on_ranks


def measure(options: argparse.Namespace) -> None:
    """Measure on every rank; print the table on rank 0."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    import tiny_gpt

    from megatron_hecate import HecateConfig, fssdp

    model = dict(num_layers=4, hidden_size=128, ffn_hidden_size=512, moe_ffn_hidden_size=512)
    case = tiny_gpt.Case(
        experts=options.experts,
        seq=128,
        micro_batch=16,
        accumulate=2,
        skew=2.0,
        settings=tuple(model.items()),
    )
    tiny_gpt.initialize(case)
    folder: list[str] = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder)
    config = HecateConfig(observe=True, record=f"{folder[0]}/run")
    run = tiny_gpt.train(case, steps=3, hook=fssdp(config))
    layers = tiny_gpt.moe_layers(run.chunks)
    observer = layers[0].router.observer
    # Observing replaces the classes of layers and routers; the stock class is the next in the MRO.
    observed = []
    for layer in layers:
        for part in (layer, layer.router):
            observed.append((part, type(part), type(part).__mro__[1]))
    seconds = torch.zeros((3, options.steps, 2), dtype=torch.float64)
    order = random.Random(0)
    for step in range(options.steps):
        # Runs 0 and 1 are stock, run 2 is observed.
        for at in order.sample(range(3), 3):
            for part, ours, stock in observed:
                part.__class__ = ours if at == 2 else stock
            method = type(observer).before_step.__get__(observer)
            observer.before_step = method if at == 2 else lambda _: None
            dist.barrier()
            start = time.perf_counter()
            busy = time.process_time()
            run.step(3 + 3 * step + at)
            took = [time.perf_counter() - start, time.process_time() - busy]
            seconds[at, step] = torch.tensor(took)
    for part, ours, _ in observed:
        part.__class__ = ours
    del observer.before_step
    wall, cpu = (part.contiguous() for part in seconds.unbind(dim=2))
    dist.all_reduce(wall, op=dist.ReduceOp.MAX)
    dist.all_reduce(cpu)
    added = _added(layers, case)
    if dist.get_rank() == 0:
        _report(torch.stack([wall, cpu], dim=2).numpy(), added)


def _added(layers: list, case: object) -> float:
    """Measure the CPU seconds that observing adds to a step.

    The added work is counting and posting progress in each layer and microbatch, and the sum at the
    end. The result is the fastest of many repetitions, which other processes disturb least.
    """
    import torch

    observer = layers[0].router.observer
    chosen = torch.rand(case.seq * case.micro_batch, case.experts).topk(2).indices
    routed = torch.zeros(case.seq * case.micro_batch, case.experts, dtype=torch.bool)
    routed.scatter_(1, chosen, True)
    # A stock router without work, so that only the observer's work is timed.
    base = type(layers[0].router).__mro__[1]
    forward = base.forward
    base.forward = lambda *_: (None, routed)
    optimizer = observer._optimizer()
    count: list[float] = []
    end: list[float] = []
    places: tuple[list[float], list[float]] = ([], [])
    for _ in range(200):
        start = time.thread_time()
        for layer in layers:
            layer.router.forward(None)
        count.append(time.thread_time() - start)
        for seconds, watched in zip(places, (False, True), strict=True):
            start = time.thread_time()
            for _ in layers:
                _exchange(watched)
            seconds.append(time.thread_time() - start)
        start = time.thread_time()
        observer.before_step(optimizer)
        end.append(time.thread_time() - start)
    base.forward = forward
    return case.accumulate * (min(count) + min(places[1]) - min(places[0])) + min(end)


def _exchange(watched: bool) -> None:
    """Run the autograd operations of a layer's dispatch and combine, forward and backward."""
    import torch

    from megatron_hecate.faults.watchdog import here

    tensor = torch.zeros(1, requires_grad=True)
    for exchange in (lambda: (tensor * 1, tensor * 1), lambda: (tensor * 1,)):
        sum(here.through("layer 1", exchange) if watched else exchange()).backward()


def _report(seconds: np.ndarray, added: float) -> None:
    """Print the table.

    Args:
        seconds: wall and CPU time by model and step, [3, steps, 2].
        added: CPU seconds that observing adds to a step.
    """
    stock = seconds[0]
    print(
        f"stock: {np.median(stock[:, 0]):.3f} s a step, "
        f"{np.median(stock[:, 1]):.3f} s of CPU on both ranks"
    )
    print("| over stock, median of paired steps | wall | quartiles | CPU | quartiles |")
    print("|---|---|---|---|---|")
    for name, of_run in (("stock again", seconds[1]), ("observed", seconds[2])):
        low, middle, high = np.quantile(of_run / stock, (0.25, 0.5, 0.75), axis=0)
        cells = [f"{middle[i]:.4f} | {low[i]:.3f} to {high[i]:.3f}" for i in (0, 1)]
        print(f"| {name} | {' | '.join(cells)} |")
    share = added / (np.median(stock[:, 1]) / 2)
    print(
        f"counting and summing by themselves: {added * 1e6:.0f} us of CPU a step and rank, "
        f"{share:.2%} of a stock step"
    )


def main() -> None:
    """Run the benchmark on 2 CPU ranks."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--experts", type=int, default=16)
    options = parser.parse_args()
    if "RANK" in os.environ:
        measure(options)
    else:
        sys.exit(again_on_ranks(__file__, 2))


if __name__ == "__main__":
    main()
