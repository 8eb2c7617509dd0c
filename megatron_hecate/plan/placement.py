"""What a placement is: who is home to an expert, who holds a replica of it, and where each copy physically lies.

A rank has P physical slots per layer: first the experts it is home to, then room for replicas. ``table`` says what
every physical slot holds, so nothing outside `Placement.initial` assumes how many homes a rank has. E = 4 experts, R =
2 ranks, one replica slot each, a replica of expert 0 on rank 1::

              homes      replica
    rank 0   [ 0    1 ]  [ - ]      table = [[0, 1, -1],
    rank 1   [ 2    3 ]  [ 0 ]               [2, 3,  0]]

A *physical expert* is the pair (rank, slot), numbered ``rank * P + slot``: that is what Megatron's dispatcher sees.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterable
from functools import cached_property

import numpy as np

EMPTY = -1  # a physical slot that holds nothing


@dataclasses.dataclass(frozen=True, eq=False)
class Placement:
    """Homes and replicas of one layer. Immutable; `with_replicas` makes a new one.

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
            raise ValueError(
                f"table must name experts 0 to {len(self.home) - 1} or {EMPTY}, got {self.table.tolist()}"
            )
        for rank in range(num_ranks):
            held = self.table[rank][self.table[rank] != EMPTY]
            if len(set(held.tolist())) != len(held):
                raise ValueError(
                    f"rank {rank} holds an expert twice: slots {self.table[rank].tolist()}"
                )
        for expert, rank in enumerate(self.home.tolist()):
            if expert not in self.table[rank]:
                raise ValueError(
                    f"expert {expert} has its home on rank {rank}, whose slots are {self.table[rank].tolist()}"
                )
        self.home.setflags(write=False)
        self.table.setflags(write=False)

    @classmethod
    def initial(cls, num_experts: int, num_ranks: int, *, num_slots: int) -> Placement:
        """Megatron's expert-parallel partition: rank r is home to experts ``r * E/R .. (r+1) * E/R``, no replicas.

        Raises:
            ValueError: if E is not divisible by R, or the slots exceed the experts that have their home elsewhere.
        """
        if num_experts % num_ranks:
            below = num_experts // num_ranks * num_ranks
            nearest = f"{below} or {below + num_ranks}" if below else f"{num_ranks}"
            raise ValueError(
                f"num_experts={num_experts} is not divisible by {num_ranks} ranks; use {nearest}"
            )
        per_rank = num_experts // num_ranks
        most = num_experts - per_rank
        if not 0 <= num_slots <= most:
            raise ValueError(
                f"slots={num_slots} is out of range: a rank that is home to {per_rank} of {num_experts} experts "
                f"can host 0 to {most} replicas"
            )
        home = np.repeat(np.arange(num_ranks), per_rank)
        table = np.full((num_ranks, per_rank + num_slots), EMPTY, dtype=np.int64)
        table[:, :per_rank] = np.arange(num_experts).reshape(num_ranks, per_rank)
        return cls(home=home, table=table)

    def with_homes(self, order: np.ndarray) -> Placement:
        """As many homes on each rank, without replicas: ``order`` [E] is the expert in each place, rank by rank."""
        table, of_rank = np.full_like(self.table, EMPTY), order.reshape(self.num_ranks, -1)
        table[:, : of_rank.shape[1]] = of_rank
        home = np.empty_like(self.home)
        home[of_rank] = np.arange(self.num_ranks)[:, None]
        return Placement(home=home, table=table)

    def with_replicas(self, replicas: Iterable[tuple[int, int]]) -> Placement:
        """The same homes, and exactly these replicas.

        Args:
            replicas: (expert, rank) pairs; each takes the rank's lowest free slot, in the given order.

        Raises:
            ValueError: if a rank has no slot left, already holds the expert, or there is no such expert or rank.
        """
        table = np.where(self.is_replica, EMPTY, self.table)
        for expert, rank in replicas:
            if not (0 <= expert < self.num_experts and 0 <= rank < self.num_ranks):
                raise ValueError(
                    f"no expert {expert} or no rank {rank}: there are {self.num_experts} and {self.num_ranks}"
                )
            free = np.flatnonzero(table[rank] == EMPTY)
            if not len(free):
                raise ValueError(
                    f"no slot left on rank {rank} for a replica of expert {expert}: {table[rank].tolist()}"
                )
            table[rank, free[0]] = expert
        return Placement(home=self.home.copy(), table=table)

    @classmethod
    def trusted(cls, home: np.ndarray, table: np.ndarray) -> Placement:
        """A placement that a planner built by rules which keep it valid: not checked, because planning is timed.

        `check` does, in tests and in development mode.
        """
        placement = object.__new__(cls)
        object.__setattr__(placement, "home", home)
        object.__setattr__(placement, "table", table)
        home.setflags(write=False)
        table.setflags(write=False)
        return placement

    @cached_property
    def homes_only(self) -> Placement:
        """The homes alone."""
        return self.with_replicas(())

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
    def is_replica(self) -> np.ndarray:
        """[R, P] bool: the slot holds a replica."""
        held_by = np.arange(self.num_ranks)[:, None]
        is_replica = (self.table != EMPTY) & (self.home[self.table] != held_by)
        is_replica.setflags(write=False)
        return is_replica

    @cached_property
    def holders(self) -> np.ndarray:
        """[E, R] bool: the rank holds the expert, as home or as replica."""
        holders = np.zeros((self.num_experts, self.num_ranks), dtype=bool)
        rank, slot = np.nonzero(self.table != EMPTY)
        holders[self.table[rank, slot], rank] = True
        holders.setflags(write=False)
        return holders

    @cached_property
    def num_replicas(self) -> int:
        return int(self.is_replica.sum())

    @cached_property
    def replicas(self) -> tuple[tuple[int, int, int], ...]:
        """(expert, rank, slot) of every replica, by expert, then rank: the order in which every transport moves
        them."""
        rank, slot = np.nonzero(self.is_replica)
        return tuple(
            sorted(zip(self.table[rank, slot].tolist(), rank.tolist(), slot.tolist(), strict=True))
        )

    def checked_load(self, load: np.ndarray) -> np.ndarray:
        """[E] contiguous int64 of a user's ``load``, or ValueError."""
        load = np.asarray(load)
        if load.shape != (self.num_experts,):
            raise ValueError(
                f"load has shape {load.shape}, expected [{self.num_experts}], one count per expert"
            )
        if not np.issubdtype(load.dtype, np.integer):
            raise ValueError(f"load has dtype {load.dtype}, expected integers; round it first")
        if load.min() < 0:
            raise ValueError(f"load must be 0 or more, got {load.min()} for expert {load.argmin()}")
        return np.ascontiguousarray(load, dtype=np.int64)

    @property
    def fingerprint(self) -> int:
        """A signed 64-bit number that differs, but for chance (2^-64), whenever two placements differ: BLAKE2b of
        ``home`` and ``table``. It does not depend on integer width, byte order or memory layout."""
        digest = hashlib.blake2b(digest_size=8)
        for name, array in (("home", self.home), ("table", self.table)):
            digest.update(f"{name}{array.shape}".encode())
            digest.update(array.astype("<i8", order="C", casting="same_kind").tobytes())
        return int.from_bytes(digest.digest(), "big", signed=True)

    def check(self, *, num_slots: int | None = None) -> None:
        """Check what `trusted` did not, recomputed from ``home`` and ``table``, and at most ``num_slots`` replicas per
        rank. Explicit raises, not ``assert``: development mode must check under ``python -O`` too.

        Raises:
            AssertionError: naming the experts, ranks and values that break a rule; it is a bug of ours.
        """
        for name in ("home", "table"):
            if not np.issubdtype((dtype := getattr(self, name).dtype), np.integer):
                raise AssertionError(f"{name} must be integers, got dtype {dtype}")
        try:
            fresh = Placement(home=self.home.copy(), table=self.table.copy())
        except ValueError as error:
            raise AssertionError(str(error)) from error
        held = fresh.is_replica.sum(axis=1)
        for rank in np.flatnonzero(held > (held.max() if num_slots is None else num_slots)):
            raise AssertionError(
                f"rank {rank} holds {held[rank]} replicas, num_slots={num_slots}: slots {fresh.table[rank].tolist()}"
            )
        # the views are cached; a plan built on stale ones would send tokens to ranks without the expert
        for expert, rank in np.argwhere(self.holders != fresh.holders):
            raise AssertionError(
                f"holders[{expert}, {rank}] is {bool(self.holders[expert, rank])}, "
                f"but rank {rank} has slots {fresh.table[rank].tolist()}"
            )
        if self.replicas != fresh.replicas:
            raise AssertionError(f"replicas are {self.replicas}, the table says {fresh.replicas}")
