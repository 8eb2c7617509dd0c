"""What GPUs were told, played through: what has surely ended before what. It finds meetings of ranks in different
orders, memory that is written while somebody may still read it, and what may run at once.

| entry | what the host told its GPU |
|---|---|
| `Work` | a kernel, a copy or a collective on a stream |
| `Record`, `Wait` | an event is recorded on a stream; a stream waits for it |
| `HostWait` | the host waits for an event, and tells nothing more until then |

Rules, by CUDA's documentation of streams. Work of one stream runs in order. Work that `meets` ends only when all the
ranks that it names have begun theirs, and holds its ``blocks`` multiprocessors until then.

Ranks that issue their meetings in one order cannot deadlock while multiprocessors suffice (`crowds`), on any number of
hardware queues, which take entries in the order of their issue: the first entry in that order that has not ended waits
for earlier entries alone, and stands behind none.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import operator
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Sequence

Range = tuple[int, int, int]  # memory: rank, first byte, end
Clock = Counter[tuple[int, int]]  # of each rank's streams, how much of their work has ended


@dataclasses.dataclass(frozen=True, eq=False)
class Work:
    """Something that runs on a stream.

    Args:
        stream: number of the stream, of this rank.
        name: of what runs.
        blocks: multiprocessors that it holds, where it waits for other ranks.
        meets: a name, the same on all ranks, and the ranks that must have begun it.
        reads, writes: memory, also that of other ranks.
    """

    stream: int
    name: str
    blocks: int = 0
    meets: tuple[str, frozenset[int]] = ("", frozenset())
    reads: tuple[Range, ...] = ()
    writes: tuple[Range, ...] = ()


@dataclasses.dataclass(frozen=True)
class Record:
    stream: int
    event: int


@dataclasses.dataclass(frozen=True)
class Wait:
    stream: int
    event: int


@dataclasses.dataclass(frozen=True)
class HostWait:
    event: int


Entry = Work | Record | Wait | HostWait
Recordings = Sequence[Sequence[Entry]]  # of every rank
Kind = Callable[[Work], bool]
# By meeting and rank: number and stream of the rank, and what has ended before it begins.
Meetings = defaultdict[str, dict[int, tuple[tuple[int, int], Clock]]]


@dataclasses.dataclass(frozen=True, eq=False)
class Played:
    """A rank's work, its place among that of its stream, and what has surely ended before it begins."""

    rank: int
    work: Work
    place: int
    ended: Clock

    def is_before(self, other: Played) -> bool:
        """Whether this one has surely ended when ``other`` begins."""
        return other.ended[self.rank, self.work.stream] >= self.place

    def is_beside(self, other: Played) -> bool:
        """Whether both may run at once."""
        return self is not other and not self.is_before(other) and not other.is_before(self)


class _Rank:
    """How far one rank's host and streams have come."""

    def __init__(self, number: int, entries: Sequence[Entry]) -> None:
        self.number, self.entries = number, deque(entries)
        self.host = Clock()
        self.streams: defaultdict[int, Clock] = defaultdict(Clock)
        self.events: dict[int, Clock] = {}

    def advance(self, meetings: Meetings, works: list[Played]) -> bool:
        """Go on up to a meeting that other ranks have not begun; whether there was progress."""
        progress = False
        while self.entries:
            entry = self.entries[0]
            if isinstance(entry, HostWait):
                self.host |= self.events.get(entry.event, Clock())
            elif isinstance(entry, Record):
                self.events[entry.event] = self.streams[entry.stream] | self.host
            elif isinstance(entry, Wait):
                self.streams[entry.stream] |= self.events.get(entry.event, Clock())
            else:
                name, peers = entry.meets
                arrivals = meetings[name] if name else {}
                if self.number not in arrivals:
                    ended = self.streams[entry.stream] | self.host
                    arrivals[self.number] = (self.number, entry.stream), ended
                    progress = True
                if peers - arrivals.keys():
                    break
                # it goes on when all have begun it, and has ended on all when it ends
                ended = functools.reduce(operator.or_, (clock for _, clock in arrivals.values()))
                places = Counter({key: clock[key] + 1 for key, clock in arrivals.values()})
                self.streams[entry.stream] = ended | places
                place = places[self.number, entry.stream]
                works.append(Played(self.number, entry, place, ended))
            self.entries.popleft()
            progress = True
        return progress


def play(recordings: Recordings) -> list[Played]:
    """All work of all ranks, each of which issued its recording in order.

    Raises:
        ValueError: when ranks do not meet in the order of their issue.
    """
    ranks = [_Rank(number, entries) for number, entries in enumerate(recordings)]
    meetings: Meetings = defaultdict(dict)
    works: list[Played] = []
    while any(rank.entries for rank in ranks):
        progress = [rank.advance(meetings, works) for rank in ranks]
        if not any(progress):
            heads = [(rank.number, rank.entries[0]) for rank in ranks if rank.entries]
            texts = [f"rank {number} comes to {entry.name}" for number, entry in heads]
            raise ValueError(f"ranks do not meet: {'; '.join(texts)}")
    return works


def beside(one: Played, works: Sequence[Played], kind: Kind) -> list[Played]:
    """Work of this kind that its rank may run at the same time."""
    return [w for w in works if w.rank == one.rank and kind(w.work) and one.is_beside(w)]


def crowds(works: Sequence[Played], transfers: Kind, *, sms: int) -> list[str]:
    """Transfers that need more than all multiprocessors with the meetings that may run beside them.

    Then one rank may begin the first of them and another rank the second one, and both wait.
    """
    texts = []
    for one in (one for one in works if transfers(one.work)):
        blocks = one.work.blocks + _most_blocks(beside(one, works, lambda work: work.blocks > 0))
        if blocks > sms:
            texts.append(f"rank {one.rank}: {blocks} blocks beside {one.work.name} on {sms} SMs")
    return texts


def _most_blocks(works: Sequence[Played]) -> int:
    """Blocks of those of one rank that may run at once."""
    sums = (
        one.work.blocks + _most_blocks([other for other in works[i:] if one.is_beside(other)])
        for i, one in enumerate(works)
    )
    return max(sums, default=0)


def hazards(works: Sequence[Played]) -> list[str]:
    """Pairs of work of which one writes what the other reads or writes, and whose order nothing settles."""
    users = [one for one in works if one.work.reads or one.work.writes]
    texts = []
    for one, other in itertools.combinations(users, 2):
        name = one.work.meets[0]
        if name and name == other.work.meets[0]:
            continue  # inside a meeting its own signals tell who is first
        kind = _clash(one.work, other.work)
        if kind and one.is_beside(other):
            texts.append(
                f"{kind}: {one.work.name} on stream {one.work.stream} of rank {one.rank}, "
                f"{other.work.name} on stream {other.work.stream} of rank {other.rank}"
            )
    return texts


def _clash(one: Work, other: Work) -> str:
    for kind, a, b in (
        ("write after write", one.writes, other.writes),
        ("write after read", one.reads, other.writes),
        ("read after write", one.writes, other.reads),
    ):
        if any(x[0] == y[0] and x[1] < y[2] and y[1] < x[2] for x in a for y in b):
            return kind
    return ""
