"""Steps of a spAG or spRS in one NVLink domain, whose ranks read each other's memory.

`domains` combines the schedules of several domains. A rank only reads (it *pulls*). The result of a
step may be read by other ranks in the next step:

| | step | reads | into |
|---|---|---|---|
| spAG | pack | the parameters of the rank's own experts | its send buffer, visible to peers |
| | fetch | chunks from the send buffer of their home | slots |
| | exchange | the parts that this rank did not fetch, from the ranks that did | slots |
| spRS | exchange | this rank's part of the gradients of all replicas | a part of the sum |
| | sum | gradients, or parts of sums | the home's main gradient |

*Exchange*: where a home would send more than any rank receives, each rank that receives a chunk
fetches a different part of it from the home, and the remaining parts from the other receivers. The
chunk is then sent once by its home, at the cost of one more step. A spRS sums the same parts.
Chunks that are sent to other domains, or received from there, are moved in parts as well.

Every rank derives the parts of all ranks from the copies alone, without communication. Places are
symbolic (`places`); `program` resolves them to addresses.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Sequence

from megatron_hecate.comm.nvlink.chunks import Chunks
from megatron_hecate.comm.nvlink.places import (
    NONE,
    AnyPart,
    Key,
    Memory,
    Part,
    Parts,
    Place,
    Pull,
)
from megatron_hecate.comm.transport import Copy


@dataclasses.dataclass(frozen=True)
class TransferSchedule:
    """One rank's part of a transfer.

    Args:
        steps: pulls of each step; all ranks have the same number of steps, which may be empty.
        peers: ranks that this rank reads from, or that read from this rank.
    """

    steps: tuple[tuple[Pull, ...], ...]
    peers: frozenset[int]

    @classmethod
    def of_fetch(
        cls,
        copies: Sequence[Copy],
        rank: int,
        *,
        domain: Sequence[int],
        elements: int,
        parts: Parts = NONE,
    ) -> TransferSchedule:
        """Schedule the spAG of ``rank``.

        Args:
            copies: all copies of the domain, in the same order on all ranks; a rank receives a
                chunk at most once.
            rank: rank whose part is scheduled.
            domain: ranks that read each other's memory.
            elements: elements of a chunk.
            parts: for chunks that are sent to other domains, the places that their parts must reach
                in the end; for chunks that were received from another, the places of their parts.

        Raises:
            ValueError: more ranks than the kernels support, an empty chunk, or contradictory
                copies.
        """
        here = _Domain(copies, rank, members=frozenset(domain), elements=elements, parts=parts)
        pack: list[Pull] = []
        fetch: list[Pull] = []
        exchange: list[Pull] = []
        for key, ranks, slots in here.chunks:
            home, index = key
            sent = Place(home, "send", index)
            if home == rank:
                pack.append(Pull((Place(rank, "parameters", index),), sent, 0, elements))
            into: Place | None = None
            if rank in ranks:
                into = Place(rank, "slot", slots[ranks.index(rank)])
            held: Sequence[AnyPart] = parts.get(key, ())
            if not held and (into is None or key not in here.shares):
                if into is not None:
                    fetch.append(Pull((sent,), into, 0, elements))
                continue
            if home in here.members and ranks:
                wanted = held
                held = here.divide(key, ranks, slots, memory="slot")
                exchange += _fill_stripes(wanted, held, rank)
            if home in here.members and home != rank:
                fetch += [Pull((sent,), *part) for part in held if part[0].rank == rank]
            if into is not None:
                exchange += [
                    Pull((at,), into, begin, end) for at, begin, end in held if at.rank != rank
                ]
        steps = [pack, fetch] if here.sends_any else []
        if here.shares or parts:
            steps.append(exchange)
        return here.schedule(steps)

    @classmethod
    def of_return(
        cls,
        copies: Sequence[Copy],
        rank: int,
        *,
        domain: Sequence[int],
        elements: int,
        parts: Parts = NONE,
    ) -> TransferSchedule:
        """Schedule the spRS of ``rank``.

        Each home's sum is over the replicas in order of rank, added to its main gradient.

        Args:
            copies: see `of_fetch`.
            rank: see `of_fetch`.
            domain: see `of_fetch`.
            elements: see `of_fetch`.
            parts: for chunks with replicas in several domains, the places that the sums over this
                domain's replicas must reach; for chunks without a replica in this domain, the
                places of the complete sums.

        Raises:
            ValueError: see `of_fetch`.
        """
        here = _Domain(copies, rank, members=frozenset(domain), elements=elements, parts=parts)
        exchange: list[Pull] = []
        sums: list[Pull] = []
        for key, ranks, slots in here.chunks:
            home, index = key
            grads = tuple(_places(ranks, "grad", slots))
            main_grad = Place(rank, "main_grad", index)
            if key not in here.shares and key not in parts:
                if home == rank:
                    sums.append(Pull(grads, main_grad, 0, elements, add=True))
                continue
            held: Sequence[AnyPart] = parts.get(key, ())
            if key in here.shares:
                held = here.divide(key, ranks, slots, memory="partial")
            if grads:
                exchange += [Pull(grads, *part) for part in held if part[0].rank == rank]
            if home == rank and (key in here.shares or not grads):
                sums += [Pull((at,), main_grad, begin, end, add=True) for at, begin, end in held]
        # All ranks must have the same steps, so the decision depends on the domain only.
        with_copies = sum(key in parts and len(ranks) > 0 for key, ranks, _ in here.chunks)
        steps = []
        if here.shares or with_copies:
            steps.append(exchange)
        if here.count > len(parts) or with_copies < len(parts):
            steps.append(sums)
        return here.schedule(steps)


def _fill_stripes(wanted: Sequence[AnyPart], held: Sequence[AnyPart], rank: int) -> list[Pull]:
    """Return the pulls that fill the stripe buffers of ``rank`` among ``wanted`` from ``held``."""
    pulls = []
    for into, first, last in wanted:
        # Other places, send buffers and slots, receive the complete chunk anyway.
        if into.rank != rank or into.memory != "stripe":
            continue
        for at, begin, end in held:
            overlap_begin = max(begin, first)
            overlap_end = min(end, last)
            if overlap_begin < overlap_end:
                pulls.append(Pull((at,), into, overlap_begin, overlap_end))
    return pulls


def _places(ranks: Sequence[int], memory: Memory, slots: Sequence[int]) -> Iterable[Place]:
    """Return a chunk's places on the ranks that receive it."""
    # `map` over `Place._make` takes less time than a call in Python for each place.
    return map(Place._make, zip(ranks, itertools.repeat(memory), slots, itertools.repeat(0)))


class _Domain:
    """A transfer in one domain, seen from ``rank``. Args as `TransferSchedule.of_fetch`."""

    def __init__(
        self,
        copies: Sequence[Copy],
        rank: int,
        *,
        members: frozenset[int],
        elements: int,
        parts: Parts,
    ) -> None:
        if elements < 1:
            raise ValueError(f"a chunk of {elements} elements cannot be moved")
        self.rank = rank
        self.members = members
        self.elements = elements
        self.parts = parts
        chunks = Chunks.of(tuple(copies), members, frozenset(parts))
        self.shares = chunks.shares
        self.sends_any = chunks.sends_any
        self.count = len(chunks.keys)
        self.chunks = chunks.of_rank(rank, parts)

    def divide(
        self, key: Key, ranks: Sequence[int], slots: Sequence[int], *, memory: Memory
    ) -> list[AnyPart]:
        """Divide a chunk among its receiving ranks, into ``memory`` of their slots.

        Empty parts are left out.
        """
        shares = self.shares.get(key) or [1] * len(ranks)
        places = _places(ranks, memory, slots)
        return [
            (place, begin, end)
            for place, (begin, end) in zip(places, Part.bounds(self.elements, shares), strict=True)
            if begin < end
        ]

    def schedule(self, steps: list[list[Pull]]) -> TransferSchedule:
        """Sort the pulls of each step and find the peers."""
        own = self.rank
        size = max(self.members) + 1

        def distance(pull: Pull) -> tuple[int, int]:
            # Rank of the first source, and first element. By index: faster than by name.
            return (pull[0][0][0] - own) % size, pull[2]

        # Every step begins with the rank after this one, so that not all ranks read from one home
        # at the same time.
        ordered = tuple([tuple(sorted(step, key=distance)) for step in steps])
        return TransferSchedule(ordered, frozenset(self._find_peers()))

    def _find_peers(self) -> set[int]:
        """Return the ranks that this rank reads from, or that read from this rank."""
        own = self.rank
        peers: set[int] = set()
        for key, ranks, _ in self.chunks:
            takers = {*ranks, *(part.at.rank for part in self.parts.get(key, ()))}
            if key[0] == own:
                peers |= takers
            elif own in takers:
                if key[0] in self.members:
                    peers.add(key[0])
                if key in self.shares or key in self.parts:
                    peers |= takers
        peers.discard(own)
        return peers
