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
import hashlib
from collections.abc import Iterable
from functools import cached_property

import numpy as np

from megatron_hecate.config import check_slots

# marks an empty physical slot
EMPTY = -1


@dataclasses.dataclass(frozen=True, eq=False)
class Placement:
    """Homes and replicas of one layer. Immutable; `with_replicas` makes a new placement.

    Args:
        home: [E] int, the rank that owns each expert.
        table: [R, P] int, the expert in each physical slot, or ``EMPTY``.

    Raises:
        ValueError: if an expert is not held exactly once by its home, a rank holds an expert twice,
            or an expert or rank does not exist.
    """

    home: np.ndarray
    table: np.ndarray

    def __post_init__(self) -> None:
        num_ranks, _ = self.table.shape
        if not ((self.home >= 0) & (self.home < num_ranks)).all():
            raise ValueError(f"home must name ranks 0 to {num_ranks - 1}, got {self.home.tolist()}")
        if not ((self.table == EMPTY) | ((self.table >= 0) & (self.table < len(self.home)))).all():
            raise ValueError(
                f"table must name experts 0 to {len(self.home) - 1} or {EMPTY}, "
                f"got {self.table.tolist()}"
            )
        for rank in range(num_ranks):
            experts = self.table[rank][self.table[rank] != EMPTY]
            if len(set(experts.tolist())) != len(experts):
                raise ValueError(
                    f"rank {rank} holds an expert twice: slots {self.table[rank].tolist()}"
                )
        for expert, rank in enumerate(self.home.tolist()):
            if expert not in self.table[rank]:
                slots = self.table[rank].tolist()
                raise ValueError(
                    f"expert {expert} has its home on rank {rank}, whose slots are {slots}"
                )
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

        Raises:
            ValueError: if a rank has no free slot, already holds the expert, or an expert or rank
                does not exist.
        """
        table = np.where(self.is_replica, EMPTY, self.table)
        for expert, rank in replicas:
            if not (0 <= expert < self.num_experts and 0 <= rank < self.num_ranks):
                raise ValueError(
                    f"no expert {expert} or no rank {rank}: "
                    f"there are {self.num_experts} and {self.num_ranks}"
                )
            free = np.flatnonzero(table[rank] == EMPTY)
            if not len(free):
                raise ValueError(
                    f"no slot left on rank {rank} for a replica of expert {expert}: "
                    f"{table[rank].tolist()}"
                )
            table[rank, free[0]] = expert
        return Placement(home=self.home.copy(), table=table)

    @classmethod
    def trusted(cls, home: np.ndarray, table: np.ndarray) -> Placement:
        """Make a placement without validation, because planning time counts.

        For planners, whose rules keep a placement valid. `check` validates it in tests and in
        development mode.
        """
        placement = object.__new__(cls)
        object.__setattr__(placement, "home", home)
        object.__setattr__(placement, "table", table)
        home.setflags(write=False)
        table.setflags(write=False)
        return placement

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

    @cached_property
    def replicas(self) -> tuple[tuple[int, int, int], ...]:
        """(expert, rank, slot) of every replica, sorted: the order of all transports."""
        rank, slot = np.nonzero(self.is_replica)
        expert = self.table[rank, slot]
        return tuple(sorted(zip(expert.tolist(), rank.tolist(), slot.tolist(), strict=True)))

    def checked_load(self, load: np.ndarray) -> np.ndarray:
        """Validate a user's ``load``, tokens per expert; return it as contiguous [E] int64.

        Raises:
            ValueError: for a wrong shape, a dtype that is no integer, or a negative count.
        """
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
        """Signed 64-bit hash (BLAKE2b) of ``home`` and ``table``.

        It does not depend on integer width, byte order or memory layout. Different placements
        collide with probability 2^-64.
        """
        digest = hashlib.blake2b(digest_size=8)
        for name, array in (("home", self.home), ("table", self.table)):
            digest.update(f"{name}{array.shape}".encode())
            digest.update(array.astype("<i8", order="C", casting="same_kind").tobytes())
        return int.from_bytes(digest.digest(), "big", signed=True)

    def check(self, *, num_slots: int | None = None) -> None:
        """Validate a placement made by `trusted`; recompute its views from ``home`` and ``table``.

        Args:
            num_slots: most replicas of a rank; ``None`` for no limit.

        Raises:
            AssertionError: for a bug of ours; the message names the experts, ranks and values.
        """
        # Explicit raises, not ``assert``: development mode must check under ``python -O``, too.
        for name in ("home", "table"):
            if not np.issubdtype((dtype := getattr(self, name).dtype), np.integer):
                raise AssertionError(f"{name} must be integers, got dtype {dtype}")
        try:
            fresh = Placement(home=self.home.copy(), table=self.table.copy())
        except ValueError as error:
            raise AssertionError(str(error)) from error
        num_replicas = fresh.is_replica.sum(axis=1)
        max_replicas = num_replicas.max() if num_slots is None else num_slots
        for rank in np.flatnonzero(num_replicas > max_replicas):
            raise AssertionError(
                f"rank {rank} holds {num_replicas[rank]} replicas, num_slots={num_slots}: "
                f"slots {fresh.table[rank].tolist()}"
            )
        # The views are cached. A plan built on a stale view would send tokens to ranks that do not
        # hold the expert.
        for expert, rank in np.argwhere(self.holders != fresh.holders):
            raise AssertionError(
                f"holders[{expert}, {rank}] is {bool(self.holders[expert, rank])}, "
                f"but rank {rank} has slots {fresh.table[rank].tolist()}"
            )
        if self.replicas != fresh.replicas:
            raise AssertionError(f"replicas are {self.replicas}, the table says {fresh.replicas}")
