"""The copies of a plan as one rank's kernels read them (``kernels/schedule.cuh``).

Each NVLink domain that has replicas of a chunk receives one copy of it, in *stripes*: the n-th rank
of the home's domain sends the n-th stripe to the n-th rank of the other domain, so that all network
adapters of both domains share the bytes.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import chain

import numpy as np

from megatron_hecate.comm.transport import Copy, LayerBuffer

CACHED: int = 512  # plans whose tables are cached; one or two per layer are in use
GRAIN: int = 128  # parts of a chunk begin at multiples of it; as in kernels/schedule.cuh
SIZES: int = 6  # numbers before the arrays of a table

Domains = Sequence[Sequence[int]]  # the ranks of every NVLink domain of a group, ascending


@dataclasses.dataclass(frozen=True)
class Chunk:
    """A chunk that concerns one domain.

    Args:
        home: rank of the FSSDP group that owns the expert.
        index: number of the expert among the home's own experts.
        copies: copies in the domain, in order of rank.
        home_domain: number of the home's domain.
        others: numbers of the further domains with copies, without the home's domain.
        stripe: number of the stripe buffers of the carriers if the chunk crosses to another domain
            or comes from there, else -1.
    """

    home: int
    index: int
    copies: tuple[Copy, ...]
    home_domain: int
    others: tuple[int, ...]
    stripe: int


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
    def chunks(self) -> tuple[Chunk, ...]:
        """The chunks with a home or a copy in this rank's domain, by home and index."""
        domain_of = {rank: i for i, domain in enumerate(self.domains) for rank in domain}
        by_chunk: dict[tuple[int, int], list[Copy]] = {}
        for copy in self.copies:
            by_chunk.setdefault((copy.home, copy.index), []).append(copy)
        return tuple(self._chunks(by_chunk, domain_of))

    def _chunks(
        self, by_chunk: dict[tuple[int, int], list[Copy]], domain_of: dict[int, int]
    ) -> Iterator[Chunk]:
        num_stripes = 0
        for (home, index), copies in sorted(by_chunk.items()):
            here = sorted(copy for copy in copies if domain_of[copy.rank] == self.own_domain)
            home_domain = domain_of[home]
            others = sorted({domain_of[copy.rank] for copy in copies} - {home_domain})
            crosses = bool(others if home_domain == self.own_domain else here)
            if here or crosses:
                stripe = num_stripes if crosses else -1
                yield Chunk(home, index, tuple(here), home_domain, tuple(others), stripe)
                num_stripes += crosses

    @cached_property
    def table(self) -> np.ndarray:
        """The table of the kernels, int32: sizes, then the arrays of a ``Table``."""
        place = {rank: i for i, rank in enumerate(self.domains[self.own_domain])}
        chunks, receivers, filled, homes, crossing = [], list[tuple[int, int]](), [], [], []
        for number, chunk in enumerate(self.chunks):
            home = place.get(chunk.home, -1)
            count = len(chunk.copies)
            chunks.append((home, chunk.index, chunk.stripe, len(receivers), count))
            for position, copy in enumerate(chunk.copies):
                if copy.rank == self.rank:
                    # Every rank begins with the home after it.
                    turn = (home - self.position) % len(place)
                    filled.append((turn, copy.slot, number, position))
                receivers.append((place[copy.rank], copy.slot))
            if chunk.home == self.rank:
                homes.append(number)
            if chunk.stripe >= 0:
                crossing.append(number)
        lists = (chunks, receivers, [row[1:] for row in sorted(filled)])
        sizes = [*map(len, lists), len(homes), len(crossing), self.num_carriers]
        rows = chain.from_iterable(chain.from_iterable(lists))
        return np.array([*sizes, *rows, *homes, *crossing], np.int32)

    def part(self, number: int, size: int) -> tuple[int, int]:
        """Return [begin, end) of rank ``number``'s stripe of a chunk; empty without one."""
        begin, end = (
            min(size, _grains(size) * n // self.num_carriers * GRAIN) for n in (number, number + 1)
        )
        return begin, end


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
    # Sums of another domain arrive beside this domain's.
    return leaving + entering, 2 * leaving + entering
