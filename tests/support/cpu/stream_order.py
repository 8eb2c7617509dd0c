"""What GPUs were told, played through: what surely ended before what, and when it would run. It finds meetings of ranks
in different orders, memory that is written while somebody may still read it, and overlap that was lost.

| entry | what the host told its GPU |
|---|---|
| `Work` | a kernel, a copy or a collective on a stream |
| `Record`, `Wait` | an event is recorded on a stream; a stream waits for it |
| `HostWait` | the host waits for an event, and tells nothing more until then |

Rules, by CUDA's documentation of streams and of ``CUDA_DEVICE_MAX_CONNECTIONS``. Work of one stream runs in order. A
hardware queue takes its entries in the order in which they were issued: one that cannot begin yet, for want of an
event or of earlier work of its stream, keeps all behind it waiting, whatever their streams. Work that `meets` ends only
when all the ranks that it names have begun theirs, and holds its ``blocks`` multiprocessors until then.

Ranks that issue their meetings in one order cannot deadlock while multiprocessors suffice (`crowds`), on any number of
queues: the first entry in that order that has not ended waits for earlier entries alone, and stands behind none.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
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
        length: time units it takes alone.
        blocks: multiprocessors that it holds, where it waits for other ranks.
        meets: a name, the same on all ranks, and the ranks that must have begun it.
        reads, writes: memory, also that of other ranks.
    """

    stream: int
    name: str
    length: float = 1.0
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


@dataclasses.dataclass(frozen=True)
class Moment:
    """A time on the given queues, and what has surely ended by then on any."""

    time: float = 0.0
    ended: Clock = dataclasses.field(default_factory=Counter)

    def join(self, other: Moment) -> Moment:
        return Moment(max(self.time, other.time), self.ended | other.ended)


@dataclasses.dataclass(frozen=True, eq=False)
class Span:
    """When a rank's work ran, what surely ended before it began, and its place among the work of its stream."""

    rank: int
    work: Work
    begin: float
    end: float
    place: int
    ended: Clock

    def is_before(self, other: Span) -> bool:
        """Whether this one has surely ended when ``other`` begins."""
        return other.ended[self.rank, self.work.stream] >= self.place


Arrivals = dict[
    int, tuple[tuple[int, int], Moment]
]  # by rank: its number and stream, and when it begins
Meetings = defaultdict[str, Arrivals]


class _Rank:
    """How far one rank's host and GPU have come."""

    def __init__(self, number: int, entries: Sequence[Entry], queues: int) -> None:
        self.number, self.entries = number, deque(entries)
        self.host = Moment()
        self.streams: defaultdict[int, Moment] = defaultdict(Moment)
        self.events: dict[int, Moment] = {}
        self.queues = [0.0] * queues  # when each took its last entry
        self.queue_of_stream: dict[int, int] = {}

    def issue(self, entry: Record | Wait | Work) -> Moment:
        """Give an entry to its queue; when its stream comes to it."""
        queues = self.queue_of_stream
        queue = queues.setdefault(entry.stream, len(queues) % len(self.queues))
        ready = self.host.join(Moment(self.queues[queue]))
        if isinstance(entry, Wait):
            ready = ready.join(self.events.get(entry.event, Moment()))
        moment = self.streams[entry.stream].join(ready)
        self.queues[queue] = moment.time if isinstance(entry, Work) else ready.time
        return moment

    def advance(self, meetings: Meetings, spans: list[Span]) -> bool:
        """Go on up to a meeting that other ranks have not begun; whether there was progress."""
        progress = False
        while self.entries:
            entry = self.entries[0]
            if isinstance(entry, HostWait):
                self.host = self.host.join(self.events.get(entry.event, Moment()))
            elif isinstance(entry, Record):
                self.events[entry.event] = self.issue(entry)
            elif isinstance(entry, Wait):
                self.streams[entry.stream] = self.issue(entry)
            else:
                name, peers = entry.meets
                arrivals = meetings[name] if name else {}
                if self.number not in arrivals:
                    arrivals[self.number] = (self.number, entry.stream), self.issue(entry)
                    progress = True
                if peers - arrivals.keys():
                    break
                spans.append(self._run(entry, arrivals))
            self.entries.popleft()
            progress = True
        return progress

    def _run(self, work: Work, arrivals: Arrivals) -> Span:
        """Run ``work`` from its arrival on; it ends when all ranks have begun it, and then all have ended."""
        _, begin = arrivals[self.number]
        last = functools.reduce(Moment.join, (moment for _, moment in arrivals.values()))
        places = Counter({key: moment.ended[key] + 1 for key, moment in arrivals.values()})
        end = self.streams[work.stream] = Moment(last.time + work.length, last.ended | places)
        place = places[self.number, work.stream]
        return Span(self.number, work, begin.time, end.time, place, last.ended)


def play(recordings: Recordings, *, queues: int = 32) -> list[Span]:
    """Run all ranks at once.

    Args:
        recordings: of every rank, in the order in which its host issued them.
        queues: hardware queues of each GPU, as CUDA_DEVICE_MAX_CONNECTIONS sets them.

    Raises:
        ValueError: when ranks do not meet in the order of their issue.
    """
    ranks = [_Rank(number, entries, queues) for number, entries in enumerate(recordings)]
    meetings: Meetings = defaultdict(dict)
    spans: list[Span] = []
    while any(rank.entries for rank in ranks):
        # each rank, before any is asked for progress
        progress = [rank.advance(meetings, spans) for rank in ranks]
        if not any(progress):
            heads = [
                f"rank {rank.number} comes to {rank.entries[0].name}"
                for rank in ranks
                if rank.entries
            ]
            raise ValueError(f"ranks do not meet: {'; '.join(heads)}")
    return spans


def crowds(spans: Sequence[Span], transfers: Kind, *, sms: int) -> list[str]:
    """Transfers that need more than all multiprocessors with the meetings that may run beside them.

    Then one rank may begin the first of them and another rank the second one, and both wait.
    """
    meetings = [span for span in spans if span.work.blocks]
    texts = []
    for span in (span for span in meetings if transfers(span.work)):
        beside = [o for o in meetings if o.rank == span.rank and _is_unordered(span, o)]
        blocks = span.work.blocks + _most_blocks(beside)
        if blocks > sms:
            texts.append(f"rank {span.rank}: {blocks} blocks beside {span.work.name} on {sms} SMs")
    return texts


def _most_blocks(spans: Sequence[Span]) -> int:
    """Blocks of those of one rank that may run at once."""
    sums = (
        span.work.blocks + _most_blocks([o for o in spans[i:] if _is_unordered(span, o)])
        for i, span in enumerate(spans)
    )
    return max(sums, default=0)


def hazards(spans: Sequence[Span]) -> list[str]:
    """Pairs of work of which one writes what the other reads or writes, and whose order nothing settles."""
    users = [span for span in spans if span.work.reads or span.work.writes]
    texts = []
    for one, other in itertools.combinations(users, 2):
        name = one.work.meets[0]
        if name and name == other.work.meets[0]:
            continue  # inside a meeting its own signals tell who is first
        kind = _clash(one.work, other.work)
        if kind and _is_unordered(one, other):
            texts.append(
                f"{kind}: {one.work.name} on stream {one.work.stream} of rank {one.rank}, "
                f"{other.work.name} on stream {other.work.stream} of rank {other.rank}"
            )
    return texts


def _is_unordered(one: Span, other: Span) -> bool:
    return one is not other and not one.is_before(other) and not other.is_before(one)


def _clash(one: Work, other: Work) -> str:
    for kind, a, b in (
        ("write after write", one.writes, other.writes),
        ("write after read", one.reads, other.writes),
        ("read after write", one.writes, other.reads),
    ):
        if any(x[0] == y[0] and x[1] < y[2] and y[1] < x[2] for x in a for y in b):
            return kind
    return ""


def overlap(spans: Sequence[Span], transfers: Kind, computes: Kind) -> float:
    """Share of the time of transfers, over all ranks, beside which the same rank computes."""
    chosen = [span for span in spans if transfers(span.work)]
    length = sum(span.end - span.begin for span in chosen)
    return sum(_beside(span, spans, computes) for span in chosen) / length if length else 0.0


def lost_overlap(
    recordings: Recordings, transfers: Kind, computes: Kind, *, queues: int
) -> list[str]:
    """Transfers that run beside computing of their rank where queues are many, and on so many for less than half of
    that time."""
    ideal, real = play(recordings, queues=256), play(recordings, queues=queues)
    spans = {span.work: span for span in real}
    texts = []
    for span in ideal:
        possible = _beside(span, ideal, computes) if transfers(span.work) else 0.0
        if possible and _beside(spans[span.work], real, computes) < possible / 2:
            texts.append(
                f"rank {span.rank}: {span.work.name} could run beside computing for {possible:.2f}"
            )
    return texts


def _beside(span: Span, spans: Sequence[Span], computes: Kind) -> float:
    """Time of ``span`` in which its rank has something that computes among ``spans``."""
    total, covered = 0.0, span.begin
    works = (other for other in spans if other.rank == span.rank and computes(other.work))
    for begin, end in sorted((other.begin, other.end) for other in works):
        begin, end = max(begin, covered), min(end, span.end)
        if begin < end:
            total, covered = total + end - begin, end
    return total
