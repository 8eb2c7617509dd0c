"""Training that is disturbed within a step: plans that change, evaluation between microbatches, exceptions.

A loop that an exception breaks off may write other weights, and goes on.

Oracle: the same run undisturbed, bit for bit; where a step is broken off, the unconverted model.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import loops
import pytest
import quantized
import tiny_gpt
import torch
from layouts import COMBINED, DISPATCH, FULL, FUSED_WGRAD, MOE
from quick import quick
from ranks import ranks

LIFETIMES = ("iteration", "layer")
REPEATED = dict(mtp_num_layers=3, mtp_use_repeated_layer=True)
STEPS = 3  # replicas come in the second
LAYERS = 3  # two share a buffer


def _case(**model: Any) -> Any:
    case = tiny_gpt.initialized(accumulate=2, settings=(("num_layers", LAYERS), *model.items()))
    return case


@ranks(2)
def test_the_backward_uses_the_plan_of_the_forward() -> None:
    """Another forecast, as soon as the first forward is over, must not change a bit, nor make anybody plan again."""
    from megatron_hecate.step.layer_planner import EarlyPlans

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


@pytest.mark.parametrize("kind", quick(["full", "moe", "mxfp8"], ["full"], oldest=["full", "moe"]))
@ranks(2, preload=lambda kind: "te-blackwell" if kind == "mxfp8" else "megatron")
def test_evaluation_within_a_step_changes_nothing(kind: str) -> None:
    """Between microbatches, and between a forward and its backward; in ``eval()``, or only without gradients. In MXFP8
    evaluation makes quantized copies for itself."""
    is_quantized = kind == "mxfp8"
    case = quantized.case_of(kind) if is_quantized else _case(**(FULL if kind == "full" else MOE))
    prepare: Callable = quantized.fuse_wgrad if is_quantized else list
    forward_step = tiny_gpt.forward_step
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

    def train(hook: Callable, step: Callable) -> Any:
        tiny_gpt.forward_step = step
        evaluated.clear()
        return tiny_gpt.train(case, hook=lambda chunks: hook(prepare(chunks)), steps=STEPS)

    train(list, disturbed)
    stock_evaluated = list(evaluated)
    for lifetime in LIFETIMES:
        hook = tiny_gpt.fssdp_hook(lifetime=lifetime)
        calm, run = train(hook, forward_step), train(hook, disturbed)
        assert run.replicas > 0 and len(evaluated) == STEPS * case.accumulate * 3
        assert evaluated == pytest.approx(stock_evaluated, rel=1e-5), lifetime
        assert tiny_gpt.difference(calm, run) == tiny_gpt.SAME, lifetime


class _UserError(Exception):
    pass


class _Fault:
    """Raises at the n-th call, and never again."""

    def __init__(self, call: int = 1) -> None:
        self._left = call

    def __call__(self, *_: Any) -> None:
        self._left -= 1
        if self._left == 0:
            raise _UserError


def _layers(run: Any) -> list[Any]:
    return [m for chunk in run.chunks for m in chunk.modules() if hasattr(m, "self_attention")]


def _after_all_forwards(run: Any) -> None:
    _layers(run)[-1].register_forward_hook(_Fault())


def _while_replicas_come(run: Any) -> None:
    """Of this layer and the next."""
    _layers(run)[1].self_attention.register_forward_pre_hook(_Fault())


def _before_a_fetch(run: Any) -> None:
    """Of replicas on one rank and the other: nothing is in the buffer."""
    transport, fault = tiny_gpt.moe_layers(run.chunks)[1].fssdp.transport, _Fault(2)
    fetch = transport.fetch
    transport.fetch = lambda *args, **kwargs: (fault(), fetch(*args, **kwargs))[1]


def _after_attention(run: Any) -> None:
    _layers(run)[1].self_attention.register_forward_hook(_Fault())


def _after_router(run: Any) -> None:
    tiny_gpt.moe_layers(run.chunks)[1].router.register_forward_hook(_Fault())


def _in_backward(run: Any) -> None:
    """The last layers' gradients have returned, or are on their way."""
    fault = _Fault()
    _layers(run)[1].register_forward_hook(lambda m, i, out: out[0].register_hook(fault) and None)


def _while_gradients_return(run: Any) -> None:
    """Of the first layer's replicas; its homes have not got them."""
    tiny_gpt.moe_layers(run.chunks)[0].register_full_backward_hook(_Fault())


def _before_combined_dispatch(run: Any) -> None:
    """In the second microbatch of the schedule that runs the layers' parts itself: no forward of a chunk ends there."""
    dispatcher, fault = tiny_gpt.moe_layers(run.chunks)[1].token_dispatcher, _Fault(2)
    preprocess = dispatcher.dispatch_preprocess
    dispatcher.dispatch_preprocess = lambda *args: (fault(), preprocess(*args))[1]


def _between_passes(run: Any) -> None:
    """Of a layer that runs three times in a microbatch, which is then as incomplete as the iteration."""
    run.chunks[0].module.mtp.layers[0].register_forward_pre_hook(_Fault(2))


def _between_linears(run: Any) -> None:
    """In the backward of grouped experts, whose weight gradients come last."""
    from transformer_engine.pytorch.module import grouped_linear

    gemm, fault = grouped_linear.general_grouped_gemm, _Fault(2)

    def fail_in_first_linear(*args: Any, layout: str = "TN", **settings: Any) -> Any:
        if layout == "NN":
            fault()
        return gemm(*args, layout=layout, **settings)

    grouped_linear.general_grouped_gemm = fail_in_first_linear


def _before_weight_gradients(run: Any) -> None:
    experts, fault = tiny_gpt.moe_layers(run.chunks)[0].experts, _Fault()
    compute = experts.backward_dw
    experts.backward_dw = lambda: (fault(), compute())


DELAYED = dict(grouped=True, settings=dict(DISPATCH, **FUSED_WGRAD))
THREE_LAYERS = dict(settings=dict(num_layers=LAYERS))
# what plants the fault, and fields of `tiny_gpt.Case`
PLACES: dict[str, tuple[Callable[[Any], None], dict[str, Any]]] = {
    "forward": (_after_all_forwards, THREE_LAYERS),
    "prefetch": (_while_replicas_come, THREE_LAYERS),
    "fetch": (_before_a_fetch, THREE_LAYERS),
    "router": (_after_router, THREE_LAYERS),
    "backward": (_in_backward, THREE_LAYERS),
    "between": (_while_gradients_return, THREE_LAYERS),
    "combined": (_before_combined_dispatch, dict(settings=COMBINED)),
    "passes": (_between_passes, dict(settings=REPEATED)),
    "linears": (_between_linears, DELAYED),
    "weight-gradients": (_before_weight_gradients, DELAYED),
}


def _step_again(run: Any, step: int) -> list[str]:
    """Do a step, twice where FSSDP objects; what it said."""
    try:
        run.step(step)
    except RuntimeError as error:
        run.step(step)
        return [str(error)]
    return []


@pytest.mark.parametrize(
    "where",
    quick(
        PLACES,
        "between combined linears".split(),
        oldest=[name for name, (_, fields) in PLACES.items() if "grouped" not in fields],
    ),
)
@ranks(2, preload=lambda where: "te" if "grouped" in PLACES[where][1] else "megatron")
def test_a_step_that_breaks_off(where: str) -> None:
    """The loop catches the user's error and does the step again. FSSDP may object once, since the microbatches that it
    counts do not add up; then all is as in stock, undisturbed, and no transfer is left without its peer."""
    plant, fields = PLACES[where]
    if "grouped" in fields:
        tiny_gpt.install_fused_wgrad()
    case = tiny_gpt.initialized(accumulate=2, **fields)
    stock = tiny_gpt.train(case, steps=5)
    transports = ["p2p", "nvlink"] if where == "between" else ["p2p"]
    for lifetime, transport in itertools.product(LIFETIMES, transports):
        hook = tiny_gpt.fssdp_hook(lifetime=lifetime, transport=transport)
        ours, objections = tiny_gpt.train(case, steps=2, hook=hook), []
        for step in range(2, 5):
            if step < 4:
                plant(ours)
                with pytest.raises(_UserError):
                    ours.step(step)
            objections += _step_again(ours, step)
        ours.read_params()
        assert len(objections) <= 2 and all("replicas" in text for text in objections), objections
        tiny_gpt.assert_trained_alike(stock, ours, f"{lifetime}, {transport}")


@ranks(2)
def test_gradients_zeroed_by_hand_after_a_backward_that_broke_off() -> None:
    """The sums of its replicas may come after the zeros, of which no call of DDP tells."""
    case = tiny_gpt.initialized(skew=4)

    def train(hook: Any) -> Any:
        loop = loops.Loop(case, hook)
        for step in range(4):
            loop.zero()
            if step:
                fault = tiny_gpt.moe_layers(loop.chunks)[0].register_full_backward_hook(_Fault())
                with pytest.raises(_UserError):
                    loop.forward(50 + step, 0).backward()
                fault.remove()
                for buffer in loop.buffers:
                    buffer.grad_data.zero_()
            loops.backward(loop, step, 0)
            loop.finish()
            loop.update()
        return [p.detach().clone() for _, p in tiny_gpt.named_parameters(loop.chunks)]

    stock = train(None)
    for lifetime in LIFETIMES:
        ours = train(tiny_gpt.fssdp_hook(lifetime=lifetime))
        for p, expected in zip(ours, stock, strict=True):
            torch.testing.assert_close(p, expected, rtol=0, atol=1e-5, msg=lifetime)


@pytest.mark.parametrize("where", quick(["attention", "passes"], ["passes"]))
@ranks(2)
def test_other_weights_after_a_forward_that_broke_off(where: str) -> None:
    """In two steps of a bare loop it breaks off, all weights are scaled, and the loop trains on with the next
    microbatch: replicas that the broken forward has fetched are not those of the next one."""
    plant = _between_passes if where == "passes" else _after_attention
    case = tiny_gpt.initialized(settings=REPEATED if where == "passes" else dict(num_layers=LAYERS))

    def train(hook: Any) -> tuple[list[float], Any]:
        """Losses and sums of gradients."""
        loop, figures = loops.Loop(case, hook), list[float]()
        for step in range(4):
            loop.zero()
            if step >= 2:
                plant(loop)
                with pytest.raises(_UserError):
                    loop.forward(step, 5)
                loop.scale(0.8, "in place")
            figures.append(loops.backward(loop, step, 0))
            loop.finish()
            for name, p in loop.chunks[0].named_parameters():
                figures += [float(p.main_grad.double().sum())] if "mtp" in name else []
            loop.update()
        return figures, loop

    expected, _ = train(None)
    for lifetime in LIFETIMES:
        figures, loop = train(tiny_gpt.fssdp_hook(lifetime=lifetime))
        assert tiny_gpt.num_replicas(loop.chunks) > 0
        assert figures == pytest.approx(expected, rel=1e-5, abs=1e-5), lifetime


@ranks(2)
def test_evaluation_after_a_recomputation_that_broke_off() -> None:
    """Evaluation computes with the weights that it finds, and training goes on as stock's."""
    case = tiny_gpt.initialized(accumulate=2, settings=FULL)

    def train(hook: Any) -> tuple[Any, list[float]]:
        run, fault = tiny_gpt.train(case, hook=hook, steps=2), _Fault()
        tiny_gpt.moe_layers(run.chunks)[0].router.register_forward_hook(
            lambda *_: fault() if torch._C._current_graph_task_id() != -1 else None
        )
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
