"""How long the kernels after the gate take on one GPU: counting, quotas, rerouting and its backward.

    python bench/routing.py

UltraEP takes 0.07 ms for quotas and 0.04 ms for rerouting, on 64 ranks. One source's tokens are routed; the loads of
all others are drawn. The same launches are then captured in a CUDA graph, which is replayed on other tokens and another
placement, and must give what running them gives. ``--device cpu`` runs the host build, to try the script; its numbers
mean nothing.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from megatron_hecate.device.launch import Kernels  # noqa: E402
from megatron_hecate.plan import CopyCost, Placement, World, plan_replicas  # noqa: E402
from megatron_hecate.routing.quotas import QuotaTables  # noqa: E402
from megatron_hecate.routing.reroute import CountedTokens, reroute  # noqa: E402
from megatron_hecate.routing.tables import GroupShape  # noqa: E402

CASES = {
    "32 ranks, 128 experts": (32, 128),
    "64 ranks, 256 experts": (64, 256),
    "1,024 ranks, 1,024 experts": (1024, 1024),
}
TOP, SLOTS, PER_NODE = 8, 2, 8
TARGET: float = 110.0  # microseconds of UltraEP, quotas and rerouting


class Case:
    """One source's microbatch in a group.

    Args:
        ranks, experts: of the group.
        tokens: of the source.
        device: where.
        seed: of all that is drawn.
    """

    def __init__(self, ranks: int, experts: int, *, tokens: int, device: torch.device, seed: int = 0) -> None:
        self.rng, self.device, self.shares = np.random.default_rng(seed), device, None
        self.tokens, self.experts, self.source = tokens, experts, ranks // 2
        self.world = World(tuple(rank // PER_NODE for rank in range(ranks)))
        self.homes = Placement.initial(experts, ranks, num_slots=SLOTS)
        self.kernels = Kernels(device)
        self.tables = QuotaTables(GroupShape.of(self.world, self.homes), device, self.kernels)
        self.loads = torch.zeros(ranks, experts, dtype=torch.int32, device=device)
        self.map = torch.zeros(tokens, experts, dtype=torch.bool, device=device)
        self.probs = torch.zeros(tokens, experts, device=device, requires_grad=True)
        self.grad = torch.randn(tokens, ranks * self.homes.slots_per_rank, device=device)
        self.draw()

    def draw(self) -> None:
        """New loads, tokens and replicas, where the old ones lie."""
        shares = self.rng.permutation(1.0 / np.arange(1, self.experts + 1))
        loads = self.rng.multinomial(self.tokens * TOP, shares / shares.sum(), size=len(self.loads))
        scores = torch.from_numpy(self.rng.gumbel(size=(self.tokens, self.experts)) + np.log(shares))
        chosen = torch.zeros(self.tokens, self.experts, dtype=torch.bool)
        chosen.scatter_(1, scores.topk(TOP, dim=1).indices, True)
        loads[self.source] = chosen.sum(dim=0).numpy()
        self.map.copy_(chosen)
        self.loads.copy_(torch.from_numpy(loads.astype(np.int32)))
        with torch.no_grad():
            self.probs.copy_(torch.rand(self.tokens, self.experts) * chosen)
        self.tables.place(plan_replicas(loads.sum(axis=0), self.homes, self.world, cost=CopyCost()))

    def count(self) -> CountedTokens:
        return CountedTokens.of(self.map, self.kernels)

    def parts(self) -> Tensor:
        return self.tables.parts(self.loads, self.source)

    def all(self) -> tuple[Tensor, Tensor, Tensor]:
        """Physical routing map, probabilities, and the gradient of the logical ones."""
        routing_map, probs = reroute(self.count(), self.probs, self.tables, self.parts())
        (grad,) = torch.autograd.grad(probs, self.probs, self.grad)
        return routing_map, probs, grad


def microseconds(run: Callable[[], object], device: torch.device, calls: int) -> float:
    """Median time of ``run``, launched from the host without waiting in between."""
    times = []
    for _ in range(calls + 3):
        if device.type == "cuda":
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            run()
            end.record()
            torch.cuda.synchronize()
            times.append(begin.elapsed_time(end) * 1e3)
        else:
            start = time.perf_counter()
            run()
            times.append((time.perf_counter() - start) * 1e6)
    return statistics.median(times[3:])


def captured(case: Case, calls: int) -> float:
    """Microseconds of one replay of everything, in a graph.

    Raises:
        RuntimeError: when a replay gives something else than running it.
    """
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(torch.cuda.Stream()):
        case.all()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        static = case.all()
    for _ in range(3):
        case.draw()
        graph.replay()
        expected = case.all()
        if not all(map(torch.equal, static, expected)):
            raise RuntimeError("a replay on other tokens and another placement gave something else than running it")
    return microseconds(graph.replay, case.device, calls)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--calls", type=int, default=50)
    parser.add_argument("--tokens", type=int, default=4096)
    options = parser.parse_args()
    device = torch.device(options.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        parser.error("no GPU here; --device cpu tries the script on the host")
    name = torch.cuda.get_device_name() if device.type == "cuda" else "host, one thread"
    print(f"{name}, {options.tokens} tokens, top {TOP}, {SLOTS} slots; microseconds, medians of {options.calls}\n")
    print("| group | count | quotas | reroute | sum | UltraEP | its backward | all, from one graph |")
    print("|---|---|---|---|---|---|---|---|")
    for title, (ranks, experts) in CASES.items():
        case = Case(ranks, experts, tokens=options.tokens, device=device)
        counted, parts = case.count(), case.parts()
        _, probs = reroute(counted, case.probs, case.tables, parts)
        runs = (
            case.count,
            case.parts,
            lambda c=case, n=counted, p=parts: reroute(n, c.probs, c.tables, p),
            lambda c=case, p=probs: torch.autograd.grad(p, c.probs, c.grad, retain_graph=True),
        )
        count, quotas, rerouting, backward = (microseconds(run, device, options.calls) for run in runs)
        graph = f"{captured(case, options.calls):.0f}" if device.type == "cuda" else "no GPU"
        times = " | ".join(f"{time:.0f}" for time in (count, quotas, rerouting, count + quotas + rerouting))
        print(f"| {title} | {times} | {TARGET:.0f} | {backward:.0f} | {graph} |", flush=True)


if __name__ == "__main__":
    main()
