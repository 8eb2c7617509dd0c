"""Exchanges of loads through peers' memory, against the all-gather in their place; also for processes that share a GPU."""

from __future__ import annotations

import numpy as np
import torch
import torch.distributed as dist
from one_layer import HOMES
from plan_cases import some_replicas

from megatron_hecate.comm.collectives import gather_rows
from megatron_hecate.comm.transport import Transport
from megatron_hecate.device.launch import Kernels
from megatron_hecate.plan import Placement, World
from megatron_hecate.routing.quotas import QuotaTables
from megatron_hecate.routing.reroute import CountedTokens
from megatron_hecate.routing.tables import GroupShape


def some_tables(rng: np.random.Generator, num_experts: int, device: torch.device) -> QuotaTables:
    homes = Placement.initial(num_experts, dist.get_world_size(), num_slots=2)
    placement = some_replicas(rng, homes, share=float(rng.choice([0.0, 0.8])))
    world = World((0,) * dist.get_world_size())
    tables = QuotaTables(GroupShape(world, placement), device, Kernels(device))
    tables.place(placement)
    return tables


def check_exchanges(transport: Transport, device: torch.device) -> None:
    """Of layers with different numbers of experts, in maps and in indices, and nothing else between them."""
    rng, rank, size = np.random.default_rng(0), dist.get_rank(), dist.get_world_size()
    own = np.random.default_rng(1 + rank)
    results = []
    for number in range(12):
        num_experts = size * (HOMES, HOMES, 1)[number % 3]
        tables = some_tables(rng, num_experts, device)
        routes = torch.from_numpy(own.random((own.integers(0, 40), num_experts)) < 0.3)
        if number % 4 == 3:
            routes = torch.where(routes, torch.arange(num_experts), -1)
        exchange = transport.exchange_loads(num_experts, label=f"layer {num_experts}")
        counted = CountedTokens(
            routes.to(device), tables.kernels, exchange=exchange, num_experts=num_experts
        )
        results.append((tables, counted.loads, tables.parts_and_exchange(exchange, rank)))
    for tables, loads, (parts, counts) in results:
        loads = gather_rows(loads.cpu(), dist.group.WORLD, what="loads", label="", timeout=20)
        gathered_parts, gathered_counts = tables.parts_and_exchange(loads.to(device), rank)
        # entries past the last holder are not written
        num_holders = int(tables.placed.holders.sum())
        assert torch.equal(parts[:num_holders], gathered_parts[:num_holders])
        for name in ("received", "of_slot", "of_source", "sent", "total"):
            assert torch.equal(getattr(counts, name), getattr(gathered_counts, name)), name
