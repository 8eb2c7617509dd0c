"""Metrics of a training run, and layers that run stock code because copies would not pay.

Oracle: the routing maps themselves, summed over ranks by hand; the unconverted model.
"""

from __future__ import annotations

from functools import partial

import pytest
from ranks import ranks


@ranks(2)
def test_metrics_count_what_was_routed() -> None:
    import tiny_gpt
    import torch
    import torch.distributed as dist

    from megatron_hecate.tools.metrics import layer_metrics

    case = tiny_gpt.Case(accumulate=2)
    tiny_gpt.initialize(case)
    run = tiny_gpt.train(case, steps=0, hook=tiny_gpt.fssdp_hook())
    assert layer_metrics(run.chunks) == []  # nothing has run
    layers = tiny_gpt.moe_layers(run.chunks)
    counts = torch.zeros(len(layers), case.experts, dtype=torch.int64)

    def count(index: int, router: object, args: object, out: tuple) -> None:
        counts[index] += out[1].sum(dim=0)

    for index, layer in enumerate(layers):
        layer.router.register_forward_hook(partial(count, index))
    for step in range(3):
        counts.zero_()
        run.step(step)
    dist.all_reduce(counts)
    metrics = layer_metrics(run.chunks)
    per_rank = counts.view(len(layers), 2, -1).sum(dim=2).double()
    assert [m.routed for m in metrics] == pytest.approx((per_rank.amax(dim=1) / per_rank.mean(dim=1)).tolist())
    assert [m.routed_tokens for m in metrics] == per_rank.amax(dim=1).tolist()
    assert all(m.replicas > 0 and not m.bypassed and 1 <= m.computed < m.routed for m in metrics)
    assert [m.layer for m in metrics] == ["layer 1", "layer 2"]


@ranks(2)
def test_where_copies_do_not_pay_the_layer_runs_stock_code() -> None:
    """Usual speeds of CPU ranks: no copy pays on so small a model. Nothing but the counts is communicated."""
    import tiny_gpt

    from megatron_hecate.plan import CPU
    from megatron_hecate.tools.metrics import layer_metrics

    case = tiny_gpt.Case(accumulate=2)
    tiny_gpt.initialize(case)
    stock = tiny_gpt.train(case)

    def forbidden(*_: object) -> None:
        raise AssertionError("a layer without replicas communicates")

    def watched(chunks: list) -> list:
        for layer in tiny_gpt.moe_layers(chunks):
            layer.fssdp.rerouter.gather_loads = forbidden
        return tiny_gpt.before_transfers(chunks, forbidden)

    hook = tiny_gpt.fssdp_hook(speeds=None)
    ours = tiny_gpt.train(case, hook=lambda chunks: watched(hook(chunks)))
    assert tiny_gpt.difference(stock, ours) == tiny_gpt.SAME
    assert tiny_gpt.moe_layers(ours.chunks)[0].fssdp.world.speeds is CPU  # also where a CPU stands in for a GPU
    metrics = layer_metrics(ours.chunks)
    assert len(metrics) == 2 and all(m.bypassed and m.replicas == 0 and m.computed == m.routed > 1 for m in metrics)
