"""Training that is disturbed within a step: plans that change, evaluation between microbatches, exceptions.

Oracle: the same run undisturbed, bit for bit; where a step is broken off, the unconverted model, broken off alike.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from ranks import ranks

LIFETIMES = ("iteration", "microbatch", "layer")
FULL = dict(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)
MOE = dict(recompute_granularity="selective", recompute_modules=["moe"])


def _hook(lifetime: str, transport: str = "p2p") -> Any:
    import tiny_gpt

    from megatron_hecate import HecateConfig, fssdp

    settings = dict(slots=2, lifetime=lifetime, transport=transport, timeout=30)
    return fssdp(HecateConfig(costs=tiny_gpt.FREE, **settings))


def _plans_once() -> None:
    raise AssertionError("planned twice in one iteration")


@pytest.mark.parametrize("lifetime", LIFETIMES)
@pytest.mark.parametrize("recompute", [{}, FULL], ids=["kept", "recomputed"])
@ranks(2, timeout=240)
def test_the_backward_uses_the_plan_of_the_forward(recompute: dict, lifetime: str) -> None:
    """Another forecast and another plan, as soon as the first forward is over, must not change a bit."""
    import tiny_gpt
    from test_parity import SAME, _largest_difference

    case = tiny_gpt.Case(accumulate=3, settings=(("num_layers", 4), *recompute.items()))
    tiny_gpt.initialize(case)
    calm = tiny_gpt.train(case, hook=_hook(lifetime), steps=4)
    run = tiny_gpt.train(case, hook=_hook(lifetime), steps=0)
    layers = tiny_gpt.moe_layers(run.chunks)
    model, disturbed = layers[0].fssdp.model, []

    def disturb(*_: Any) -> None:
        if model.forecast is not None:
            model.forecast = model.forecast[:, ::-1].copy()
            disturbed.append(1)
        for layer in layers:
            layer.fssdp._plan = _plans_once

    layers[-1].register_forward_hook(disturb)
    for step in range(4):
        run.step(step)
        for layer in layers:
            del layer.fssdp._plan
    run.params = {name: p.detach().clone() for name, p in tiny_gpt._named(run.chunks)}
    assert run.guests > 0 and len(disturbed) >= 9
    assert _largest_difference(calm, run) == SAME


@pytest.mark.parametrize("lifetime", LIFETIMES)
@pytest.mark.parametrize("recompute", [{}, FULL, MOE], ids=["kept", "recomputed", "moe-recomputed"])
@ranks(2, timeout=240)
def test_evaluation_within_a_step_changes_nothing(recompute: dict, lifetime: str) -> None:
    """Between microbatches, and between a forward and its backward; in ``eval()``, or only without gradients."""
    import tiny_gpt
    import torch
    from test_parity import SAME, _largest_difference

    case = tiny_gpt.Case(accumulate=2, settings=(("num_layers", 4), *recompute.items()))
    tiny_gpt.initialize(case)
    forward_step, evaluated = tiny_gpt.forward_step, []

    def evaluate(model: Any, *, mode: bool) -> None:
        model.train(mode)
        with torch.no_grad():
            output, _ = forward_step(iter([tiny_gpt.batch(case, 77, 0)]), model, case=case)
        model.train()
        evaluated.append(float(output.float().mean()))

    def disturbed(iterator: Any, model: Any, **kwargs: Any) -> Any:
        evaluate(model, mode=False)
        output, loss = forward_step(iterator, model, **kwargs)

        def loss_func(output: torch.Tensor) -> Any:
            evaluate(model, mode=False)
            evaluate(model, mode=True)
            return loss(output)

        return output, loss_func

    calm = tiny_gpt.train(case, hook=_hook(lifetime), steps=4)
    tiny_gpt.forward_step = disturbed
    run = tiny_gpt.train(case, hook=_hook(lifetime), steps=4)
    assert run.guests > 0 and len(evaluated) == 4 * 2 * 3
    assert _largest_difference(calm, run) == SAME
    seen, evaluated = evaluated, []
    tiny_gpt.train(case, steps=4)
    assert seen == pytest.approx(evaluated, rel=1e-5)


class _UserError(Exception):
    pass


def _break_off(run: Any, where: str) -> None:
    """Have the next step fail in its first microbatch, on all ranks alike."""
    import tiny_gpt

    layers = [m for chunk in run.chunks for m in chunk.modules() if hasattr(m, "self_attention")]
    handles = []

    def fail(*_: Any) -> None:
        for handle in handles:
            handle.remove()
        raise _UserError

    if where == "forward":  # all forwards have run
        handles.append(layers[-1].register_forward_hook(fail))
    elif where == "prefetch":  # guests of this layer and the next are on their way
        handles.append(layers[2].self_attention.register_forward_pre_hook(fail))
    elif where == "between":  # gradients of the first layer's guests are on their way, its homes have not got them
        handles.append(tiny_gpt.moe_layers(run.chunks)[0].register_full_backward_hook(fail))
    elif where == "backward":  # the last layers' gradients have gone home, or are on their way
        handles.append(layers[1].register_forward_hook(lambda m, i, out: out[0].register_hook(fail) and None))
    else:
        assert where == "router", where
        handles.append(tiny_gpt.moe_layers(run.chunks)[1].router.register_forward_hook(fail))


@pytest.mark.parametrize("where", ["forward", "prefetch", "router", "backward", "between"])
@ranks(2, timeout=240)
def test_a_step_that_breaks_off(where: str) -> None:
    """The loop catches the user's error and does the step again. FSSDP may object once, since the microbatches that it
    counts do not add up; then all is as in stock."""
    import tiny_gpt
    from test_parity import _largest_difference

    case = tiny_gpt.Case(accumulate=2, settings=(("num_layers", 4),))
    tiny_gpt.initialize(case)

    def train(hook: Any) -> tuple[Any, list[str]]:
        run, objections = tiny_gpt.train(case, steps=2, hook=hook), []
        for step in range(2, 6):
            if step % 2 == 0:
                _break_off(run, where)
                with pytest.raises(_UserError):
                    run.step(step)
            try:
                run.step(step)
            except RuntimeError as error:
                objections.append(str(error))
                run.step(step)
        run.params = {name: p.detach().clone() for name, p in tiny_gpt._named(run.chunks)}
        return run, objections

    stock, none = train(None)
    assert not none
    transports = ["p2p", "sm"] if where == "between" else ["p2p"]
    for lifetime, transport in itertools.product(LIFETIMES, transports):
        ours, objections = train(_hook(lifetime, transport))
        assert ours.guests > 0
        assert len(objections) <= 2 and all("guests" in text for text in objections), objections
        worst = _largest_difference(stock, ours)
        assert worst["loss"] <= 1e-5 and worst["grad"] <= 1e-5, (lifetime, worst)
        tiny_gpt.moe_layers(ours.chunks)[0].fssdp.model.memory().reset()  # raises where a transfer is left without peer
