"""Experts of single layers, or of all, are frozen, always or for a time.

Oracle: the same model without FSSDP, on the same ranks and data: losses, main gradients, parameters.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import loops
import pytest
import rehoming_hooks
import tiny_gpt
import torch
import torch.distributed as dist
from layouts import BIAS, MOE, SHARDED
from quick import quick
from ranks import ranks

STEPS = 6


@dataclasses.dataclass(frozen=True)
class Case:
    """What is frozen: a function of the step and a parameter's name."""

    frozen: Callable[[int, str], bool]
    settings: dict[str, Any] = dataclasses.field(default_factory=dict)  # of FSSDP
    fields: dict[str, Any] = dataclasses.field(default_factory=dict)  # of tiny_gpt.Case
    model: dict[str, Any] = dataclasses.field(default_factory=dict)  # of TransformerConfig
    own_loop: bool = False  # without Megatron's schedules
    fused: bool = False  # gradients are added to main_grad by GEMMs


def _experts(layer: str = "", steps: tuple[int, ...] = tuple(range(STEPS))) -> Callable:
    """Freeze the experts of layers whose names contain ``layer``, in some steps."""
    return lambda step, name: step in steps and ".experts." in name and layer in name


def _everything_but(*parts: str) -> Callable[[int, str], bool]:
    return lambda step, name: not any(part in name for part in parts)


def _in_turn(step: int, name: str) -> bool:
    """Freeze the experts of each layer in every other step."""
    return ".experts." in name and f"layers.{step % 2}." in name


LAYER, NVLINK = dict(lifetime="layer"), dict(transport="nvlink")
CASES = {
    "first-layer": Case(_experts("layers.0.")),
    "second-layer-nvlink": Case(_experts("layers.1."), {**LAYER, **NVLINK}),
    "all": Case(_experts()),
    "late-replicas": Case(_experts("layers.0."), dict(late_replicas=4)),
    "own-loop": Case(_experts("layers.0."), own_loop=True),
    "distopt-overlap": Case(_experts("layers.1."), fields=SHARDED),
    "fused-biases": Case(_experts("layers.0."), model=BIAS, fused=True),
    "all-later": Case(_experts(steps=(2, 3))),
    "until": Case(_experts("layers.0.", steps=(0, 1, 2))),
    "in-turn": Case(_in_turn),
    "in-turn-layer": Case(_in_turn, LAYER),
    "front-recomputed": Case(_everything_but("layers.1.", "output_layer"), LAYER, model=MOE),
    "edp2": Case(_experts("layers.0."), fields=dict(overlap=True)),
}
QUICK = "second-layer-nvlink all-later in-turn"
GROUPED = {
    "first-layer": Case(_experts("layers.0.")),
    "second-layer-layer": Case(_experts("layers.1."), LAYER),
    "in-turn-nvlink": Case(_in_turn, NVLINK),
    "biases": Case(_experts("layers.0."), model=BIAS),
    "all-later-fused": Case(_experts(steps=(2, 3)), fused=True),
}


@pytest.mark.parametrize("name", quick(CASES, QUICK.split()))
@ranks(lambda name: 4 if name == "edp2" else 2)
def test_sequential_experts(name: str) -> None:
    _compare(name, CASES[name], grouped=False)


@pytest.mark.newest
@pytest.mark.parametrize("name", quick(GROUPED, ["all-later-fused"]))
@ranks(2, preload="te")
def test_grouped_experts(name: str) -> None:
    _compare(name, GROUPED[name], grouped=True)


def _compare(name: str, case: Case, *, grouped: bool) -> None:
    if case.fused:
        tiny_gpt.install_fused_wgrad()
    settings = dict(case.model, gradient_accumulation_fusion=case.fused)
    tiny = tiny_gpt.initialized(skew=4, grouped=grouped, settings=settings, **case.fields)
    stock_losses, stock_grads, stock_params, _ = _train(case, tiny, None)
    losses, grads, params, replicas = _train(case, tiny, tiny_gpt.fssdp_hook(**case.settings))
    assert replicas, f"{name}: nothing was replicated"
    torch.testing.assert_close(losses, stock_losses, rtol=1e-5, atol=0, msg=name)
    _check_grads(grads, stock_grads)
    for parameter, value in stock_params.items():
        torch.testing.assert_close(params[parameter], value, rtol=0, atol=1e-5, msg=parameter)


def _check_grads(grads: list[dict[str, Any]], stock_grads: list[dict[str, Any]]) -> None:
    """Compare the gradients of each step by parameter, relative to the step's largest."""
    for step, (ours, wanted) in enumerate(zip(grads, stock_grads, strict=True)):
        assert ours.keys() == wanted.keys()
        largest = max([float(grad.abs().max()) for grad in wanted.values()] or [0.0])
        for parameter, grad in wanted.items():
            where = f"step {step}: {parameter}"
            torch.testing.assert_close(
                ours[parameter], grad, rtol=0, atol=1e-5 * largest, msg=where
            )


def _train(case: Case, tiny: Any, hook: Callable | None) -> tuple[Any, list, dict, int]:
    """Losses, main gradients of each step, parameters, and the most replicas of a layer."""

    def freeze(chunks: list, step: int) -> None:
        for name, p in tiny_gpt.named_parameters(chunks):
            p.requires_grad_(not case.frozen(step, name))

    def freeze_and_convert(chunks: list) -> list:
        freeze(chunks, 0)
        return hook(chunks) if hook is not None else chunks

    loop = loops.Loop(tiny, freeze_and_convert)
    losses, grads, replicas = [], [], 0
    for step in range(STEPS):
        freeze(loop.chunks, step)
        loop.zero()
        if case.own_loop:
            losses.append(loops.backward(loop, step, 0))
            loop.finish()
        else:
            losses.append(loop.call(step, 2))
        grads.append({name: _grad(p) for name, p in tiny_gpt.named_parameters(loop.chunks)})
        replicas = max(replicas, tiny_gpt.num_replicas(loop.chunks))
        loop.update()
    params = {name: p.detach().clone() for name, p in tiny_gpt.named_parameters(loop.chunks)}
    return torch.tensor(losses), grads, params, replicas


def _grad(p: Any) -> Any:
    """The main gradient, or the gradient of a parameter that DDP does not know: it was frozen then."""

    grad = getattr(p, "main_grad", p.grad)
    return torch.zeros_like(p) if grad is None else grad.detach().clone()


@ranks(2)
def test_within_an_iteration() -> None:
    """An error: replicas' gradients of the first microbatches would be lost, or come too early."""
    case = tiny_gpt.initialized(skew=4)
    for is_frozen in ([True, False], [False, True]):
        loop, turns = loops.Loop(case, tiny_gpt.fssdp_hook()), iter(is_frozen)
        for step in range(2):
            loop.zero()
            loop.call(step, 1)
            loop.update()

        def forward_step(iterator: Any, model: Any, turns: Any = turns) -> Any:
            is_trained = not next(turns)
            for layer in tiny_gpt.moe_layers([model]):
                layer.experts.requires_grad_(is_trained)
            return tiny_gpt.forward_step(iterator, model, case=case)

        loop.zero()
        with pytest.raises(RuntimeError, match="were frozen or unfrozen within an iteration"):
            loop.reports(2, forward_step, 2)


def _freeze(chunks: list, *numbers: int) -> list:
    """Freeze some of this rank's experts of the first MoE layer."""
    for number in numbers:
        tiny_gpt.moe_layers(chunks)[0].experts.local_experts[number].requires_grad_(False)
    return chunks


@pytest.mark.parametrize("settings", [dict(slots=2), dict(slots=0, rehome=2)])
@ranks(2)
def test_some_frozen_experts_are_refused(settings: dict[str, Any]) -> None:
    """One error on all ranks, also on those with no frozen expert."""
    case = tiny_gpt.initialized()
    hook = tiny_gpt.fssdp_hook(**settings)
    some = [1] if dist.get_rank() == 1 else []
    message = r"layer 1: 2 of the 8 parameters of its experts are frozen; .* off \(rank 1\)"
    with pytest.raises(ValueError, match=message):
        tiny_gpt.train(case, steps=1, hook=lambda chunks: hook(_freeze(chunks, *some)))
    whole = range(4) if dist.get_rank() == 1 else []
    message = r"rank 1 has experts of layer 1='.*, frozen \(freeze them on all ranks or on none\)'"
    with pytest.raises(ValueError, match=message):
        tiny_gpt.train(case, steps=1, hook=lambda chunks: hook(_freeze(chunks, *whole)))
    with pytest.raises(ValueError, match=r"layer 1: 2 of the 8 .* off \(rank 1\)"):
        tiny_gpt.train(case, steps=1, hook=lambda chunks: _freeze(hook(chunks), *some))
    message = r"layer 1: experts are frozen on some ranks only; .* \(rank 1\)"
    with pytest.raises(ValueError, match=message):
        tiny_gpt.train(case, steps=1, hook=lambda chunks: _freeze(hook(chunks), *whole))
    trained = tiny_gpt.train(case, steps=2, hook=hook)
    _freeze(trained.chunks, 0)
    with pytest.raises(ValueError, match="layer 1: 2 of the 8 parameters"):
        trained.step(2)


@ranks(2)
def test_some_frozen_experts_without_replicas() -> None:
    """Without slots nothing is refused, and training is bitwise stock's."""
    case = tiny_gpt.initialized()
    stock = tiny_gpt.train(case, steps=2, hook=lambda chunks: _freeze(chunks, 1))
    hook = tiny_gpt.fssdp_hook(slots=0)
    trained = tiny_gpt.train(case, steps=2, hook=lambda chunks: hook(_freeze(chunks, 1)))
    assert trained.losses == stock.losses


@ranks(2)
def test_homes_of_which_some_ranks_are_frozen_stay() -> None:
    """An expert that came to a frozen one's place would learn no more. All ranks say so."""
    case = tiny_gpt.initialized(skew=4)
    hook = rehoming_hooks.rehoming_hook(slots=0)
    trained = tiny_gpt.train(case, steps=2, hook=hook)
    if dist.get_rank() == 1:
        _freeze(trained.chunks, *range(4))
    with pytest.raises(ValueError, match="cannot move experts: those of one layer are frozen on"):
        for step in range(2, 8):
            tiny_gpt.move_skew_sometimes(trained.chunks, step)
            trained.step(step)


@pytest.mark.parametrize("is_fused", [False, True])
@ranks(2)
def test_a_trained_and_a_frozen_forward_before_the_backward(is_fused: bool) -> None:
    """In a loop without schedules every forward is trained, or frozen, by itself."""
    if is_fused:
        tiny_gpt.install_fused_wgrad()
    settings = dict(gradient_accumulation_fusion=is_fused)
    case = tiny_gpt.initialized(skew=4, settings=settings)

    def train(hook: Callable | None) -> list[dict[str, Any]]:
        loop, grads = loops.Loop(case, hook), []
        for step in range(4):
            loop.zero()
            losses = []
            for is_trained in (True, step < 2):
                for layer in tiny_gpt.moe_layers(loop.chunks):
                    layer.experts.requires_grad_(is_trained)
                losses.append(loop.forward(step, len(losses)))
            for layer in tiny_gpt.moe_layers(loop.chunks):
                layer.experts.requires_grad_(True)
            sum(losses).backward()
            loop.finish()
            grads.append({name: _grad(p) for name, p in tiny_gpt.named_parameters(loop.chunks)})
            loop.update()
        assert hook is None or tiny_gpt.num_replicas(loop.chunks)
        return grads

    _check_grads(train(tiny_gpt.fssdp_hook()), train(None))
