"""Autograd nodes that join replicas to their homes.

These nodes take part in one microbatch of a layer. The table has the order of the forward; the
backward runs from the bottom to the top:

    _Homes            homes, before the attention   waits for the spRS, completes gradients
    ...               attention, router, dispatch
    _Experts          input of the experts          takes all gradients, may start the spRS
    ...               experts
    (layer_replicas)  output of the experts         makes replicas ready for the backward

Autograd runs nodes that were made later first, so the spRS runs during the backward of the
attention.

The weights are made once per plan (`bound_weights.BoundWeights`, with the node `_Experts`). Fused
GEMMs add weight gradients to memory that belongs to homes and replicas, so the weights pass
through no node of a microbatch: only an empty tensor connects `_Homes` to `_Experts`. Gradients
that autograd carries, such as gradients of biases, pass through `_Experts` one by one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import Parameter

from megatron_hecate.device.autograd import direct_apply

if TYPE_CHECKING:
    from megatron_hecate.replicas.buffers import Buffer, ExpertWeights


class PendingGradients:
    """Replica gradients of one microbatch that are in flight to this rank's homes.

    Implements `comm.transport.HomeGradients`.

    Args:
        experts: the layer's own experts, the homes.
    """

    def __init__(self, experts: ExpertWeights) -> None:
        self.homes = experts.homes()
        self.layout = experts.layout
        self._replicated: tuple[int, ...] = ()
        # The buffer whose transfer delivers the gradients.
        self._buffer: Buffer | None = None
        self._sums: dict[int, Tensor] = {}
        # Gradients of the homes, from the experts' backward or computed after it.
        self._grads: list[Tensor | None] | None = None
        # True once the backward has left the `_Homes` node without gradients.
        self._is_late = False

    @classmethod
    def join_homes(cls, experts: ExpertWeights) -> tuple[PendingGradients, Tensor]:
        """Make the `_Homes` node of one microbatch.

        Returns:
            The pending gradients that the node completes, and an empty tensor that connects the
            node to `bound_weights.BoundWeights.join`.
        """
        pending = cls(experts)
        return pending, _join_homes(pending._reach_homes, *chain.from_iterable(pending.homes))

    def begin(self) -> None:
        """Begin a backward of the experts, whose gradients `take` gets after it."""
        self._is_late = False

    def take(self, grads: list[Tensor | None]) -> None:
        """Store the gradients of the homes, a flat list."""
        self._grads = grads

    def _reach_homes(self) -> list[Tensor | None]:
        """Complete the gradients in the backward of `_Homes`, unless they are computed later."""
        grads = self._grads
        self._grads = None
        if grads is None:
            self._is_late = True
            return [None] * (len(self.homes) * len(self.layout.shapes))
        return self.complete(grads)

    def settle(self) -> bool:
        """Complete gradients that were computed after the backward into ``.grad``.

        Returns:
            False if the backward has not reached the `_Homes` node yet, which then completes them.
        """
        if not self._is_late or self._grads is None:
            return False
        completed = self.complete(self._grads)
        self._grads = None
        for p, grad in zip(chain.from_iterable(self.homes), completed, strict=True):
            if grad is not None:
                p.grad = grad.to(p.dtype) if p.grad is None else p.grad + grad
        return True

    def expect(self, replicated: tuple[int, ...], buffer: Buffer) -> None:
        """Expect sums for the own experts ``replicated`` from the transfer of ``buffer``."""
        self._replicated = replicated
        self._buffer = buffer

    def _is_hooked(self, index: int) -> bool:
        """Return whether a user's hook reads the gradients of home ``index`` from autograd.

        The replicas' sums must then pass through autograd, too. DDP registers its own hooks on
        autograd's nodes, not on the parameters. Autograd has only placeholders for fused GEMMs.
        """
        hooks = (p._backward_hooks or p._post_accumulate_grad_hooks for p in self.homes[index])
        return not self.layout.fuses_any and any(hooks)

    def check_destination(self, node: Any, label: str) -> None:
        """Raise a RuntimeError in the backward of ``torch.autograd.grad`` of the homes.

        The sums of replicas would be added to ``main_grad``, which ``torch.autograd.grad`` does not
        write, and would be missing from its result.

        Args:
            node: the `_Homes` node of the running backward.
            label: name of the layer.
        """
        # Autograd carries placeholders for fused weights, in stock Megatron as well.
        if self.layout.fuses_any:
            return
        homes = ((index, p) for index, home in enumerate(self.homes) for p in home)
        for (index, p), (accumulate, _) in zip(homes, node.next_functions, strict=True):
            try:
                is_complete = torch._C._will_engine_execute_node(accumulate)
            except RuntimeError:
                # Autograd returns this gradient.
                is_complete = self._is_hooked(index) or not hasattr(p, "main_grad")
            if not is_complete:
                raise RuntimeError(
                    f"{label}: torch.autograd.grad of experts' weights leaves out what their "
                    "replicas add, and backward(inputs=...) of some weights adds to others; call "
                    "backward() of the loss instead and read main_grad after finish_grad_sync(), "
                    "or leave experts' weights out"
                )

    def main_grads(self, index: int) -> list[Tensor] | None:
        if self._is_hooked(index):
            return None
        grads = [getattr(p, "main_grad", None) for p in self.homes[index]]
        dtypes = {None if t is None or not t.is_contiguous() else t.dtype for t in grads}
        return grads if dtypes in ({torch.float32}, {torch.bfloat16}) else None

    def add(self, index: int, total: Tensor) -> None:
        """Add a home's sum to ``main_grad`` where it exists; else keep it for autograd.

        ``main_grad`` is fp32 as a rule: in a bf16 ``.grad`` the sum would lose bits.
        """
        has_main_grads = all(hasattr(p, "main_grad") for p in self.homes[index])
        if has_main_grads and not self._is_hooked(index):
            self._add_to_main_grads(index, total)
        else:
            self._sums[index] = total.clone()

    def _add_to_main_grads(self, index: int, total: Tensor) -> None:
        for p, part in zip(self.homes[index], self.layout.views(total), strict=True):
            if hasattr(p, "main_grad"):
                p.main_grad += part
            else:
                # DDP does not know a parameter that was frozen when DDP wrapped the model.
                p.grad = part.to(p.dtype, copy=True) if p.grad is None else p.grad + part

    def arrive(self) -> None:
        """Wait until the sums are in ``main_grad``, outside of any backward."""
        assert self._buffer is not None
        self._buffer.wait()
        self._buffer.abandon = None
        # Sums of homes with hooks: no backward calls the hooks any more.
        for index, total in self._sums.items():
            self._add_to_main_grads(index, total)
        self._sums.clear()

    def abandon(self) -> None:
        """Zero homes' gradients that got a sum, after a backward that never reached `complete`.

        Called when another backward begins. The homes' gradients are then as after ``zero_grad``,
        which may have run before the sum was added.
        """
        for index in self._replicated:
            for p in self.homes[index]:
                if hasattr(p, "main_grad"):
                    p.main_grad.zero_()
        self._sums.clear()

    def complete(self, grads: list[Tensor | None]) -> list[Tensor | None]:
        """Wait for the sums and add each to its home's gradient in ``grads``, a flat list."""
        if self._buffer is not None:
            self._buffer.wait()
            self._buffer.abandon = None
        parts = len(self.layout.shapes)
        for index in self._replicated:
            total = self._sums.get(index)
            views = [None] * parts if total is None else self.layout.views(total)
            if total is not None and total.is_cuda:
                total.record_stream(torch.cuda.current_stream())
            weights = zip(self.homes[index], views, strict=True)
            for number, (p, part) in enumerate(weights, index * parts):
                grad = grads[number]
                if part is not None:
                    grads[number] = (part if grad is None else part + grad).to(p.dtype)
                elif grad is None:
                    grads[number] = torch.zeros_like(p)
        # Another backward through the same forward may return nothing.
        self._replicated = ()
        self._sums.clear()
        return grads


# For each backward with delayed weight gradients: the placeholders that autograd carried, and the
# callback that takes the gradients once they are computed.
Delayed = deque[tuple[list[Tensor | None], Callable[[list[Tensor | None]], PendingGradients]]]


def release(ctx: Any, name: str) -> Any:
    """Return the attribute ``name`` of a node in its backward, and drop it with the graph.

    Nodes outlive their backward where something keeps a tensor of their forward. Only a backward
    with ``retain_graph=True`` leaves the attribute, for the next backward.
    """
    value = getattr(ctx, name)
    if not torch._C._autograd._get_current_graph_task_keep_graph():
        setattr(ctx, name, None)
    return value


class _Homes(torch.autograd.Function):
    """Node from homes to an empty tensor; its backward waits for replica gradients."""

    @staticmethod
    def forward(ctx: Any, complete: Callable, *homes: Parameter) -> Tensor:
        ctx.complete = complete
        ctx.set_materialize_grads(False)
        return torch.empty(0, device=homes[0].device)

    @staticmethod
    def backward(ctx: Any, _: Tensor | None) -> tuple[Tensor | None, ...]:
        return (None, *release(ctx, "complete")())


_join_homes = direct_apply(_Homes)
