"""A MoE layer's forward and backward on one GPU, on torch alone, with and without replicas.

    python bench/step.py

Several virtual ranks share the GPU (`step_layer`): router, count, quotas, rerouting, permutation,
experts by ``torch._grouped_mm`` with SwiGLU, and back. With replicas, a step also fetches replicas
on a separate stream, concurrent with router and permutation, and returns their gradients after the
backward. First, outputs and all gradients with replicas are compared with a step without replicas.
Then, for each of the two:

| column | meaning |
|---|---|
| fullest | tokens that the fullest rank computes, over the mean |
| eager, graph | device time of a step per rank, launched from Python or replayed as a CUDA graph |
| experts | forward and backward of a rank's experts alone: mean of the ranks, and the slowest |
| layer | *by a model*: a step without experts, per rank, plus the experts of the slowest rank |
| host | time of Python to launch one rank's step, from a loop of tiny steps without waits |
| fetch, return | time of one rank, alone |

The layer column is the time of a rank that waits for the slowest rank, without the all-to-all.

``--device cpu`` runs the host build of the kernels, and ``--tiny`` tiny sizes, to try the script.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "bench")]

from gpu_clock import Clock, captured, name_of  # noqa: E402
from rows import Table  # noqa: E402
from step_layer import Layer, Sizes, Weights  # noqa: E402

MODELS = {
    "Qwen3-30B-A3B": Sizes(ranks=4, homes=16, hidden=2048, ffn=768, tokens=4096, top=8),
    "DeepSeek-V3": Sizes(ranks=4, homes=4, hidden=7168, ffn=2048, tokens=4096, top=4),
    "Mixtral-8x7B": Sizes(ranks=4, homes=2, hidden=4096, ffn=14336, tokens=4096, top=2),
}
TINY = dict(hidden=64, ffn=32, tokens=48)
# Largest relative difference of norms. A bf16 sum of gradients is rounded once for each holder.
TOLERANCE = {torch.bfloat16: 1e-2, torch.float32: 1e-5}


def values(layer: Layer, run: Callable[[], object] | None = None) -> dict[str, Tensor]:
    """Run one step from zeroed main gradients.

    Args:
        layer: layer to run.
        run: replay of the step, whose outputs are not returned; None: an eager step.

    Returns:
        Outputs and gradients by name.
    """
    weights = layer.weights
    # Gradients accumulate in the main gradients.
    for grads in weights.main_grads:
        for grad in grads:
            grad.zero_()
    found = {}
    if run is None:
        found["outputs"] = torch.cat(layer.step()).float()
    else:
        run()
    return found | {
        "gradients of inputs": torch.cat([x.grad for x in weights.inputs]).float(),
        "gradient of the router": weights.router.grad.float(),
        "gradients of w1": torch.stack([first for first, _ in weights.main_grads]),
        "gradients of w2": torch.stack([second for _, second in weights.main_grads]),
    }


def differences(found: dict[str, Tensor], expected: dict[str, Tensor]) -> dict[str, float]:
    """Compute each value's difference as a norm, relative to the norm of the expected value."""
    return {
        name: float((value - expected[name]).norm() / expected[name].norm())
        for name, value in found.items()
    }


def compare(name: str, weights: Weights, table: Table) -> bool:
    """Add a row of differences by replicas; returns whether all are within the tolerance."""
    stock = Layer(weights, replicas=False)
    ours = Layer(weights, replicas=True)
    expected = {key: value.clone() for key, value in values(stock).items()}
    found = differences(values(ours), expected)
    # A difference of NaN fails the comparison, too.
    reached = all(difference <= TOLERANCE[weights.dtype] for difference in found.values())
    table.add(model=name, replicas=ours.placement.num_replicas, **found, near_enough=reached)
    return reached


def host_seconds(
    sizes: Sizes, device: torch.device, dtype: torch.dtype, *, replicas: bool
) -> float:
    """Time Python's launches of one rank's step, at tiny sizes, at which the device never lags."""
    layer = Layer(Weights(dataclasses.replace(sizes, **TINY), device, dtype), replicas=replicas)
    return Clock(device).host(layer.step, repeats=5).seconds / sizes.ranks


def measure(weights: Weights, clock: Clock, *, replicas: bool) -> dict[str, float | bool | None]:
    """Measure a step, and return a row of the table."""
    layer = Layer(weights, replicas=replicas)
    ranks = weights.sizes.ranks
    eager = clock.time(layer.step)
    experts = [clock.time(layer.experts_alone(rank)).seconds for rank in range(ranks)]
    row: dict[str, float | bool | None] = {
        "replicas": replicas,
        "fullest": float(layer.computed.max() / layer.computed.mean()),
        "eager, ms": eager.seconds / ranks * 1e3,
        "experts, mean, ms": sum(experts) / ranks * 1e3,
        "experts, slowest, ms": max(experts) * 1e3,
    }
    whole = eager.seconds
    if clock.device.type == "cuda":
        expected = {name: value.clone() for name, value in values(layer).items()}
        replay, _ = captured(layer.step)
        row["replay differs by"] = max(differences(values(layer, replay), expected).values())
        whole = clock.time(replay).seconds
        row["graph, ms"] = whole / ranks * 1e3
    row["layer, by a model, ms"] = ((whole - sum(experts)) / ranks + max(experts)) * 1e3
    row["host, us"] = 1e6 * host_seconds(
        weights.sizes, clock.device, weights.dtype, replicas=replicas
    )
    transfers = layer.transfers
    row["fetch, us"] = clock.time(transfers.fetch).us / ranks if transfers else None
    row["return, us"] = clock.time(transfers.give_back).us / ranks if transfers else None
    row["host bound"] = eager.host_bound
    return row


def main() -> int:
    """Print the tables; returns 1 if replicas change a value by more than the tolerance."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--calls", type=int, default=10)
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    device = torch.device(options.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        parser.error("no GPU here; --device cpu tries the script on the host")
    if device.type == "cuda":
        torch.cuda.set_stream(torch.cuda.Stream())
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    clock = Clock(device, calls=2 if options.tiny else options.calls)
    print(f"{name_of(device)}, torch {torch.__version__}, {dtype}")
    same = True
    values_table = Table("values with replicas against those without")
    times = Table("a step of one rank")
    for name, sizes in MODELS.items():
        if options.tiny or device.type == "cpu":
            sizes = dataclasses.replace(sizes, **TINY)
        weights = Weights(sizes, device, dtype)
        same &= compare(name, weights, values_table)
        for replicas in (False, True):
            row = measure(weights, clock, replicas=replicas)
            same &= row.get("replay differs by", 0.0) <= TOLERANCE[dtype]
            times.add(model=name, **row)
        del weights
    verdict = "those without" if same else "NOT those without"
    print(f"\nvalues with replicas, and of replays, are {verdict}")
    return int(not same)


if __name__ == "__main__":
    sys.exit(main())
