"""One order of starting reductions of experts' gradients, at the same points on all ranks.

With ``overlap_grad_reduce`` Megatron's DDP starts a bucket's reduction when its last gradient is
ready. In a layer with replicas the homes' gradients are ready later, after the attention's
backward, and all at once. Ranks that share gradients belong to different expert-parallel (EP)
groups, which plan independently. Two problems would follow:

- Each EP group would start the reductions of experts in an order of its own, and gradients of
  different experts would be added up. So a bucket waits until the buckets before it have started.
  PyTorch's DDP does the same (Li et al., "PyTorch Distributed", VLDB 2020, section 3.2.3).
- The start of a reduction may wait: with ``reduce_scatter_with_fp32_accumulation`` it first awaits
  the previous bucket, to free its memory. An EP group without replicas would wait there for a
  bucket of experts that a group with replicas starts after the attention's backward. The group with
  replicas would wait for a dense bucket, or for a collective inside the attention, that the other
  group reaches later: a deadlock. So a bucket also waits for the `ReductionPoint` of its layers:
  the end of the attention's backward, with or without replicas.

This is part of the rule in `megatron.parameter_gathers`. Where no attention precedes the experts,
or its input needs no gradient, gradients of homes are complete at the end of the experts' backward,
and a reduction starts when it is ready.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel
from torch import Tensor

from megatron_hecate.device.autograd import direct_apply


class ReductionPoint:
    """Point in the backward of one layer at which the reductions of its experts' gradients start.

    Args:
        by_hand: whether weight gradients are delayed beyond the attention's backward: the layer
            then calls `reach` when they are complete.
    """

    def __init__(self, *, by_hand: bool) -> None:
        self._by_hand = by_hand
        # order of the buckets; None where EP groups share no buckets
        self.order: _Order | None = None
        # forwards whose backward has not reached the point
        self.awaited = 0

    def before_attention(self, hidden: Tensor) -> Tensor:
        """Put the point into the backward of the attention with the input ``hidden``, any shape.

        Returns ``hidden``, with a node of autograd. Call it before the homes are joined: autograd
        runs nodes that were made later first.
        """
        if self.order is None or not (torch.is_grad_enabled() and hidden.requires_grad):
            return hidden
        self.awaited += 1
        if self._by_hand:
            return hidden
        return _put_point(self, hidden)

    def reach(self) -> None:
        """Start the reductions that wait for this point only."""
        if self.order is not None:
            self.awaited = max(0, self.awaited - 1)
            self.order.start_ready()


class _Point(torch.autograd.Function):
    """Identity on the attention's input whose backward reaches a `ReductionPoint`."""

    @staticmethod
    def forward(ctx: Any, point: ReductionPoint, hidden: Tensor) -> Tensor:
        ctx.point = point
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor]:
        ctx.point.reach()
        return None, grad


_put_point = direct_apply(_Point)


class _Order:
    """Order of one DDP's reductions of experts' gradients.

    Args:
        groups: bucket groups in that order.
    """

    def __init__(self, groups: Sequence[_OrderedReduction]) -> None:
        self.groups = groups
        self.is_starting = False
        # index of the group to start next
        self._next = 0

    def start_ready(self) -> None:
        """Start the groups that are ready and whose turn it is."""
        while (group := self.groups[self._next]).is_ready:
            self._next = (self._next + 1) % len(self.groups)
            self.is_starting = True
            try:
                group.start_now()
            finally:
                self.is_starting = False

    def give_up_points(self) -> None:
        """Stop waiting for points after the end of the backward, which reaches no further point."""
        for group in self.groups:
            for point in group.points:
                point.awaited = 0
        self.start_ready()

    def restart(self) -> None:
        """Begin with the first group again."""
        self._next = 0


class _OrderedReduction:
    """Mixin in front of Megatron's bucket groups that starts reductions in order.

    Attributes:
        order: order of the DDP's bucket groups.
        points: reduction points of the layers whose experts the group holds.
    """

    order: _Order
    points: frozenset[ReductionPoint]
    _held: tuple[tuple[Any, ...], dict[str, Any]] | None = None

    @property
    def is_ready(self) -> bool:
        """Whether all gradients are ready and all layers' points are reached."""
        return self._held is not None and not any(point.awaited for point in self.points)

    def start_grad_sync(self, *args: Any, **kwargs: Any) -> None:
        """Call Megatron's method, now or at this group's turn."""
        self._held = (args, kwargs)
        self.order.start_ready()

    def start_now(self) -> None:
        """Call Megatron's ``start_grad_sync`` with the arguments of the held call."""
        assert self._held is not None
        args, kwargs = self._held
        self._held = None
        super().start_grad_sync(*args, **kwargs)  # type: ignore[misc]

    def finish_grad_sync(self, *args: Any, **kwargs: Any) -> None:
        """Call Megatron's method, at the end of the backward or when the next group starts."""
        if not self.order.is_starting:
            self.order.give_up_points()
        super().finish_grad_sync(*args, **kwargs)  # type: ignore[misc]

    def reset(self) -> None:
        """Call Megatron's method and restart the order, for a new iteration."""
        super().reset()  # type: ignore[misc]
        self._held = None
        self.order.restart()


def order_buckets(ddp: DistributedDataParallel) -> None:
    """Make ``ddp`` reduce the experts' buckets in one order, at the same points on all ranks."""
    groups = ddp.expert_parallel_bucket_groups
    if not groups or not ddp.ddp_config.overlap_grad_reduce:
        return
    order = _Order(groups)
    points = {}
    for module in ddp.modules():
        if (physical := getattr(module, "physical", None)) is not None:
            points.update(dict.fromkeys(module.parameters(), physical.reduction_point))
            if ddp.expt_dp_group.size() > 1:
                physical.reduction_point.order = order
    kinds = {}
    for base in map(type, groups):
        kinds[base] = type(f"Ordered{base.__name__}", (_OrderedReduction, base), {})
    for group in groups:
        group.order = order
        group.points = frozenset(points[p] for p in group.params if p in points)
        group.__class__ = kinds[type(group)]
