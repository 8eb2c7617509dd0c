"""Experts to physical experts. Oracle: a token-by-token loop that hands out quotas, written without tensors."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from ranks import ranks
from rerouting_cases import (
    EXPERTS,
    RANKS,
    TOKENS,
    as_indices,
    as_map,
    check_every_token,
    some_placement,
)
from seeds import seeds

from megatron_hecate.device.launch import Kernels
from megatron_hecate.plan import Placement, World
from megatron_hecate.routing.reroute import CountedTokens, Rerouter


@pytest.mark.fast
@pytest.mark.parametrize("tp_size", [1, 2])
@seeds(8)
def test_every_token_gets_a_holder_by_quota(seed: int, tp_size: int) -> None:
    """With expert tensor parallelism (``tp_size``) as many sources share a rank."""
    check_every_token(seed, tp_size=tp_size)


@pytest.mark.fast
def test_a_count_adds_to_a_sum() -> None:
    """Oracle: torch's sum. The sum may exceed 32 bits, and a sum is optional."""
    kernels = Kernels(torch.device("cpu"))
    begun = torch.arange(EXPERTS) + (1 << 40)
    total = begun.clone()
    counted = torch.zeros(EXPERTS, dtype=torch.int64)
    for num_tokens in (1, 0, 333):
        routing_map = torch.rand(num_tokens, EXPERTS) < 0.3
        CountedTokens(routing_map, kernels)
        assert torch.equal(CountedTokens(routing_map, kernels, total).loads, routing_map.sum(0))
        counted += routing_map.sum(0)
    assert torch.equal(total, begun + counted)


@pytest.mark.fast
@pytest.mark.parametrize("indices", [None, torch.int64])
def test_sources_without_tokens(indices: torch.dtype | None) -> None:
    check_every_token(4, tokens=(TOKENS, 0, TOKENS, 0), indices=indices)


@pytest.mark.fast
@pytest.mark.parametrize("indices", [torch.int16, torch.int32, torch.int64])
@seeds(4)
def test_indices_become_those_of_holders(seed: int, indices: torch.dtype) -> None:
    check_every_token(seed, tp_size=1 + seed % 2, indices=indices)


@pytest.mark.fast
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("indices", [torch.int16, torch.int64])
@pytest.mark.parametrize(("top", "tokens"), [(1, 0), (1, 4999), (3, 1), (3, 4999), (EXPERTS, 333)])
def test_indices_are_routed_as_a_map(
    top: int, tokens: int, indices: torch.dtype, dtype: torch.dtype
) -> None:
    """Several tiles of tokens, every choice of which goes to as few experts as there can be; some tokens are padding.
    Oracle: the other form, of which the loop above is the oracle."""
    rng = np.random.default_rng(top)
    chosen = np.zeros((tokens, EXPERTS), dtype=bool)
    chosen[:, :top] = True
    chosen[rng.random(tokens) < 0.1] = False
    placement, world = some_placement(rng, 6), World((0, 0, 1, 1))
    config = SimpleNamespace(
        moe_token_dispatcher_type="flex",
        moe_flex_dispatcher_backend="hybridep",
        moe_pad_expert_input_to_capacity=False,
    )
    group = SimpleNamespace(size=lambda: RANKS, rank=lambda: 2)
    dispatcher = SimpleNamespace(tp_ep_group=group, tp_size=1, config=config)
    rerouter = Rerouter(dispatcher, world, placement, torch.device("cpu"))
    rerouter.tables.place(placement)
    probs = (torch.rand(tokens, EXPERTS) * torch.from_numpy(chosen)).to(dtype).requires_grad_()
    results = []
    for routes in (torch.from_numpy(chosen), as_indices(chosen, indices, top=top)):
        total = torch.ones(EXPERTS, dtype=torch.int64)
        counted = rerouter.count(routes, probs, total)
        # all other sources have as many tokens
        loads = counted.loads.repeat(RANKS, 1)
        physical, physical_probs, _ = rerouter.reroute(probs, counted, loads)
        weights = torch.arange(physical_probs.numel()).view_as(physical_probs) % 97 + 1
        # column by column, as Megatron's permutation returns it
        given = weights.to(dtype).t().contiguous().t()
        (grad,) = torch.autograd.grad(physical_probs, probs, given)
        if routes.dtype is not torch.bool:
            assert physical.dtype == indices and physical.shape == routes.shape
            assert torch.equal(physical < 0, routes < 0)
            physical = as_map(physical, physical_probs.shape[1])
        results.append((counted.loads, total, physical, physical_probs, grad))
    for by_map, by_indices in zip(*results, strict=True):
        assert torch.equal(by_map, by_indices)


@pytest.mark.fast
def test_without_replicas_tokens_follow_homes_that_move() -> None:
    """A token for expert e reaches the place that holds e now, and its gradient comes back from there. In between
    there are replicas, and a backward that runs after the next move is that of its own forward."""
    config = SimpleNamespace(
        moe_token_dispatcher_type="alltoall", moe_pad_expert_input_to_capacity=False
    )
    group = SimpleNamespace(size=lambda: RANKS, rank=lambda: 0)
    dispatcher = SimpleNamespace(tp_ep_group=group, tp_size=1, config=config)
    initial = Placement.initial(EXPERTS, RANKS, num_slots=1)
    rerouter = Rerouter(dispatcher, World((0, 0, 1, 1)), initial, torch.device("cpu"))
    routing_map = torch.eye(EXPERTS, dtype=torch.bool)  # token e goes to expert e
    forwards = []
    for seed in range(4):
        order = np.random.default_rng(seed).permutation(EXPERTS).reshape(RANKS, -1)
        table, home = initial.table.copy(), initial.home.copy()
        table[:, :2] = order
        home[order] = np.arange(RANKS)[:, None]
        homes = Placement(home=home, table=table)
        rerouter.tables.place(homes)
        probs = torch.rand(EXPERTS, EXPERTS, dtype=torch.float64) * routing_map
        probs.requires_grad_()
        counted = rerouter.count(routing_map, probs)
        physical_map, physical_probs, _ = rerouter.reroute(probs, counted, None)
        place = {int(e): 3 * r + i for (r, i), e in np.ndenumerate(order)}
        assert physical_map.nonzero().tolist() == [[e, place[e]] for e in range(EXPERTS)]
        forwards.append((probs, physical_probs, torch.rand_like(physical_probs), place))
        rerouter.tables.place(homes.with_replicas([(int(order[0, 0]), 3)]))
    for probs, physical_probs, weights, place in forwards:
        (physical_probs * weights).sum().backward()
        assert [probs.grad[e, e] for e in range(EXPERTS)] == [
            weights[e, place[e]] for e in range(EXPERTS)
        ]


@ranks(4)
def test_ranks_agree_on_loads() -> None:
    """All ranks gather the same loads, in the order of their ranks."""
    from megatron_hecate.comm.collectives import gather_rows

    own = torch.tensor([0, dist.get_rank(), 0], dtype=torch.int32)
    loads = gather_rows(own, dist.group.WORLD, what="gathering", label="layer 1", timeout=30)
    assert loads.dtype == torch.int32 and loads.tolist() == [[0, count, 0] for count in range(4)]
