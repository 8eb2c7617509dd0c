"""Training that is disturbed within a step: plans that change, evaluation between microbatches, exceptions.

A loop that an exception breaks off may write other weights, and goes on.

Oracle: the same run undisturbed, bit for bit; where a step is broken off, the unconverted model, broken off alike.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from layouts import FULL, MOE
from quick import quick
from ranks import ranks

LIFETIMES = ("iteration", "layer")
REPEATED = (("mtp_num_layers", 3), ("mtp_use_repeated_layer", True))
STEPS = 3  # replicas come in the second
LAYERS = 3  # two share a buffer


def _case(**model: Any) -> Any:
    import tiny_gpt

    case = tiny_gpt.initialized(accumulate=2, settings=(("num_layers", LAYERS), *model.items()))
    return case


@ranks(2)
def test_the_backward_uses_the_plan_of_the_forward() -> None:
    """Another forecast, as soon as the first forward is over, must not change a bit, nor make anybody plan again."""
    import tiny_gpt

    from megatron_hecate.step.early_plans import EarlyPlans

    case, plan, planned_too_late = _case(**FULL), EarlyPlans.plan, [False]

    def plan_in_time(*args: Any) -> Any:
        assert not planned_too_late[0], "planned twice in one iteration"
        return plan(*args)

    EarlyPlans.plan = plan_in_time
    for lifetime in LIFETIMES:
        hook = tiny_gpt.fssdp_hook(lifetime=lifetime)
        calm = tiny_gpt.train(case, hook=hook, steps=STEPS)
        run = tiny_gpt.train(case, hook=hook, steps=0)
        layers, disturbed = tiny_gpt.moe_layers(run.chunks), []
        prefetcher = layers[0].prefetcher

        def disturb(*_: Any, prefetcher: Any = prefetcher, disturbed: list = disturbed) -> None:
            if prefetcher.forecast is not None:
                prefetcher.forecast = prefetcher.forecast[:, ::-1].copy()
                disturbed.append(1)
            planned_too_late[0] = True

        layers[-1].register_forward_hook(disturb)
        for step in range(STEPS):
            run.step(step)
            planned_too_late[0] = False
        run.read_params()
        assert run.replicas > 0 and len(disturbed) >= case.accumulate * (STEPS - 1)
        assert tiny_gpt.difference(calm, run) == tiny_gpt.SAME, lifetime


@pytest.mark.parametrize(
    "model", [FULL, pytest.param(MOE, marks=pytest.mark.slow)], ids=["full", "moe"]
)
@ranks(2)
def test_evaluation_within_a_step_changes_nothing(model: dict) -> None:
    """Between microbatches, and between a forward and its backward; in ``eval()``, or only without gradients."""
    import tiny_gpt

    case, forward_step = _case(**model), tiny_gpt.forward_step
    evaluated: list[float] = []

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

    def train(hook: Callable | None, step: Callable) -> Any:
        tiny_gpt.forward_step = step
        evaluated.clear()
        return tiny_gpt.train(case, hook=hook, steps=STEPS)

    train(None, disturbed)
    stock_evaluated = list(evaluated)
    for lifetime in LIFETIMES:
        hook = tiny_gpt.fssdp_hook(lifetime=lifetime)
        calm, run = train(hook, forward_step), train(hook, disturbed)
        assert run.replicas > 0 and len(evaluated) == STEPS * case.accumulate * 3
        assert evaluated == pytest.approx(stock_evaluated, rel=1e-5), lifetime
        assert tiny_gpt.difference(calm, run) == tiny_gpt.SAME, lifetime


class _UserError(Exception):
    pass


def _step_again(run: Any, step: int) -> list[str]:
    """Do a step, twice where FSSDP objects; what it said."""
    try:
        run.step(step)
    except RuntimeError as error:
        run.step(step)
        return [str(error)]
    return []


def _compare_after_a_failure(train: Callable[[Callable | None], Any]) -> None:
    """``train`` does two steps with a hook and has the third fail, once; then each lifetime trains as stock does, with
    at most one objection."""
    import tiny_gpt

    def go_on(hook: Callable | None) -> tuple[Any, list[str]]:
        run, objections = train(hook), []
        with pytest.raises(_UserError):
            run.step(2)
        for step in (2, 3):
            objections += _step_again(run, step)
        run.read_params()
        return run, objections

    stock, _ = go_on(None)
    for lifetime in LIFETIMES:
        ours, objections = go_on(tiny_gpt.fssdp_hook(lifetime=lifetime))
        assert len(objections) <= 1 and all("replicas" in text for text in objections), objections
        tiny_gpt.assert_trained_alike(stock, ours, lifetime)


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
    elif where == "prefetch":  # replicas of this layer and the next are on their way
        handles.append(layers[1].self_attention.register_forward_pre_hook(fail))
    elif (
        where == "between"
    ):  # gradients of the first layer's replicas are on their way, its homes have not got them
        handles.append(tiny_gpt.moe_layers(run.chunks)[0].register_full_backward_hook(fail))
    elif where == "backward":  # the last layers' gradients have returned, or are on their way
        handles.append(
            layers[1].register_forward_hook(lambda m, i, out: out[0].register_hook(fail) and None)
        )
    else:
        assert where == "router", where
        handles.append(tiny_gpt.moe_layers(run.chunks)[1].router.register_forward_hook(fail))


@pytest.mark.parametrize(
    "where",
    quick(["forward", "prefetch", "router", "backward", "between"], ["between"]),
)
@ranks(2)
def test_a_step_that_breaks_off(where: str) -> None:
    """The loop catches the user's error and does the step again. FSSDP may object once, since the microbatches that it
    counts do not add up; then all is as in stock, and no transfer is left without its peer."""
    import tiny_gpt

    case = _case()

    def train(hook: Callable | None) -> tuple[Any, list[str]]:
        run, objections = tiny_gpt.train(case, steps=2, hook=hook), []
        for step in range(2, 5):
            if step < 4:
                _break_off(run, where)
                with pytest.raises(_UserError):
                    run.step(step)
            objections += _step_again(run, step)
        run.read_params()
        return run, objections

    stock, none = train(None)
    assert not none
    transports = ["p2p", "nvlink"] if where == "between" else ["p2p"]
    for lifetime, transport in itertools.product(LIFETIMES, transports):
        ours, objections = train(tiny_gpt.fssdp_hook(lifetime=lifetime, transport=transport))
        assert len(objections) <= 2 and all("replicas" in text for text in objections), objections
        tiny_gpt.assert_trained_alike(stock, ours, f"{lifetime}, {transport}")


@ranks(2)
def test_a_combined_step_that_breaks_off() -> None:
    """The schedule that runs the layers' parts itself, between a layer's router and its dispatch: no forward of a model
    chunk ends there."""
    import tiny_gpt

    case = tiny_gpt.initialized(
        accumulate=2, settings=(("overlap_moe_expert_parallel_comm", True),)
    )

    def train(hook: Callable | None) -> Any:
        run, calls = tiny_gpt.train(case, steps=2, hook=hook), itertools.count(1)
        dispatcher = tiny_gpt.moe_layers(run.chunks)[1].token_dispatcher
        preprocess = dispatcher.dispatch_preprocess

        def fail(*args: Any) -> Any:
            if next(calls) == 2:  # the second microbatch's
                raise _UserError
            return preprocess(*args)

        dispatcher.dispatch_preprocess = fail
        return run

    _compare_after_a_failure(train)


@pytest.mark.slow
@ranks(2)
def test_a_step_that_breaks_off_between_two_passes() -> None:
    """Of a layer that runs three times in a microbatch, which is then as incomplete as the iteration."""
    import tiny_gpt
    from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionLayer

    case = tiny_gpt.initialized(accumulate=2, settings=REPEATED)

    def train(hook: Callable | None) -> Any:
        run, calls = tiny_gpt.train(case, steps=2, hook=hook), itertools.count(1)

        def fail(*_: object) -> None:
            if next(calls) == 2:
                raise _UserError

        (repeated,) = (
            m for m in run.chunks[0].modules() if isinstance(m, MultiTokenPredictionLayer)
        )
        repeated.register_forward_pre_hook(fail)
        return run

    _compare_after_a_failure(train)


class _Fault:
    """Raises once, when it is armed, at the n-th call."""

    def __init__(self, calls: int = 1) -> None:
        self.is_armed, self._calls, self._left = False, calls, calls

    def __call__(self, *_: Any) -> None:
        if not self.is_armed:
            return
        self._left -= 1
        if not self._left:
            self.is_armed, self._left = False, self._calls
            raise _UserError


def _plant(loop: Any, where: str) -> _Fault:
    """A fault behind the attention of a layer, or between two passes of a repeated one."""
    from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionLayer

    modules = [module for chunk in loop.chunks for module in chunk.modules()]
    if where == "between passes":
        fault = _Fault(calls=2)
        (repeated,) = (
            module for module in modules if isinstance(module, MultiTokenPredictionLayer)
        )
        repeated.register_forward_pre_hook(fault)
        return fault
    fault, layers = _Fault(), [module for module in modules if hasattr(module, "self_attention")]
    layers[int(where.removeprefix("attention "))].self_attention.register_forward_hook(fault)
    return fault


def _train(case: Any, hook: Any, where: str) -> tuple[list[float], int]:
    """Losses and sums of gradients of a bare loop, and the most replicas of a layer. In two steps a microbatch breaks
    off, the loop scales all weights, and trains on with the next one."""
    import tiny_gpt
    from loops import Loop

    loop, found = Loop(case, hook), list[float]()
    fault = _plant(loop, where)
    for step in range(4):
        loop.zero()
        if step >= 2:
            fault.is_armed = True
            with pytest.raises(_UserError):
                loop.forward(step, 5)
            loop.scale(0.8, "in place")
        loss = loop.forward(step, 0)
        loss.backward()
        loop.finish()
        found.append(float(loss))
        found += [
            float(p.main_grad.double().sum())
            for name, p in loop.chunks[0].named_parameters()
            if "mtp" in name
        ]
        loop.update()
    layers = tiny_gpt.moe_layers(loop.chunks)
    return found, 0 if hook is None else max(layer.fssdp.placement.num_replicas for layer in layers)


@pytest.mark.parametrize(
    "where",
    quick(["attention 1", "between passes"], ["between passes"]),
)
@ranks(2)
def test_other_weights_after_a_forward_that_broke_off(where: str) -> None:
    """Replicas that the broken forward has fetched are not those of the next one."""
    import tiny_gpt

    case = tiny_gpt.initialized(
        settings=REPEATED if where == "between passes" else (("num_layers", 3),)
    )
    expected, _ = _train(case, None, where)
    for lifetime in LIFETIMES:
        found, replicas = _train(case, tiny_gpt.fssdp_hook(lifetime=lifetime), where)
        assert replicas > 0
        assert found == pytest.approx(expected, rel=1e-5, abs=1e-5), lifetime


@ranks(2)
def test_evaluation_after_a_recomputation_that_broke_off() -> None:
    """Evaluation computes with the weights that it finds, and training goes on as stock's."""
    import tiny_gpt

    case = tiny_gpt.initialized(accumulate=2, settings=FULL)

    def train(hook: Any) -> tuple[Any, list[float]]:
        run, fault = tiny_gpt.train(case, hook=hook, steps=2), _Fault()

        def in_backward(*_: Any) -> None:
            if torch._C._current_graph_task_id() != -1:
                fault()

        tiny_gpt.moe_layers(run.chunks)[0].router.register_forward_hook(in_backward)
        fault.is_armed = True
        with pytest.raises(_UserError):
            run.step(2)
        with torch.no_grad():
            for parameter in (p for chunk in run.chunks for p in chunk.parameters()):
                parameter.mul_(0.7)
        evaluated = []
        with tiny_gpt.evaluating(run.chunks):
            for _ in range(2):
                output, loss = tiny_gpt.forward_step(
                    iter([tiny_gpt.batch(case, 77, 0)]), run.chunks[0], case=case
                )
                evaluated.append(float(loss(output)[2]["lm loss"][0]))
        for step in (2, 3):
            run.step(step)
        run.read_params()
        return run, evaluated

    stock, expected = train(None)
    for lifetime in LIFETIMES:
        ours, evaluated = train(tiny_gpt.fssdp_hook(lifetime=lifetime))
        assert evaluated == pytest.approx(expected, rel=1e-6), lifetime
        difference = tiny_gpt.difference(stock, ours)
        assert difference["loss"] < 1e-5 and difference["grad"] < 1e-5, (lifetime, difference)
