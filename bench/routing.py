"""Time and check the kernels after the gate on one GPU: count, quotas, rerouting and its backward.

    python bench/routing.py

One source's tokens are routed; the loads of all others are drawn, with popularities as 1, 1/2, 1/3 ... of the experts.
Replicas are filled greedily where times are taken, and drawn as well where values are compared: all that comes from the
GPU must equal what the host build of the same kernels gives for the same tokens, bit for bit. *In a row* is one of many
launches in a CUDA graph, and *all* one graph of all four. That is also replayed on other tokens and another placement,
and must give what running it gives.

UltraEP takes 0.07 ms for quotas and 0.04 ms for rerouting, on 64 ranks. ``--device cpu`` runs the host build, and
``--tiny`` few tokens, to try the script; the numbers mean nothing then.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "bench")]

from gpu_clock import Clock, captured, name_of  # noqa: E402
from placing import greedy_placement, random_placement  # noqa: E402
from rows import Table  # noqa: E402

from megatron_hecate.device.launch import Kernels  # noqa: E402
from megatron_hecate.plan import Placement, World  # noqa: E402
from megatron_hecate.routing.quotas import QuotaTables  # noqa: E402
from megatron_hecate.routing.reroute import CountedTokens, reroute  # noqa: E402
from megatron_hecate.routing.tables import GroupShape  # noqa: E402

GROUPS: tuple[tuple[int, int], ...] = (
    (64, 256),
    (32, 128),
    (16, 128),
    (8, 64),
)  # ranks, experts; the largest first
LARGE: tuple[int, int] = (1024, 1024)
SLOTS = (2, 1)
TOP, PER_NODE = 8, 8
DRAWS: int = 5  # of loads, tokens and placement, for each row
TARGETS = {"quotas": 70.0, "reroute": 40.0}  # microseconds of UltraEP
CPU = torch.device("cpu")


class Case:
    """One source's microbatch in a group.

    Args:
        ranks, experts: of the group.
        slots: of a rank, all of them taken.
        tokens: of the source.
        device: where.
        seed: of all that is drawn.
    """

    def __init__(
        self,
        group: tuple[int, int],
        slots: int,
        *,
        tokens: int,
        device: torch.device,
        seed: int = 0,
    ) -> None:
        (ranks, experts), self.slots = group, slots
        self.rng, self.device = np.random.default_rng(seed), device
        self.tokens, self.experts, self.source = tokens, experts, ranks // 2
        self.world = World(tuple(rank // PER_NODE for rank in range(ranks)))
        self.homes = Placement.initial(experts, ranks, num_slots=slots)
        self.kernels = Kernels(device)
        self.tables = QuotaTables(GroupShape.of(self.world, self.homes), device, self.kernels)
        self.loads = torch.zeros(ranks, experts, dtype=torch.int32, device=device)
        self.map = torch.zeros(tokens, experts, dtype=torch.bool, device=device)
        self.probs = torch.zeros(tokens, experts, device=device, requires_grad=True)
        self.grad = torch.zeros(tokens, ranks * self.homes.slots_per_rank, device=device)
        self.draw()

    def draw(self, *, greedily: bool = True) -> None:
        """New loads, tokens and replicas, where the old ones lie; the same on every device."""
        shares = self.rng.permutation(1.0 / np.arange(1, self.experts + 1))
        loads = self.rng.multinomial(self.tokens * TOP, shares / shares.sum(), size=len(self.loads))
        scores = torch.from_numpy(
            self.rng.gumbel(size=(self.tokens, self.experts)) + np.log(shares)
        )
        chosen = torch.zeros(self.tokens, self.experts, dtype=torch.bool, device=CPU)
        chosen.scatter_(1, scores.topk(TOP, dim=1).indices, True)
        loads[self.source] = chosen.sum(dim=0).numpy()
        generator = torch.Generator().manual_seed(int(self.rng.integers(2**31)))
        self.map.copy_(chosen)
        self.loads.copy_(torch.from_numpy(loads.astype(np.int32)))
        with torch.no_grad():
            self.probs.copy_(torch.rand(self.tokens, self.experts, generator=generator) * chosen)
        self.grad.copy_(torch.randn(self.grad.shape, generator=generator))
        if greedily:
            self.tables.place(greedy_placement(loads.sum(axis=0), self.homes, self.slots))
        else:
            self.tables.place(random_placement(self.rng, self.homes, self.slots))

    def count(self) -> CountedTokens:
        return CountedTokens.of(self.map, self.kernels)

    def parts(self) -> Tensor:
        return self.tables.parts(self.loads, self.source)

    def all(self) -> tuple[Tensor, ...]:
        """Loads, parts, physical routing map, probabilities, and the gradient of the logical ones."""
        counted, parts = self.count(), self.parts()
        # A leaf of its own: one that other graphs hold on to would tie a capture to the stream of those.
        logical = self.probs.detach().requires_grad_()
        routing_map, probs = reroute(counted, logical, self.tables, parts)
        (grad,) = torch.autograd.grad(probs, logical, self.grad)
        return counted.loads, parts[: self._defined], routing_map, probs, grad

    @property
    def _defined(self) -> int:
        """How many of the parts are of holders: those behind them are not written."""
        return self.experts + self.slots * len(self.loads)


def compare(group: tuple[int, int], slots: int, *, tokens: int, device: torch.device) -> str:
    """What of several draws differs between ``device`` and the host; empty where nothing does."""
    cases = [Case(group, slots, tokens=tokens, device=where) for where in (device, CPU)]
    for number in range(DRAWS):
        for case in cases:
            case.draw(greedily=number % 2 == 0)
        names = ("count", "quotas", "routing map", "probabilities", "gradient")
        for name, found, expected in zip(names, *(case.all() for case in cases), strict=True):
            if not torch.equal(found.cpu(), expected):
                wrong = int((found.cpu() != expected).sum())
                return f"draw {number}: {wrong} of {expected.numel()} values of {name}"
    return ""


def replayed(case: Case) -> Callable[[], object]:
    """A replay of everything as one graph, which gave the same as running it, on other tokens and placements.

    Raises:
        RuntimeError: where it did not.
    """
    replay, static = captured(case.all)
    for _ in range(3):
        case.draw()
        replay()
        expected = case.all()
        if not all(map(torch.equal, static, expected)):
            raise RuntimeError(
                "a replay on other tokens and another placement gave something else than running it"
            )
    return replay


def measure(
    group: tuple[int, int], slots: int, clock: Clock, *, tokens: int
) -> dict[str, float | bool | str]:
    """Microseconds of each kernel, over several draws."""
    cases = [
        Case(group, slots, tokens=tokens, device=clock.device, seed=seed) for seed in range(DRAWS)
    ]
    counted, parts = [case.count() for case in cases], [case.parts() for case in cases]
    zipped = list(zip(cases, counted, parts, strict=True))
    probs = [reroute(n, case.probs, case.tables, p)[1] for case, n, p in zipped]
    runs = {
        "count": [case.count for case in cases],
        "quotas": [case.parts for case in cases],
        "reroute": [lambda c=c, n=n, p=p: reroute(n, c.probs, c.tables, p) for c, n, p in zipped],
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
    if clock.device.type == "cuda":
        row["quotas in a row"] = clock.in_a_row(cases[0].parts).us
        row["count in a row"] = clock.in_a_row(cases[0].count).us
        row["all"] = clock.time(replayed(cases[0])).us
    row["host bound"] = any(time.host_bound for time in times.values())
    return row


def main() -> int:
    """Print the tables; 1 where a value is wrong."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--calls", type=int, default=25)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--large", action="store_true", help=f"also {LARGE[0]} ranks")
    options = parser.parse_args()
    device = torch.device(options.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        parser.error("no GPU here; --device cpu tries the script on the host")
    tokens, groups = (64, GROUPS[-1:]) if options.tiny else (options.tokens, GROUPS)
    clock = Clock(device, calls=2 if options.tiny else options.calls)
    print(f"{name_of(device)}, {tokens} tokens, top {TOP}")
    times, values, wrong = (
        Table("after the gate, microseconds"),
        Table("values, as on the host"),
        [],
    )
    for group in groups:
        for slots in SLOTS:
            differs = compare(group, slots, tokens=min(tokens, 1024), device=device)
            values.add(
                ranks=group[0],
                experts=group[1],
                slots=slots,
                draws=DRAWS,
                differs=differs or "nothing",
            )
            wrong += [differs] if differs else []
    for group in [*groups, *([LARGE] if options.large else [])]:
        for slots in SLOTS:
            about = {"ranks": group[0], "experts": group[1], "slots": slots}
            times.add(**about, **measure(group, slots, clock, tokens=tokens))
    print("\nvalues are wrong" if wrong else "\nevery value is as on the host")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
