"""What a placement is: who is home to an expert, who lends it a slot, and where each copy physically lies.

A rank has P physical slots per layer: first the experts it is home to, then room for guests. ``table`` says what every
physical slot holds, so nothing outside `Placement.initial` assumes how many homes a rank has. E = 4 experts, R = 2
ranks, one guest slot each, expert 0 lent to rank 1::

              homes      guest
    rank 0   [ 0    1 ]  [ - ]      table = [[0, 1, -1],
    rank 1   [ 2    3 ]  [ 0 ]               [2, 3,  0]]

A *physical expert* is the pair (rank, slot), numbered ``rank * P + slot``: that is what Megatron's dispatcher sees.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from functools import cached_property

import numpy as np

from megatron_hecate.plan.graph import graph_of
from megatron_hecate.plan.world import World

EMPTY = -1  # a physical slot that holds nothing


@dataclasses.dataclass(frozen=True, eq=False)
class Placement:
    """Homes and guests of one layer. Immutable; `with_guests` makes a new one.

    Args:
        home: [E] int, the rank that owns each expert.
        table: [R, P] int, the expert in each physical slot, or ``EMPTY``.

    Raises:
        ValueError: if an expert is not held exactly once by its home, a rank holds an expert twice, or an expert or
            rank does not exist.
    """

    home: np.ndarray
    table: np.ndarray

    def __post_init__(self) -> None:
        num_ranks, _ = self.table.shape
        if not ((self.home >= 0) & (self.home < num_ranks)).all():
            raise ValueError(f"home must name ranks 0 to {num_ranks - 1}, got {self.home.tolist()}")
        if not ((self.table == EMPTY) | ((self.table >= 0) & (self.table < len(self.home)))).all():
            raise ValueError(f"table must name experts 0 to {len(self.home) - 1} or {EMPTY}, got {self.table.tolist()}")
        for rank in range(num_ranks):
            held = self.table[rank][self.table[rank] != EMPTY]
            if len(set(held.tolist())) != len(held):
                raise ValueError(f"rank {rank} holds an expert twice: slots {self.table[rank].tolist()}")
        for expert, rank in enumerate(self.home.tolist()):
            if expert not in self.table[rank]:
                raise ValueError(
                    f"expert {expert} has its home on rank {rank}, whose slots are {self.table[rank].tolist()}"
                )
        self.home.setflags(write=False)
        self.table.setflags(write=False)

    @classmethod
    def initial(cls, num_experts: int, num_ranks: int, *, num_slots: int) -> Placement:
        """Megatron's expert-parallel partition: rank r is home to experts ``r * E/R .. (r+1) * E/R``, no guests.

        Raises:
            ValueError: if E is not divisible by R, or the slots exceed the experts that have their home elsewhere.
        """
        if num_experts % num_ranks:
            below = num_experts // num_ranks * num_ranks
            nearest = f"{below} or {below + num_ranks}" if below else f"{num_ranks}"
            raise ValueError(f"num_experts={num_experts} is not divisible by {num_ranks} ranks; use {nearest}")
        per_rank = num_experts // num_ranks
        most = num_experts - per_rank
        if not 0 <= num_slots <= most:
            raise ValueError(
                f"slots={num_slots} is out of range: a rank that is home to {per_rank} of {num_experts} experts "
                f"can host 0 to {most} guests"
            )
        home = np.repeat(np.arange(num_ranks), per_rank)
        table = np.full((num_ranks, per_rank + num_slots), EMPTY, dtype=np.int64)
        table[:, :per_rank] = np.arange(num_experts).reshape(num_ranks, per_rank)
        return cls(home=home, table=table)

    def with_guests(self, guests: Iterable[tuple[int, int]]) -> Placement:
        """The same homes, and exactly these guests.

        Args:
            guests: (expert, rank) pairs; each takes the rank's lowest free slot, in the given order.

        Raises:
            ValueError: if a rank has no slot left, already holds the expert, or there is no such expert or rank.
        """
        table = np.where(self.is_guest, EMPTY, self.table)
        for expert, rank in guests:
            if not (0 <= expert < self.num_experts and 0 <= rank < self.num_ranks):
                raise ValueError(
                    f"no expert {expert} or no rank {rank}: there are {self.num_experts} and {self.num_ranks}"
                )
            free = np.flatnonzero(table[rank] == EMPTY)
            if not len(free):
                raise ValueError(f"no slot left on rank {rank} for a guest of expert {expert}: {table[rank].tolist()}")
            table[rank, free[0]] = expert
        return Placement(home=self.home.copy(), table=table)

    @classmethod
    def trusted(cls, home: np.ndarray, table: np.ndarray) -> Placement:
        """A placement that a planner built by rules which keep it valid: not checked, because planning is timed.

        `valid.assert_valid` checks it in tests and in debug mode.
        """
        placement = object.__new__(cls)
        object.__setattr__(placement, "home", home)
        object.__setattr__(placement, "table", table)
        home.setflags(write=False)
        table.setflags(write=False)
        return placement

    @cached_property
    def without_guests(self) -> Placement:
        """The homes alone."""
        return self.with_guests(())

    @cached_property
    def free_slots(self) -> np.ndarray:
        """[R] slots that hold nothing."""
        free_slots = (self.table == EMPTY).sum(axis=1)
        free_slots.setflags(write=False)
        return free_slots

    @cached_property
    def most_free(self) -> int:
        """The most of them that a rank has."""
        return int(self.free_slots.max())

    @property
    def num_experts(self) -> int:
        return len(self.home)

    @property
    def num_ranks(self) -> int:
        return self.table.shape[0]

    @property
    def slots_per_rank(self) -> int:
        """P: physical slots of a rank, homes included."""
        return self.table.shape[1]

    @cached_property
    def is_guest(self) -> np.ndarray:
        """[R, P] bool: the slot holds a guest."""
        held_by = np.arange(self.num_ranks)[:, None]
        is_guest = (self.table != EMPTY) & (self.home[self.table] != held_by)
        is_guest.setflags(write=False)
        return is_guest

    @cached_property
    def holders(self) -> np.ndarray:
        """[E, R] bool: the rank holds the expert, as home or as guest."""
        holders = np.zeros((self.num_experts, self.num_ranks), dtype=bool)
        rank, slot = np.nonzero(self.table != EMPTY)
        holders[self.table[rank, slot], rank] = True
        holders.setflags(write=False)
        return holders

    def graph(self, world: World) -> np.ndarray:
        """The graph of holders on these nodes, packed (`graph.pack`); computed once."""
        graphs = self.__dict__.setdefault("_graphs", [])
        for node, graph in graphs:
            if node is world.node or node == world.node:
                return graph
        graphs.append((world.node, graph_of(self.table.ravel(), self.home, world.node_index, world.order)))
        return graphs[-1][1]

    @cached_property
    def num_guests(self) -> int:
        return int(self.is_guest.sum())

    @cached_property
    def guests(self) -> tuple[tuple[int, int, int], ...]:
        """(expert, rank, slot) of every guest, by expert, then rank: the order in which every transport moves them."""
        rank, slot = np.nonzero(self.is_guest)
        return tuple(sorted(zip(self.table[rank, slot].tolist(), rank.tolist(), slot.tolist(), strict=True)))

    def slot_of(self, expert: int, rank: int) -> int:
        """Physical slot of ``expert`` on ``rank``, which must hold it."""
        return int(np.flatnonzero(self.table[rank] == expert)[0])
