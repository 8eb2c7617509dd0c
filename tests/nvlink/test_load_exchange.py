"""Loads of all sources through peers' memory, between CPU ranks, and as on GPUs.

Oracle: `gather_rows`, the all-gather in its place, bitwise; literal messages.
"""

from __future__ import annotations

import threading
import time

import gpu_on_cpu
import numpy as np
import pytest
import torch
import torch.distributed as dist
from one_layer import CPU, HOMES, allocate, make_transport
from plan_cases import some_replicas
from ranks import ranks

from megatron_hecate.comm.collectives import TransferError, gather_rows
from megatron_hecate.comm.transport import Transport
from megatron_hecate.device.launch import Kernels
from megatron_hecate.faults.attempt import Attempt
from megatron_hecate.plan import Placement, World
from megatron_hecate.routing.quotas import QuotaTables
from megatron_hecate.routing.reroute import CountedTokens
from megatron_hecate.routing.tables import GroupShape

MATCH = r"layer 1: the exchange of loads failed on rank 0 of 2 \(timeout 1 s\): expected rank 1 to send its loads; it .* 0 were seen"


def _tables(rng: np.random.Generator, num_experts: int, device: torch.device) -> QuotaTables:
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
        tables = _tables(rng, num_experts, device)
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


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@ranks(3)
def test_the_loads_of_an_all_gather(device: str) -> None:
    driver = gpu_on_cpu.install() if device == "cuda" else None
    transport, place = make_transport("nvlink"), gpu_on_cpu.GPU if driver else CPU
    assert transport.exchange_loads(6, label="layer 1") is None, "nothing is allocated"
    allocate(transport, place, torch.float32)
    check_exchanges(transport, place)
    assert driver is None or not driver.faults, driver.log


@ranks(4)
def test_several_domains_have_no_exchange() -> None:
    transport = make_transport("nvlink", ((0, 1), (2, 3)))
    allocate(transport, CPU, torch.float32)
    assert transport.exchange_loads(8, label="layer 1") is None


@ranks(2)
def test_a_peer_that_sends_no_loads_is_named() -> None:
    """By the wait, and by whatever asks for an exchange later."""
    transport = make_transport("nvlink", timeout=1.0)
    allocate(transport, CPU, torch.float32)
    if dist.get_rank() == 0:
        tables = _tables(np.random.default_rng(0), 4, CPU)
        exchange = transport.exchange_loads(4, label="layer 1")
        CountedTokens(torch.ones(5, 4, dtype=torch.bool), tables.kernels, exchange=exchange)
        with pytest.raises(TransferError, match=MATCH):
            tables.parts(exchange, 0)
        with pytest.raises(TransferError, match=MATCH):
            transport.exchange_loads(4, label="layer 2")
    dist.barrier()


@ranks(2)
def test_no_wait_outlives_the_attempt() -> None:
    """As when the job restarts in the process. The wait ends as if the peer had come."""
    transport = make_transport("nvlink", timeout=60.0)
    layers = allocate(transport, CPU, torch.float32)
    if dist.get_rank() == 0:
        tables = _tables(np.random.default_rng(0), 4, CPU)
        exchange = transport.exchange_loads(4, label="layer 1")
        CountedTokens(torch.ones(5, 4, dtype=torch.bool), tables.kernels, exchange=exchange)
        timer = threading.Timer(0.5, Attempt.current().close)
        timer.start()
        start = time.monotonic()
        tables.parts(exchange, 0)
        assert time.monotonic() - start < 30 and layers
    dist.barrier()
