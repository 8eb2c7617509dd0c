"""Choose the sizes of a layer so that ranks of a part of one GPU stand for a node's GPUs.

    python bench/node_scale.py [--ranks 8] [--model qwen3] [--tokens 4096]
    python bench/node_scale.py --ranks 8 --measure          on the GPU here

Several NCCL ranks share one GPU, and each has a part of its multiprocessors (MPS). Such a rank is
like a GPU of a node only if the parts of a step have the same ratios there. The parts, of one layer
and microbatch, forward and backward, balanced:

| part | work |
|---|---|
| GEMM | experts of a rank on tokens x top-k pairs |
| weights | every expert's: read in forward and dgrad (bf16), gradient read and written (fp32) |
| fetch, return | of one replica: weights in bf16, gradient in fp32 |
| all-to-all | 4 trips of tokens x top-k pairs in bf16 |
| attention | projections and scores |
| host | launches: as long on both, as the host is real |

Hidden size, ffn size and tokens are searched for the least error of the worst ratio to the GEMMs,
whose time is kept. A row *agrees* if its ratios differ by at most a fifth. A part that does not is
a misfit: steps of such sizes are no headline.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "bench")]

from launch import again_on_gpus  # noqa: E402
from node_machine import (  # noqa: E402
    MODELS,
    RECORDED,
    Machine,
    Shape,
    h100_node,
)
from node_models import start  # noqa: E402
from node_speeds import measure_speeds  # noqa: E402
from rows import Table  # noqa: E402

from megatron_hecate.plan import Link  # noqa: E402

# Ratios agree within this factor.
TOLERANCE: float = 1.2
# steps and least values of the search for hidden size, ffn size and tokens
STEPS: tuple[int, int, int] = (128, 64, 64)
LEAST: tuple[int, int, int] = (256, 128, 128)
# largest sizes, in sizes of the model: a wider ffn makes up for a slow all-to-all
MOST: tuple[int, int, int] = (1, 2, 1)


def parts(shape: Shape, machine: Machine) -> dict[str, Any]:
    """Return the seconds of every part on ``machine``, a layer and microbatch.

    Raises:
        ValueError: experts do not divide among the ranks, or the model's rate is not known.
    """
    if shape.experts % machine.ranks:
        raise ValueError(
            f"{shape.name}: {shape.experts} experts do not divide among {machine.ranks} ranks; "
            f"use {-(-shape.experts // machine.ranks) * machine.ranks}"
        )
    if shape.name not in machine.experts:
        raise ValueError(f"{shape.name}: not measured; there are {', '.join(machine.experts)}")
    return {
        "GEMM": 6 * shape.expert * shape.pairs / machine.experts[shape.name],
        # 2 bytes in forward, 2 in dgrad, 4 + 4 of the gradient in wgrad
        "weights": 12 * shape.expert * (shape.experts // machine.ranks) / machine.memory,
        "fetch": _seconds_over(machine.fetch, 2 * shape.expert),
        "return": _seconds_over(machine.back, 4 * shape.expert),
        "all-to-all": 4 * _seconds_over(machine.exchange, 2 * shape.pairs * shape.hidden),
        "attention": shape.attention_flops / machine.dense,
        "host": machine.host,
    }


def _seconds_over(link: Link, num_bytes: Any) -> Any:
    # `Link.seconds` takes no arrays.
    return num_bytes / link.bandwidth + link.latency


def scaled(shape: Shape, machine: Machine, node: Machine | None = None) -> Shape:
    """Return the sizes at which ``machine`` has the ratios that ``shape`` has on ``node``.

    Args:
        shape: sizes of the model.
        machine: speeds of the ranks here.
        node: speeds to stand for; by default as many GPUs of a node of H100.
    """
    full = (shape.hidden, shape.ffn, shape.tokens)
    grid = np.ix_(*map(_sizes, LEAST, full, STEPS, MOST))
    names = ("hidden", "ffn", "tokens")
    candidates = dataclasses.replace(shape, **dict(zip(names, grid, strict=True)))
    error = np.stack(
        np.broadcast_arrays(
            *(
                np.abs(np.log(quotient))
                for part, quotient in _quotients(shape, candidates, machine, node).items()
                # Heads of attention are chosen afterwards.
                if part != "attention"
            )
        )
    )
    # The mean decides between worst parts that are about equal.
    worst = error.max(axis=0) + 0.1 * error.mean(axis=0)
    index = np.unravel_index(np.argmin(worst), worst.shape)
    best = [int(axis.ravel()[i]) for axis, i in zip(grid, index, strict=True)]
    sizes = dataclasses.replace(shape, **dict(zip(names, best, strict=True)))
    choices = [_with_heads(sizes, heads, shape) for heads in range(1, shape.heads + 1)]
    return min(
        choices, key=lambda one: abs(np.log(_quotients(shape, one, machine, node)["attention"]))
    )


def _sizes(least: int, full: int, step: int, most: int) -> np.ndarray:
    return np.union1d(np.arange(least, most * full + 1, step), [full])


def _with_heads(shape: Shape, heads: int, model: Shape) -> Shape:
    """Return ``shape`` with ``heads`` in about as large groups as ``model`` has."""
    most = max(1, heads * model.kv_heads // model.heads)
    kv_heads = max(count for count in range(1, most + 1) if heads % count == 0)
    return dataclasses.replace(shape, heads=heads, kv_heads=kv_heads)


def _quotients(shape: Shape, here: Shape, machine: Machine, node: Machine | None) -> dict[str, Any]:
    """Return every part's ratio to the GEMMs here, over that on the node; all but the GEMMs'."""
    theirs, ours = _both(shape, here, machine, node)
    gemm = theirs["GEMM"] / ours["GEMM"]
    return {part: ours[part] / theirs[part] * gemm for part in theirs if part != "GEMM"}


def _both(
    shape: Shape, here: Shape, machine: Machine, node: Machine | None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the parts on the node and here, with the same host."""
    node = dataclasses.replace(node or h100_node(machine.ranks), host=machine.host)
    return parts(shape, node), parts(here, machine)


def rows(
    shape: Shape, scaled_shape: Shape, machine: Machine, node: Machine | None = None
) -> list[dict[str, Any]]:
    """Return a row per part: milliseconds on the node and here, ratios to the GEMMs, a verdict."""
    theirs, ours = _both(shape, scaled_shape, machine, node)
    quotients = {"GEMM": 1.0, **_quotients(shape, scaled_shape, machine, node)}
    return [
        dict(
            part=part,
            node_ms=1e3 * theirs[part],
            ranks_ms=1e3 * ours[part],
            node_ratio=theirs[part] / theirs["GEMM"],
            ranks_ratio=ours[part] / ours["GEMM"],
            quotient=quotient,
            verdict="agrees" if _is_near(quotient) else f"off by {quotient:.2f}",
            # "assumed" or "measured"
            speeds=machine.source.split()[0],
        )
        for part, quotient in quotients.items()
    ]


def misfits(
    shape: Shape, scaled_shape: Shape, machine: Machine, node: Machine | None = None
) -> tuple[str, ...]:
    """Return the parts whose ratio to the GEMMs here is not the node's."""
    quotients = _quotients(shape, scaled_shape, machine, node)
    return tuple(part for part, quotient in quotients.items() if not _is_near(quotient))


def agrees(
    shape: Shape, scaled_shape: Shape, machine: Machine, node: Machine | None = None
) -> bool:
    """Return True if all ratios are the node's, so that a step time may be a headline."""
    return not misfits(shape, scaled_shape, machine, node)


def _is_near(quotient: float) -> bool:
    return 1 / TOLERANCE <= quotient <= TOLERANCE


def measure(
    device: torch.device, *, shapes: Sequence[Shape] = (), transport: str = "auto"
) -> Machine:
    """Measure the speeds of the job's ranks, all at once. Collective.

    Args:
        device: this rank's device.
        shapes: sizes to measure, one for each model; by default those that `RECORDED` speeds ask
            for, on CPU ranks tiny ones.
        transport: transport of replicas, as ``--moe-fssdp-transport``.

    Raises:
        ValueError: no sizes are known for this number of ranks, or the transport cannot be used.
    """
    ranks = dist.get_world_size()
    if not shapes and device.type != "cuda":
        tiny = dict(hidden=256, ffn=128, tokens=128, sequences=1, experts=2 * ranks, top_k=2)
        shapes = [dataclasses.replace(shape, **tiny) for shape in MODELS.values()]
    elif not shapes and ranks not in RECORDED:
        raise ValueError(
            f"no sizes are recorded for {ranks} ranks of a GPU; start {list(RECORDED)} ranks"
        )
    shapes = shapes or [scaled(shape, RECORDED[ranks]) for shape in MODELS.values()]
    return measure_speeds(device, shapes, transport=transport)


def table(shape: Shape, here: Shape, machine: Machine) -> None:
    """Print the sizes ``here`` that stand for ``shape`` on ``machine``, and the ratios of parts."""
    off = misfits(shape, here, machine)
    print(
        f"\n{here.name} on {machine.ranks} ranks ({machine.source}): hidden {shape.hidden} -> "
        f"{here.hidden}, ffn {shape.ffn} -> {here.ffn}, tokens {shape.tokens} -> {here.tokens}, "
        f"heads {shape.heads}/{shape.kv_heads} -> {here.heads}/{here.kv_heads}; experts of a layer "
        f"take {here.training_bytes / 1e9:.1f} GB of the GPU; "
        + (f"scale off: {', '.join(off)}" if off else "all ratios agree")
    )
    printed = Table(f"scale of {here.name}, {machine.ranks} ranks")
    for row in rows(shape, here, machine):
        printed.add(**row)


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--ranks", type=int, choices=RECORDED, help="4 and 8 by default")
    parser.add_argument("--model", choices=MODELS, help="all by default")
    parser.add_argument("--tokens", type=int, help="of a rank and microbatch; the model's own")
    parser.add_argument("--measure", action="store_true", help="measure speeds here, on --ranks")
    parser.add_argument("--transport", default="auto", help="transport of replicas to measure")
    options = parser.parse_args()
    names = [options.model] if options.model else list(MODELS)
    shapes = [MODELS[name] for name in names]
    if options.tokens:
        shapes = [dataclasses.replace(shape, tokens=options.tokens) for shape in shapes]
    if options.measure:
        if "RANK" not in os.environ:
            sys.exit(again_on_gpus(__file__, options.ranks or max(RECORDED)))
        _measured(shapes, options.transport)
        return
    for ranks, machine in RECORDED.items():
        if options.ranks in (None, ranks):
            for shape in shapes:
                table(shape, scaled(shape, machine), machine)


def _measured(shapes: Sequence[Shape], transport: str) -> None:
    """Measure, choose sizes, measure again at these, and print on rank 0."""
    start()
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", torch.cuda.current_device())
    machine = measure(device, transport=transport)
    here = [scaled(shape, machine) for shape in shapes]
    machine = measure(device, shapes=here, transport=transport)
    if dist.get_rank() == 0:
        for shape, sizes in zip(shapes, here, strict=True):
            table(shape, sizes, machine)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
