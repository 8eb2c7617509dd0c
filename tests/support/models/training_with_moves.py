"""Trains a tiny GPT with homes that are made to move, and compares all that lies on a rank with stock Megatron's.

`compare` moves homes at every look, first without replicas: then nothing but the order of experts on the ranks differs,
and with top-1 and top-2 routing losses, parameters and all that optimizers keep are the stock ones bit for bit. With
more, a token's outputs are summed in another order, which two terms do not show. Gradients are not clipped, since their
norm would be summed in another order. With replicas it agrees within a tolerance.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist
from adam_on_cpu import join
from quick import quick
from torch import Tensor

Hook = Callable[[list], list]
LOOKS = 3  # iterations between two
STEPS = 8  # homes move before the fourth and the seventh


def compare(
    case: Any,
    *,
    orders: Callable[..., Any] | None = None,
    prepare: Hook = lambda chunks: chunks,
    tolerance: float = 1e-5,
    repeat: bool = False,
    may_be_back: bool = False,
    **settings: Any,
) -> None:
    """Train ``case`` with stock Megatron, and with homes that move.

    Args:
        case: a `tiny_gpt.Case`, which `tiny_gpt.initialize` got.
        orders: as in `rehoming_hooks.rehoming_hook`.
        prepare: of every model, before it is converted.
        tolerance: of the run with replicas.
        repeat: whether that run is done twice, and must be the same bit for bit.
        may_be_back: whether experts may end where Megatron built them.
        settings: of FSSDP in the run with replicas; with no slots there is none.
    """
    import rehoming_hooks
    import tiny_gpt

    def train(hook: Hook | None = None) -> Any:
        return tiny_gpt.train(case, steps=STEPS, hook=lambda chunks: (hook or prepare)(chunks))

    def moved(**asked: Any) -> Any:
        hook = rehoming_hooks.rehoming_hook(
            **({} if orders is None else {"orders": orders}), rehome=LOOKS, **asked
        )
        trained = train(lambda chunks: hook(prepare(chunks)))
        restore(trained, may_be_back=may_be_back)
        return trained

    case = dataclasses.replace(case, optimizer=(*case.optimizer, ("clip_grad", 0.0)))
    stock = train()
    before = optimizer_values(stock.optimizer)
    assert before
    bare = moved(**{**settings, "slots": 0, "late_replicas": 0})
    exact = dict(case.settings).get("moe_router_topk", 2) <= 2
    assert bare.losses == (stock.losses if exact else pytest.approx(stock.losses, rel=1e-6))
    assert tiny_gpt.difference(stock, bare)["param"] <= (0 if exact else tolerance)
    after = optimizer_values(bare.optimizer)
    assert before.keys() == after.keys()
    for name, values in before.items():
        close = dict(rtol=0, atol=0) if exact else dict(rtol=1e-3, atol=tolerance)
        torch.testing.assert_close(after[name], values, **close, msg=name)
    if settings.get("slots") == 0:
        return
    ours = moved(**settings)
    assert ours.replicas > 0, "no replica was placed"
    worst = tiny_gpt.difference(stock, ours)
    assert worst["loss"] <= tolerance and worst["param"] <= tolerance, worst
    for name, values in optimizer_values(ours.optimizer).items():
        torch.testing.assert_close(
            values, before[name], rtol=max(1e-3, tolerance), atol=tolerance, msg=name
        )
    if repeat:
        again = moved(**settings)
        assert tiny_gpt.difference(ours, again) == tiny_gpt.SAME, "two runs differ"


def params(cases: Mapping[str, tuple], num_ranks: int, chosen: str = "") -> list:
    """For `pytest.mark.parametrize`: the names of the cases whose first field is ``num_ranks``; all but the ``chosen``
    ones are slow."""
    found = [name for name, (size, *_) in cases.items() if size == num_ranks]
    return quick(found, chosen.split())


def restore(trained: Any, *, may_be_back: bool = False) -> None:
    """Have homes of a trained model where Megatron built them, and note its parameters. Gradients stay where the
    backward left them, under other experts' names, and are not compared."""
    import tiny_gpt

    prefetcher = tiny_gpt.moe_layers(trained.chunks)[0].prefetcher
    homes = prefetcher.rehoming.homes
    received = torch.tensor(homes.received_bytes)
    dist.all_reduce(received)
    assert received > 0, "nothing has moved, so nothing was tested"
    assert may_be_back or homes.are_moved
    prefetcher.rehoming.restore()
    assert not homes.are_moved
    trained.read_params()


def optimizer_values(optimizer: Any) -> dict[str, Tensor]:
    """All that Megatron's ``optimizer`` steps and keeps on this rank, by where it lies in torch's optimizers."""
    found = {}
    for i, inner in enumerate(_torch_optimizers(optimizer)):
        stepped = [p for group in inner.param_groups for p in group["params"]]
        for j, p in enumerate(stepped):
            found[f"{i}.{j}"] = p.detach().clone()
            for name, value in inner.state.get(p, {}).items():
                if isinstance(value, Tensor):
                    is_remainder = (
                        value.dtype is torch.int16
                    )  # of the main parameter, below the parameter's own bits
                    found[f"{i}.{j}.{name}"] = (
                        join(p, value) if is_remainder else value.detach().clone()
                    )
    return found


def _torch_optimizers(optimizer: Any) -> Iterator[torch.optim.Optimizer]:
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        if part is not optimizer and hasattr(part, "chained_optimizers"):
            yield from _torch_optimizers(part)
            continue
        inner = part.optimizer
        if inner is not None:
            yield inner
            yield from getattr(inner, "sub_optimizers", [])  # of HybridDeviceOptimizer


def farthest(a: Tensor, b: Tensor) -> float:
    return float((a.double() - b.double()).abs().max())
