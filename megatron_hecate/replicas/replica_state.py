"""States of a layer's replicas, the legal transitions, and what replicas tell of a backward."""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from megatron_hecate.replicas.layer_replicas import Replicas


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
