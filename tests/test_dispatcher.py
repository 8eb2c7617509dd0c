"""Logical to physical experts. Oracle: a token-by-token loop that hands out quotas, written without tensors."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from ranks import ranks


@pytest.mark.parametrize("seed", range(8))
@ranks(1)
def test_every_token_gets_a_holder_by_quota(seed: int) -> None:
    import megatron_on_cpu

    megatron_on_cpu.install()
    from megatron_hecate.dispatcher import Columns, to_physical
    from megatron_hecate.plan import Placement, World, split_quotas

    rng = np.random.default_rng(seed)
    num_ranks, num_experts, num_tokens, top = 4, 8, 50, 3
    placement = Placement.initial(num_experts, num_ranks, num_slots=3)
    pairs = [(e, r) for e in range(num_experts) for r in range(num_ranks) if placement.home[e] != r]
    rng.shuffle(pairs)
    guests, used = [], [0] * num_ranks
    for e, r in pairs[: 2 * seed]:
        if used[r] < 3:
            guests.append((int(e), int(r)))
            used[r] += 1
    placement = placement.with_guests(guests)
    maps = []
    for _ in range(num_ranks):
        scores = rng.random((num_tokens, num_experts)) * (1 + 3 * (np.arange(num_experts) == seed))
        chosen = np.zeros((num_tokens, num_experts), dtype=bool)
        np.put_along_axis(chosen, np.argsort(-scores, axis=1)[:, :top], True, axis=1)
        chosen[0] = False  # a dropped token
        maps.append(chosen)
    loads = np.stack([m.sum(axis=0) for m in maps]).astype(np.int64)
    quotas = split_quotas(loads, placement, World((0, 0, 1, 1)))

    computed = np.zeros(num_ranks, dtype=np.int64)
    for source in range(num_ranks):
        routing_map = torch.from_numpy(maps[source])
        probs = torch.rand(num_tokens, num_experts, dtype=torch.float64) * routing_map
        probs.requires_grad_()
        columns = Columns.of(placement, torch.device("cpu"))
        row = torch.from_numpy(quotas.tokens[source])
        physical_map, physical_probs = to_physical(routing_map, probs, row, columns)

        left = {
            (int(e), int(r)): int(n) for e, r, n in zip(quotas.expert, quotas.rank, quotas.tokens[source], strict=True)
        }
        want_map = torch.zeros(num_tokens, num_ranks * placement.slots_per_rank, dtype=torch.bool)
        want_probs = torch.zeros(want_map.shape, dtype=torch.float64)
        for token in range(num_tokens):
            for expert in np.flatnonzero(maps[source][token]):
                holder = next(r for r in range(num_ranks) if left.get((int(expert), r), 0) > 0)
                left[int(expert), holder] -= 1
                slot = placement.table[holder].tolist().index(expert)
                want_map[token, holder * placement.slots_per_rank + slot] = True
                want_probs[token, holder * placement.slots_per_rank + slot] = probs[token, expert].detach()
                computed[holder] += 1
        assert not any(left.values())
        assert torch.equal(physical_map, want_map) and torch.equal(physical_probs.detach(), want_probs)
        weights = torch.rand_like(want_probs)
        (physical_probs * weights).sum().backward()
        for token, expert in zip(*np.nonzero(maps[source]), strict=True):
            physical = int(torch.nonzero(want_map[token] & _columns_of(placement, expert)).item())
            assert probs.grad[token, expert] == weights[token, physical]
    assert (computed == quotas.rank_load(num_ranks)).all()


def _columns_of(placement, expert: int) -> torch.Tensor:
    return torch.from_numpy((placement.table == expert).reshape(-1))


@ranks(4)
def test_ranks_agree_on_quotas() -> None:
    """All ranks gather the same loads, in the order of their ranks."""
    import megatron_on_cpu

    megatron_on_cpu.install()
    import torch.distributed as dist

    from megatron_hecate.dispatcher import gather_loads

    rank = dist.get_rank()
    routing_map = torch.zeros(5, 3, dtype=torch.bool)
    routing_map[:rank, 1] = True
    loads = gather_loads(routing_map, dist.group.WORLD, label="layer 1", timeout=30)
    assert loads.dtype == torch.int32 and loads.tolist() == [[0, 0, 0], [0, 1, 0], [0, 2, 0], [0, 3, 0]]


@ranks(2)
def test_flex_is_built_over_physical_experts() -> None:
    """DeepEP needs a GPU; what its manager is told can be checked without: literal sizes for 4 homes and 2 slots."""
    import tiny_gpt
    from megatron.core.transformer.moe import token_dispatcher

    from megatron_hecate.dispatcher import physical_dispatcher

    told = []

    class Manager:
        def __init__(self, **arguments: object) -> None:
            told.append(arguments)

    token_dispatcher._DeepepManager = Manager
    case = tiny_gpt.Case(settings=(("moe_token_dispatcher_type", "flex"), ("moe_flex_dispatcher_backend", "deepep")))
    tiny_gpt.initialize(case)
    chunks, config = tiny_gpt.build(case)
    stock = tiny_gpt.moe_layers(chunks)[0].token_dispatcher
    told.clear()
    ours = physical_dispatcher(stock, 6)
    rank = torch.distributed.get_rank()
    assert type(ours) is type(stock) and ours.local_expert_indices == [6 * rank + i for i in range(6)]
    assert (told[0]["num_local_experts"], told[0]["num_experts"], told[0]["router_topk"]) == (6, 12, 2)
    assert config.num_moe_experts == 8
