"""Bytes that torch allocates during a call, and their peak in a step, under skewed routing."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

# added to the router's logits of experts 0, 1 and 2, in every layer
BIAS = (4.0, 3.0, 1.0)


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
    largest = alive = 0
    for size in sizes:
        alive += size
        largest = max(largest, alive)
    return largest


def skewed(chunks: list) -> list:
    """Make the first experts of every layer hot; works before and after `fssdp`."""
    import tiny_gpt

    for layer in tiny_gpt.moe_layers(chunks):
        bias = torch.zeros(layer.config.num_moe_experts)
        bias[: len(BIAS)] = torch.tensor(BIAS)
        gating = layer.router.gating
        layer.router.gating = lambda hidden, gating=gating, bias=bias: gating(hidden) + bias
    return chunks


def buffer_bytes(chunks: list) -> list[int]:
    """Record the bytes of buffers when transports allocate them.

    Returns:
        List that grows with each allocation: bytes of the buffers and of the transport's own
        memory.
    """
    import tiny_gpt

    allocated: list[int] = []

    def counted(allocate: Callable, extra: Callable, size: int, layers: Any, *args: Any) -> Any:
        allocated.append(size + extra(layers))
        return allocate(size, layers, *args)

    layers = [layer for layer in tiny_gpt.moe_layers(chunks) if hasattr(layer, "fssdp")]
    for one in {layer.fssdp.transport for layer in layers}:
        one.allocate = functools.partial(counted, one.allocate, one.extra_bytes)
    return allocated


def peaks(case: Any, hook: Callable[[list], list] | None, steps: int) -> tuple[list[int], Any]:
    """Train, and return the peak bytes of each step on this rank, with buffers, and the run."""
    import tiny_gpt

    run = tiny_gpt.train(case, steps=0, hook=hook)
    buffers = buffer_bytes(run.chunks)
    step_peaks = []
    for step in range(steps):
        # Buffers of earlier steps are still allocated; the profiler records new allocations only.
        allocated = sum(buffers)
        step_peaks.append(allocated + peak(allocations(lambda step=step: run.step(step))))
    return step_peaks, run
