"""Several backwards through one forward: two losses, ``retain_graph=True``, `torch.autograd.grad` first.

Oracle: the same loop without FSSDP, on the same ranks and data.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from ranks import ranks


def _two_losses(loop: Any, loss: Any, second: Any) -> list[float]:
    loss.backward(retain_graph=True)
    second.backward()
    return []


def _three_losses(loop: Any, loss: Any, second: Any) -> list[float]:
    loss.backward(retain_graph=True)
    second.backward(retain_graph=True)
    (loss + second).backward()
    return []


def _first_in_no_sync(loop: Any, loss: Any, second: Any) -> list[float]:
    with loop.chunks[0].no_sync():
        loss.backward(retain_graph=True)
    second.backward()
    return []


def _always_retained(loop: Any, loss: Any, second: Any) -> list[float]:
    (loss + second).backward(retain_graph=True)
    return []


def _gradient_first(part: str) -> Callable[[Any, Any, Any], list[float]]:
    def run(loop: Any, loss: Any, second: Any) -> list[float]:
        import torch

        (weight,) = [p for name, p in loop.chunks[0].named_parameters() if part in name]
        (grad,) = torch.autograd.grad(loss, weight, retain_graph=True)
        (loss + second).backward()
        return [float(grad.norm())]

    return run


PATTERNS = {
    "two losses": _two_losses,
    "three losses": _three_losses,
    "the first in no_sync": _first_in_no_sync,
    "always retained": _always_retained,
    "gradient of the embedding first": _gradient_first("word_embeddings"),
    "gradient of the head first": _gradient_first("output_layer"),
}


@ranks(2)
def test_patterns() -> None:
    import tiny_gpt

    for settings in ((), (("add_bias_linear", True),)):
        case = tiny_gpt.Case(skew=4, settings=settings)
        tiny_gpt.initialize(case)
        for name, pattern in PATTERNS.items():
            stock = _train(case, pattern, None)
            for lifetime in ("iteration", "layer"):
                ours = _train(case, pattern, tiny_gpt.fssdp_hook(lifetime=lifetime))
                _assert_alike(ours, stock, f"{name}, {lifetime}")
        if settings:
            return
        from megatron.core import parallel_state

        parallel_state.destroy_model_parallel()


@pytest.mark.slow
@ranks(2)
def test_other_gradients() -> None:
    """Fused weight gradients, gradients through autograd's hooks, transport nvlink, recomputation."""
    import tiny_gpt

    tiny_gpt.install_fused_wgrad()
    recomputed = (("recompute_granularity", "selective"), ("recompute_modules", ["moe"]))
    for settings in ((("gradient_accumulation_fusion", True),), recomputed):
        case = tiny_gpt.Case(skew=4, settings=settings)
        tiny_gpt.initialize(case)
        stock = _train(case, _two_losses, None)
        for transport in ("p2p", "nvlink"):
            ours = _train(case, _two_losses, tiny_gpt.fssdp_hook(transport=transport))
            _assert_alike(ours, stock, f"{settings}, {transport}")
        from megatron.core import parallel_state

        parallel_state.destroy_model_parallel()


def _assert_alike(ours: tuple[Any, dict], stock: tuple[Any, dict], name: str) -> None:
    import torch

    torch.testing.assert_close(ours[0], stock[0], rtol=1e-5, atol=0, msg=name)
    largest = max(float(grad.abs().max()) for grad in stock[1].values())
    for parameter, grad in stock[1].items():
        torch.testing.assert_close(
            ours[1][parameter], grad, rtol=0, atol=1e-5 * largest, msg=f"{name}: {parameter}"
        )


def _train(case: Any, pattern: Callable, hook: Callable | None) -> tuple[Any, dict]:
    """Losses, and the main gradients of the last step."""
    import loops
    import tiny_gpt
    import torch

    loop = loops.Loop(case, hook)
    numbers, grads = [], {}
    for step in range(4):
        loop.zero()
        data = tiny_gpt.batch(case, step, 0)
        tokens, labels = data[:, :-1].contiguous(), data[:, 1:].contiguous()
        mask = torch.ones(1, 1, case.seq, case.seq, dtype=torch.bool).triu(1)
        positions = torch.arange(case.seq).expand(case.micro_batch, -1)
        logits = loop.chunks[0](tokens, positions, mask).float()
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        second = 0.01 * logits.logsumexp(-1).square().mean()
        numbers += [*pattern(loop, loss, second), float(loss), float(second)]
        loop.finish()
        grads = {name: p.main_grad.clone() for name, p in tiny_gpt._named(loop.chunks)}
        loop.update()
    if hook is not None:
        assert any(layer.fssdp.placement.num_replicas for layer in tiny_gpt.moe_layers(loop.chunks))
    return torch.tensor(numbers), grads
