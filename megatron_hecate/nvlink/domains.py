"""A spAG or spRS over several NVLink domains, in stages: kernels inside domains, messages between.

Each domain that has replicas of a chunk receives one copy of it, in stripes: the n-th rank of the
home's domain sends the n-th stripe to the n-th rank of the other domain, so that all network
adapters of both domains share the bytes.

| | stage | |
|---|---|---|
| spAG | in each domain | the home's domain: replicas get the chunk, each rank its stripe to send |
| | between | stripes, all at once |
| | in each domain | other domains: replicas get the chunk from the ranks that received stripes |
| spRS | in each domain | own experts: sums on the homes; other experts: stripes of the sums |
| | between | stripes of sums are added to the stripes there, one round per other domain |
| | in each domain | stripes are added on the homes |

In a round each domain receives from one other domain, each from a different one: a rank needs
memory for the stripes of one round, and the domains are added in the same order in every run. A
home with many replicas in its domain sums no stripe over the replicas: it receives the complete
chunk at the end.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from megatron_hecate.comm.transport import Copy, LayerBuffer
from megatron_hecate.nvlink.chunks import SEND, SLOT, STRIPE, Key, Part, Parts
from megatron_hecate.nvlink.schedule import GRAIN, TransferSchedule

Domains = Sequence[Sequence[int]]  # the ranks of every NVLink domain of a group, ascending

Message = tuple[Part, int]  # a part, and the rank that it is sent to or received from


@dataclasses.dataclass(frozen=True)
class Messages:
    """One rank's messages between domains.

    The messages between two ranks have the same order on both ranks.

    Args:
        sends: parts to send, with the destination rank.
        receives: parts to receive, with the source rank.
        adds: received parts, and the parts of sums on this rank that they are added to then.
    """

    sends: Sequence[Message]
    receives: Sequence[Message]
    adds: Sequence[tuple[Part, Part]] = ()


Stage = TransferSchedule | Messages


def stages_of(
    copies: Sequence[Copy], rank: int, *, domains: Domains, elements: int, sums: bool
) -> tuple[Stage, ...]:
    """Return the stages of a transfer of ``rank``; all ranks have the same number of stages.

    The sum of a home in a spRS adds the gradients of the replicas in its domain in order of rank.
    Then it adds the sums over each other domain's replicas, in order of the domains from its own
    on.

    Args:
        copies: all copies of the group, in the same order on all ranks; a rank receives a chunk at
            most once.
        rank: rank whose part is scheduled.
        domains: NVLink domains of the group.
        elements: elements of a chunk.
        sums: True for a spRS.
    """
    group = _Group(domains, rank, elements=elements, sums=sums)
    if len(domains) == 1:
        return (group.schedule(copies, {}),)
    crossing = list(group.crossing(copies))
    own_copies = [copy for copy in copies if group.domain_of[copy.rank] == group.own]
    if sums:
        return _stages_of_return(group, crossing, own_copies)
    inside = [copy for copy in own_copies if group.domain_of[copy.home] == group.own]
    from_others = [copy for copy in own_copies if group.domain_of[copy.home] != group.own]
    leaving: dict[Key, list[Part]] = {}
    entering: dict[Key, list[Part]] = {}
    sends: list[Message] = []
    receives: list[Message] = []
    for chunk in crossing:
        home, index = chunk.key
        places = {copy.rank: (SLOT, copy.slot) for copy in chunk.here}
        home_domain = group.domain_of[home]
        if home_domain == group.own:
            # Stripes lie in memory that holds the chunk anyway: the home's send buffer, slots.
            places[home] = (SEND, index)
            leaving[chunk.key] = group.stripes(chunk, places)
            for domain in chunk.others:
                sends += group.messages(chunk, leaving[chunk.key], domain=domain)
        else:
            entering[chunk.key] = group.stripes(chunk, places)
            receives += group.messages(chunk, entering[chunk.key], domain=home_domain)
    return (
        group.schedule(inside, leaving),
        Messages(sends, receives),
        group.schedule(from_others, entering),
    )


def _stages_of_return(
    group: _Group, crossing: Sequence[_Chunk], copies: Sequence[Copy]
) -> tuple[Stage, ...]:
    """Return the stages of a spRS over several domains.

    Args:
        group: the domains.
        crossing: chunks that are sent to other domains or received.
        copies: copies to this rank's domain.
    """
    sums: dict[Key, list[Part]] = {}
    for chunk in crossing:
        places = {copy.rank: (SLOT, copy.slot) for copy in chunk.here}
        sums[chunk.key] = group.stripes(chunk, places)
    # Without a replica in this domain the first received stripe is the sum.
    begun = {chunk.key for chunk in crossing if chunk.here}
    summed_here = {key: parts for key, parts in sums.items() if key in begun}
    stages: list[Stage] = [group.schedule(copies, summed_here)]
    own_chunks = [chunk for chunk in crossing if group.domain_of[chunk.key[0]] == group.own]
    busy_buffers = group.used.copy()
    num_domains = len(group.domains)
    for turn in range(1, num_domains):
        # A round reuses the stripe buffers of the previous round.
        group.used = busy_buffers.copy()
        source_domain = (group.own + turn) % num_domains
        target_domain = (group.own - turn) % num_domains
        sends: list[Message] = []
        receives: list[Message] = []
        adds: list[tuple[Part, Part]] = []
        for chunk in crossing:
            if group.domain_of[chunk.key[0]] == target_domain:
                sends += group.messages(chunk, sums[chunk.key], domain=target_domain)
        for chunk in own_chunks:
            if source_domain not in chunk.others:
                continue
            arrived = sums[chunk.key]
            if chunk.key in begun:
                arrived = group.stripes(chunk, {})
                adds += [
                    (source, total)
                    for source, total in zip(arrived, sums[chunk.key], strict=True)
                    if total.rank == group.rank
                ]
            begun.add(chunk.key)
            receives += group.messages(chunk, arrived, domain=source_domain)
        stages.append(Messages(sends, receives, adds))
    last = group.schedule([], {chunk.key: sums[chunk.key] for chunk in own_chunks})
    return (*stages, last)


@functools.cache
def stripe_elements(elements: int, sizes: tuple[int, ...]) -> int:
    """Return the elements of the largest stripe of a chunk.

    Args:
        elements: elements of a chunk.
        sizes: number of ranks of each domain.
    """
    fewest = min(sizes)
    if _is_spared(fewest, fewest - 1):
        fewest -= 1
    return max(end - begin for begin, end in _stripe_bounds(elements, fewest))


def most_stripes(layer: LayerBuffer, sizes: tuple[int, ...]) -> tuple[int, int]:
    """Return the most stripe buffers of a rank that a spAG uses at once, and the same of a spRS.

    Args:
        layer: layer whose chunks are sent between domains.
        sizes: number of ranks of each domain.
    """
    if len(sizes) == 1:
        return 0, 0
    # Upper bounds of the chunks that are sent to other domains: all chunks of the homes in this
    # domain, and all slots of the other domains. Of the chunks that are received: all slots of
    # this domain.
    largest = max(sizes)
    leave = min(largest * layer.homes, (sum(sizes) - min(sizes)) * layer.slots)
    enter = largest * layer.slots
    return leave + enter, enter + leave + min(largest * layer.homes, enter)


def _stripe_bounds(elements: int, count: int) -> list[tuple[int, int]]:
    """Return [begin, end) of each of ``count`` stripes; stripes of a small chunk may be empty."""
    grains = -(-elements // GRAIN)
    ends = [min(elements, grains * number // count * GRAIN) for number in range(count + 1)]
    return list(itertools.pairwise(ends))


def _is_spared(size: int, replicas: int) -> bool:
    """Return True if a home sums no stripe over the replicas.

    With a stripe it would receive a stripe of each replica's gradient in its domain and all other
    stripes of the sum, together more than 1.25 chunks.

    Args:
        size: ranks of the home's domain.
        replicas: replicas in the home's domain.
    """
    return (replicas + size - 1) / size > 1.25


@dataclasses.dataclass(frozen=True)
class _Chunk:
    """A chunk that is sent from this domain to others, or received from another domain.

    Args:
        key: the chunk.
        here: copies in this domain.
        others: domains with copies, without the home's domain.
        spared: True if the home sums no stripe over the replicas, see `_is_spared`.
    """

    key: Key
    here: Sequence[Copy]
    others: Sequence[int]
    spared: bool


class _Group:
    """The domains of a group, seen from one rank.

    Attributes:
        domain_of: number of each rank's domain.
        own: number of this rank's domain.
        used: stripe buffers in use on each rank of this domain.
    """

    def __init__(self, domains: Domains, rank: int, *, elements: int, sums: bool) -> None:
        self.domains = domains
        self.rank = rank
        self._elements = elements
        self._sums = sums
        self.domain_of: dict[int, int] = {}
        for number, domain in enumerate(domains):
            self.domain_of.update(dict.fromkeys(domain, number))
        self.own = self.domain_of[rank]
        self.used: Counter[int] = Counter()

    def crossing(self, copies: Sequence[Copy]) -> Iterator[_Chunk]:
        """Yield the chunks that this domain sends to others or receives, in order of their homes.

        Args:
            copies: all copies of the group.
        """
        by_chunk: dict[Key, list[Copy]] = {}
        for copy in copies:
            by_chunk.setdefault((copy.home, copy.index), []).append(copy)
        for key in sorted(by_chunk):
            home_domain = self.domain_of[key[0]]
            counts = Counter(self.domain_of[copy.rank] for copy in by_chunk[key])
            further_domains = sorted(counts.keys() - {home_domain})
            if self.own in further_domains or (further_domains and home_domain == self.own):
                own_copies = [
                    copy for copy in by_chunk[key] if self.domain_of[copy.rank] == self.own
                ]
                size = len(self.domains[home_domain])
                spared = self._sums and _is_spared(size, counts[home_domain])
                yield _Chunk(key, own_copies, further_domains, spared=spared)

    def schedule(self, copies: Sequence[Copy], parts: Parts) -> TransferSchedule:
        """Schedule what moves inside this rank's domain. Args as `TransferSchedule.of`."""
        return TransferSchedule.of(
            copies,
            self.rank,
            domain=self.domains[self.own],
            elements=self._elements,
            sums=self._sums,
            parts=parts,
        )

    def stripes(self, chunk: _Chunk, places: Mapping[int, tuple[int, int]]) -> list[Part]:
        """Assign the stripes of ``chunk`` to the ranks of this domain.

        Args:
            chunk: the chunk.
            places: kind of memory and index for stripes, by rank; a rank without a place takes a
                stripe buffer.
        """
        carriers = self._carriers(chunk, self.own)
        bounds = _stripe_bounds(self._elements, len(carriers))
        parts = []
        for rank, (begin, end) in zip(carriers, bounds, strict=True):
            if begin == end:
                continue
            if rank in places:
                parts.append(Part(rank, *places[rank], begin, end, 0))
            else:
                parts.append(Part(rank, STRIPE, self.used[rank], begin, end, begin))
                self.used[rank] += 1
        return parts

    def messages(self, chunk: _Chunk, parts: Sequence[Part], *, domain: int) -> list[Message]:
        """Return the ``parts`` that this rank exchanges with domain ``domain``, with the peers."""
        carriers = self._carriers(chunk, self.own)
        opposite = dict(zip(carriers, self._carriers(chunk, domain), strict=True))
        return [(part, opposite[self.rank]) for part in parts if part.rank == self.rank]

    def _carriers(self, chunk: _Chunk, domain: int) -> list[int]:
        """Return the ranks of ``domain`` that carry the stripes of ``chunk``, in order.

        In the home's domain the first carrier is the home, in other domains the rank with the same
        position; if the home is spared, the rank after it.
        """
        home = chunk.key[0]
        home_ranks = self.domains[self.domain_of[home]]
        ranks = self.domains[domain]
        first = home_ranks.index(home) + chunk.spared
        count = min(*map(len, self.domains), len(home_ranks) - chunk.spared)
        return [ranks[(first + i) % len(ranks)] for i in range(count)]
