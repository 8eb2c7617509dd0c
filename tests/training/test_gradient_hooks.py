"""Hooks on experts' weights see the gradients of all tokens, as in stock Megatron, also those that replicas had.

Oracle: stock Megatron with the same hooks, on the same ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import loops
import pytest
import tiny_gpt
import torch
from ranks import ranks

Seen = dict[str, list]


def _watch_tensor(name: str, p: Any, seen: Seen) -> None:
    p.register_hook(lambda grad: seen.setdefault(name, []).append(grad.detach().double()))


def _watch_accumulated(name: str, p: Any, seen: Seen) -> None:
    """After DDP's own hook, which empties ``.grad``: stock sees nothing else either."""
    p.register_post_accumulate_grad_hook(
        lambda p: seen.setdefault(name, []).append(
            (p.main_grad if p.grad is None else p.grad).detach().double()
        )
    )


def _watch_node(name: str, p: Any, seen: Seen) -> None:
    """Nobody can tell these from DDP's own; a tensor's hook that does nothing says that someone looks."""
    p.register_hook(lambda grad: None)
    node = p.expand_as(p).grad_fn.next_functions[0][0]
    seen.setdefault("nodes", []).append(node)
    node.register_prehook(
        lambda grads: seen.setdefault(name, []).append(grads[0].detach().double())
    )


def _double(name: str, p: Any, seen: Seen) -> None:
    p.register_hook(lambda grad: 2 * grad)


# fields of `tiny_gpt.Case`, the hook, and what else `_compare` takes
CASES: tuple[tuple[dict[str, Any], Callable, dict[str, Any]], ...] = (
    ({}, _watch_accumulated, {}),
    ({}, _watch_node, {}),
    ({}, _double, {}),
    ({}, _watch_tensor, dict(only="local_experts.1.")),
    (dict(settings=dict(add_bias_linear=True)), _watch_tensor, dict(transport="nvlink")),
    (dict(distributed_optimizer=True, overlap=True), _watch_tensor, {}),
    # The last microbatch brings what replicas had in all: the sum is right.
    (dict(accumulate=2), _watch_tensor, {}),
    (dict(accumulate=2), _watch_tensor, dict(lifetime="layer")),
    (dict(bf16=True), _watch_tensor, dict(tolerance=1e-2)),
)


@ranks(2)
def test_hooks() -> None:
    tiny_gpt.initialize(tiny_gpt.Case())
    for fields, watch, further in CASES:
        tiny_gpt.set_num_microbatches(tiny_gpt.Case(), fields.get("accumulate", 1))
        _compare(tiny_gpt.Case(skew=2.5, **fields), watch, **further)


def _compare(
    case: Any, watch: Callable, *, tolerance: float = 1e-5, only: str = "experts", **settings: Any
) -> None:
    results = []
    for hook in (None, tiny_gpt.fssdp_hook(**settings)):
        run, seen = tiny_gpt.train(case, steps=2, hook=hook), {}
        for name, p in tiny_gpt.named_parameters(run.chunks):
            if ".experts." in name and only in name:
                watch(name, p, seen)
        run.step(2)
        seen.pop("nodes", None)
        run.read_params()
        results.append((run, seen))
    (stock, wanted), (ours, found) = results
    tiny_gpt.assert_trained_alike(stock, ours, watch.__name__, tolerance=tolerance)
    assert wanted.keys() == found.keys() and (bool(wanted) or watch is _double)
    for name, grads in wanted.items():
        each = settings.get("lifetime", "iteration") != "iteration"
        pairs = zip(grads, found[name], strict=True) if each else [(sum(grads), sum(found[name]))]
        for stock_grad, our_grad in pairs:
            largest = float(stock_grad.abs().max())
            torch.testing.assert_close(
                our_grad, stock_grad, rtol=0, atol=max(tolerance * largest, 1e-8), msg=name
            )


@ranks(2)
def test_gradients_by_autograd_grad_of_weights_with_a_hook() -> None:
    """`torch.autograd.grad` has all of them, and leaves ``main_grad`` alone."""
    case = tiny_gpt.initialized(skew=2.5)
    results = []
    for hook in (None, tiny_gpt.fssdp_hook()):
        run = tiny_gpt.train(case, steps=2, hook=hook)
        run.zero()
        named = tiny_gpt.named_parameters(run.chunks)
        experts = {name: p for name, p in named if ".experts." in name}
        for p in experts.values():
            p.register_hook(lambda grad: None)
        grads = torch.autograd.grad(run.forward(7, 0), list(experts.values()))
        assert not any(p.main_grad.any() for p in experts.values())
        results.append(dict(zip(experts, grads, strict=True)))
    assert run.replicas > 0
    stock, ours = results
    largest = max(float(grad.abs().max()) for grad in stock.values())
    for name, grad in stock.items():
        torch.testing.assert_close(ours[name], grad, rtol=0, atol=1e-5 * largest, msg=name)


@ranks(2)
def test_gradients_by_autograd_grad() -> None:
    """Of inputs they are stock's. Of experts with replicas they would lack the replicas' share, which went into
    ``main_grad`` unasked: refused with the way out, and the loop goes on."""
    case = tiny_gpt.initialized(skew=4)

    def train(hook: Callable | None) -> list[float]:
        loop, seen = loops.Loop(case, hook), []
        embedding = loop.chunks[0].module.embedding
        handle = embedding.register_forward_hook(lambda module, args, output: seen.append(output))
        numbers = []
        for step in range(loops.STEPS):
            if hook is not None and step == 2:
                message = r"call backward\(\) of the loss instead and read main_grad"
                with pytest.raises(RuntimeError, match=message):
                    torch.autograd.grad(loop.forward(step, 0), loop.parameters)
                # of some experts, in any way
                expert = tiny_gpt.moe_layers(loop.chunks)[0].experts.local_experts[1]
                weight = expert.linear_fc1.weight
                with pytest.raises(RuntimeError, match=r"torch.autograd.grad of experts' weights"):
                    torch.autograd.grad(loop.forward(step, 0), [weight])
                with pytest.raises(RuntimeError, match=r"backward\(inputs=...\) of some weights"):
                    loop.forward(step, 0).backward(inputs=[weight])
            loop.zero()
            (grad,) = torch.autograd.grad(loop.forward(step, 0), seen[-1])
            loss = loop.forward(step, 1)
            loss.backward()
            numbers += [float(grad.abs().sum()), float(loss)]
            loop.finish()
            loop.update()
        handle.remove()
        return numbers

    stock = train(None)
    for lifetime in ("iteration", "layer"):
        assert train(tiny_gpt.fssdp_hook(lifetime=lifetime)) == pytest.approx(stock, rel=1e-5), (
            lifetime
        )
