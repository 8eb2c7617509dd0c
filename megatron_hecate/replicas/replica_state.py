"""States of a layer's replicas, and the legal transitions between them."""

from __future__ import annotations

import enum


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
    # A buffer may hold the weights of an earlier microbatch with the same plan.
    ReplicaState.EMPTY: frozenset({ReplicaState.FETCHING, ReplicaState.HELD}),
    # Another fetch: weights have changed, late replicas come, or another layer took the buffer.
    ReplicaState.FETCHING: frozenset({ReplicaState.FETCHING, ReplicaState.HELD}),
    ReplicaState.HELD: frozenset({ReplicaState.FETCHING, ReplicaState.ACCUMULATING}),
    # Gradients of an abandoned iteration are dropped.
    ReplicaState.ACCUMULATING: frozenset({ReplicaState.RETURNING, ReplicaState.HELD}),
    ReplicaState.RETURNING: frozenset({ReplicaState.FETCHING, ReplicaState.ACCUMULATING}),
}
