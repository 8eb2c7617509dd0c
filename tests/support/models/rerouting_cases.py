"""Routing maps through quotas and rerouting. Oracle: a loop over tokens, without tensors."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from megatron_hecate.plan import Placement, World
from megatron_hecate.routing.reroute import Rerouter
from megatron_hecate.routing.tables import GroupShape
from megatron_hecate.tools.quotas import quotas_of_all

TOKENS, EXPERTS, RANKS, TOP = 50, 8, 4, 3


def some_placement(rng: np.random.Generator, seed: int) -> Any:
    """Up to 14 replicas at random places, three slots per rank."""
    homes = Placement.initial(EXPERTS, RANKS, num_slots=3)
    pairs = [(e, r) for e in range(EXPERTS) for r in range(RANKS) if homes.home[e] != r]
    rng.shuffle(pairs)
    replicas, used = [], [0] * RANKS
    for e, r in pairs[: 2 * seed]:
        if used[r] < 3:
            replicas.append((int(e), int(r)))
            used[r] += 1
    return homes.with_replicas(replicas)


def some_routing_map(rng: np.random.Generator, hot: int, *, tokens: int = TOKENS) -> np.ndarray:
    """[T, E] bool: every token but one that was dropped goes to three experts."""
    scores = rng.random((tokens, EXPERTS)) * (1 + 3 * (np.arange(EXPERTS) == hot))
    chosen = np.zeros((tokens, EXPERTS), dtype=bool)
    np.put_along_axis(chosen, np.argsort(-scores, axis=1)[:, :TOP], True, axis=1)
    chosen[:1] = False
    return chosen


def as_indices(routing_map: np.ndarray, dtype: torch.dtype, *, top: int = TOP) -> torch.Tensor:
    """[T, k] experts of each token in an order that says nothing, -1 where there are fewer; see `dense_routes`."""
    experts = np.argsort(~routing_map, axis=1, kind="stable")[:, :top]
    chosen = np.where(np.take_along_axis(routing_map, experts, axis=1), experts, -1)
    order = np.argsort((chosen * 7 + np.arange(len(chosen))[:, None]) % 11, axis=1)
    return torch.from_numpy(np.take_along_axis(chosen, order, axis=1)).to(dtype)


def as_map(indices: torch.Tensor, columns: int) -> torch.Tensor:
    """[T, columns] bool, of indices [T, k] that are below 0 where there is none."""
    routing_map = torch.zeros(len(indices), columns + 1, dtype=torch.bool)
    return routing_map.scatter_(1, indices.long() % (columns + 1), True)[:, :columns]


def check_every_token(
    seed: int,
    *,
    tp_size: int = 1,
    tokens: tuple[int, ...] = (TOKENS,),
    indices: torch.dtype | None = None,
) -> None:
    """Compare with the loop, for all sources in turn, which have so many ``tokens`` each, repeated. Routes are maps or
    ``indices`` of this type."""
    rng = np.random.default_rng(seed)
    placement, world, sources = some_placement(rng, seed), World((0, 0, 1, 1)), RANKS * tp_size
    maps = [some_routing_map(rng, seed, tokens=tokens[n % len(tokens)]) for n in range(sources)]
    loads = torch.from_numpy(np.stack([m.sum(axis=0) for m in maps])).int()
    shape = GroupShape(world, placement, [n // tp_size for n in range(sources)])
    config = SimpleNamespace(
        moe_token_dispatcher_type="alltoall", moe_pad_expert_input_to_capacity=False
    )
    quotas, order = quotas_of_all(loads.numpy(), placement, shape)
    routed, exchanges = [], []
    for source in range(sources):
        group = SimpleNamespace(size=lambda: sources, rank=lambda source=source: source)
        dispatcher = SimpleNamespace(tp_ep_group=group, tp_size=tp_size, config=config)
        rerouter = Rerouter(dispatcher, world, placement, torch.empty(0).device, exchanges=True)
        routing_map = torch.from_numpy(maps[source])
        probs = torch.rand(routing_map.shape, dtype=torch.float64) * routing_map
        probs.requires_grad_()
        rerouter.tables.place(placement)
        routes = routing_map if indices is None else as_indices(maps[source], indices)
        counted = rerouter.count(routes, probs)
        physical_map, physical_probs, exchange = rerouter.reroute(probs, counted, loads)
        physical_routes = physical_map
        if indices is not None:
            assert physical_routes.dtype == indices
            physical_map = as_map(physical_routes, RANKS * placement.slots_per_rank)
        routed.append(physical_map.cpu().sum(dim=0))
        exchanges.append(exchange)

        holders = zip(
            order.expert.tolist(), order.rank.tolist(), quotas[source].tolist(), strict=True
        )
        left = {(e, r): n for e, r, n in holders}
        want_map = torch.zeros(len(probs), RANKS * placement.slots_per_rank, dtype=torch.bool)
        want_probs = torch.zeros(want_map.shape, dtype=torch.float64)
        physical_of = {}
        for token, expert in np.argwhere(maps[source]).tolist():
            holder = next(r for r in range(RANKS) if left.get((expert, r), 0) > 0)
            left[expert, holder] -= 1
            slot = placement.table[holder].tolist().index(expert)
            physical = physical_of[token, expert] = holder * placement.slots_per_rank + slot
            want_map[token, physical] = True
            want_probs[token, physical] = probs[token, expert].detach()
        assert not any(left.values())
        if indices is not None:
            expected = [
                [-1 if expert < 0 else physical_of[token, expert] for expert in experts]
                for token, experts in enumerate(routes.tolist())
            ]
            assert physical_routes.tolist() == expected
        assert torch.equal(physical_map, want_map) and torch.equal(
            physical_probs.detach(), want_probs
        )
        weights = torch.rand_like(want_probs)
        (physical_probs * weights).sum().backward()
        for (token, expert), physical in physical_of.items():
            assert probs.grad[token, expert] == weights[token, physical]
    # as Megatron counts: each source sums its routing map, and the sums are gathered
    slots = placement.slots_per_rank
    for source, exchange in enumerate(exchanges):
        received = torch.stack(routed)[:, source // tp_size * slots :][:, :slots]
        assert torch.equal(exchange.received.cpu(), received)
        assert torch.equal(exchange.of_slot.cpu(), received.sum(dim=0))
        assert torch.equal(exchange.of_source.cpu(), received.sum(dim=1))
        assert torch.equal(exchange.sent.cpu(), routed[source].view(RANKS, slots).sum(dim=1))
        assert exchange.total.tolist() == [int(received.sum())]
