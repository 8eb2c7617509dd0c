"""Late guests, quotas on the device, the bypass and the metrics, in training. Oracle: stock Megatron on the same ranks.

Tier 1 is replaced by plans that are wrong on purpose, so that tier 2 has something to do: were a late guest's weights,
its gradient or a token lost, or a plan of the forward not that of the backward, losses or gradients would differ.
"""

from __future__ import annotations

import types

import pytest
import torch.distributed as dist
from ranks import ranks

RECOMPUTE = dict(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)
CASES: dict[str, tuple[dict, dict]] = {
    "plain": ({}, {}),
    "accumulate4-distopt-overlap": (dict(accumulate=4, distributed_optimizer=True, overlap=True), {}),
    "recompute": (dict(accumulate=2), RECOMPUTE),
    "one-expert": (dict(one_expert=True, accumulate=2), {}),
    "ep-comm-overlap": (dict(accumulate=4), dict(overlap_moe_expert_parallel_comm=True)),
}


def _no_plan(forecast, homes, world, **limits):  # noqa: ANN003
    return homes


def _bad_plan(forecast, homes, world, **limits):  # noqa: ANN003
    """The coldest experts in every slot."""
    from megatron_hecate.plan import plan_guests

    return plan_guests(forecast.max() - forecast, homes, world)


def _train(name: str, *, plan, late: int, costs: str | None = "free") -> None:
    import tiny_gpt
    from test_parity import _largest_difference

    from megatron_hecate import HecateConfig, fssdp, state
    from megatron_hecate.metrics import layer_metrics

    fields, settings = CASES[name]
    case = tiny_gpt.Case(**fields, settings=tuple(settings.items()))
    tiny_gpt.initialize(case)
    stock = tiny_gpt.train(case)
    state.plan_guests = plan
    settings = HecateConfig(costs=costs and tiny_gpt.FREE, slots=2, late=late, timeout=60)
    ours = tiny_gpt.train(case, hook=fssdp(settings))
    metrics = layer_metrics(ours.chunks)
    if costs is None:
        assert sum(m.late for m in metrics) == 0, metrics
    else:
        assert sum(m.late for m in metrics) > 0, f"no late guest: nothing was tested: {metrics}"
    assert all(m.late <= late and m.computed <= m.routed for m in metrics), metrics
    worst = _largest_difference(stock, ours)
    assert worst["loss"] <= 1e-5 and worst["grad"] <= 1e-5, worst


@pytest.mark.parametrize("name", CASES)
@ranks(2)
def test_late_guests_where_there_were_none(name: str) -> None:
    _train(name, plan=_no_plan, late=2)


@pytest.mark.parametrize("name", CASES)
@ranks(2)
def test_late_guests_replace_useless_ones(name: str) -> None:
    _train(name, plan=_bad_plan, late=4)


@ranks(4)
def test_late_guests_in_a_pipeline_of_four_ranks() -> None:
    CASES["pipeline"] = (dict(pp=2, vpp=2, accumulate=4, distributed_optimizer=True, overlap=True), {})
    _train("pipeline", plan=_bad_plan, late=3)


@pytest.mark.parametrize("costs", [None, "free"])
@ranks(4)
def test_late_guests_come_from_other_machines_where_speeds_are_measured(costs: str | None) -> None:
    """Every rank is a machine of its own, and copies cost nothing, whether that was measured or not."""
    import tiny_gpt

    from megatron_hecate import layer, transports
    from megatron_hecate.plan import Speeds

    transports.socket = types.SimpleNamespace(gethostname=lambda: f"machine {dist.get_rank()}")
    layer.CPU = Speeds.load(tiny_gpt.FREE)
    CASES["machines"] = (dict(ep=4, accumulate=2), {})
    _train("machines", plan=_bad_plan, late=4, costs=costs)


@pytest.mark.parametrize("fields", [{}, dict(tp=2, etp=2), dict(ep=4, accumulate=2)], ids=["ep2", "etp2", "ep4"])
@ranks(4)
def test_quotas_by_torch_operations_train_the_same_model(fields: dict) -> None:
    """What runs on a GPU, run here: no host code for quotas, the same losses and gradients."""
    import tiny_gpt
    from test_parity import _largest_difference

    from megatron_hecate import HecateConfig, fssdp, quotas

    case = tiny_gpt.Case(**fields)
    tiny_gpt.initialize(case)
    stock = tiny_gpt.train(case)
    quotas.splits_on_device = lambda loads: True
    quotas.split_quotas = None
    ours = tiny_gpt.train(case, hook=fssdp(HecateConfig(costs=tiny_gpt.FREE, slots=2, timeout=60)))
    assert ours.guests > 0
    worst = _largest_difference(stock, ours)
    assert worst["loss"] <= 1e-5 and worst["grad"] <= 1e-5, worst


@ranks(2)
def test_where_copies_do_not_pay_the_layer_runs_stock_code() -> None:
    """Usual speeds of CPU ranks: no copy pays on so small a model. Nothing but the counters is communicated."""
    import tiny_gpt
    from test_parity import SAME, _largest_difference

    from megatron_hecate import HecateConfig, fssdp, quotas, state
    from megatron_hecate.metrics import layer_metrics
    from megatron_hecate.plan.world import CPU

    case = tiny_gpt.Case(accumulate=2)
    tiny_gpt.initialize(case)
    stock = tiny_gpt.train(case)
    quotas.gather_loads = state.Guests = None  # using them would fail
    ours = tiny_gpt.train(case, hook=fssdp(HecateConfig(slots=2, timeout=60)))
    assert _largest_difference(stock, ours) == SAME
    assert tiny_gpt.moe_layers(ours.chunks)[0].fssdp.model.speeds is CPU  # also where a CPU stands in for a GPU
    metrics = layer_metrics(ours.chunks)
    assert len(metrics) == 2 and all(m.bypassed and m.guests == 0 and m.computed == m.routed > 1 for m in metrics)


@ranks(2)
def test_bypass_has_hysteresis() -> None:
    """At a gain between the two thresholds, a layer stays what it is: with guests, or without."""
    import numpy as np
    import tiny_gpt

    from megatron_hecate import HecateConfig, fssdp

    case = tiny_gpt.Case()
    tiny_gpt.initialize(case)
    run = tiny_gpt.train(case, steps=1, hook=fssdp(HecateConfig(costs=tiny_gpt.FREE, slots=1, timeout=60)))
    layer = tiny_gpt.moe_layers(run.chunks)[0].fssdp
    shape = layer.shape
    price = shape.copy_tokens(layer.world)
    type(layer).shape = property(
        lambda self: type(
            "Priced",
            (),
            dict(copy_tokens=lambda s, w: 1000.0, routing_tokens=lambda s, w: 0.0, fetch_seconds=lambda s, w: 1e9),
        )()
    )
    assert price < 1

    def gains(tokens: float) -> bool:
        """Whether guests are planned when perfect balance would win ``tokens``."""
        load = np.full(case.experts, 10_000.0)
        half = case.experts // 2
        load[:half] += tokens / half  # on rank 0
        load[half:] -= tokens / half
        layer.model.forecast = load[None].repeat(len(run.chunks) + 1, axis=0)
        layer.tier1 = layer._plan()
        return layer.tier1.num_guests > 0

    assert not gains(500)
    assert not gains(1450)  # above the price and what planning leaves (1/128 of 40,000 tokens), but not by a fifth
    assert gains(4000)
    assert gains(1250)  # on, it stays on
    assert not gains(500)


@ranks(2)
def test_metrics_count_what_was_routed() -> None:
    """Oracle: the routing maps themselves, summed over ranks by hand."""
    from functools import partial

    import tiny_gpt
    import torch
    import torch.distributed as dist

    from megatron_hecate import HecateConfig, fssdp
    from megatron_hecate.metrics import layer_metrics

    case = tiny_gpt.Case(accumulate=2)
    tiny_gpt.initialize(case)
    run = tiny_gpt.train(case, steps=0, hook=fssdp(HecateConfig(costs=tiny_gpt.FREE, slots=2, timeout=60)))
    assert layer_metrics(run.chunks) == []  # nothing has run
    layers = tiny_gpt.moe_layers(run.chunks)
    counts = torch.zeros(len(layers), case.experts, dtype=torch.int64)

    def count(index: int, router, args, out) -> None:
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
    assert all(m.guests > 0 and not m.bypassed and 1 <= m.computed < m.routed for m in metrics)
    assert [m.layer for m in metrics] == ["layer 1", "layer 2"]


@ranks(2)
def test_development_mode_checks_every_plan() -> None:
    """``python -X dev``: ranks that plan differently are told apart in the first plan, not by a hang in the fetch."""
    from types import SimpleNamespace

    import tiny_gpt
    import torch.distributed as dist

    from megatron_hecate import HecateConfig, fssdp, state

    case = tiny_gpt.Case()
    tiny_gpt.initialize(case)
    state.sys = SimpleNamespace(flags=SimpleNamespace(dev_mode=True))
    run = tiny_gpt.train(case, steps=3, hook=fssdp(HecateConfig(costs=tiny_gpt.FREE, slots=2, timeout=30)))
    assert run.guests > 0  # valid plans pass
    if dist.get_rank() == 1:
        state.plan_guests = _no_plan
    with pytest.raises(AssertionError, match=r"layer 1: ranks of \[0, 1\] planned differently: \[-?\d+, -?\d+\]"):
        run.step(3)


@ranks(2)
def test_a_late_plan_may_take_a_guest_and_give_none() -> None:
    """Oracle: the homes' own parameters. Rank 0's guest is replaced, rank 1's goes; gradients still come home."""
    import torch
    import torch.distributed as dist

    from megatron_hecate.lend import ChunkLayout
    from megatron_hecate.materialization import Materialization
    from megatron_hecate.memory import Need, SlotMemory
    from megatron_hecate.plan import Placement
    from megatron_hecate.slots import Guests, LayerSlots

    rank = dist.get_rank()
    weights = [torch.nn.Parameter(torch.full((3,), float(e))) for e in (2 * rank, 2 * rank + 1)]
    layout = ChunkLayout(shapes=(torch.Size([3]),), fused=(False,))
    homes = Placement.initial(4, 2, num_slots=1)
    first = homes.with_guests([(2, 0), (0, 1)])
    need = Need(slots=1, elements=3, dtype=torch.float32)
    slots = LayerSlots(
        index=0,
        homes=lambda: [[w] for w in weights],
        layout=layout,
        group=dist.group.WORLD,
        memory=SlotMemory([need], "iteration", in_flight=1, device=torch.device("cpu")),
        ready=lambda: None,
        label="layer 1",
        timeout=30,
    )
    planned = Materialization.of(first, rank)
    guests = Guests(slots, planned)
    guests.start()
    guests.wait()
    assert [w.tolist() for w in guests.weights()] == ([[2.0] * 3] if rank == 0 else [[0.0] * 3])
    guests.correct(*planned.corrected(homes.with_guests([(3, 0)])))
    physical = guests.materialize()
    assert len(physical) == 3
    if rank == 0:
        assert physical[2][0].tolist() == [3.0] * 3
    output = sum(w.sum() * (1 if k < 2 or rank == 0 else 0) for k, (w,) in enumerate(physical))
    guests.computed_by(output).backward()
    lent = [1.0, 2.0] if rank == 1 else [1.0, 1.0]  # expert 3 was computed with on both ranks
    assert [w.grad.tolist() for w in weights] == [[g] * 3 for g in lent]
