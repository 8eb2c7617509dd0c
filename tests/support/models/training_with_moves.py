"""Trains a tiny GPT with homes that are made to move, and compares all that lies on a rank with stock Megatron's.

`compare` moves homes at every look, first without replicas: then nothing but the order of experts on the ranks differs,
and with top-1 and top-2 routing losses, parameters and all that optimizers keep are the stock ones bit for bit. With
more, a token's outputs are summed in another order, which two terms do not show. Gradients are not clipped, since their
norm would be summed in another order. With replicas it agrees within a tolerance.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import rehoming_hooks
import tiny_gpt
import torch
import torch.distributed as dist
from adam_on_cpu import join
from torch import Tensor

Hook = Callable[[list], list]
LOOKS = 3  # iterations between two
FIELDS = ("orders", "tolerance", "may_be_back")
STEPS = 8  # homes move before the fourth and the seventh


def unclipped(case: Any) -> Any:
    return dataclasses.replace(case, optimizer=(*case.optimizer, ("clip_grad", 0.0)))


@dataclasses.dataclass
class MovedHomes:
    """Trainings whose homes move at every look, against one training of stock Megatron.

    Args:
        case: a `tiny_gpt.Case` that does not clip gradients.
        stock: is trained on to `STEPS` steps.
        prepare: what is done with every model before it is converted.
        orders: as in `rehoming_hooks.rehoming_hook`.
        tolerance: of runs with replicas.
        may_be_back: whether experts may end where Megatron built them.
    """

    case: Any
    stock: Any
    prepare: Hook = list
    orders: Callable[..., Any] = rehoming_hooks.wanted_at
    tolerance: float = 1e-5
    may_be_back: bool = False
    # all that stock's optimizer keeps
    values: dict[str, Tensor] = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        for index in range(len(self.stock.losses), STEPS):
            self.stock.step(index)
        self.stock.gather_params()
        self.values = optimizer_values(self.stock.optimizer)
        assert self.values

    def train(self, **settings: Any) -> Any:
        hook = rehoming_hooks.rehoming_hook(self.orders, rehome=LOOKS, **settings)
        trained = tiny_gpt.train(
            self.case, steps=STEPS, hook=lambda chunks: hook(self.prepare(chunks))
        )
        restore(trained, may_be_back=self.may_be_back)
        return trained

    def assert_bitwise(self, **settings: Any) -> None:
        """Without replicas the model is stock's, with the optimizer's state."""
        ours = self.train(**{**settings, "slots": 0, "late_replicas": 0})
        exact = dict(self.case.settings).get("moe_router_topk", 2) <= 2
        losses = self.stock.losses
        assert ours.losses == (losses if exact else pytest.approx(losses, rel=1e-6))
        worst = tiny_gpt.difference(self.stock, ours)
        assert worst["param"] <= (0 if exact else self.tolerance), worst
        close = dict(rtol=0, atol=0) if exact else dict(rtol=1e-3, atol=self.tolerance)
        self._assert_values(ours, **close)

    def assert_close(self, **settings: Any) -> Any:
        """With replicas it is stock's within the tolerance."""
        ours = self.train(**settings)
        assert ours.replicas > 0, "no replica was placed"
        worst = tiny_gpt.difference(self.stock, ours)
        # A last bit of an optimizer's value may be a whole step of FP4: there values are compared alone.
        kinds = ["loss"] if "fp4_param" in dict(self.case.settings) else ["loss", "param"]
        assert all(worst[kind] <= self.tolerance for kind in kinds), worst
        self._assert_values(ours, rtol=max(1e-3, self.tolerance), atol=self.tolerance)
        return ours

    def _assert_values(self, ours: Any, **close: float) -> None:
        values = optimizer_values(ours.optimizer)
        assert values.keys() == self.values.keys()
        for name, expected in self.values.items():
            torch.testing.assert_close(values[name], expected, **close, msg=name)


def compare(case: Any, *, prepare: Hook = list, **further: Any) -> None:
    """Compare a case without replicas and, unless ``slots`` is 0, with them.

    Args:
        case: a `tiny_gpt.Case`, which `tiny_gpt.initialize` got.
        prepare: as in `MovedHomes`.
        further: fields of `MovedHomes`, and settings of FSSDP.
    """
    fields = {name: further.pop(name) for name in FIELDS if name in further}
    case = unclipped(case)
    stock = tiny_gpt.train(case, steps=STEPS, hook=prepare)
    moved = MovedHomes(case, stock, prepare=prepare, **fields)
    moved.assert_bitwise(**further)
    if further.get("slots") != 0:
        moved.assert_close(**further)


def restore(trained: Any, *, may_be_back: bool = False) -> None:
    """Have homes of a trained model where Megatron built them, and note its parameters. Gradients stay where the
    backward left them, under other experts' names, and are not compared."""
    prefetcher = tiny_gpt.moe_layers(trained.chunks)[0].prefetcher
    homes = prefetcher.rehoming.homes
    received = torch.tensor(rehoming_hooks.received_bytes)
    rehoming_hooks.received_bytes = 0  # another model may be trained next
    dist.all_reduce(received)
    assert received > 0, "nothing has moved, so nothing was tested"
    assert may_be_back or homes.are_moved
    prefetcher.rehoming.restore()
    assert not homes.are_moved
    trained.read_params()


def optimizer_values(optimizer: Any) -> dict[str, Tensor]:
    """All that Megatron's ``optimizer`` steps and keeps on this rank, by where it lies in torch's optimizers."""
    values = {}
    for i, inner in enumerate(_torch_optimizers(optimizer)):
        stepped = [p for group in inner.param_groups for p in group["params"]]
        for j, p in enumerate(stepped):
            values[f"{i}.{j}"] = p.detach().clone()
            for name, value in inner.state.get(p, {}).items():
                if isinstance(value, Tensor):
                    # of the main parameter, below the parameter's own bits
                    is_remainder = value.dtype is torch.int16
                    value = join(p, value) if is_remainder else value.detach().clone()
                    values[f"{i}.{j}.{name}"] = value
    return values


def _torch_optimizers(optimizer: Any) -> Iterator[torch.optim.Optimizer]:
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        if part is not optimizer and hasattr(part, "chained_optimizers"):
            yield from _torch_optimizers(part)
            continue
        inner = part.optimizer
        if inner is not None:
            yield inner
            yield from getattr(inner, "sub_optimizers", [])  # of HybridDeviceOptimizer
