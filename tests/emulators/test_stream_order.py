"""The simulator of streams finds what is planted. Oracle: each recording's outcome is worked out by hand."""

from __future__ import annotations

import pytest
from stream_order import (
    HostWait,
    Record,
    Wait,
    Work,
    crowds,
    hazards,
    lost_overlap,
    overlap,
    play,
)

pytestmark = pytest.mark.fast
BOTH = frozenset({0, 1})


def _is_transfer(work: Work) -> bool:
    return work.name.startswith("spAG")


def _is_compute(work: Work) -> bool:
    return work.name.startswith("mm")


def _meeting(stream: int, name: str, *, blocks: int = 16) -> Work:
    return Work(stream, name, 1.0, blocks, (name, BOTH))


def _times(*recordings: list, queues: int = 32) -> dict[str, tuple[float, float]]:
    """When the works of rank 0 begin and end."""
    spans = play(recordings, queues=queues)
    return {span.work.name: (span.begin, span.end) for span in spans if span.rank == 0}


def test_streams_and_queues() -> None:
    """Two streams of two works each; on one queue the second stream waits behind the first one's second work."""
    entries = [Work(0, "a", 2.0), Work(0, "b", 2.0), Work(7, "c", 1.0), Work(7, "d", 1.0)]
    assert _times(entries) == {"a": (0, 2), "b": (2, 4), "c": (0, 1), "d": (1, 2)}
    assert _times(entries, queues=1) == {"a": (0, 2), "b": (2, 4), "c": (2, 3), "d": (3, 4)}


def test_events_order_streams_and_the_host() -> None:
    head = [Work(0, "a", 2.0), Record(0, 1), Wait(7, 1), Work(7, "b")]
    entries = [*head, Record(7, 2), HostWait(2), Work(9, "c")]
    assert _times(entries) == {"a": (0, 2), "b": (2, 3), "c": (3, 4)}
    a, b, c = play([entries])
    assert a.is_before(b) and b.is_before(c) and a.is_before(c)
    assert not c.is_before(a) and not b.is_before(a)
    # waited for before it was recorded
    d, e = play([[Wait(7, 5), Work(7, "d"), Record(0, 5), Work(0, "e")]])
    assert not d.is_before(e) and not e.is_before(d)


def test_a_meeting_ends_when_all_have_begun() -> None:
    late = [Work(0, "slow", 5.0), Record(0, 1), Wait(7, 1), _meeting(7, "spAG")]
    assert _times([_meeting(7, "spAG")], late) == {"spAG": (0, 6)}


def test_ranks_that_do_not_meet() -> None:
    one = [_meeting(7, "spAG"), _meeting(8, "spRS")]
    with pytest.raises(ValueError, match="rank 0 comes to spAG; rank 1 comes to spRS"):
        play([one, one[::-1]])


@pytest.mark.parametrize("settled", [False, True])
def test_a_transfer_that_may_find_no_multiprocessors_is_named(settled: bool) -> None:
    """A collective, and two others one after the other beside both: each may come first on another rank."""
    waits = [Record(7, 1), Wait(8, 1)] if settled else []
    works = [
        _meeting(8, "all-to-all", blocks=4),
        _meeting(9, "a", blocks=3),
        _meeting(9, "b", blocks=2),
    ]
    spans = play([[_meeting(7, "spAG", blocks=8), *waits, *works]] * 2)
    needed = 11 if settled else 15
    assert not crowds(spans, _is_transfer, sms=needed)
    assert sorted(crowds(spans, _is_transfer, sms=needed - 1)) == [
        f"rank {rank}: {needed} blocks beside spAG on {needed - 1} SMs" for rank in range(2)
    ]


def test_lost_overlap_is_named() -> None:
    """A third stream's wait keeps the transfer from starting before the attention ends, on one queue alone."""
    head = [Work(0, "mm attention", 4.0), Record(0, 1), Wait(9, 1), Work(9, "spread", 0.1)]
    recordings, kinds = [[*head, Work(7, "spAG", 2.0)]], (_is_transfer, _is_compute)
    assert lost_overlap(recordings, *kinds, queues=32) == []
    assert lost_overlap(recordings, *kinds, queues=1) == [
        "rank 0: spAG could run beside computing for 2.00"
    ]
    assert [overlap(play(recordings, queues=n), *kinds) for n in (32, 1)] == [1.0, 0.0]
    ordered = [[Work(0, "mm", 4.0), Record(0, 1), Wait(7, 1), Work(7, "spAG", 2.0)]]
    assert not lost_overlap(ordered, *kinds, queues=1), "it could never run beside it"


@pytest.mark.parametrize("settled", [False, True])
@pytest.mark.parametrize("kind", ["write after read", "read after write", "write after write"])
def test_a_hazard_is_named_and_an_event_settles_it(kind: str, settled: bool) -> None:
    memory = ((0, 100, 200),)
    near, far = ((0, 199, 300),), ((0, 200, 300), (1, 100, 200))
    second, first = (word + "s" for word in kind.split(" after "))
    one = Work(0, "mm", **{first: memory})
    waits = [Record(0, 1), Wait(7, 1)] if settled else []
    texts = hazards(play([[one, *waits, Work(7, "spAG", **{second: near})]]))
    assert texts == (
        [] if settled else [f"{kind}: mm on stream 0 of rank 0, spAG on stream 7 of rank 0"]
    )
    assert not hazards(play([[one, Work(7, "spAG", **{second: far})]])), "other memory"


@pytest.mark.parametrize("meets", [False, True])
def test_a_hazard_between_ranks(meets: bool) -> None:
    """Rank 1 pulls what rank 0 writes over afterwards, which is right only after both have met."""
    key = ("spAG", BOTH) if meets else ("", frozenset())
    write = Work(0, "mm", writes=((0, 0, 8),))
    here = [Work(7, "spAG", meets=key), Record(7, 1), Wait(0, 1), write]
    there = [Work(7, "spAG", meets=key, reads=((0, 0, 8),))]
    assert len(hazards(play([here, there]))) == (0 if meets else 1)
