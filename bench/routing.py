"""Time and check the kernels after the gate on one GPU: count, quotas, rerouting and its backward.

    python bench/routing.py

The benchmark routes one source's tokens and draws the loads of all other sources, with expert
popularities 1, 1/2, 1/3 ... For times, slots are filled greedily; to compare values, replicas are
drawn as well. All results of the GPU must be bitwise equal to the host build of the same kernels.
*Quotas* include the token counts of the all-to-all dispatcher; *no counts* leaves them out.
*Indices* are routes [T, k] in place of a routing map. *In a row* is one of many launches in a CUDA
graph, *all* of all four kernels; `graph.py` checks replays.

UltraEP takes 0.07 ms for quotas and 0.04 ms for rerouting, on 64 ranks. ``--tiny`` routes few
tokens, to try the script; the numbers are then meaningless.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "bench")]

from gpu_clock import Clock, name_of  # noqa: E402
from placing import greedy_placement, random_placement  # noqa: E402
from rows import Table  # noqa: E402

from megatron_hecate.device.launch import Kernels  # noqa: E402
from megatron_hecate.plan import Placement, World  # noqa: E402
from megatron_hecate.routing.quotas import Exchange, QuotaTables  # noqa: E402
from megatron_hecate.routing.reroute import CountedTokens, reroute  # noqa: E402
from megatron_hecate.routing.tables import GroupShape  # noqa: E402

# ranks and experts; quotas of the first group take shared memory that a kernel must opt in to
GROUPS: tuple[tuple[int, int], ...] = ((64, 512), (64, 256), (32, 128), (16, 128), (8, 64))
LARGE: tuple[int, int] = (1024, 1024)
SLOTS = (2, 1)
TOP = 8
PER_NODE = 8
# draws of loads, tokens and placement for each row
DRAWS: int = 5
# microseconds of UltraEP
TARGETS = {"quotas": 70.0, "reroute": 40.0}
CPU = torch.device("cpu")


class Case:
    """One source's microbatch in a group.

    Args:
        group: number of ranks and of experts.
        slots: slots per rank, all in use.
        tokens: tokens of the source.
        device: device of all tensors.
        seed: seed of all draws.
        source: the source whose tokens are routed; by default one in the middle.
    """

    def __init__(
        self,
        group: tuple[int, int],
        slots: int,
        *,
        tokens: int,
        device: torch.device,
        seed: int = 0,
        source: int | None = None,
    ) -> None:
        ranks, experts = group
        self.slots = slots
        self.rng = np.random.default_rng(seed)
        self.device = device
        self.tokens = tokens
        self.experts = experts
        self.source = ranks // 2 if source is None else source
        self.world = World(tuple(rank // PER_NODE for rank in range(ranks)))
        self.homes = Placement.initial(experts, ranks, num_slots=slots)
        self.kernels = Kernels(device)
        self.tables = QuotaTables(GroupShape(self.world, self.homes), device, self.kernels)
        self.loads = torch.zeros(ranks, experts, dtype=torch.int32, device=device)
        self.map = torch.zeros(tokens, experts, dtype=torch.bool, device=device)
        self.indices = torch.zeros(tokens, TOP, dtype=torch.int64, device=device)
        self.probs = torch.zeros(tokens, experts, device=device, requires_grad=True)
        self.grad = torch.zeros(tokens, ranks * self.homes.slots_per_rank, device=device)
        self.draw()

    def draw(self, *, greedily: bool = True) -> None:
        """Draw loads, tokens and replicas into the same memory; equal on every device."""
        # The same on all ranks, but for the tokens of this source.
        shares = self.rng.permutation(1.0 / np.arange(1, self.experts + 1))
        loads = self.rng.multinomial(self.tokens * TOP, shares / shares.sum(), size=len(self.loads))
        if greedily:
            placement = greedy_placement(loads.sum(axis=0), self.homes, self.slots)
        else:
            placement = random_placement(self.rng, self.homes, self.slots)
        self.tables.place(placement)
        seed = int(self.rng.integers(2**31))
        scores = torch.from_numpy(
            np.random.default_rng((seed, self.source)).gumbel(size=(self.tokens, self.experts))
            + np.log(shares)
        )
        indices = scores.topk(TOP, dim=1).indices
        chosen = torch.zeros(self.tokens, self.experts, dtype=torch.bool, device=CPU)
        chosen.scatter_(1, indices, True)
        loads[self.source] = chosen.sum(dim=0).numpy()
        generator = torch.Generator().manual_seed(seed)
        self.map.copy_(chosen)
        self.indices.copy_(indices)
        self.loads.copy_(torch.from_numpy(loads.astype(np.int32)))
        with torch.no_grad():
            self.probs.copy_(torch.rand(self.tokens, self.experts, generator=generator) * chosen)
        self.grad.copy_(torch.randn(self.grad.shape, generator=generator))

    def count(self, *, by_index: bool = False) -> CountedTokens:
        """Count the tokens of each expert, by the routing map or by indices."""
        routes = self.indices if by_index else self.map
        return CountedTokens(routes, self.kernels, num_experts=self.experts)

    def parts(self) -> Tensor:
        """Compute the source's tokens for each holder."""
        return self.tables.parts(self.loads, self.source)

    def quotas(self) -> tuple[Tensor, Exchange]:
        """Compute the parts, and the counts that the all-to-all dispatcher takes."""
        return self.tables.parts_and_exchange(self.loads, self.source)

    def all(self, *, by_index: bool = False) -> tuple[Tensor, ...]:
        """Run all kernels for one form of routes.

        Returns:
            Loads, parts, physical routes, physical probabilities, the gradient of the logical
            probabilities, and the counts of the all-to-all.
        """
        counted = self.count(by_index=by_index)
        parts, exchange = self.quotas()
        # A new leaf: a leaf in other autograd graphs would tie a capture to their stream.
        logical = self.probs.detach().requires_grad_()
        routes, probs = reroute(counted, logical, self.tables, parts)
        (grad,) = torch.autograd.grad(probs, logical, self.grad)
        counts = vars(exchange).values()
        return counted.loads, parts[: self._defined], routes, probs, grad, *counts

    @property
    def _defined(self) -> int:
        """Number of parts that belong to holders; the kernel leaves all further parts unwritten."""
        return self.experts + self.slots * len(self.loads)


def compare(group: tuple[int, int], slots: int, *, tokens: int, device: torch.device) -> str:
    """Compare the results on ``device`` and on the host for several draws.

    Returns:
        Description of the first difference, or "".
    """
    cases = [Case(group, slots, tokens=tokens, device=where) for where in (device, CPU)]
    for number in range(DRAWS):
        for case in cases:
            # Greedy and random placements alternate.
            case.draw(greedily=number % 2 == 0)
        names = ("count", "quotas", "routes", "probabilities", "gradient")
        names += tuple(field.name for field in dataclasses.fields(Exchange))
        results = [[*case.all(), *case.all(by_index=True)] for case in cases]
        for name, found, expected in zip([*names, *names], *results, strict=True):
            if not torch.equal(found.cpu(), expected):
                wrong = int((found.cpu() != expected).sum())
                return f"draw {number}: {wrong} of {expected.numel()} values of {name}"
    return ""


def measure(
    group: tuple[int, int], slots: int, clock: Clock, *, tokens: int
) -> dict[str, float | bool | str]:
    """Time each kernel over several draws, in microseconds."""
    cases = [
        Case(group, slots, tokens=tokens, device=clock.device, seed=seed) for seed in range(DRAWS)
    ]
    counted = [case.count() for case in cases]
    parts = [case.parts() for case in cases]
    zipped = list(zip(cases, counted, parts, strict=True))
    by_index = list(zip(cases, [case.count(by_index=True) for case in cases], parts, strict=True))
    probs = [reroute(n, case.probs, case.tables, p)[1] for case, n, p in zipped]
    runs = {
        "count": [case.count for case in cases],
        "quotas": [case.quotas for case in cases],
        "quotas, no counts": [case.parts for case in cases],
        "reroute": [lambda c=c, n=n, p=p: reroute(n, c.probs, c.tables, p) for c, n, p in zipped],
        "count, indices": [lambda c=c: c.count(by_index=True) for c in cases],
        "reroute, indices": [
            lambda c=c, n=n, p=p: reroute(n, c.probs, c.tables, p) for c, n, p in by_index
        ],
        "backward": [
            lambda c=c, p=p: torch.autograd.grad(p, c.probs, c.grad, retain_graph=True)
            for c, p in zip(cases, probs, strict=True)
        ],
    }
    times = {name: clock.time(*each) for name, each in runs.items()}
    row: dict[str, float | bool | str] = {name: time.us for name, time in times.items()}
    row["quotas, p90"] = times["quotas"].high * 1e6
    row["sum"] = sum(times[name].us for name in ("count", "quotas", "reroute"))
    row["UltraEP"] = sum(TARGETS.values())
    for name in ("quotas", "count", "all"):
        row[f"{name} in a row"] = clock.in_a_row(getattr(cases[0], name)).us
    row["host bound"] = any(time.host_bound for time in times.values())
    return row


def main() -> int:
    """Print the tables; returns 1 if a value is wrong."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--calls", type=int, default=25)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--large", action="store_true", help=f"also {LARGE[0]} ranks")
    options = parser.parse_args()
    device = torch.device("cuda")
    tokens = 64 if options.tiny else options.tokens
    groups = GROUPS[-1:] if options.tiny else GROUPS
    clock = Clock(device, calls=2 if options.tiny else options.calls)
    print(f"{name_of(device)}, {tokens} tokens, top {TOP}")
    times = Table("after the gate, microseconds")
    values = Table("values, as on the host")
    wrong = False
    for group in groups:
        for slots in SLOTS:
            differs = compare(group, slots, tokens=min(tokens, 1024), device=device)
            about = {"ranks": group[0], "experts": group[1], "slots": slots}
            values.add(**about, draws=DRAWS, differs=differs or "nothing")
            wrong = wrong or bool(differs)
    if options.large:
        groups = (*groups, LARGE)
    for group in groups:
        for slots in SLOTS:
            about = {"ranks": group[0], "experts": group[1], "slots": slots}
            times.add(**about, **measure(group, slots, clock, tokens=tokens))
    print("\nvalues are wrong" if wrong else "\nevery value is as on the host")
    return int(wrong)


if __name__ == "__main__":
    sys.exit(main())
