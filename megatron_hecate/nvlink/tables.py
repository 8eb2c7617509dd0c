"""The copies of a plan as one rank's kernels read them (``kernels/schedule.cuh``).

Each NVLink domain that has replicas of a chunk receives one copy of it, in *stripes*: the n-th rank
of the home's domain sends the n-th stripe to the n-th rank of the other domain, so that all network
adapters of both domains share the bytes.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np

from megatron_hecate.comm.transport import Copy, LayerBuffer

CACHED: int = 512  # plans whose tables are cached; one or two per layer are in use
GRAIN: int = 128  # parts of a chunk begin at multiples of it; as in kernels/schedule.cuh
SIZES: int = 6  # numbers before the arrays of a table

Domains = Sequence[Sequence[int]]  # the ranks of every NVLink domain of a group, ascending


@dataclasses.dataclass(frozen=True)
class Crossing:
    """A chunk that crosses between this rank's domain and further ones.

    Args:
        home_domain: number of the home's domain.
        further: numbers of the domains with copies, without the home's domain.
        is_received: True if this rank's domain has copies.
    """

    home_domain: int
    further: tuple[int, ...]
    is_received: bool


@dataclasses.dataclass(frozen=True)
class DomainPlan:
    """The copies of a plan, seen from one rank and its domain.

    Args:
        copies: all copies of the group, the same on all ranks; a rank receives a chunk at most
            once.
        rank: this rank.
        domains: NVLink domains of the group.
    """

    copies: tuple[Copy, ...]
    rank: int
    domains: tuple[tuple[int, ...], ...]

    @staticmethod
    @functools.lru_cache(maxsize=CACHED)
    def of(copies: tuple[Copy, ...], rank: int, domains: tuple[tuple[int, ...], ...]) -> DomainPlan:
        """Return the plan, with its table, which all microbatches of a placement share."""
        plan = DomainPlan(copies, rank, domains)
        _ = plan.table
        return plan

    @cached_property
    def own_domain(self) -> int:
        """Number of this rank's domain."""
        return next(i for i, domain in enumerate(self.domains) if self.rank in domain)

    @property
    def num_carriers(self) -> int:
        """Ranks of a domain that carry the stripes of a chunk: the first ones."""
        return min(map(len, self.domains))

    @cached_property
    def position(self) -> int:
        """Number of this rank in its domain."""
        return self.domains[self.own_domain].index(self.rank)

    @cached_property
    def _copies(self) -> _CopyTable:
        return _CopyTable.of(self.copies, self.domains, self.own_domain)

    @cached_property
    def crossing(self) -> tuple[Crossing, ...]:
        """The chunks that cross between domains, in the order of their stripes."""
        copies = self._copies
        chunks = []
        for number in np.flatnonzero(copies.crosses):
            rows = copies.chunk == number
            home_domain = int(copies.domain_of[copies.home[rows][0]])
            domains = np.unique(copies.domain_of[copies.rank[rows]]).tolist()
            further = tuple(domain for domain in domains if domain != home_domain)
            chunks.append(Crossing(home_domain, further, self.own_domain in domains))
        return tuple(chunks)

    @cached_property
    def table(self) -> np.ndarray:
        """The table of the kernels, int32: sizes, then the arrays of a ``Table``."""
        copies = self._copies
        domain = self.domains[self.own_domain]
        place = np.full(len(copies.domain_of), -1)
        place[list(domain)] = np.arange(len(domain))
        # The chunks with a home or a copy in the domain, and their numbers among them.
        (concerned,) = np.nonzero((place[copies.homes] >= 0) | (copies.counts > 0))
        number = np.zeros(len(copies.homes), np.int64)
        number[concerned] = np.arange(len(concerned))
        counts = copies.counts[concerned]
        first = np.cumsum(counts) - counts
        homes = place[copies.homes[concerned]]
        crosses = copies.crosses[concerned]
        stripe = np.where(crosses, np.cumsum(crosses) - 1, -1)
        chunks = np.stack((homes, copies.indices[concerned], stripe, first, counts), axis=1)
        # The copies in the domain.
        rows = copies.is_here
        rank, slot, chunk = copies.rank[rows], copies.slot[rows], number[copies.chunk[rows]]
        (filled,) = np.nonzero(rank == self.rank)
        # Every rank begins with the home after it.
        turn = (homes[chunk[filled]] - place[self.rank]) % len(domain)
        filled = filled[np.argsort(turn, kind="stable")]
        position = filled - first[chunk[filled]]
        (own_chunks,) = np.nonzero(homes == place[self.rank])
        arrays = (
            chunks,
            np.stack((place[rank], slot), axis=1),
            np.stack((slot[filled], chunk[filled], position), axis=1),
            own_chunks,
            np.flatnonzero(crosses),
        )
        sizes = [*map(len, arrays), self.num_carriers]
        return np.concatenate([sizes, *map(np.ravel, arrays)]).astype(np.int32)

    def part(self, number: int, size: int) -> tuple[int, int]:
        """Return [begin, end) of rank ``number``'s stripe of a chunk; empty without one."""
        begin, end = (
            min(size, _grains(size) * n // self.num_carriers * GRAIN) for n in (number, number + 1)
        )
        return begin, end


class _CopyTable(NamedTuple):
    """All copies of a plan as arrays, seen from one domain. N copies of C chunks, R ranks.

    Args:
        home, rank, slot: of each copy, by chunk, then rank, [N].
        chunk: number of each copy's chunk, [N].
        is_here: whether each copy is in the domain, [N].
        homes, indices: of each chunk, [C].
        counts: copies of each chunk in the domain, [C].
        crosses: whether each chunk crosses between the domain and further ones, [C].
        domain_of: number of each rank's domain, [R].
    """

    home: np.ndarray
    rank: np.ndarray
    slot: np.ndarray
    chunk: np.ndarray
    is_here: np.ndarray
    homes: np.ndarray
    indices: np.ndarray
    counts: np.ndarray
    crosses: np.ndarray
    domain_of: np.ndarray

    @classmethod
    def of(cls, copies: Sequence[Copy], domains: Domains, own_domain: int) -> _CopyTable:
        """Sort ``copies`` and find the chunks that cross."""
        domain_of = np.empty(sum(map(len, domains)), np.int64)
        for number, domain in enumerate(domains):
            domain_of[list(domain)] = number
        rows = np.array(copies, np.int64).reshape(-1, len(Copy._fields))
        home, index, rank, slot = rows[np.lexsort((rows[:, 2], rows[:, 1], rows[:, 0]))].T
        is_first = np.ones(len(rows), bool)
        is_first[1:] = (home[1:] != home[:-1]) | (index[1:] != index[:-1])
        chunk = np.cumsum(is_first) - 1
        is_here = domain_of[rank] == own_domain
        homes = home[is_first]
        counts, all_counts = (np.bincount(chunk[k], minlength=len(homes)) for k in (is_here, ...))
        is_own = domain_of[homes] == own_domain
        crosses = np.where(is_own, all_counts > counts, counts > 0)
        return cls(
            home, rank, slot, chunk, is_here, homes, index[is_first], counts, crosses, domain_of
        )


def most_numbers(num_ranks: int, num_slots: int) -> int:
    """Return the most numbers of a table in a group of so many ranks with so many slots each."""
    num_copies = num_ranks * num_slots
    # Of each copy at most a chunk, a receiver, a chunk of this rank and one that crosses.
    return SIZES + (5 + 2 + 1 + 1) * num_copies + 3 * num_slots


def part_size(size: int, count: int) -> int:
    """Return the size of the largest of ``count`` parts of a chunk."""
    return min(size, -(-_grains(size) // count) * GRAIN)


def _grains(size: int) -> int:
    return -(-size // GRAIN)


def most_stripes(layer: LayerBuffer, sizes: tuple[int, ...]) -> tuple[int, int]:
    """Return the most stripe buffers of a rank that a spAG uses, and the same of a spRS.

    Args:
        layer: layer whose chunks are sent between domains.
        sizes: number of ranks of each domain.
    """
    if len(sizes) == 1:
        return 0, 0
    # Upper bounds of the chunks that leave for other domains: all chunks of the homes in this
    # domain, and all slots of the other domains. Of the chunks that enter: all slots of this
    # domain.
    largest = max(sizes)
    leaving = min(largest * layer.homes, (sum(sizes) - min(sizes)) * layer.slots)
    entering = largest * layer.slots
    # Sums of another domain arrive in buffers of their own.
    return leaving + entering, 2 * leaving + entering
