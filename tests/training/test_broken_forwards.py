"""A forward breaks off, the loop writes other weights, and goes on.

Oracle: the unconverted model, whose forwards break off alike.
"""

from __future__ import annotations

from typing import Any

import pytest
from layouts import FULL, MOE
from quick import quick
from ranks import ranks

LIFETIMES = ("iteration", "layer")
RECOMPUTED = {
    "full": FULL,
    "moe": MOE,
}
REPEATED = (("mtp_num_layers", 3), ("mtp_use_repeated_layer", True))


class _UserError(Exception):
    pass


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
    quick(["attention 0", "attention 1", "between passes"], ["between passes"]),
)
@ranks(2)
def test_other_weights_after_a_forward_that_broke_off(where: str) -> None:
    """Replicas that the broken forward has fetched are not those of the next one."""
    import tiny_gpt

    case = tiny_gpt.Case(settings=REPEATED if where == "between passes" else (("num_layers", 3),))
    tiny_gpt.initialize(case)
    expected, _ = _train(case, None, where)
    for lifetime in LIFETIMES:
        found, replicas = _train(case, tiny_gpt.fssdp_hook(lifetime=lifetime), where)
        assert replicas > 0
        assert found == pytest.approx(expected, rel=1e-5, abs=1e-5), lifetime


@pytest.mark.parametrize("recompute", quick(RECOMPUTED, ["full"]))
@ranks(2)
def test_evaluation_after_a_recomputation_that_broke_off(recompute: str) -> None:
    """Evaluation computes with the weights that it finds, and training goes on as stock's."""
    import tiny_gpt
    import torch

    case = tiny_gpt.Case(accumulate=2, settings=tuple(RECOMPUTED[recompute].items()))
    tiny_gpt.initialize(case)

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
