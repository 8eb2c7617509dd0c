"""Autograd nodes that join replicas to their homes.

Three nodes take part in one microbatch of a layer. The table has the order of the forward; the
backward runs from the bottom to the top:

    _Homes            homes, before the attention   waits for the spRS, completes gradients
    ...               attention, router, dispatch
    _Experts          input of the experts          takes all gradients, may start the spRS
    ...               experts
    (layer_replicas)  output of the experts         makes replicas ready for the backward

Autograd runs nodes that were made later first, so the spRS runs during the backward of the
attention.

The weights are made once per plan (`BoundWeights`). Fused GEMMs add weight gradients to memory that
belongs to homes and replicas, so fused weights need no node: only an empty tensor connects `_Homes`
to `_Experts`. Gradients that autograd carries, such as gradients of biases, pass through `_Experts`
one by one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain, compress
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from megatron_hecate import trace
from megatron_hecate.comm.transport import TransferPlan
from megatron_hecate.device.direct_apply import direct_apply
from megatron_hecate.replicas.buffers import Buffer
from megatron_hecate.replicas.chunk_layout import ChunkLayout


class PendingGradients:
    """Replica gradients of one microbatch that are in flight to this rank's homes.

    Implements `comm.transport.HomeGradients`.

    Args:
        homes: parameters of this rank's own experts, expert by expert.
        layout: layout of an expert's parameters in a chunk.
    """

    def __init__(self, homes: list[list[Parameter]], layout: ChunkLayout) -> None:
        self.homes = homes
        self.layout = layout
        self._replicated: tuple[int, ...] = ()
        # The buffer whose transfer delivers the gradients.
        self._buffer: Buffer | None = None
        self._sums: dict[int, Tensor] = {}
        self._delayed = False
        # True once autograd has reached `complete` before the delayed gradients were computed.
        self._passed = False
        self._taken: list[Tensor | None] | None = None
        self._later: list[Tensor | None] | None = None
        self._label = ""
        self._began = 0.0

    @classmethod
    def join_homes(
        cls, homes: list[list[Parameter]], layout: ChunkLayout
    ) -> tuple[PendingGradients, Tensor]:
        """Make the `_Homes` node of one microbatch.

        Returns:
            The pending gradients that the node completes, and an empty tensor that connects the
            node to `BoundWeights.join`.
        """
        pending = cls(homes, layout)
        token = _join_homes(pending._complete_taken, *chain.from_iterable(homes))
        return pending, token

    def take(self, grads: list[Tensor | None]) -> None:
        """Store the gradients of the homes, a flat list, from the experts' backward."""
        self._taken = grads

    def _complete_taken(self) -> list[Tensor | None]:
        taken = self._taken
        self._taken = None
        if taken is None:
            taken = [None] * (len(self.homes) * len(self.layout.shapes))
        return self.complete(taken)

    def delay(self) -> None:
        """Expect the gradients of the homes after the experts' backward, by `computed_later`."""
        self._delayed = True

    def computed_later(self, grads: Sequence[Tensor | None]) -> None:
        """Store the delayed gradients of the homes."""
        self._later = list(grads)

    def settle(self) -> bool:
        """Complete delayed gradients into ``.grad``.

        Returns:
            False where autograd has not reached `complete` yet: then `complete` returns the
            gradients and nothing is done here.
        """
        if not self._passed:
            return False
        completed = self.complete([])
        for p, grad in zip(chain.from_iterable(self.homes), completed, strict=True):
            if grad is not None:
                p.grad = grad.to(p.dtype) if p.grad is None else p.grad + grad
        return True

    def expect(self, replicated: tuple[int, ...], buffer: Buffer, *, label: str) -> None:
        """Expect sums for the own experts ``replicated`` from the transfer of ``buffer``."""
        self._replicated = replicated
        self._buffer = buffer
        self._label = label
        self._began = time.perf_counter()

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
        try:
            for _, (accumulate, _) in zip(self.homes[0], node.next_functions, strict=False):
                if accumulate is not None:
                    torch._C._will_engine_execute_node(accumulate)
        except RuntimeError as error:
            trained = (p for p in self.homes[0] if p.requires_grad)
            if not any(hasattr(p, "main_grad") for p in trained) or self._is_hooked(0):
                return
            raise RuntimeError(
                f"{label}: torch.autograd.grad of experts' weights leaves out what their replicas "
                "add; call backward() of the loss instead and read main_grad after "
                "finish_grad_sync(), or leave these weights out"
            ) from error

    def main_grads(self, index: int) -> list[Tensor] | None:
        if self._is_hooked(index):
            return None
        found = [getattr(p, "main_grad", None) for p in self.homes[index]]
        fp32 = all(t is not None and t.dtype is torch.float32 and t.is_contiguous() for t in found)
        return found if fp32 else None

    def add(self, index: int, total: Tensor) -> None:
        """Add a home's sum to ``main_grad`` where it exists; else keep it for autograd.

        ``main_grad`` is fp32 as a rule: in a bf16 ``.grad`` the sum would lose bits.
        """
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
        # Sums of homes with hooks: no backward calls the hooks any more.
        for index, total in self._sums.items():
            for p, part in zip(self.homes[index], self.layout.views(total), strict=True):
                p.main_grad += part
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
        if self._delayed:
            if self._later is None:
                self._passed = True
                return grads
            grads = self._later
            self._later = None
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
                p = self.homes[index][at - index * parts]
                grad = grads[at]
                if part is not None:
                    grads[at] = (part if grad is None else part + grad).to(p.dtype)
                elif grad is None:
                    grads[at] = torch.zeros_like(p)
        return grads


class BoundWeights:
    """Weights of all physical experts for one plan: homes, then replicas in one buffer.

    Weights are a flat list, parameter by parameter. Autograd adds nothing to the gradients of
    homes, which get the sums of their replicas first.

    Args:
        plan: content of the buffer.
        homes: parameters of this rank's own experts, expert by expert.
        replicas: parameters of each slot.
        layout: layout of an expert's parameters in a chunk.
        grads: gradient accumulators of fused GEMMs, [elements] per slot; ``None`` where no GEMM is
            fused.
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
        self.plan = plan
        own = list(chain.from_iterable(homes))
        self.trained = own[0].requires_grad
        # An empty slot may hold any values: it has no tokens. Detached tensors are no views, whose
        # nodes autograd would replace after writes.
        of_slots = [part.detach() for part in chain.from_iterable(replicas)]
        self.weights = [p.detach() for p in own] + of_slots
        parts = len(layout.shapes)
        self._num_homes = len(homes)
        self._num_weights = len(self.weights)
        # Homes' weights in `weights` by parameter, for parameters of fused GEMMs, each with the
        # first home's.
        self._fused = [
            (slice(part, len(own), parts), own[part])
            for part, is_fused in enumerate(layout.fused)
            if is_fused
        ]
        fused = layout.fused * (len(homes) + len(replicas))
        # Indices of the weights whose gradients pass through autograd.
        self._passed: list[int] = []
        if not self.trained:
            return
        if not layout.fuses_any and not layout.uniform:
            used = [*range(len(homes)), *(len(homes) + slot for slot in plan.slots)]
            for expert in used:
                self._passed += range(expert * parts, (expert + 1) * parts)
            return
        self._passed = [at for at, is_fused in enumerate(fused) if not is_fused]
        _require_grads(list(compress(self.weights, fused)))
        # A fused grouped GEMM needs a gradient for every weight.
        main_grads = [getattr(p, "main_grad", None) for p in own]
        main_grads += chain.from_iterable(map(layout.views, grads or ()))
        for weight, main_grad, is_fused in zip(
            self.weights, main_grads, fused, strict=grads is not None
        ):
            if is_fused:
                weight.main_grad = main_grad

    def join(
        self, hidden: Tensor, token: Tensor, take: Callable[[Any, list[Tensor | None]], None]
    ) -> tuple[Tensor, list[Tensor]]:
        """Make the `_Experts` node of a forward that a backward follows.

        Args:
            hidden: input of the experts, any shape.
            token: empty tensor from `PendingGradients.join_homes`.
            take: callback of the backward. Its arguments are the `_Homes` node, and the list of
                complete gradients of all weights, with placeholders for weights of fused GEMMs.

        Returns:
            The experts' input and their weights, a flat list.
        """
        carried = [self.weights[at] for at in self._passed]
        hidden, *passed = _join_experts(partial(self._take, take), token, hidden, *carried)
        if not passed:
            return hidden, self.weights
        weights = list(self.weights)
        for at, weight in zip(self._passed, passed, strict=True):
            weights[at] = weight
        return hidden, weights

    def _take(
        self,
        take: Callable[[Any, list[Tensor | None]], None],
        node: Any,
        passed: Sequence[Tensor | None],
    ) -> None:
        grads: list[Tensor | None] = [None] * self._num_weights
        for at, grad in zip(self._passed, passed, strict=True):
            grads[at] = grad
        for of_homes, home in self._fused:
            # A home may be quantized; its gradient is not.
            placeholder = torch.empty(home.shape, dtype=home.dtype, device=home.device)
            # One view per home: autograd steals a gradient to which it has the only reference,
            # and copies any other.
            grads[of_homes] = placeholder.expand(self._num_homes, *home.shape).unbind()
        take(node, grads)


class _FusedWeights(torch.autograd.Function):
    """Common node of weights whose gradients fused GEMMs add to ``main_grad``.

    GEMMs compute no gradients for tensors that need none. Leaves of autograd need some, but each
    has a node of its own, which takes 2 us in a backward although it gets no gradient.
    """

    @staticmethod
    def forward(ctx: Any, _: Tensor, weights: list[Tensor]) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        # In a list, they are no inputs for autograd, which then attaches the node to them.
        return tuple(weights)

    @staticmethod
    def backward(ctx: Any, *_: Tensor | None) -> tuple[None, None]:
        return None, None


_attach_to_fused = direct_apply(_FusedWeights)


def _require_grads(weights: list[Tensor]) -> None:
    """Make detached ``weights`` of fused GEMMs require gradients."""
    with torch.enable_grad():
        _attach_to_fused(torch.empty(0, requires_grad=True), weights)


class _Homes(torch.autograd.Function):
    """Node from homes to an empty tensor; its backward waits for replica gradients."""

    @staticmethod
    def forward(ctx: Any, complete: Callable, *homes: Parameter) -> Tensor:
        ctx.complete = complete
        ctx.set_materialize_grads(False)
        return torch.empty(0, device=homes[0].device)

    @staticmethod
    def backward(ctx: Any, _: Tensor | None) -> tuple[Tensor | None, ...]:
        complete = ctx.complete
        ctx.complete = None
        return (None, *complete())


_join_homes = direct_apply(_Homes)


class _Experts(torch.autograd.Function):
    """Node of the experts' input and of the weights whose gradients autograd carries.

    Its backward passes the gradients of the weights to ``take``.
    """

    @staticmethod
    def forward(
        ctx: Any, take: Callable, token: Tensor, hidden: Tensor, *weights: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.take = take
        ctx.device = token.device
        # A weight without a gradient then gives None instead of a tensor of zeros.
        ctx.set_materialize_grads(False)
        # Autograd returns inputs as views, which takes less time than to make views here.
        return (hidden, *weights)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        # Dispatchers keep tensors of the last forward, and with a tensor this node, which must not
        # keep the replicas.
        take = ctx.take
        ctx.take = None
        (homes, _), *_ = ctx.next_functions
        # False if `torch.autograd.grad` of other tensors runs.
        if torch._C._will_engine_execute_node(homes):
            take(homes, grads)
        # The gradient of the token must be defined: autograd runs nodes with undefined gradients in
        # the thread that called it, and at once.
        token = torch.empty(0, device=ctx.device)
        # The weights are detached, and have no gradients here.
        return (None, token, grad, *[None] * len(grads))


_join_experts = direct_apply(_Experts)
