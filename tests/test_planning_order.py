"""When layers are planned, and by what, in training.

Oracle: the calls that real layers make, written down in the order they come. Were a layer planned twice, late, or in
another iteration, or left half prepared, it would fetch wrong guests or wait for gradients that never come.
"""

from __future__ import annotations

import itertools
import types

import pytest
from ranks import ranks


@ranks(2)
def test_each_layer_reconsiders_its_plan_in_another_iteration() -> None:
    """In one of four, and by the plan before it in the others."""
    import tiny_gpt

    from megatron_hecate import HecateConfig, fssdp, state

    plan, asked = state.plan_guests, []

    def planned(forecast, homes, world, **settings):  # noqa: ANN003
        asked.append((settings["reconsider"], settings["previous"], plan(forecast, homes, world, **settings)))
        return asked[-1][-1]

    state.plan_guests = planned
    case = tiny_gpt.Case()
    tiny_gpt.initialize(case)
    tiny_gpt.train(case, steps=10, hook=fssdp(HecateConfig(costs=tiny_gpt.FREE, slots=1, timeout=60)))
    for layer in range(2):
        its = asked[layer::2]  # from the second iteration on
        assert [reconsider for reconsider, *_ in its] == [(plan + layer) % 4 == 0 for plan in range(1, 10)]
        assert all(previous is made for (*_, made), (_, previous, _) in itertools.pairwise(its))


@pytest.mark.parametrize("lifetime", ["iteration", "layer"])
@ranks(2)
def test_layers_are_planned_four_at_a_time(lifetime: str) -> None:
    """One right after another, each once in an iteration and before it is fetched, in whatever microbatch."""
    import tiny_gpt

    from megatron_hecate import HecateConfig, fssdp
    from megatron_hecate.state import LayerState

    case = tiny_gpt.Case(accumulate=2, settings=(("num_layers", 11),))
    tiny_gpt.initialize(case)
    config = HecateConfig(costs=tiny_gpt.FREE, slots=1, lifetime=lifetime, timeout=60)
    run = tiny_gpt.train(case, steps=2, hook=fssdp(config))
    plan, host, done = LayerState._plan, LayerState._host, []
    LayerState._plan = lambda self: (done.append(("plan", self.index)), plan(self))[1]
    LayerState._host = lambda self, what: (done.append(("fetch", self.index)), host(self, what))[1]
    run.step(2)
    groups = [[layer for _, layer in its] for what, its in itertools.groupby(done, lambda d: d[0]) if what == "plan"]
    assert groups == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10]]
    fetched = {layer for what, layer in done if what == "fetch"}
    assert len(fetched) > 4 and all(done.index(("plan", i)) < done.index(("fetch", i)) for i in fetched)


def test_no_plan_is_made_for_another_chunk() -> None:
    from megatron_hecate.model import ModelState

    planned: list[int] = []
    states = [types.SimpleNamespace(planned=6, plan=lambda i=i: planned.append(i)) for i in range(9)]
    clock = types.SimpleNamespace(iteration=7)
    model = types.SimpleNamespace(states=states, chunk_of=[0] * 6 + [1] * 3, clock=clock)
    ModelState.plan(model, 4)
    assert planned == [4, 5]
    states[7].planned = 7
    ModelState.plan(model, 6)
    assert planned == [4, 5, 6, 8]
    ModelState.plan(model, 7)
    assert planned == [4, 5, 6, 8]


@ranks(2)
def test_a_plan_that_fails_leaves_no_layer_half_prepared() -> None:
    """The loop catches the error and goes on; layers planned before must not wait for gradients of the broken step."""
    import tiny_gpt

    from megatron_hecate import HecateConfig, fssdp
    from megatron_hecate.state import LayerState

    case = tiny_gpt.Case(accumulate=3, settings=(("num_layers", 4),))
    tiny_gpt.initialize(case)
    run = tiny_gpt.train(case, steps=3, hook=fssdp(HecateConfig(costs=tiny_gpt.FREE, slots=1, timeout=30)))
    plan, failed = LayerState._plan, []

    def fails_once(self: LayerState):
        if self.index == 2 and not failed:
            failed.append(True)
            raise ValueError("no plan")
        return plan(self)

    LayerState._plan = fails_once
    with pytest.raises(ValueError, match="no plan"):
        run.step(3)
    for step in (4, 5):
        run.step(step)
    assert any(layer.fssdp.placement.num_guests for layer in tiny_gpt.moe_layers(run.chunks))
