"""Replicas of one layer: fetched weights, gathered gradients, and their states.

Module `buffers` defines lifetimes and memory, module `autograd` the autograd nodes. Replicas are
plain tensors, no ``nn.Parameter``: DDP, the optimizer, checkpoints and parameter counts see homes
only.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from megatron_hecate.comm.transport import TransferPlan, chunks_in
from megatron_hecate.device.autograd import direct_apply
from megatron_hecate.plan import Placement
from megatron_hecate.replicas.autograd import PendingGradients, release
from megatron_hecate.replicas.bound_weights import BoundWeights
from megatron_hecate.replicas.buffers import ReplicaSlots


class ReplicaState(enum.Enum):
    """What the replicas of one layer hold on this rank."""

    # Nothing has been fetched.
    EMPTY = enum.auto()
    # A fetch of weights is in flight.
    FETCHING = enum.auto()
    # Weights have arrived. Where layers share buffers, another layer may drop them.
    HELD = enum.auto()
    # Gradients of one or more backwards wait for a later one; weights are held.
    ACCUMULATING = enum.auto()
    # The sums of gradients are on their way to the homes.
    RETURNING = enum.auto()


# Legal next states.
SUCCESSORS: dict[ReplicaState, frozenset[ReplicaState]] = {
    # A buffer may hold the weights of an earlier microbatch with the same transfers.
    ReplicaState.EMPTY: frozenset({ReplicaState.FETCHING, ReplicaState.HELD}),
    # Another fetch: weights have changed, late replicas come, or another layer took the buffer.
    ReplicaState.FETCHING: frozenset({ReplicaState.FETCHING, ReplicaState.HELD}),
    ReplicaState.HELD: frozenset({ReplicaState.FETCHING, ReplicaState.ACCUMULATING}),
    # Gradients of an abandoned iteration are dropped.
    ReplicaState.ACCUMULATING: frozenset({ReplicaState.RETURNING, ReplicaState.HELD}),
    ReplicaState.RETURNING: frozenset({ReplicaState.FETCHING, ReplicaState.ACCUMULATING}),
}


class BackwardEvents(Protocol):
    """Listener to the backwards of a model's replicas; `step.prefetch.Prefetcher`."""

    def backward_begins(self, replicas: Replicas) -> None:
        """Prepare the backward of replicas that may have been dropped since their forward."""

    def backward_ended(self, replicas: Replicas) -> None:
        """Release replicas that serve one microbatch, after its last backward."""

    def is_last_backward(self, replicas: Replicas, microbatches: int) -> bool:
        """Return whether the running backward returns the gradients of all microbatches so far.

        A hint: `Replicas.return_waiting` returns the rest, and several returns add up.

        Args:
            replicas: replicas that live for an iteration.
            microbatches: number of microbatches with a complete backward.
        """


class Replicas:
    """Replicas of one layer on this rank, for one iteration or one microbatch (their lifetime).

    Args:
        slots: the layer's slots.
        placement: experts of each rank, with at least one replica on some rank.
        transfers: this rank's transfers of a fetch. A buffer identifies its content by them, so
            each iteration makes an object of its own.
        passes: passes of one microbatch through the layer.
        events: listener to the backwards.
    """

    def __init__(
        self,
        slots: ReplicaSlots,
        placement: Placement,
        transfers: TransferPlan,
        *,
        events: BackwardEvents,
        passes: int = 1,
    ) -> None:
        slots.check()
        self.slots = slots
        self.label = slots.label
        self.passes = passes
        self._passes_left = passes
        self._events = events
        # True if the replicas live for an iteration, and gradients of its microbatches add up.
        self.are_kept = slots.pool.lifetime == "iteration"
        self.placement = placement
        self.transfers = transfers
        self.buffer = slots.pool.weights(slots.index)
        self._grad_buffer = slots.pool.grads(slots.index)
        self.state = ReplicaState.EMPTY
        # Backward passes that have run.
        self.backwards = 0
        # False if the experts of the last forward are frozen.
        self._is_trained = True

    def _become(self, state: ReplicaState) -> None:
        assert state in SUCCESSORS[self.state], (
            f"{self.label}: replicas cannot go from {self.state.name} to {state.name}"
        )
        self.state = state

    @property
    def is_accumulating(self) -> bool:
        """True if gradients of backwards wait on this rank."""
        return self.state is ReplicaState.ACCUMULATING

    def drop_waiting(self) -> None:
        """Forget waiting gradients of an abandoned iteration."""
        if self.is_accumulating:
            self._become(ReplicaState.HELD)
        self.backwards = 0

    def return_waiting(self) -> PendingGradients:
        """Begin to return waiting gradients, outside of any backward.

        Collective: all ranks call it at the same point.
        """
        pending = PendingGradients(self.slots.experts)
        self._return_gradients(pending)
        return pending

    def start(self) -> None:
        """Begin to fetch the replicas, unless they are in the buffer."""
        if self.buffer.holds is not self.transfers:
            # What uses the content, such as the fetch of another layer, comes first.
            self.buffer.wait()
            self._fetch(self.transfers)

    def refresh(self, transfers: TransferPlan) -> None:
        """Begin to fetch the homes' current weights with ``transfers``, equal to the old ones.

        Collective where gradients wait: they return first.
        """
        if self.is_accumulating:
            self.return_waiting().arrive()
        self.transfers = transfers
        self.start()

    def _fetch(self, transfers: TransferPlan) -> None:
        slots = self.slots
        # An error leaves a buffer without content.
        self.buffer.holds = None
        slots.experts.wait_for_values()
        self.buffer.transfer = slots.pool.transport.fetch(
            transfers,
            slots.experts.stored(),
            self.buffer.chunks(slots.sizes.slots, *slots.sizes.weights),
            label=self.label,
        )
        self.buffer.holds = self.transfers
        self._become(ReplicaState.FETCHING)

    def add_late(self, placement: Placement, transfers: TransferPlan) -> None:
        """Change the placement and fetch the new replicas.

        Replicas in both placements keep their slots. Call it before any microbatch has computed
        with the old replicas.

        Args:
            placement: new placement.
            transfers: this rank's transfers for all replicas of ``placement``.
        """
        assert not self.backwards, f"{self.label}: replicas are replaced after a backward"
        self.start()
        self._wait_for_fetch()
        earlier_transfers = self.transfers
        self.transfers = transfers
        self.placement = placement
        self._fetch(transfers.without(earlier_transfers))

    def wait(self) -> None:
        """Wait until the weights have arrived.

        Raises:
            TransferError: if a peer dies or the transfer times out.
            RuntimeError: if the replicas were dropped.
        """
        if self.buffer.holds is not self.transfers:
            pool = self.slots.pool
            raise RuntimeError(
                f"{self.label}: a backward needs replicas that were dropped (lifetime "
                f"{pool.lifetime}): after their forward {pool.reset_because}, and another forward "
                "began an iteration; run each backward before the next forward there, or use "
                "--moe-fssdp-lifetime layer, which fetches replicas again"
            )
        self._wait_for_fetch()

    def _wait_for_fetch(self) -> None:
        # Another microbatch with the same transfers may have begun the fetch.
        self.buffer.wait()
        if self.state in (ReplicaState.EMPTY, ReplicaState.FETCHING):
            self._become(ReplicaState.HELD)

    def _grads(self) -> list[Tensor]:
        """Return the gradient accumulators, [elements] per slot."""
        sizes = self.slots.sizes
        return self._grad_buffer.chunks(sizes.slots, sizes.elements, sizes.grad_dtype)

    def join(
        self, hidden: Tensor, joined_homes: tuple[PendingGradients, Tensor] | None = None
    ) -> tuple[Tensor, list[Tensor]]:
        """Connect one microbatch to the weights of all physical experts.

        Each home parameter gets one gradient per microbatch, after its replicas' gradients have
        arrived: DDP may reduce it at once.

        Args:
            hidden: input of the experts, any shape.
            joined_homes: result of `PendingGradients.join_homes` before the attention.

        Returns:
            The experts' input and the weights, a flat list: homes first, then slots, parameter by
            parameter.
        """
        self.start()
        self._wait_for_fetch()
        bound = self._bound()
        if not torch.is_grad_enabled():
            return hidden, bound.weights
        pending, link = joined_homes or PendingGradients.join_homes(self.slots.experts)
        if {p.requires_grad for home in pending.homes for p in home} != {bound.is_trained}:
            raise RuntimeError(
                f"{self.label}: parameters of experts were frozen or unfrozen within an iteration; "
                "do so after the optimizer's step, before the next forward"
            )
        self._is_trained = bound.is_trained
        if not bound.is_trained:
            return hidden, bound.weights
        return bound.join(hidden, link, partial(self._take_gradients, pending, bound))

    def _bound(self) -> BoundWeights:
        """Return the weights, made once per object of transfers.

        Homes are the same tensors, with the same values, as long as the object is the same.
        """
        slots = self.slots
        sizes = slots.sizes
        bound = self.buffer.bound.get(slots.index)
        if bound is not None and bound.transfers is self.transfers:
            return bound
        slots.experts.wait_for_values()
        # New tensors, which autograd may save: no transfer writes them.
        chunks = chunks_in(self.buffer.memory, sizes.slots, *sizes.weights)
        bound = BoundWeights(
            self.transfers,
            slots.experts.homes(),
            [slots.experts.weights_in(chunk) for chunk in chunks],
            layout=slots.experts.layout,
            grads=self._grads() if slots.experts.are_trained() else (),
        )
        # TransformerEngine attaches derived tensors to quantized weights: do not keep such weights
        # where the buffer serves another microbatch next.
        if self.are_kept or not sizes.stored_bytes:
            self.buffer.bound[slots.index] = bound
        return bound

    def computed_by(self, output: Tensor) -> Tensor:
        """Attach a node to ``output`` that prepares replicas and gradients for the backward."""
        if output.requires_grad:
            return _attach(partial(self._prepare_backward, self._is_trained), output)
        if torch.is_grad_enabled():
            # The experts and everything before are frozen: no backward follows.
            self._finish()
        # Else the forward is recomputed later, or has no backward.
        return output

    def _finish(self) -> None:
        self._passes_left -= 1
        if not (self._passes_left or self.are_kept):
            self._events.backward_ended(self)

    def _prepare_backward(self, is_trained: bool) -> None:
        # Delayed gradients that are still queued belong to a backward that failed.
        self.slots.experts.drop_delayed()
        if not self.are_kept:
            self._events.backward_begins(self)
        self.wait()
        if not is_trained:
            # No gradient marks the end of the experts' backward.
            torch.autograd.Variable._execution_engine.queue_callback(self._finish)
        elif not self.is_accumulating:
            self._grad_buffer.clear()
            if self.slots.experts.layout.fuses_any:
                # Fused GEMMs add gradients to it.
                self._grad_buffer.memory.zero_()

    def _take_gradients(
        self,
        pending: PendingGradients,
        bound: BoundWeights,
        node: Any,
        grads: list[Tensor | None],
    ) -> None:
        """Take one microbatch's gradients of all weights, or queue delayed gradients."""
        pending.check_destination(node, self.label)
        if self.slots.experts.delayed is None:
            self._add_gradients(pending, bound, grads)
        else:
            pending.begin()
            take = partial(self._add_gradients, pending, bound)
            self.slots.experts.delayed.append((grads, take))

    def _add_gradients(
        self, pending: PendingGradients, bound: BoundWeights, grads: list[Tensor | None]
    ) -> PendingGradients:
        """Accumulate one microbatch's gradients of all slots; return the sums after the last one.

        Returns:
            ``pending``, which takes the gradients of the homes.
        """
        layout = self.slots.experts.layout
        first = self.state is not ReplicaState.ACCUMULATING
        for index, total in bound.carried_sums:
            _add(total, grads[index], first=first)
        for part, is_fused in enumerate(layout.fused):
            if is_fused:
                # DDP then skips the placeholder that autograd carries, as after stock's GEMM.
                for expert in pending.homes:
                    expert[part].grad_added_to_main_grad = True
        if first:
            self._become(ReplicaState.ACCUMULATING)
        self.backwards += 1
        microbatches, pass_index = divmod(self.backwards, self.passes)
        if not self.are_kept or (
            not pass_index and self._events.is_last_backward(self, microbatches)
        ):
            self._return_gradients(pending)
            self._finish()
        pending.take(grads[: len(pending.homes) * len(layout.shapes)])
        return pending

    def _return_gradients(self, pending: PendingGradients) -> None:
        self._become(ReplicaState.RETURNING)
        buffer = self._grad_buffer
        pending.expect(self.transfers.replicated, buffer)
        buffer.transfer = self.slots.pool.transport.return_gradients(
            self.transfers, self._grads(), pending, label=self.label
        )
        buffer.abandon = pending.abandon


def _add(total: Tensor, grad: Tensor | None, *, first: bool) -> None:
    """Add ``grad`` to ``total``; the first one overwrites ``total``."""
    if not first:
        total += 0 if grad is None else grad
    elif grad is None:
        total.zero_()
    else:
        total.copy_(grad)


class _ExpertsOutput(torch.autograd.Function):
    """Identity on the experts' output; ``before_backward`` runs first in the layer's backward."""

    @staticmethod
    def forward(ctx: Any, before_backward: Callable[[], None], output: Tensor) -> Tensor:
        ctx.before_backward = before_backward
        # returned as a view by autograd
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor]:
        release(ctx, "before_backward")()
        return None, grad


_attach = direct_apply(_ExpertsOutput)
