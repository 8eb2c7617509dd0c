"""Some experts are frozen, others trained (expert-specialized fine-tuning), on some ranks or all, for a time or always.

Oracle: the same model without FSSDP, on the same ranks and data: losses, main gradients, parameters.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import loops
import pytest
import tiny_gpt
import torch
from layouts import BIAS, MOE, SHARDED
from quick import quick
from ranks import ranks

EXPERTS = 8
STEPS = 6


@dataclasses.dataclass(frozen=True)
class Case:
    """What is frozen: a function of the step and a parameter's name, with the expert's number in the job."""

    frozen: Callable[[int, int, str], bool]  # (step, expert or -1, name)
    settings: dict[str, Any] = dataclasses.field(default_factory=dict)  # of FSSDP
    fields: dict[str, Any] = dataclasses.field(default_factory=dict)  # of tiny_gpt.Case
    model: dict[str, Any] = dataclasses.field(default_factory=dict)  # of TransformerConfig
    own_loop: bool = False  # without Megatron's schedules
    fused: bool = False  # gradients are added to main_grad by GEMMs


def _always(*experts: int) -> Callable[[int, int, str], bool]:
    return lambda step, expert, name: expert in experts


def _in_steps(steps: tuple[int, ...], *experts: int) -> Callable[[int, int, str], bool]:
    return lambda step, expert, name: step in steps and expert in experts


def _everything_but(*parts: str) -> Callable[[int, int, str], bool]:
    return lambda step, expert, name: not any(part in name for part in parts)


def _in_turn(step: int, expert: int, name: str) -> bool:
    return expert >= 0 and (step + expert) % 2 == 0


LAYER, NVLINK = dict(lifetime="layer"), dict(transport="nvlink")
CASES = {
    "one-nvlink": Case(_always(5), NVLINK),
    "all-of-rank-1-layer-nvlink": Case(_always(4, 5, 6, 7), {**LAYER, **NVLINK}),
    "all-but-one": Case(_always(*range(1, EXPERTS))),
    "all": Case(_always(*range(EXPERTS))),
    "first-of-each-rank-late": Case(_always(0, 4), dict(late_replicas=4)),
    "own-loop": Case(_always(0, 5), own_loop=True),
    "distopt-overlap": Case(_always(0, 5), fields=SHARDED),
    "fused-biases": Case(_always(0, 5), model=BIAS, fused=True),
    "all-later": Case(_in_steps((2, 3), *range(EXPERTS))),
    "until": Case(_in_steps((0, 1, 2), 0, 5, 6)),
    "in-turn": Case(_in_turn),
    "in-turn-layer": Case(_in_turn, LAYER),
    "first-linears": Case(lambda step, expert, name: expert >= 0 and "linear_fc1" in name),
    "biases-alone": Case(lambda step, expert, name: expert >= 0 and "bias" not in name, model=BIAS),
    "front-recomputed": Case(_everything_but("layers.1.", "output_layer"), LAYER, model=MOE),
    "all-but-some-experts": Case(
        lambda step, expert, name: not (expert in (0, 6) and "layers.1." in name)
    ),
    "edp2": Case(_always(0, 5), fields=dict(overlap=True)),
}
QUICK = "one-nvlink all-of-rank-1-layer-nvlink in-turn first-linears"
GROUPED = {
    "all-of-rank-0": Case(_always(0, 1, 2, 3)),
    # stock's grouped GEMM computes no weight gradients of a rank whose first expert is frozen
    "first-of-each-rank": Case(_always(0, 4)),
    "first-of-rank-1-layer": Case(_always(4), LAYER),
    "in-turn-nvlink": Case(_in_turn, NVLINK),
    "biases": Case(_always(1, 5), model=BIAS),
    # for one iteration stock's fused GEMM ignores it
    "one-step-fused": Case(_in_steps((2,), 5), fused=True),
    "all-later-fused": Case(_in_steps((2, 3), *range(EXPERTS)), fused=True),
}


@pytest.mark.parametrize("name", quick(CASES, QUICK.split()))
@ranks(lambda name: 4 if name == "edp2" else 2)
def test_sequential_experts(name: str) -> None:
    _compare(name, CASES[name], grouped=False)


@pytest.mark.newest
@pytest.mark.parametrize("name", quick(GROUPED, ["first-of-each-rank"]))
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
    for step, (ours, wanted) in enumerate(zip(grads, stock_grads, strict=True)):
        assert ours.keys() == wanted.keys()
        largest = max([float(grad.abs().max()) for grad in wanted.values()] or [0.0])
        for parameter, grad in wanted.items():
            where = f"{name}, step {step}: {parameter}"
            torch.testing.assert_close(
                ours[parameter], grad, rtol=0, atol=1e-5 * largest, msg=where
            )
    for parameter, value in stock_params.items():
        torch.testing.assert_close(params[parameter], value, rtol=0, atol=1e-5, msg=parameter)


def _train(case: Case, tiny: Any, hook: Callable | None) -> tuple[Any, list, dict, int]:
    """Losses, main gradients of each step, parameters, and the most replicas of a layer."""

    first = tiny_gpt.parallel_state.get_expert_model_parallel_rank() * (EXPERTS // tiny.ep)

    def freeze(chunks: list, step: int) -> None:
        for name, p in tiny_gpt.named_parameters(chunks):
            p.requires_grad_(not case.frozen(step, _expert(name, first), name))

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


def _expert(name: str, first: int) -> int:
    """The number of a parameter's expert in the job; -1 of another parameter."""
    if ".experts." not in name:
        return -1
    if ".local_experts." in name:
        return first + int(name.split(".local_experts.")[1].split(".")[0])
    digits = name.removesuffix("_v").rpartition(".")[2].lstrip("abcdefghijklmnopqrstuvwxyz_")
    return first + int(digits)


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


REFUSED = {
    "a linear": (
        lambda step, expert, name: expert >= 0 and "linear_fc1" in name,
        False,
        "layer 1: some parameters of an expert are frozen and others are not; a grouped GEMM",
    ),
    # stock's GEMM fails itself where DDP has given an expert no main gradient
    "fused": (
        _in_steps((2, 3), 5),
        True,
        "layer 1: 1 of 8 experts are frozen, but grouped GEMMs with fused or delayed weight gradients",
    ),
}


@pytest.mark.newest
@ranks(2, preload="te")
def test_mixtures_that_a_grouped_gemm_cannot_compute() -> None:
    """One error on all ranks, also on those with no frozen expert."""
    tiny_gpt.install_fused_wgrad()
    tiny_gpt.initialize(tiny_gpt.Case())
    for frozen, fused, message in REFUSED.values():
        tiny = tiny_gpt.Case(
            skew=4, grouped=True, settings=dict(gradient_accumulation_fusion=fused)
        )
        with pytest.raises(ValueError, match=message):
            _train(Case(frozen), tiny, tiny_gpt.fssdp_hook())
