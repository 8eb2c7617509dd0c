"""What GPUs were told, played through: streams on 1 or 32 hardware queues, few multiprocessors, ranks that wait for
each other. It finds deadlocks, overlap that was lost, and memory that is written while somebody may still read it.

| entry | what the host told its GPU |
|---|---|
| `Work` | a kernel, a copy or a collective on a stream |
| `Record`, `Wait` | an event is recorded on a stream; a stream waits for it |
| `HostWait` | the host waits for an event, and tells nothing more until then |

Rules, by CUDA's documentation of streams and of ``CUDA_DEVICE_MAX_CONNECTIONS``. Work of one stream runs in order. A
hardware queue takes its entries in the order in which they were issued: one that cannot begin yet, for want of an
event, of earlier work of its stream, or of multiprocessors, keeps all behind it waiting, whatever their streams. Work
with ``blocks`` waits for other ranks while it runs: it holds as many multiprocessors from beginning to end, and begins
only when so many are free. Other kernels need one that is free, and hold none, as their blocks come and go. Work that
`meets` ends only when all the ranks that it names have begun theirs.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence

Range = tuple[int, int, int]  # memory: rank, first byte, end
Clock = Counter[tuple[int, int]]  # of each rank's streams, how much of their work has ended


@dataclasses.dataclass(frozen=True, eq=False)
class Work:
    """Something that runs on a stream.

    Args:
        stream: number of the stream, of this rank.
        name: of what runs.
        length: time units it takes alone.
        blocks: multiprocessors that it holds.
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


@dataclasses.dataclass(frozen=True)
class Span:
    """When a rank's work ran."""

    work: Work
    begin: float
    end: float


@dataclasses.dataclass(frozen=True)
class Played:
    """What came of it.

    Args:
        spans: of every rank, in order of their beginning.
        deadlock: what everything waits for in the end; empty when all work was done.
    """

    spans: list[list[Span]]
    deadlock: list[str]

    def overlap(self, transfers: Callable[[Work], bool], computes: Callable[[Work], bool]) -> float:
        """Share of the time of transfers, over all ranks, beside which the same rank computes."""
        beside = whole = 0.0
        for spans in self.spans:
            for span in (span for span in spans if transfers(span.work)):
                whole, beside = (
                    whole + span.end - span.begin,
                    beside + _beside(span, spans, computes),
                )
        return beside / whole if whole else 0.0


class _Rank:
    """One rank's host and GPU."""

    def __init__(self, number: int, entries: Sequence[Entry], *, queues: int, sms: int) -> None:
        self.number, self.todo, self.free = number, deque(entries), sms
        self.queues: list[deque[Entry]] = [deque() for _ in range(queues)]
        self.queue_of: dict[int, int] = {}
        self.running: dict[int, Work] = {}  # by stream
        self.begun: dict[Work, float] = {}
        self.pending: dict[int, list[int]] = {}  # events recorded behind running work, by stream
        self.over: set[int] = set()  # events
        self.recorded: set[int] = set()  # by the host
        self.spans: list[Span] = []

    def issue(self) -> bool:
        """Let the host go on; whether it did."""
        moved = False
        while self.todo:
            entry = self.todo[0]
            if isinstance(entry, HostWait):
                if entry.event in self.recorded and entry.event not in self.over:
                    break
            else:
                if isinstance(entry, Record):
                    self.recorded.add(entry.event)
                if (
                    not isinstance(entry, Wait) or entry.event in self.recorded
                ):  # else it waits for nothing
                    queue = self.queue_of.setdefault(
                        entry.stream, len(self.queue_of) % len(self.queues)
                    )
                    self.queues[queue].append(entry)
            self.todo.popleft()
            moved = True
        return moved

    def obstacle(self, entry: Entry) -> str:
        """Why the head of a queue cannot be taken; empty when it can."""
        if isinstance(entry, Wait):
            return "" if entry.event in self.over else f"event {entry.event}"
        if isinstance(entry, Work):
            if entry.stream in self.running:
                return f"{self.running[entry.stream].name} before it"
            if self.free < max(entry.blocks, 1):
                holders = ", ".join(work.name for work in self.running.values() if work.blocks)
                return (
                    f"{max(entry.blocks, 1)} multiprocessors, {self.free} are free beside {holders}"
                )
        return ""

    def take(self, now: float) -> bool:
        """Take what can be taken from the queues; whether there was something."""
        moved = False
        for queue in self.queues:
            while queue and not self.obstacle(queue[0]):
                entry = queue.popleft()
                moved = True
                if isinstance(entry, Record):
                    if entry.stream in self.running:
                        self.pending.setdefault(entry.stream, []).append(entry.event)
                    else:
                        self.over.add(entry.event)
                elif isinstance(entry, Work):
                    self.running[entry.stream], self.begun[entry] = entry, now
                    self.free -= entry.blocks
        return moved

    def end(self, work: Work, now: float) -> None:
        del self.running[work.stream]
        self.free += work.blocks
        self.over.update(self.pending.pop(work.stream, ()))
        self.spans.append(Span(work, self.begun[work], now))

    def waits(self) -> Iterator[str]:
        """What does not go on, and why."""
        if self.todo and isinstance(self.todo[0], HostWait):
            yield f"rank {self.number}: the host waits for event {self.todo[0].event}"
        for queue in self.queues:
            if queue:
                head = queue[0]
                what = head.name if isinstance(head, Work) else "a wait"
                behind = [
                    entry.name
                    for entry in itertools.islice(queue, 1, None)
                    if isinstance(entry, Work)
                ]
                text = f"rank {self.number}: {what} on stream {head.stream} waits for {self.obstacle(head)}"
                yield text + (
                    f", and behind it in its queue {', '.join(behind[:3])}" if behind else ""
                )


def play(recordings: Recordings, *, queues: int = 32, sms: int = 132) -> Played:
    """Run all ranks at once.

    Args:
        recordings: of every rank, in the order in which its host issued them.
        queues: hardware queues of each GPU, as CUDA_DEVICE_MAX_CONNECTIONS sets them.
        sms: multiprocessors of each GPU.
    """
    ranks = [
        _Rank(number, entries, queues=queues, sms=sms) for number, entries in enumerate(recordings)
    ]
    arrived: dict[str, dict[int, float]] = {}
    now = 0.0
    while True:
        while [rank for rank in ranks if rank.issue() | rank.take(now)]:
            pass
        ends: list[tuple[float, _Rank, Work]] = []
        for rank in ranks:
            for work in rank.running.values():
                name, others = work.meets
                arrived.setdefault(name, {})[rank.number] = rank.begun[work]
        missing = []
        for rank in ranks:
            for work in rank.running.values():
                name, others = work.meets
                late = sorted(others - arrived[name].keys()) if name else []
                if late:
                    missing.append(
                        f"rank {rank.number}: {work.name} waits for ranks {late} to begin it"
                    )
                else:
                    begins = [arrived[name][other] for other in others] if name else []
                    ends.append((max([rank.begun[work], *begins]) + work.length, rank, work))
        if not ends:
            deadlock = missing + [text for rank in ranks for text in rank.waits()]
            spans = [sorted(rank.spans, key=lambda span: span.begin) for rank in ranks]
            return Played(spans, deadlock)
        now = max(now, min(end for end, _, _ in ends))
        for end, rank, work in ends:
            if end <= now:
                rank.end(work, end)


@dataclasses.dataclass(frozen=True, eq=False)
class Ordered:
    """A rank's work, with what surely ended before it began, and its own place among that of its stream."""

    rank: int
    work: Work
    place: int
    before: Clock

    def is_before(self, other: Ordered) -> bool:
        """Whether this one has surely ended when ``other`` begins."""
        return other.before[self.rank, self.work.stream] >= self.place


def order(recordings: Recordings) -> list[Ordered]:
    """All work with what streams, events, waits of the host and meetings say of its order, whatever the queues.

    Raises:
        ValueError: when ranks do not meet in the order of their issue.
    """
    streams: dict[tuple[int, int], Clock] = {}
    events: dict[tuple[int, int], Clock] = {}
    hosts: list[Clock] = [Counter() for _ in recordings]
    todo = [deque(entries) for entries in recordings]
    met: dict[str, dict[int, tuple[Clock, Clock]]] = {}
    found: list[Ordered] = []
    waiting: dict[int, Work] = {}
    while any(todo):
        moved = False
        for rank, entries in enumerate(todo):
            while entries:
                entry = entries[0]
                if isinstance(entry, HostWait):
                    hosts[rank] |= events.get((rank, entry.event), Counter())
                elif isinstance(entry, Record):
                    events[rank, entry.event] = (
                        streams.get((rank, entry.stream), Counter()) | hosts[rank]
                    )
                elif isinstance(entry, Wait):
                    known = streams.get((rank, entry.stream), Counter())
                    streams[rank, entry.stream] = known | events.get((rank, entry.event), Counter())
                else:
                    before = streams.get((rank, entry.stream), Counter()) | hosts[rank]
                    name, others = entry.meets
                    own = Counter({(rank, entry.stream): 1})
                    if waiting.get(rank) is not entry:
                        waiting[rank], moved = entry, True
                        met.setdefault(name, {})[rank] = before, before + own
                    if name and others - met[name].keys():
                        break
                    place, after = before[rank, entry.stream] + 1, before + own
                    for other in (
                        others if name else ()
                    ):  # it goes on when the others have begun, ends when they do
                        before, after = before | met[name][other][0], after | met[name][other][1]
                    found.append(Ordered(rank, entry, place, before))
                    streams[rank, entry.stream] = after
                entries.popleft()
                moved = True
        if not moved:
            names = [
                f"rank {rank} comes to {waiting[rank].name}"
                for rank, entries in enumerate(todo)
                if entries
            ]
            raise ValueError(f"ranks do not meet: {'; '.join(names)}")
    return found


def hazards(recordings: Recordings) -> list[str]:
    """Pairs of work of which one writes what the other reads or writes, and whose order nothing settles."""
    works = [one for one in order(recordings) if one.work.reads or one.work.writes]
    found = []
    for at, one in enumerate(works):
        for other in works[at + 1 :]:
            kind = _clash(one.work, other.work)
            if kind and not one.is_before(other) and not other.is_before(one):
                if one.work.meets[0] and one.work.meets[0] == other.work.meets[0]:
                    continue  # inside a meeting its own signals tell who is first
                found.append(
                    f"{kind}: {one.work.name} on stream {one.work.stream} of rank {one.rank}, "
                    f"{other.work.name} on stream {other.work.stream} of rank {other.rank}"
                )
    return found


def _clash(one: Work, other: Work) -> str:
    for kind, a, b in (
        ("write after write", one.writes, other.writes),
        ("write after read", one.reads, other.writes),
        ("read after write", one.writes, other.reads),
    ):
        if any(x[0] == y[0] and x[1] < y[2] and y[1] < x[2] for x in a for y in b):
            return kind
    return ""


def lost_overlap(
    recordings: Recordings,
    played: Played,
    transfers: Callable[[Work], bool],
    computes: Callable[[Work], bool],
) -> list[str]:
    """Transfers that run beside computing of their rank where queues and multiprocessors are many, and here do so for
    less than half of that time."""
    ideal = play(recordings, queues=256, sms=1 << 20)
    found = []
    for rank, (most, spans) in enumerate(zip(ideal.spans, played.spans, strict=True)):
        possible, real = (
            {span.work: span for span in s if transfers(span.work)} for s in (most, spans)
        )
        for work, span in possible.items():
            could = _beside(span, most, computes)
            if work in real and _beside(real[work], spans, computes) < could / 2:
                found.append(f"rank {rank}: {work.name} could run beside computing for {could:.2f}")
    return found


def _beside(span: Span, spans: Sequence[Span], computes: Callable[[Work], bool]) -> float:
    """Time of ``span`` in which ``spans`` have something that computes."""
    total, at = 0.0, span.begin
    for begin, end in sorted((other.begin, other.end) for other in spans if computes(other.work)):
        begin, end = max(begin, at), min(end, span.end)
        if begin < end:
            total, at = total + end - begin, end
    return total
