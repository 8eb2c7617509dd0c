"""Weights of all physical experts, and how they take part in autograd (overview in `autograd`)."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain, compress
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from megatron_hecate.comm.transport import TransferPlan
from megatron_hecate.device.autograd import direct_apply
from megatron_hecate.replicas.autograd import release
from megatron_hecate.replicas.buffers import ChunkLayout


class BoundWeights:
    """Weights of all physical experts for one placement: homes, then replicas in one buffer.

    Weights are a flat list, parameter by parameter. Autograd adds nothing to the gradients of
    homes, which get the sums of their replicas first.

    Args:
        transfers: transfers that filled the buffer.
        homes: parameters of this rank's own experts, expert by expert.
        replicas: parameters of each slot.
        layout: layout of an expert's parameters in a chunk.
        grads: gradient accumulators, [elements] per slot; none if the experts are frozen.
    """

    def __init__(
        self,
        transfers: TransferPlan,
        homes: list[list[Parameter]],
        replicas: list[list[Tensor]],
        *,
        layout: ChunkLayout,
        grads: Sequence[Tensor],
    ) -> None:
        self.transfers = transfers
        home_weights = list(chain.from_iterable(homes))
        self.is_trained = bool(grads)
        # An empty slot may hold any values: it has no tokens. Detached tensors are no views, whose
        # nodes autograd would replace after writes.
        slot_weights = [part.detach() for part in chain.from_iterable(replicas)]
        self.weights = [p.detach() for p in home_weights] + slot_weights
        parts = len(layout.shapes)
        slot_grads = [layout.views(chunk) for chunk in grads]
        # Accumulators of gradients that autograd carries, each with the index of its weight.
        self.carried_sums = [
            ((len(homes) + slot) * parts + part, slot_grads[slot][part])
            for slot in (transfers.slots if grads else ())
            for part, is_fused in enumerate(layout.fused)
            if not is_fused
        ]
        self._num_homes = len(homes)
        self._num_weights = len(self.weights)
        # Homes' weights in `weights` by parameter, for parameters of fused GEMMs, each with the
        # first home's.
        self._fused = [
            (slice(part, len(home_weights), parts), home_weights[part])
            for part, is_fused in enumerate(layout.fused)
            if is_fused
        ]
        fused = layout.fused * (len(homes) + len(replicas))
        is_computed = [self.is_trained] * len(home_weights)
        for slot in range(len(replicas)):
            is_filled = layout.uniform or slot in transfers.slots
            is_computed += [self.is_trained and is_filled] * parts
        # Indices of the weights whose gradients pass through autograd.
        self._passed = [
            index for index, is_fused in enumerate(fused) if is_computed[index] and not is_fused
        ]
        if layout.fuses_any and self.is_trained:
            main_grads = [getattr(p, "main_grad", None) for p in home_weights]
            main_grads += chain.from_iterable(slot_grads)
            self._fuse(main_grads, list(map(operator.and_, fused, is_computed)))

    def _fuse(self, main_grads: Sequence[Tensor | None], is_fused: Sequence[bool]) -> None:
        """Let fused GEMMs add the gradients of weights to ``main_grads``.

        Raises:
            ValueError: if these have several data types, of which a grouped GEMM can write one.
        """
        fused_grads = list(compress(main_grads, is_fused))
        dtypes = {grad.dtype for grad in fused_grads if grad is not None}
        if len(dtypes) > 1:
            raise ValueError(
                f"main gradients of experts and their replicas have dtypes "
                f"{sorted(map(str, dtypes))}; with gradient_accumulation_fusion FSSDP needs one, "
                "which the homes have when an iteration begins"
            )
        fused_weights = list(compress(self.weights, is_fused))
        with torch.enable_grad():
            _attach_to_fused(torch.empty(0, requires_grad=True), fused_weights)
        for weight, main_grad in zip(fused_weights, fused_grads, strict=True):
            weight.main_grad = main_grad

    def join(
        self, hidden: Tensor, link: Tensor, take: Callable[[Any, list[Tensor | None]], None]
    ) -> tuple[Tensor, list[Tensor]]:
        """Make the `_Experts` node of a forward that a backward follows.

        Args:
            hidden: input of the experts, any shape.
            link: empty tensor from `PendingGradients.join_homes`.
            take: callback of the backward. Its arguments are the `_Homes` node, and the list of
                complete gradients of all weights, with placeholders for weights of fused GEMMs.

        Returns:
            The experts' input and their weights, a flat list.
        """
        unfused = [self.weights[index] for index in self._passed]
        hidden, *joined = _join_experts(partial(self._take, take), link, hidden, *unfused)
        if not joined:
            return hidden, self.weights
        weights = list(self.weights)
        for index, weight in zip(self._passed, joined, strict=True):
            weights[index] = weight
        return hidden, weights

    def _take(
        self,
        take: Callable[[Any, list[Tensor | None]], None],
        node: Any,
        grads_of_unfused: Sequence[Tensor | None],
    ) -> None:
        """Complete the list of gradients with placeholders, and pass the list to ``take``."""
        grads: list[Tensor | None] = [None] * self._num_weights
        for index, grad in zip(self._passed, grads_of_unfused, strict=True):
            grads[index] = grad
        for home_grads, home in self._fused:
            # A home may be quantized; its gradient is not.
            placeholder = torch.empty(home.shape, dtype=home.dtype, device=home.device)
            # One view per home: autograd steals a gradient to which it has the only reference,
            # and copies any other.
            grads[home_grads] = placeholder.expand(self._num_homes, *home.shape).unbind()
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


class _Experts(torch.autograd.Function):
    """Node of the experts' input and of the weights whose gradients autograd carries.

    Its backward passes the gradients of the weights to ``take``.
    """

    @staticmethod
    def forward(
        ctx: Any, take: Callable, link: Tensor, hidden: Tensor, *weights: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.take = take
        ctx.device = link.device
        # A weight without a gradient then gives None instead of a tensor of zeros.
        ctx.set_materialize_grads(False)
        # Autograd returns inputs as views, which takes less time than to make views here.
        return (hidden, *weights)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        # Dispatchers keep tensors of the last forward, and with a tensor this node, which must not
        # keep the replicas.
        take = release(ctx, "take")
        (homes, _), *_ = ctx.next_functions
        # False if `torch.autograd.grad` of other tensors runs.
        if torch._C._will_engine_execute_node(homes):
            take(homes, grads)
        # The gradient of the link must be defined: autograd runs nodes with undefined gradients in
        # the thread that called it, and at once.
        link = torch.empty(0, device=ctx.device)
        # The weights are detached, and have no gradients here.
        return (None, link, grad, *[None] * len(grads))


_join_experts = direct_apply(_Experts)
