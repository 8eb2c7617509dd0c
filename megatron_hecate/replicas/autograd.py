"""The autograd nodes that join replicas to their homes.

Three nodes take part in one microbatch of a layer. They stand here in the order of the forward; the backward runs
upwards:

    _Homes            homes, before the attention   waits for the spRS, returns the homes' complete gradients
    ...               attention, router, dispatch
    _Experts          the experts' input            takes the gradients of all weights; the spRS starts with the last
    ...               experts
    (layer_replicas)  the experts' output           makes replicas ready for the backward

So the spRS runs while the attention's backward does: autograd runs nodes that were made later first.

The weights themselves are made once for a plan (`BoundWeights`). Fused GEMMs add their gradients to memory that
belongs to homes and replicas, so these weights need no node: of the two nodes, an empty tensor is all that passes from
the first to the second. Gradients that autograd carries, as those of biases, pass through `_Experts` one by one.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.nn import Parameter

from megatron_hecate import trace
from megatron_hecate.comm.transport import TransferPlan
from megatron_hecate.device.direct_apply import apply_directly
from megatron_hecate.replicas.buffers import Buffer


@dataclasses.dataclass(frozen=True)
class ChunkLayout:
    """How one expert's parameters lie end to end in a chunk.

    Args:
        shapes: shape of every parameter, in the order of the expert's module.
        fused: whether a GEMM adds this parameter's gradient straight into ``main_grad``
            (Megatron's ``gradient_accumulation_fusion``), and what autograd then carries is a placeholder.
        uniform: whether all weights must require gradients where some do, also those of empty slots.
    """

    shapes: tuple[torch.Size, ...]
    fused: tuple[bool, ...]
    uniform: bool = False

    @property
    def elements(self) -> int:
        return sum(shape.numel() for shape in self.shapes)

    def views(self, chunk: Tensor) -> list[Tensor]:
        """The parameters in one ``chunk`` [elements], as views."""
        parts = chunk.split([shape.numel() for shape in self.shapes])
        return [part.view(shape) for part, shape in zip(parts, self.shapes, strict=True)]


class PendingGradients:
    """Gradients of replicas on their way to this rank's homes, in one microbatch (`comm.transport.HomeGradients`).

    Args:
        homes: the parameters of this rank's own experts.
        layout: how they form a chunk.
    """

    def __init__(self, homes: list[list[Parameter]], layout: ChunkLayout) -> None:
        self.homes, self.layout = homes, layout
        self._replicated: tuple[int, ...] = ()
        self._buffer: Buffer | None = None  # whose transfer brings them
        self._sums: dict[int, Tensor] = {}
        self._delayed = self._passed = False
        self._taken: list[Tensor | None] | None = None
        self._later: list[Tensor | None] | None = None
        self._label, self._began = "", 0.0

    @classmethod
    def join_homes(
        cls, homes: list[list[Parameter]], layout: ChunkLayout
    ) -> tuple[PendingGradients, Tensor]:
        """What the homes' gradients of one microbatch wait for, and an empty tensor to compute the experts with."""
        pending = cls(homes, layout)
        return pending, apply_directly(
            _Homes, pending._complete_taken, *[p for expert in homes for p in expert]
        )

    def take(self, grads: list[Tensor | None]) -> None:
        """Gradients of the homes, flat, from the experts' backward."""
        self._taken = grads

    def _complete_taken(self) -> list[Tensor | None]:
        taken, self._taken = self._taken, None
        return self.complete(
            [None] * (len(self.homes) * len(self.layout.shapes)) if taken is None else taken
        )

    def delay(self) -> None:
        """The homes' gradients will be computed after the experts' backward: `computed_later` brings them."""
        self._delayed = True

    def computed_later(self, grads: Sequence[Tensor | None]) -> None:
        """The gradients of the homes, which were delayed."""
        self._later = list(grads)

    def settle(self) -> bool:
        """Complete delayed gradients into ``.grad``; returns whether it was to be done here. It is not where autograd
        has yet to come to `complete`."""
        if not self._passed:
            return False
        for p, grad in zip(
            (p for expert in self.homes for p in expert), self.complete([]), strict=True
        ):
            if grad is not None:
                p.grad = grad.to(p.dtype) if p.grad is None else p.grad + grad
        return True

    def expect(self, replicated: tuple[int, ...], buffer: Buffer, *, label: str) -> None:
        """Sums for the own experts ``replicated`` will come with the transfer of ``buffer``."""
        self._replicated, self._buffer = replicated, buffer
        self._label, self._began = label, time.perf_counter()

    def _is_hooked(self, index: int) -> bool:
        """Whether a user's hook reads this home's gradients as autograd has them: sums must then go there, too. DDP's
        own hooks are on autograd's nodes. Of fused GEMMs autograd has placeholders only."""
        hooks = (p._backward_hooks or p._post_accumulate_grad_hooks for p in self.homes[index])
        return not any(self.layout.fused) and any(hooks)

    def check_destination(self, label: str) -> None:
        """Raise a RuntimeError in the backward of ``torch.autograd.grad`` of the homes: sums of replicas would go to
        ``main_grad``, where it writes nothing, and lack in what it returns."""
        home = [p for p in self.homes[0] if p.requires_grad and hasattr(p, "main_grad")]
        if not home or any(self.layout.fused) or self._is_hooked(0):
            return
        try:
            for p in home:
                torch._C._will_engine_execute_node(get_gradient_edge(p).node)
        except RuntimeError as error:
            raise RuntimeError(
                f"{label}: torch.autograd.grad of experts' weights leaves out what their replicas add; call backward() "
                "of the loss instead and read main_grad after finish_grad_sync(), or leave these weights out"
            ) from error

    def main_grads(self, index: int) -> list[Tensor] | None:
        if self._is_hooked(index):
            return None
        found = [getattr(p, "main_grad", None) for p in self.homes[index]]
        fp32 = all(t is not None and t.dtype is torch.float32 and t.is_contiguous() for t in found)
        return found if fp32 else None

    def add(self, index: int, total: Tensor) -> None:
        """To ``main_grad`` (fp32, as a rule) where there is one: in a bf16 ``.grad`` the sum would lose bits."""
        if all(hasattr(p, "main_grad") for p in self.homes[index]) and not self._is_hooked(index):
            for p, part in zip(self.homes[index], self.layout.views(total), strict=True):
                p.main_grad += part
        else:
            self._sums[index] = total.clone()

    def arrive(self) -> None:
        """Wait until the sums are in ``main_grad``, outside of any backward."""
        assert self._buffer is not None
        trace.add("gradients home", self._label, self._began)
        self._buffer.wait()
        self._buffer.abandon = None
        # of homes with hooks, which no backward will call any more
        for index, total in self._sums.items():
            for p, part in zip(self.homes[index], self.layout.views(total), strict=True):
                p.main_grad += part
        self._sums.clear()

    def abandon(self) -> None:
        """The backward broke off before `complete`, and another one begins: gradients of homes that got a sum are zero
        again, as after the ``zero_grad`` that may have come before the sum."""
        for index in self._replicated:
            for p in self.homes[index]:
                if hasattr(p, "main_grad"):
                    p.main_grad.zero_()
        self._sums.clear()

    def complete(self, grads: list[Tensor | None]) -> list[Tensor | None]:
        """Wait for the sums; ``grads`` of the homes become complete."""
        if self._delayed:
            if self._later is None:
                self._passed = True
                return grads
            grads, self._later = self._later, None
        if self._buffer is not None:
            trace.add("attention backward", self._label, self._began)
            self._buffer.wait()
            self._buffer.abandon = None
        parts = len(self.layout.shapes)
        for index in self._replicated:
            total = self._sums.get(index)
            views = [None] * parts if total is None else self.layout.views(total)
            if total is not None and total.is_cuda:
                total.record_stream(torch.cuda.current_stream())
            for at, part in enumerate(views, index * parts):
                p, grad = self.homes[index][at - index * parts], grads[at]
                if part is None:
                    grads[at] = torch.zeros_like(p) if grad is None else grad
                else:
                    grads[at] = (part if grad is None else part + grad).to(p.dtype)
        return grads


class BoundWeights:
    """The weights of all physical experts, for one plan: homes, then what is in one buffer, each by parameter.

    Autograd adds nothing to those of homes themselves, which get the sums of their replicas first.

    Args:
        plan: what the buffer holds.
        homes: the parameters of this rank's own experts.
        replicas: those of each slot.
        layout: how an expert's lie in a chunk.
        grads: [elements] for each slot, where the gradients of fused GEMMs add up; ``None`` where none are fused.
    """

    def __init__(
        self,
        plan: TransferPlan,
        homes: list[list[Parameter]],
        replicas: list[list[Tensor]],
        *,
        layout: ChunkLayout,
        grads: Sequence[Tensor] | None,
    ) -> None:
        self.plan, self._layout = plan, layout
        self._homes = [p for expert in homes for p in expert]
        self.trained = self._homes[0].requires_grad
        # a slot without a replica computes on zero tokens, so that all ranks run one graph: any memory will do
        self.weights = [p.detach() for p in self._homes] + [
            part.detach() for slot in replicas for part in slot
        ]
        parts, num_experts = len(layout.shapes), len(homes) + len(replicas)
        fused = layout.fused * num_experts
        self._passed: list[int] = []  # those that pass through autograd
        if not self.trained:
            return
        if not any(layout.fused) and not layout.uniform:
            used = [*range(len(homes)), *(len(homes) + slot for slot in plan.slots)]
            self._passed = [expert * parts + part for expert in used for part in range(parts)]
            return
        # a fused grouped GEMM wants a gradient for every weight
        self._passed = [at for at, is_fused in enumerate(fused) if not is_fused]
        memory = [] if grads is None else [part for chunk in grads for part in layout.views(chunk)]
        main_grads = [getattr(p, "main_grad", None) for p in self._homes] + memory
        for weight, main_grad, is_fused in zip(
            self.weights, main_grads, fused, strict=grads is not None
        ):
            if is_fused:
                weight.requires_grad_().main_grad = main_grad

    def join(
        self, hidden: Tensor, token: Tensor, take: Callable[[list[Tensor | None]], None]
    ) -> tuple[Tensor, list[Tensor]]:
        """The experts' input ``hidden`` and their weights, flat, for a forward whose backward will come.

        Args:
            hidden: any shape.
            token: what `PendingGradients.join_homes` gave.
            take: called in the backward with the gradients of all weights, once they are complete; placeholders for
                those of fused GEMMs.
        """
        carried = [self.weights[at] for at in self._passed]
        hidden, *passed = apply_directly(
            _Experts, partial(self._take, take), carried, token, hidden
        )
        if not passed:
            return hidden, self.weights
        weights = list(self.weights)
        for at, weight in zip(self._passed, passed, strict=True):
            weights[at] = weight
        return hidden, weights

    def _take(
        self, take: Callable[[list[Tensor | None]], None], passed: Sequence[Tensor | None]
    ) -> None:
        grads: list[Tensor | None] = [None] * len(self.weights)
        for at, grad in zip(self._passed, passed, strict=True):
            grads[at] = grad
        parts = len(self._layout.shapes)
        for part, is_fused in enumerate(self._layout.fused):
            if is_fused:
                home = self._homes[part]  # perhaps quantized: gradients are not
                placeholder = torch.empty(home.shape, dtype=home.dtype, device=home.device)
                # a view for each home: autograd keeps a tensor that nobody else has, and copies others
                views = placeholder.expand(len(self._homes) // parts, *home.shape).unbind()
                grads[part : len(self._homes) : parts] = views
        take(grads)


class _Homes(torch.autograd.Function):
    """Home parameters in, an empty tensor out; the backward waits for the replicas' gradients."""

    @staticmethod
    def forward(ctx: Any, complete: Callable, *homes: Parameter) -> Tensor:
        ctx.complete = complete
        ctx.set_materialize_grads(False)
        return torch.empty(0, device=homes[0].device)

    @staticmethod
    def backward(ctx: Any, _: Tensor | None) -> tuple[Tensor | None, ...]:
        complete, ctx.complete = ctx.complete, None
        return (None, *complete())


class _Experts(torch.autograd.Function):
    """The experts' input and the weights that autograd carries gradients of; the backward gives these to ``take``."""

    @staticmethod
    def forward(
        ctx: Any, take: Callable, weights: Sequence[Tensor], token: Tensor, hidden: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.take, ctx.device = take, token.device
        ctx.set_materialize_grads(
            False
        )  # a weight without gradient gives None, not a tensor of zeros
        return (hidden.view_as(hidden), *(weight.view_as(weight) for weight in weights))

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        # Dispatchers keep tensors of the last forward, and with them this node: it must not keep the replicas.
        take, ctx.take = ctx.take, None
        (homes, _), *_ = ctx.next_functions
        if torch._C._will_engine_execute_node(
            homes
        ):  # else `torch.autograd.grad` of other tensors runs
            take(grads)
        # a gradient that is defined: autograd runs nodes without one in the thread that called it, and at once
        return None, None, torch.empty(0, device=ctx.device), grad
