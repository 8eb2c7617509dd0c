"""Transfers of one layer by our kernels, one after another, between the ranks of four processes. Also for a GPU that
they share (`one_gpu.py`).
"""

from __future__ import annotations

import functools

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_hecate import hierarchy
from megatron_hecate.collectives import Fused, start_gather, start_reduce
from megatron_hecate.hierarchy import Domains
from megatron_hecate.materialization import Materialization
from megatron_hecate.peers import Peers
from megatron_hecate.plan import Placement
from megatron_hecate.sm import Sm

RANKS = 4
SHAPES = ((40, 30), (77,), (1,))
ELEMENTS = 40 * 30 + 77 + 1
APART = 2048  # elements from one chunk to the next
HOMES, GUESTS, TOTALS = range(3)


def check(
    device: torch.device, domains: Domains, *, copy_engines: bool = False, p2p: bool = False, rounds: int = 12
) -> None:
    """Random placements. What must come out is computed here, in the order that `hierarchy` promises, and bitwise.

    Args:
        p2p: whether that transport must give the same sums.
    """
    group, rank = dist.group.WORLD, dist.get_rank()
    groups = [dist.new_group(list(domain)) for domain in domains]
    here = next(i for i, domain in enumerate(domains) if rank in domain)
    peers = Peers(groups[here], 4 << 20, device, ranks=domains[here])
    sm = Sm(peers, group, domains, copy_engines=copy_engines)
    arena, sizes = peers.arena.view(torch.float32), [len(domain) for domain in domains]
    chunks = [arena[i * APART : i * APART + ELEMENTS] for i in range(5)]
    outbox, rows = chunks[:2], chunks[2:]
    stripes = arena[5 * APART :].split(hierarchy.width(ELEMENTS, sizes))
    relays = stripes[: max(hierarchy.relays(sizes, homes=2, slots=3))]
    settings = dict(label="layer 1", timeout=20.0)
    for seed in range(rounds):
        placement = _placement(seed)
        views = [Materialization.of(placement, r) for r in range(RANKS)]
        what, homes = views[rank], [[t.to(device) for t in home] for home in _drawn(HOMES, seed, rank)[:2]]
        fused = Fused(sm, what.loans(), rows, outbox, relays)
        start_gather(homes, what.route, [], group, fused=fused, **settings).wait()
        for row, expert in zip(what.rows, what.route.experts, strict=True):
            assert torch.equal(rows[row].cpu(), _flat(_drawn(HOMES, seed, expert // 2)[expert % 2]))
        grads = {
            (r, expert): _flat(_drawn(GUESTS, seed, r)[i])
            for r, view in enumerate(views)
            for i, expert in enumerate(view.route.experts)
        }
        before = _drawn(TOTALS, seed, rank)[:2]
        expected = [_expected(_flat(home), 2 * rank + i, grads, domains, here) for i, home in enumerate(before)]
        totals = [[t.to(device) for t in home] for home in before]
        for direct in (True, False):
            for row, expert in zip(what.rows, what.route.experts, strict=True):
                rows[row].copy_(grads[rank, expert])
            found: dict[int, Tensor] = {}
            start_reduce(
                [],
                what.route,
                [],
                found.__setitem__,
                group,
                fused=fused,
                totals=lambda home, direct=direct, totals=totals: totals[home] if direct else None,
                **settings,
            ).wait()
            assert tuple(sorted(found)) == (() if direct else what.route.lent)
            for home in what.route.lent:
                seen = _flat(totals[home]) if direct else found[home]
                assert torch.equal(seen.cpu(), expected[home][0 if direct else 1])
        if p2p:
            sums: dict[int, Tensor] = {}

            def add(home: int, total: Tensor, sums: dict = sums) -> None:
                sums[home] = total.clone()

            staging = [torch.empty(ELEMENTS) for _ in range(5)]
            own = [grads[rank, expert] for expert in what.route.experts]
            start_reduce(own, what.route, staging, add, group, **settings).wait()
            assert sums.keys() == found.keys() and all(torch.equal(found[home], sums[home]) for home in sums)


def _placement(seed: int) -> Placement:
    """Guests drawn at random; expert 0 is a guest everywhere else."""
    rng = np.random.default_rng(seed)
    homes = Placement.initial(2 * RANKS, RANKS, num_slots=3)
    guests = [(0, rank) for rank in range(1, RANKS)]
    drawn = [(int(e), r) for r in range(RANKS) for e in rng.permutation(range(1, 2 * RANKS))[:2]]
    return homes.with_guests(guests + [(e, r) for e, r in drawn if homes.home[e] != r])


def _drawn(kind: int, seed: int, rank: int) -> list[list[Tensor]]:
    """Three chunks of a rank: every other rank can say what they are."""
    torch.manual_seed(1000 * seed + 10 * rank + kind)
    return [[torch.randn(shape) for shape in SHAPES] for _ in range(3)]


def _flat(chunk: list[Tensor]) -> Tensor:
    return torch.cat([t.flatten() for t in chunk])


def _expected(
    before: Tensor, expert: int, grads: dict[tuple[int, int], Tensor], domains: Domains, here: int
) -> tuple[Tensor, Tensor]:
    """The gradients of an expert's guests, added to what was there, and to nothing."""
    alone = torch.zeros(ELEMENTS)
    for turn in range(len(domains)):
        hosts = sorted(r for r in domains[(here + turn) % len(domains)] if (r, expert) in grads)
        if hosts:
            alone = alone + functools.reduce(torch.add, [grads[host, expert] for host in hosts])
    return before + alone, alone
