"""Replicas of one layer: fetched weights, gathered gradients.

How long they live, and whose memory they use, is the business of `buffers`; how autograd runs through them that of
`autograd`. Replicas are plain tensors, no ``nn.Parameter``: DDP, the optimizer, checkpoints and parameter counts see
homes only.
"""

from __future__ import annotations

import dataclasses
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from megatron_hecate import trace
from megatron_hecate.comm.overlap import OverlapMeter
from megatron_hecate.comm.transport import LayerBuffer, TransferPlan
from megatron_hecate.device.direct_apply import apply_directly
from megatron_hecate.plan import Placement
from megatron_hecate.replicas.autograd import BoundWeights, ChunkLayout, PendingGradients
from megatron_hecate.replicas.buffers import BufferPool

# what autograd carried in place of gradients, and what takes these when they are computed
Delayed = deque[tuple[list[Tensor | None], Callable[[list[Tensor | None]], PendingGradients]]]


@dataclasses.dataclass(frozen=True, eq=False)
class ReplicaSlots:
    """The replica slots of one layer on this rank.

    Args:
        index: of the layer among the rank's.
        homes: looks up the parameters of this rank's own experts, expert by expert.
        stored: what travels of them.
        weights: the parameters in one chunk of what has come.
        layout: how their gradients form a chunk.
        pool: the rank's buffers.
        ready: called before homes are read: makes sure that they hold this iteration's values.
        label: name of the layer in errors.
        delayed: gets each backward whose weight gradients are computed later; `drop_delayed` empties it.
    """

    index: int
    homes: Callable[[], list[list[Parameter]]]
    stored: Callable[[], list[list[Tensor]]]
    weights: Callable[[Tensor], list[Tensor]]
    layout: ChunkLayout
    pool: BufferPool
    ready: Callable[[], None]
    label: str
    delayed: Delayed | None = None
    drop_delayed: Callable[[], None] = lambda: None

    @property
    def sizes(self) -> LayerBuffer:
        return self.pool.layers[self.index]

    @property
    def trained(self) -> bool:
        """Whether experts get gradients at all."""
        return self.homes()[0][0].requires_grad

    def check(self) -> None:
        """Raises ValueError when some parameters are frozen and others are trained, or their dtypes differ."""
        homes = self.homes()
        if len({p.requires_grad for expert in homes for p in expert}) > 1:
            raise ValueError(
                f"{self.label}: some expert parameters are frozen and others are not; freeze all or none"
            )
        dtypes = {p.dtype for expert in homes for p in expert}
        if dtypes != {self.sizes.dtype}:
            raise ValueError(
                f"{self.label}: expert parameters have dtypes {sorted(map(str, dtypes))}; FSSDP needs one, and keeps "
                f"to {self.sizes.dtype}, which they had in the first step"
            )


class Replicas:
    """The replicas of one layer on this rank: for one iteration, or for one microbatch, as their lifetime says.

    Args:
        slots: the layer's slots.
        placement: who holds what; some rank has a replica.
        plan: this rank's part in fetching them. A buffer holds what its plan brought: each iteration makes its own.
        passes: times that one microbatch runs the layer.
        is_last: whether gradients return with the running backward, the n-th of a microbatch, and add up until then. A
            hint: `return_waiting` returns the rest, and several returns add up. Without it each pass returns its own.
        meter: gets the transfers that fetch them, where it times copies.
    """

    # Called before the experts' backward, and when these replicas are not needed any more.
    before_backward: Callable[[Replicas], None] | None = None
    after_backward: Callable[[Replicas], None] | None = None

    def __init__(
        self,
        slots: ReplicaSlots,
        placement: Placement,
        plan: TransferPlan,
        *,
        passes: int = 1,
        is_last: Callable[[int], bool] | None = None,
        meter: OverlapMeter | None = None,
    ) -> None:
        slots.check()
        self.slots, self.label, self.passes, self._passes_left = slots, slots.label, passes, passes
        self._is_last = is_last
        self.placement, self.plan, self._meter = placement, plan, meter
        self.buffer = slots.pool.weights(slots.index, label=slots.label)
        self._trained = slots.trained
        self.unreturned = 0  # backward passes whose gradients wait on this rank
        self.backwards, self.computed = 0, False

    def drop_unreturned(self) -> None:
        """Forget gradients that wait: their iteration was abandoned."""
        self.unreturned = self.backwards = 0

    def return_waiting(self) -> PendingGradients:
        """Begin to return gradients that wait, outside of any backward. All ranks call it at the same point."""
        pending = PendingGradients(self.slots.homes(), self.slots.layout)
        self._return_gradients(pending, self._grads())
        return pending

    def start(self) -> None:
        """Begin to fetch, unless they are here."""
        if self.buffer.holds is not self.plan:
            self.buffer.hold(self.plan)
            self._fetch(self.plan)

    def refresh(self, plan: TransferPlan) -> None:
        """Begin to fetch the homes' current weights by ``plan``, which equals the plan so far."""
        self.plan = plan
        self.start()

    def _fetch(self, plan: TransferPlan) -> None:
        slots = self.slots
        slots.ready()
        timed = self._meter is not None and self._meter.times_copies
        self.buffer.transfer = slots.pool.transport.fetch(
            plan, slots.stored(), self._weights(), label=self.label, timed=timed
        )
        if self._meter is not None and timed:
            self._meter.follow(self.buffer.transfer, max(len(plan.sends), len(plan.receives)))

    def add_late(self, placement: Placement, plan: TransferPlan) -> None:
        """Become ``placement``, of which ``plan`` is this rank's part. Replicas that stay keep their slots; only new
        ones are fetched. Call it before any microbatch has computed with them."""
        assert not self.computed, (
            f"{self.label}: replicas cannot be replaced once they have computed"
        )
        self.start()
        self.buffer.wait()
        earlier, self.plan, self.placement = self.plan, plan, placement
        self.buffer.holds = plan
        self._fetch(plan.without(earlier))

    def wait(self) -> None:
        """Wait until their weights are here.

        Raises:
            TransferError: when a peer dies or does not answer in time.
            RuntimeError: when they were dropped.
        """
        if self.buffer.holds is not self.plan:
            pool = self.slots.pool
            raise RuntimeError(
                f"{self.label}: a backward needs replicas that were dropped (lifetime {pool.lifetime}): after their "
                f"forward {pool.reset_because}, and another forward began an iteration; run each backward before the "
                "next forward there, or use --moe-fssdp-lifetime layer, which fetches replicas again"
            )
        self.buffer.wait()

    def _weights(self) -> list[Tensor]:
        return self.buffer.weights(self.slots.sizes)

    def _grads(self) -> list[Tensor]:
        """Where the gradients of slots add up: a fused grouped GEMM wants one dtype for all, and that of the homes."""
        home = self.slots.homes()[0][0] if any(self.slots.layout.fused) else None
        dtype = (
            self.slots.sizes.grad_dtype if home is None else getattr(home, "main_grad", home).dtype
        )
        return self.slots.pool.grads(self.slots.index).chunks(self.slots.sizes, dtype)

    def join(
        self, hidden: Tensor, joined_homes: tuple[PendingGradients, Tensor] | None = None
    ) -> tuple[Tensor, list[Tensor]]:
        """The experts' input and the weights that this rank computes with in one microbatch: homes first, then slots,
        flat, parameter by parameter.

        Each home parameter gets one gradient per microbatch, and gets it after its replicas' gradients arrived: DDP may
        reduce it at once.

        Args:
            hidden: the experts' input, any shape.
            joined_homes: what `PendingGradients.join_homes` gave before the attention.
        """
        self.start()
        self.wait()
        self.computed = True
        bound = self._bound()
        if not (bound.trained and torch.is_grad_enabled()):
            return hidden, bound.weights
        pending, token = joined_homes or PendingGradients.join_homes(
            self.slots.homes(), self.slots.layout
        )
        return bound.join(hidden, token, partial(self._take_gradients, pending))

    def _bound(self) -> BoundWeights:
        """The weights, made once for a plan: homes are the same tensors, with the same values, for so long."""
        slots = self.slots
        bound = self.buffer.bound.get(slots.index)
        if bound is not None and bound.plan is self.plan:
            return bound
        slots.ready()
        bound = BoundWeights(
            self.plan,
            slots.homes(),
            [slots.weights(chunk) for chunk in self._weights()],
            layout=slots.layout,
            grads=self._grads() if any(slots.layout.fused) and slots.trained else None,
        )
        if self.after_backward is None or not slots.sizes.stored_bytes:
            self.buffer.bound[slots.index] = bound
        # else TransformerEngine keeps with them what it derives, and these replicas do not stay
        return bound

    def computed_by(self, output: Tensor) -> Tensor:
        """The experts' ``output``, with a node that makes replicas and their gradients ready for the backward."""
        if not torch.is_grad_enabled():
            return output  # will be computed again, or never has a backward
        if not output.requires_grad:
            self._finish()  # frozen, and so is all before: no backward comes
            return output
        return apply_directly(_ExpertsOutput, self._prepare_backward, output)

    def _finish(self) -> None:
        self._passes_left -= 1
        if not self._passes_left and self.after_backward is not None:
            self.after_backward(self)

    def _prepare_backward(self) -> None:
        self.slots.drop_delayed()  # those of a backward that broke off
        if self.before_backward is not None:
            self.before_backward(self)
        self.wait()
        self._backward_began = time.perf_counter()
        if not self._trained:  # no gradient will say that the experts are done
            torch.autograd.Variable._execution_engine.queue_callback(self._finish)
        elif not self.unreturned:
            self.slots.pool.grads(self.slots.index).begin_sums(
                from_zero=any(self.slots.layout.fused)
            )

    def _take_gradients(self, pending: PendingGradients, grads: list[Tensor | None]) -> None:
        """Take one microbatch's gradients of all weights, or have them taken later."""
        trace.add("experts backward", self.label, self._backward_began)
        pending.check_destination(self.label)
        if self.slots.delayed is None:
            pending.take(self._add_gradients(pending, grads))
        else:
            pending.delay()
            self.slots.delayed.append((grads, partial(self._take_delayed, pending)))

    def _take_delayed(
        self, pending: PendingGradients, grads: list[Tensor | None]
    ) -> PendingGradients:
        pending.computed_later(self._add_gradients(pending, grads))
        return pending

    def _add_gradients(
        self, pending: PendingGradients, grads: list[Tensor | None]
    ) -> list[Tensor | None]:
        """Add one microbatch's gradients of all slots; the last one's returns them to their homes. Returns those of the
        homes."""
        layout, first, parts = self.slots.layout, not self.unreturned, len(self.slots.layout.shapes)
        num_homes = len(pending.homes) * parts
        if not all(layout.fused):
            chunks = self._grads()
            for slot in self.plan.slots:
                of_slot = grads[num_homes + slot * parts :]
                for total, grad, fused in zip(
                    layout.views(chunks[slot]), of_slot, layout.fused, strict=False
                ):
                    if not fused:
                        _add(total, grad, first=first)
        for expert in pending.homes if any(layout.fused) else ():
            for p, fused in zip(expert, layout.fused, strict=True):
                if fused:
                    p.grad_added_to_main_grad = True
        self.unreturned += 1
        self.backwards += 1
        microbatches, within = divmod(self.backwards, self.passes)
        if self._is_last is None or (not within and self._is_last(microbatches)):
            self._return_gradients(pending, self._grads())
            self._finish()
        return grads[:num_homes]

    def _return_gradients(self, pending: PendingGradients, summed: list[Tensor]) -> None:
        self.unreturned = 0
        buffer = self.slots.pool.grads(self.slots.index)
        chunks = buffer.chunks(self.slots.sizes, self.slots.sizes.grad_dtype)
        if (
            summed[0].dtype is not chunks[0].dtype
        ):  # bf16: they grow in the same memory, so the last one goes first
            for slot in reversed(self.plan.slots):
                chunks[slot].copy_(summed[slot].clone())
        pending.expect(self.plan.replicated, buffer, label=self.label)
        buffer.transfer = self.slots.pool.transport.return_gradients(
            self.plan, chunks, pending, label=self.label
        )
        buffer.abandon = pending.abandon
        if any(self.slots.layout.fused):
            written = [chunks] if summed[0].dtype is chunks[0].dtype else [summed, chunks]
            buffer.zero_after_transfer([of[slot] for of in written for slot in self.plan.slots])


def _add(total: Tensor, grad: Tensor | None, *, first: bool) -> None:
    """Add ``grad`` to ``total``, which it replaces where it is the first."""
    if not first:
        total += 0 if grad is None else grad
    elif grad is None:
        total.zero_()
    else:
        total.copy_(grad)


class _ExpertsOutput(torch.autograd.Function):
    """The experts' output through; ``before_backward`` runs first in the layer's backward."""

    @staticmethod
    def forward(ctx: Any, before_backward: Callable[[], None], output: Tensor) -> Tensor:
        ctx.before_backward = before_backward
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor]:
        before_backward, ctx.before_backward = ctx.before_backward, None
        before_backward()
        return None, grad
