"""Placement of one layer's experts: homes, replicas, and the physical slot of each copy.

A rank has P physical slots per layer: first its home experts, then room for replicas. ``table``
maps every physical slot to its expert, so only `Placement.initial` assumes a number of homes per
rank. Example with E = 4 experts, R = 2 ranks, one replica slot each, and a replica of expert 0 on
rank 1::

              homes      replica
    rank 0   [ 0    1 ]  [ - ]      table = [[0, 1, -1],
    rank 1   [ 2    3 ]  [ 0 ]               [2, 3,  0]]

A *physical expert* is the pair (rank, slot), numbered ``rank * P + slot``; Megatron's dispatcher
routes to physical experts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from functools import cached_property

import numpy as np

from megatron_hecate.config import check_slots

# marks an empty physical slot
EMPTY = -1


@dataclasses.dataclass(frozen=True, eq=False)
class Placement:
    """Homes and replicas of one layer. Immutable; `with_replicas` makes a new placement.

    Planning time counts, so nothing is validated here.

    Args:
        home: [E] int, the rank that owns each expert.
        table: [R, P] int, the expert in each physical slot, or ``EMPTY``.
    """

    home: np.ndarray
    table: np.ndarray

    def __post_init__(self) -> None:
        self.home.setflags(write=False)
        self.table.setflags(write=False)

    @classmethod
    def initial(cls, num_experts: int, num_ranks: int, *, num_slots: int) -> Placement:
        """Build Megatron's expert-parallel partition, without replicas.

        Rank r is home to experts ``r * E/R`` to ``(r+1) * E/R - 1``.

        Raises:
            ValueError: if E is not divisible by R, or the slots exceed the experts with their home
                on another rank.
        """
        check_slots(num_slots, num_experts=num_experts, num_ranks=num_ranks)
        per_rank = num_experts // num_ranks
        home = np.repeat(np.arange(num_ranks), per_rank)
        table = np.full((num_ranks, per_rank + num_slots), EMPTY, dtype=np.int64)
        table[:, :per_rank] = np.arange(num_experts).reshape(num_ranks, per_rank)
        return cls(home=home, table=table)

    def with_homes(self, order: np.ndarray) -> Placement:
        """Reassign the homes: the same number per rank, without replicas.

        Args:
            order: [E] int, the expert of each position; positions are numbered rank by rank.
        """
        by_rank = order.reshape(self.num_ranks, -1)
        table = np.full_like(self.table, EMPTY)
        table[:, : by_rank.shape[1]] = by_rank
        home = np.empty_like(self.home)
        home[by_rank] = np.arange(self.num_ranks)[:, None]
        return Placement(home=home, table=table)

    def with_replicas(self, replicas: Iterable[tuple[int, int]]) -> Placement:
        """Replace all replicas and keep the homes.

        Args:
            replicas: (expert, rank) pairs; each takes the rank's lowest free slot, in the given
                order.
        """
        table = np.where(self.is_replica, EMPTY, self.table)
        for expert, rank in replicas:
            table[rank, np.flatnonzero(table[rank] == EMPTY)[0]] = expert
        return Placement(home=self.home, table=table)

    @cached_property
    def homes_only(self) -> Placement:
        """Placement with the same homes and no replicas."""
        return self.with_replicas(())

    @cached_property
    def num_experts(self) -> int:
        return len(self.home)

    @property
    def num_ranks(self) -> int:
        return self.table.shape[0]

    @property
    def slots_per_rank(self) -> int:
        """Physical slots of a rank (P), homes included."""
        return self.table.shape[1]

    @cached_property
    def is_replica(self) -> np.ndarray:
        """[R, P] bool: whether the slot holds a replica."""
        held_by = np.arange(self.num_ranks)[:, None]
        is_replica = (self.table != EMPTY) & (self.home[self.table] != held_by)
        is_replica.setflags(write=False)
        return is_replica

    @cached_property
    def holders(self) -> np.ndarray:
        """[E, R] bool: whether the rank holds the expert, as home or as replica."""
        holders = np.zeros((self.num_experts, self.num_ranks), dtype=bool)
        rank, slot = np.nonzero(self.table != EMPTY)
        holders[self.table[rank, slot], rank] = True
        holders.setflags(write=False)
        return holders

    @cached_property
    def num_replicas(self) -> int:
        return int(self.is_replica.sum())
