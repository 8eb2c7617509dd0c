"""Measure the speeds of ranks, all at once because they share a GPU: see `node_scale`.

Ranks on CPUs, over gloo, run the same code on tiny sizes, to rehearse it.
"""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable, Sequence
from statistics import median
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from experts_gemm import Experts, evenly
from gpu_clock import CYCLES_PER_SECOND, LONGEST_SLEEP, WARM, name_of
from node_machine import Machine, Shape, ThreadBlocks, line

from megatron_hecate.comm.transport import Copy, LayerBuffer, TransferPlan, Transport, chunks_in
from megatron_hecate.switch_on.connect import connect

REPEATS: int = 5
TIMEOUT: float = 60.0


def measure_speeds(device: torch.device, shapes: Sequence[Shape], *, transport: str) -> Machine:
    """Measure the speeds of the job's ranks. Collective.

    Args:
        device: this rank's device.
        shapes: sizes at which GEMMs, all-to-alls and copies are measured, one for each model.
        transport: transport of replicas.

    Raises:
        ValueError: the transport cannot be used.
    """
    ranks = dist.get_world_size()
    problems: list[str] = []
    group = tuple(range(ranks))
    ctas = ThreadBlocks.of(ranks).p2p
    connection = connect(transport, group, problems, timeout=TIMEOUT, nccl_ctas=ctas)
    if problems:
        raise ValueError("; ".join(problems))
    elements = [shape.expert for shape in shapes]
    ends = (max(1, min(elements) // 4), max(elements))
    copies = [_copies(connection.transport, count, device) for count in ends]
    exchanged = [shape.pairs * shape.hidden for shape in shapes]
    ends = (max(ranks, min(exchanged) // 4), max(exchanged))
    width, floats = (4096, 64 << 20) if device.type == "cuda" else (256, 1 << 20)
    x = torch.ones(floats, device=device)
    a = torch.randn(2 * width, width, device=device, dtype=_dtype(device))
    b = a[:width].clone()
    machine = Machine(
        source=f"measured on {ranks} ranks of {name_of(device)}, {connection.name}",
        ranks=ranks,
        experts={shape.name: _experts_rate(shape, ranks, device) for shape in shapes},
        dense=4.0 * width**3 / _seconds(lambda: a @ b, device),
        memory=8.0 * floats / _seconds(lambda: x.add_(1.0), device),
        fetch=line(*(pair[0] for pair in copies)),
        back=line(*(pair[1] for pair in copies)),
        exchange=line(*(_exchange(count, ranks, device) for count in ends)),
    )
    # The job that goes on shares the GPU's memory with the other ranks.
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return machine


def _dtype(device: torch.device) -> torch.dtype:
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def _slowest(seconds: float) -> float:
    """Return the maximum over all ranks."""
    times: list[float] = [0.0] * dist.get_world_size()
    dist.all_gather_object(times, seconds)
    return max(times)


def _seconds(run: Callable[[], object], device: torch.device) -> float:
    """Time ``run`` on all ranks at once; returns the slowest rank's median, without launches."""
    for _ in range(WARM):
        run()
    if device.type == "cuda":
        torch.cuda.synchronize()
    began = time.perf_counter()
    run()
    # All streams sleep until even the slowest host has launched everything.
    sleep = min(LONGEST_SLEEP, 1e-3 + 2 * _slowest(time.perf_counter() - began))
    samples = []
    for _ in range(REPEATS):
        if device.type != "cuda":
            dist.barrier()
            began = time.perf_counter()
            run()
            samples.append(time.perf_counter() - began)
            continue
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        dist.barrier()
        torch.cuda._sleep(int(sleep * CYCLES_PER_SECOND))
        begin.record()
        run()
        end.record()
        torch.cuda.synchronize()
        samples.append(begin.elapsed_time(end) / 1e3)
    return _slowest(median(samples))


class _PlainExperts:
    """The experts of `experts_gemm.Experts` without TransformerEngine."""

    def __init__(self, num: int, shape: Shape, device: torch.device) -> None:
        def matrices(*sizes: int) -> list[torch.Tensor]:
            made = [torch.randn(*sizes, device=device, dtype=_dtype(device)) for _ in range(num)]
            return [matrix.requires_grad_() for matrix in made]

        self.first = matrices(shape.hidden, 2 * shape.ffn)
        self.second = matrices(shape.ffn, shape.hidden)

    def run(self, inputs: torch.Tensor, splits: list[int]) -> None:
        """Run forward and backward; ``splits``: tokens of each expert."""
        outputs = []
        for part, up, down in zip(inputs.split(splits), self.first, self.second, strict=True):
            gate, linear = (part @ up).chunk(2, dim=-1)
            outputs.append(torch.nn.functional.silu(gate) * linear @ down)
        torch.cat(outputs).sum().backward()


def _experts_rate(shape: Shape, ranks: int, device: torch.device) -> float:
    """Measure the FLOP/s of a rank's experts, forward and backward, on balanced tokens."""
    num = shape.experts // ranks
    has_te = device.type == "cuda" and importlib.util.find_spec("transformer_engine")
    experts: Any = (
        Experts(num, shape.hidden, shape.ffn) if has_te else _PlainExperts(num, shape, device)
    )
    inputs = torch.randn(shape.pairs, shape.hidden, device=device, dtype=_dtype(device))
    inputs.requires_grad_()
    splits = evenly(shape.pairs, num)
    seconds = _seconds(lambda: experts.run(inputs, splits), device)
    return 6.0 * shape.expert * shape.pairs / seconds


def _exchange(elements: int, ranks: int, device: torch.device) -> tuple[float, float]:
    """Measure an all-to-all of ``elements`` in bf16; returns bytes and seconds."""
    sent = torch.zeros(elements // ranks * ranks, dtype=torch.bfloat16, device=device)
    received = torch.empty_like(sent)
    seconds = _seconds(lambda: dist.all_to_all_single(received, sent), device)
    return 2.0 * len(sent), seconds


def _copies(
    transport: Transport, elements: int, device: torch.device
) -> tuple[tuple[float, float], tuple[float, float]]:
    """Measure a fetch and a return of every rank's expert, which has a replica on the next rank.

    Returns:
        Bytes and seconds of the fetch, and of the return.
    """
    rank, ranks = transport.group.rank(), transport.group.size()
    plan = TransferPlan(rank, tuple(Copy(home, 0, (home + 1) % ranks, 0) for home in range(ranks)))
    layer = LayerBuffer(slots=1, elements=elements, dtype=torch.bfloat16, homes=1)
    memory = transport.allocate(layer.weight_bytes + layer.grad_bytes, [layer], device)
    weights = chunks_in(memory, 1, elements, layer.dtype)
    grads = chunks_in(memory[layer.weight_bytes :], 1, elements, layer.grad_dtype)
    memory.zero_()
    expert = torch.zeros(elements, dtype=layer.dtype, device=device)
    total = torch.zeros(elements, device=device)
    homes: Any = SimpleNamespace(
        main_grads=lambda index: [total], add=lambda index, other: total.add_(other)
    )
    fetch = _seconds(
        lambda: transport.fetch(plan, [[expert]], weights, label="measure").wait(), device
    )
    back = _seconds(
        lambda: transport.return_gradients(plan, grads, homes, label="measure").wait(), device
    )
    transport.release()
    return (2.0 * elements, fetch), (4.0 * elements, back)
