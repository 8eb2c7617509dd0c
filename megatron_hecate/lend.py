"""The autograd nodes that join guests to their homes.

Three nodes take part in one microbatch of a layer. They stand here in the order of the forward; the backward runs
upwards:

    Home       homes, before the attention    waits for the spRS, returns the homes' complete gradients
    ...        attention, router, dispatch
    Lend       homes and guests, all weights  adds up the guests' gradients and starts the spRS, when all are there
    ...        experts
    Before     the experts' output            fetches dropped guests again (lifetime ``layer``)

So the spRS runs while the attention's backward does: autograd runs nodes that were made later first.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import Parameter

from megatron_hecate import trace
from megatron_hecate.memory import Frame


@dataclasses.dataclass(frozen=True)
class ChunkLayout:
    """How one expert's parameters lie end to end in a chunk.

    Args:
        shapes: shape of every parameter, in the order of the expert's module.
        fused: whether a GEMM adds this parameter's gradient straight into ``main_grad``
            (Megatron's ``gradient_accumulation_fusion``), and what autograd then carries is a placeholder.
    """

    shapes: tuple[torch.Size, ...]
    fused: tuple[bool, ...]

    @property
    def sizes(self) -> list[int]:
        return [shape.numel() for shape in self.shapes]

    def views(self, chunk: Tensor) -> list[Tensor]:
        """The parameters in one ``chunk`` [elements], as views."""
        return [part.view(shape) for part, shape in zip(chunk.split(self.sizes), self.shapes, strict=True)]


class Delivery:
    """The guests' gradients of one microbatch on their way home, between `Lend` and `Home`.

    Args:
        homes: the parameters of this rank's own experts.
        layout: how they form a chunk.
    """

    def __init__(self, homes: list[list[Parameter]], layout: ChunkLayout) -> None:
        self.homes, self.layout = homes, layout
        self.lent: tuple[int, ...] = ()
        self.frame: Frame | None = None  # whose transfer it is
        self.sums: dict[int, Tensor] = {}
        self.label, self.began = "", 0.0  # of the layer; when they left

    def add(self, home: int, total: Tensor) -> None:
        """Add the sum [chunk] of the guests of own expert ``home``. To ``main_grad`` (fp32, as a rule) where there is
        one: on its way through a bf16 ``.grad`` it would lose bits."""
        if all(hasattr(p, "main_grad") for p in self.homes[home]):
            for p, part in zip(self.homes[home], self.layout.views(total), strict=True):
                p.main_grad += part
        else:
            self.sums[home] = total.clone()

    def totals(self, home: int) -> list[Tensor] | None:
        """The ``main_grad`` of own expert ``home``, tensor by tensor, where sums can be added in fp32."""
        found = [getattr(p, "main_grad", None) for p in self.homes[home]]
        fp32 = all(t is not None and t.dtype is torch.float32 and t.is_contiguous() for t in found)
        return found if fp32 else None

    def give_up(self) -> None:
        """The backward broke off before `complete`, and another one begins: gradients of homes that got a sum are zero
        again, as after the ``zero_grad`` that may have come before the sum."""
        for home in self.lent:
            for p in self.homes[home]:
                if hasattr(p, "main_grad"):
                    p.main_grad.zero_()
        self.sums.clear()

    def complete(self, grads: list[Tensor | None]) -> list[Tensor | None]:
        """Wait for the guests' part; ``grads`` of the homes become complete."""
        if self.frame is not None:
            trace.add("attention backward", self.label, self.began)
            self.frame.settle()
            self.frame.given_up = None
        parts = len(self.layout.shapes)
        for home in self.lent:
            total = self.sums.get(home)
            views = [None] * parts if total is None else self.layout.views(total)
            if total is not None and total.is_cuda:
                total.record_stream(torch.cuda.current_stream())
            for at, part in enumerate(views, home * parts):
                p, grad = self.homes[home][at - home * parts], grads[at]
                if part is None:
                    grads[at] = torch.zeros_like(p) if grad is None else grad
                else:
                    grads[at] = (part if grad is None else part + grad).to(p.dtype)
        return grads


class Hosted(Protocol):
    """What the nodes ask of guests (`slots.Guests`)."""

    num_guests: int
    layout: ChunkLayout

    def weights(self) -> list[Tensor]: ...
    def prepare_backward(self) -> None: ...
    def backward(self, delivery: Delivery, guest_grads: Sequence[Tensor | None]) -> None: ...


def homes_of(homes: list[list[Parameter]], layout: ChunkLayout) -> tuple[Delivery, list[Tensor]]:
    """The weights of the homes for one microbatch, flat, and the delivery their gradients will wait for."""
    delivery = Delivery(homes, layout)
    return delivery, list(Home.apply(delivery, *(p for expert in homes for p in expert)))


class Home(torch.autograd.Function):
    """Home parameters through; the backward waits for the guests' gradients."""

    @staticmethod
    def forward(ctx: Any, delivery: Delivery, *homes: Parameter) -> tuple[Tensor, ...]:
        ctx.delivery = delivery
        ctx.set_materialize_grads(False)  # a weight without gradient gives None, not a tensor of zeros
        return tuple(p.view_as(p) for p in homes)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        delivery, ctx.delivery = ctx.delivery, None
        return (None, *delivery.complete(list(grads)))


class Lend(torch.autograd.Function):
    """Homes in, all physical experts' weights out; the backward takes guest gradients."""

    @staticmethod
    def forward(ctx: Any, guests: Hosted, delivery: Delivery, *homes: Tensor) -> tuple[Tensor, ...]:
        ctx.guests, ctx.delivery, ctx.num_homes = guests, delivery, len(homes)
        ctx.set_materialize_grads(False)
        layout = guests.layout
        hosted = [view for chunk in guests.weights() for view in layout.views(chunk)]
        if not any(layout.fused):  # no gradient for nobody; a fused grouped GEMM wants one for every weight
            ctx.mark_non_differentiable(*hosted[guests.num_guests * len(layout.shapes) :])
        return (*(p.view_as(p) for p in homes), *hosted)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        # Dispatchers keep tensors of the last forward, and with them this node: it must not keep the guests.
        guests, ctx.guests = ctx.guests, None
        delivery, ctx.delivery = ctx.delivery, None
        guests.backward(delivery, grads[ctx.num_homes :])
        return (None, None, *grads[: ctx.num_homes])


class Before(torch.autograd.Function):
    """The experts' output through; runs first in the layer's backward."""

    @staticmethod
    def forward(ctx: Any, guests: Hosted, output: Tensor) -> Tensor:
        ctx.guests = guests
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor]:
        guests, ctx.guests = ctx.guests, None
        guests.prepare_backward()
        return None, grad
