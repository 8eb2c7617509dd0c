"""Quotas on a device against those of one thread on the host, for random loads and placements."""

from __future__ import annotations

import numpy as np
import torch
from plan_cases import chain, some_homes, some_load, some_replicas, some_world

from megatron_hecate.device.launch import Kernels
from megatron_hecate.plan import Placement
from megatron_hecate.routing.quotas import NOTED, QuotaTables
from megatron_hecate.routing.tables import GroupShape, HolderOrder
from megatron_hecate.tools.quotas import quotas_of_all


def loads_of(
    rng: np.random.Generator, num_sources: int, num_experts: int, tokens: int = 20_000
) -> np.ndarray:
    """[N, E] of sources with tastes of their own, some of them without a token."""
    has_tokens = rng.random((num_sources, 1)) < 0.9
    return np.array([some_load(rng, num_experts, tokens=tokens) for _ in has_tokens]) * has_tokens


def noted_loads(
    quotas: np.ndarray, order: HolderOrder, placement: Placement, loads: np.ndarray
) -> list[int]:
    """What a launch notes of all sources' quotas: largest rank loads over the mean, with replicas and as built."""
    ranks, tokens = placement.num_ranks, loads.sum(axis=0)
    computed = np.zeros(ranks, np.int64)
    np.add.at(computed, order.rank, quotas.sum(axis=0))
    built = np.arange(len(tokens)) // -(-len(tokens) // ranks)
    fullest = [computed.max(), max(tokens[built == rank].sum() for rank in range(ranks))]
    return [-(int(load) * ranks * NOTED // -max(1, int(tokens.sum()))) for load in fullest]


def check_every_source(seed: int, device: torch.device) -> None:
    """Compare what each rank computes on ``device``, its part and the counts that it exchanges, with the table of all
    in 64 bits. Tokens around the bound of 32 bits, which an even start, or only a later level, may exceed; placements
    where no rank can push, and without replicas."""
    rng = np.random.default_rng(seed)
    placement = some_replicas(rng, some_homes(rng), share=float(rng.choice([0.3, 1.0])))
    if seed % 4 == 2:
        placement = chain(int(rng.integers(3, 14)))
    if seed % 5 == 3:
        placement = placement.homes_only
    shape = GroupShape(some_world(rng, placement.num_ranks), placement)
    loads = loads_of(rng, placement.num_ranks, placement.num_experts)
    if seed % 2:
        scale = int(rng.uniform(0.02, 2) * 2**31 / max(1, loads.sum()))
        loads = np.minimum(loads * scale, 2**31 - 1)
    tables = QuotaTables(shape, device, Kernels(device))
    tables.place(some_replicas(rng, placement.homes_only))  # an earlier one leaves no trace
    tables.place(placement)
    expected, order = quotas_of_all(loads, placement, shape, bits=64)
    assert placement.num_replicas or np.array_equal(expected, loads[:, order.expert])
    physical = np.zeros((placement.num_ranks, shape.num_physical), np.int64)
    physical[:, order.physical] = expected
    slots, on_device = shape.slots_per_rank, torch.from_numpy(loads.astype(np.int32)).to(device)
    tables.noted = torch.tensor([0, 9 * NOTED], device=device)
    for source in range(placement.num_ranks):
        parts, exchange = tables.parts_and_exchange(on_device, source)
        received = physical[:, source * slots : (source + 1) * slots]
        for counts, numbers in (
            (exchange.received, received),
            (exchange.of_slot, received.sum(axis=0)),
            (exchange.of_source, received.sum(axis=1)),
            (exchange.sent, physical[source].reshape(-1, slots).sum(axis=1)),
            (exchange.total, [received.sum()]),
        ):
            assert np.array_equal(counts.cpu().numpy(), numbers), source
        ends = parts.cpu().numpy()
        for expert in range(placement.num_experts):
            (holders,) = np.nonzero(order.expert == expert)
            assert np.array_equal(ends[holders], expected[source, holders].cumsum()), source
    noted = noted_loads(expected, order, placement, loads)
    assert tables.noted.tolist() == [noted[0], max(9 * NOTED, noted[1])]
