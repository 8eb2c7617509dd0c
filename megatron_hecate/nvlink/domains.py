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
import itertools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from megatron_hecate.comm.transport import Copy, LayerBuffer
from megatron_hecate.nvlink.chunks import Key
from megatron_hecate.nvlink.pulls import GRAIN
from megatron_hecate.nvlink.schedule import Part, Place, Pull, TransferSchedule

Domains = Sequence[Sequence[int]]  # the ranks of every NVLink domain of a group, ascending


@dataclasses.dataclass(frozen=True)
class Messages:
    """One rank's messages between domains.

    The messages between two ranks have the same order on both ranks.

    Args:
        sends: parts to send, with the destination rank.
        receives: parts to receive, with the source rank.
    """

    sends: tuple[tuple[Part, int], ...]
    receives: tuple[tuple[Part, int], ...]


Stage = TransferSchedule | Messages


class Stages:
    """Stages of a transfer over several domains; all ranks have the same number of stages."""

    @staticmethod
    def of_fetch(
        copies: Sequence[Copy], rank: int, *, domains: Domains, elements: int
    ) -> tuple[Stage, ...]:
        """Return the stages of the spAG of ``rank``.

        Args:
            copies: all copies of the group, in the same order on all ranks; a rank receives a chunk
                at most once.
            rank: rank whose part is scheduled.
            domains: NVLink domains of the group.
            elements: elements of a chunk.
        """
        if len(domains) == 1:
            return (TransferSchedule.of_fetch(copies, rank, domain=domains[0], elements=elements),)
        group = _Group(domains, rank, elements=elements, sums=False)
        leaving: dict[Key, list[Part]] = {}
        entering: dict[Key, list[Part]] = {}
        sends: list[tuple[Part, int]] = []
        receives: list[tuple[Part, int]] = []
        for chunk in group.crossing(copies):
            home, index = chunk.key
            slots = {copy.rank: Place(copy.rank, "slot", copy.slot) for copy in chunk.here}
            if group.domain_of[home] == group.own:
                # Stripes lie in memory that holds the chunk anyway: the home's send buffer, slots.
                places = {home: Place(home, "send", index), **slots}
                leaving[chunk.key] = group.stripes(chunk, places)
                for target_domain in chunk.others:
                    sends += group.messages(chunk, leaving[chunk.key], domain=target_domain)
            else:
                entering[chunk.key] = group.stripes(chunk, slots)
                target_domain = group.domain_of[home]
                receives += group.messages(chunk, entering[chunk.key], domain=target_domain)
        inside, from_others = group.copies_to_own_domain(copies)
        domain = domains[group.own]
        return (
            TransferSchedule.of_fetch(
                inside, rank, domain=domain, elements=elements, parts=leaving
            ),
            Messages(tuple(sends), tuple(receives)),
            TransferSchedule.of_fetch(
                from_others, rank, domain=domain, elements=elements, parts=entering
            ),
        )

    @staticmethod
    def of_return(
        copies: Sequence[Copy], rank: int, *, domains: Domains, elements: int
    ) -> tuple[Stage, ...]:
        """Return the stages of the spRS of ``rank``. Args as `of_fetch`.

        The sum of a home adds the gradients of the replicas in its domain in order of rank. Then it
        adds the sums over each other domain's replicas, in order of the domains from its own on.
        """
        if len(domains) == 1:
            return (TransferSchedule.of_return(copies, rank, domain=domains[0], elements=elements),)
        group = _Group(domains, rank, elements=elements, sums=True)
        domain = domains[group.own]
        rounds = range(1, len(domains))
        crossing = list(group.crossing(copies))
        stripes = _StripeSums(group, crossing)
        sends = _sends_of_rounds(group, crossing, stripes)
        inside, from_others = group.copies_to_own_domain(copies)
        stages: list[Stage] = [
            TransferSchedule.of_return(
                [*inside, *from_others],
                rank,
                domain=domain,
                elements=elements,
                parts=stripes.begun.copy(),
            )
        ]
        own_chunks = [chunk for chunk in crossing if group.domain_of[chunk.key[0]] == group.own]
        busy_bytes = group.used.copy()
        for turn in rounds:
            # A round reuses the stripe buffers of the previous round.
            group.used = busy_bytes.copy()
            source_domain = (group.own + turn) % len(domains)
            receives: list[tuple[Part, int]] = []
            adds: list[Pull] = []
            for chunk in own_chunks:
                if source_domain in chunk.others:
                    stripes.receive(chunk, source_domain, receives, adds)
            stages.append(Messages(tuple(sends[turn]), tuple(receives)))
            # Only this rank's memory is read and written, so no peers need to be waited for.
            stages.append(TransferSchedule.of_pulls((adds,), rank))
        sums = {chunk.key: stripes.sums[chunk.key] for chunk in own_chunks}
        last = TransferSchedule.of_return([], rank, domain=domain, elements=elements, parts=sums)
        return (*stages, last)

    @staticmethod
    def stripe_buffers(
        layer: LayerBuffer, elements: int, sizes: Sequence[int]
    ) -> tuple[int, int, int]:
        """Return the size and the number of stripe buffers of a rank.

        Args:
            layer: layer whose chunks are sent between domains.
            elements: elements of a chunk.
            sizes: number of ranks of each domain.

        Returns:
            Elements of the largest stripe; most stripe buffers in use at once in a spAG; the same
            in a spRS.
        """
        smallest = min(sizes)
        largest = max(sizes)
        fewest = smallest
        if _is_spared(smallest, smallest - 1):
            fewest -= 1
        elements = max(end - begin for begin, end in _stripe_bounds(elements, fewest))
        if len(sizes) == 1:
            return elements, 0, 0
        # Upper bounds of the chunks that are sent to other domains: all chunks of the homes in this
        # domain, and all slots of the other domains. Of the chunks that are received: all slots of
        # this domain.
        leave = min(largest * layer.homes, (sum(sizes) - smallest) * layer.slots)
        enter = largest * layer.slots
        return elements, leave + enter, enter + leave + min(largest * layer.homes, enter)


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

    def copies_to_own_domain(self, copies: Sequence[Copy]) -> tuple[list[Copy], list[Copy]]:
        """Return the copies to this domain: from its own homes, and from other domains."""
        own_copies = [copy for copy in copies if self.domain_of[copy.rank] == self.own]
        inside = [copy for copy in own_copies if self.domain_of[copy.home] == self.own]
        return inside, [copy for copy in own_copies if self.domain_of[copy.home] != self.own]

    def stripes(self, chunk: _Chunk, places: Mapping[int, Place]) -> list[Part]:
        """Assign the stripes of ``chunk`` to the ranks of this domain.

        Args:
            chunk: the chunk.
            places: places for stripes, by rank; a rank without a place takes a stripe buffer.
        """
        carriers = self._carriers(chunk, self.own)
        bounds = _stripe_bounds(self._elements, len(carriers))
        parts = []
        for rank, (begin, end) in zip(carriers, bounds, strict=True):
            if begin == end:
                continue
            place = places.get(rank)
            if place is None:
                place = Place(rank, "stripe", self.used[rank], begin)
                self.used[rank] += 1
            parts.append(Part(place, begin, end))
        return parts

    def messages(
        self, chunk: _Chunk, parts: Sequence[Part], *, domain: int
    ) -> list[tuple[Part, int]]:
        """Return the ``parts`` that this rank exchanges with domain ``domain``, with the peers."""
        carriers = self._carriers(chunk, self.own)
        opposite = dict(zip(carriers, self._carriers(chunk, domain), strict=True))
        return [(part, opposite[self.rank]) for part in parts if part.at.rank == self.rank]

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


class _StripeSums:
    """Stripes of the sums of a spRS on the ranks of this domain.

    Attributes:
        sums: stripes of each chunk that is sent or received.
        begun: the chunks of `sums` whose stripes hold a sum already.
    """

    def __init__(self, group: _Group, crossing: Sequence[_Chunk]) -> None:
        self._group = group
        self.sums: dict[Key, list[Part]] = {}
        self.begun: dict[Key, list[Part]] = {}
        for chunk in crossing:
            places = {copy.rank: Place(copy.rank, "partial", copy.slot) for copy in chunk.here}
            self.sums[chunk.key] = group.stripes(chunk, places)
            # Without a replica in this domain the first received stripe is the sum.
            if chunk.here:
                self.begun[chunk.key] = self.sums[chunk.key]

    def receive(
        self,
        chunk: _Chunk,
        domain: int,
        receives: list[tuple[Part, int]],
        adds: list[Pull],
    ) -> None:
        """Append the messages and sums of a chunk whose stripes arrive from domain ``domain``.

        Args:
            chunk: chunk of this domain.
            domain: number of the sending domain.
            receives: parts to receive, with the source rank; appended to.
            adds: additions of received stripes to the sums on this rank; appended to.
        """
        group = self._group
        sums = self.sums[chunk.key]
        if chunk.key not in self.begun:
            self.begun[chunk.key] = sums
            receives += group.messages(chunk, sums, domain=domain)
            return
        arrived = group.stripes(chunk, {})
        receives += group.messages(chunk, arrived, domain=domain)
        for source, total in zip(arrived, sums, strict=True):
            if total.at.rank == group.rank:
                adds.append(Pull((source.at,), total.at, source.begin, source.end, add=True))


def _sends_of_rounds(
    group: _Group, crossing: Sequence[_Chunk], stripes: _StripeSums
) -> dict[int, list[tuple[Part, int]]]:
    """Return the stripes that this rank sends in each round of a spRS, with the peers.

    Args:
        group: the domains.
        crossing: chunks that are sent to other domains or received.
        stripes: stripes of their sums.
    """
    num_domains = len(group.domains)
    sends: dict[int, list[tuple[Part, int]]] = {turn: [] for turn in range(1, num_domains)}
    for chunk in crossing:
        home_domain = group.domain_of[chunk.key[0]]
        if home_domain != group.own:
            turn = (group.own - home_domain) % num_domains
            sends[turn] += group.messages(chunk, stripes.sums[chunk.key], domain=home_domain)
    return sends
