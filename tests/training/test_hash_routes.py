"""Layers that route tokens by their ids are planned for the tokens of the same iteration, from the first one on.

Megatron's released versions have no hash-routed layers, so a stand-in follows the router of its development branch: the
experts of a token come from a table ``tid2eid``, their weights from the gate. Oracle: stock Megatron with the same
router, and loads counted token by token in Python.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from ranks import ranks

EXPERTS, LAYERS = 8, 2


def table_of(vocabulary: int) -> torch.Tensor:
    """[V, 2] experts of each token id: three of four ids choose experts 0 and 1."""
    ids = torch.arange(vocabulary)
    first = torch.where(ids % 4 > 0, 0, ids % EXPERTS)
    return torch.stack([first, (first + 1) % EXPERTS], dim=1).int()


def route_by_ids(vocabulary: int) -> Callable[[list], None]:
    """Have routers with a table use it, and return what gives the first layer of a model a table."""
    import tiny_gpt
    from megatron.core.transformer.moe.router import TopKRouter

    routing, forward_step = TopKRouter.routing, tiny_gpt.forward_step

    def hash_routing(router: Any, logits: torch.Tensor, *args: Any, **kwargs: Any) -> tuple:
        if getattr(router, "tid2eid", None) is None:
            return routing(router, logits, *args, **kwargs)
        logits = logits.reshape(-1, EXPERTS)
        # ids are [b, s], hidden states [s, b, h]
        chosen = router.tid2eid[router.ids.T.reshape(-1)].long()
        weights = torch.softmax(logits, dim=-1).gather(1, chosen)
        probs = torch.zeros_like(logits).scatter(1, chosen, weights)
        return probs, torch.zeros_like(logits).int().scatter(1, chosen, 1).bool()

    def forward_with_ids(iterator: Any, model: Any, *args: Any, **kwargs: Any) -> tuple:
        data = next(iterator)
        for layer in tiny_gpt.moe_layers([model]):
            layer.router.ids = data[:, :-1]
        return forward_step(iter([data]), model, *args, **kwargs)

    TopKRouter.routing, tiny_gpt.forward_step = hash_routing, forward_with_ids

    def give_table(chunks: list) -> None:
        router = tiny_gpt.moe_layers(chunks)[0].router
        router.register_buffer("tid2eid", table_of(vocabulary), persistent=False)

    return give_table


@pytest.mark.parametrize("lifetime", ["iteration", "layer"])
@ranks(2)
def test_the_first_iteration_has_replicas_for_its_own_tokens(lifetime: str) -> None:
    import tiny_gpt
    import torch.distributed as dist

    from megatron_hecate.routes.known_routes import expect_tokens
    from megatron_hecate.step.early_plans import EarlyPlans

    case = tiny_gpt.Case(accumulate=2)
    tiny_gpt.initialize(case)
    give_table = route_by_ids(tiny_gpt.VOCAB)
    planned: list[tuple[int, np.ndarray]] = []
    plan = EarlyPlans.plan

    def noted(early: EarlyPlans, index: int, inputs: Any) -> Any:
        planned.append((index, np.array(inputs.forecast)))
        return plan(early, index, inputs)

    EarlyPlans.plan = noted

    def train(announce: bool, **settings: Any) -> tuple[Any, list[list[int]]]:
        """Three steps, and the replicas of each layer after each step."""
        hook = tiny_gpt.fssdp_hook(**settings) if settings else None
        run, replicas = tiny_gpt.train(case, steps=0, hook=hook), []
        give_table(run.chunks)
        for step in range(3):
            if announce:
                ids = [tiny_gpt.batch(case, step, i)[:, :-1] for i in range(case.accumulate)]
                assert expect_tokens(run.chunks, torch.cat(ids)) == 1
            run.step(step)
            layers = tiny_gpt.moe_layers(run.chunks) if settings else []
            replicas.append([layer.fssdp.placement.num_replicas for layer in layers])
        run.read_params()
        return run, replicas

    stock, _ = train(announce=False)
    unannounced, replicas = train(announce=False, slots=2, lifetime=lifetime)
    assert replicas[0] == [0, 0], "nothing is known before the first forward"
    tiny_gpt.assert_trained_alike(stock, unannounced)
    planned.clear()
    ours, replicas = train(announce=True, slots=2, lifetime=lifetime)
    assert replicas[0][0] > 0 and replicas[0][1] == 0, replicas
    tiny_gpt.assert_trained_alike(stock, ours)
    table = table_of(tiny_gpt.VOCAB)
    counted = []
    for step in range(3):
        load = np.zeros(EXPERTS, dtype=np.int64)
        for microbatch in range(case.accumulate):
            for token in tiny_gpt.batch(case, step, microbatch)[:, :-1].flatten().tolist():
                for expert in table[token].tolist():
                    load[expert] += 1
        of_ranks = torch.from_numpy(load)
        dist.all_reduce(of_ranks)
        counted.append(of_ranks.numpy())
    by_ids = [load for index, load in planned if index == 0]
    assert len(by_ids) == 3
    assert all(np.array_equal(load, true) for load, true in zip(by_ids, counted, strict=True)), (
        by_ids,
        counted,
    )
    # the other layer is planned by its own past, from the second iteration on
    assert len([load for index, load in planned if index == 1]) == 2
    with pytest.raises(ValueError, match=f"router.tid2eid has {tiny_gpt.VOCAB} rows"):
        expect_tokens(ours.chunks, torch.tensor([tiny_gpt.VOCAB]))
    for layer in tiny_gpt.moe_layers(ours.chunks):
        layer.router.tid2eid = None
    assert expect_tokens(ours.chunks, torch.zeros(1)) == 0
