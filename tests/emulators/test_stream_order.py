"""The simulator of streams finds what is planted. Oracle: each recording's outcome is worked out by hand."""

from __future__ import annotations

import pytest
from stream_order import HostWait, Record, Wait, Work, hazards, lost_overlap, order, play

pytestmark = pytest.mark.fast
BOTH = frozenset({0, 1})


def _is_transfer(work: Work) -> bool:
    return work.name.startswith("spAG")


def _is_compute(work: Work) -> bool:
    return work.name.startswith("mm")


def _meeting(stream: int, name: str, *, blocks: int = 16) -> Work:
    return Work(stream, name, 1.0, blocks, (name, BOTH))


def test_streams_and_queues() -> None:
    """Two streams of two works each; on one queue the second stream waits behind the first one's second work."""
    entries = [Work(0, "a", 2.0), Work(0, "b", 2.0), Work(7, "c", 1.0), Work(7, "d", 1.0)]
    times = {s.work.name: (s.begin, s.end) for s in play([entries]).spans[0]}
    assert times == {"a": (0, 2), "b": (2, 4), "c": (0, 1), "d": (1, 2)}
    times = {s.work.name: (s.begin, s.end) for s in play([entries], queues=1).spans[0]}
    assert times == {"a": (0, 2), "b": (2, 4), "c": (2, 3), "d": (3, 4)}


def test_events_order_streams_and_the_host() -> None:
    entries = [
        Work(0, "a", 2.0),
        Record(0, 1),
        Wait(7, 1),
        Work(7, "b"),
        Record(7, 2),
        HostWait(2),
        Work(9, "c"),
    ]
    times = {s.work.name: (s.begin, s.end) for s in play([entries]).spans[0]}
    assert times == {"a": (0, 2), "b": (2, 3), "c": (3, 4)}
    a, b, c = order([entries])
    assert (
        a.is_before(b)
        and b.is_before(c)
        and a.is_before(c)
        and not c.is_before(a)
        and not b.is_before(a)
    )
    d, e = order(
        [[Wait(7, 5), Work(7, "d"), Record(0, 5), Work(0, "e")]]
    )  # waited for before it was recorded
    assert not d.is_before(e) and not e.is_before(d)


def test_a_meeting_ends_when_all_have_begun() -> None:
    late = [Work(0, "slow", 5.0), Record(0, 1), Wait(7, 1), _meeting(7, "spAG")]
    played = play([[_meeting(7, "spAG")], late])
    assert [(s.begin, s.end) for s in played.spans[0]] == [(0, 6)] and not played.deadlock


def test_a_deadlock_of_opposite_orders_is_named() -> None:
    """Two transfers of all multiprocessors, the other way round on the other rank."""
    one = [_meeting(7, "spAG 1", blocks=8), _meeting(8, "all-to-all", blocks=8)]
    recordings = [one, one[::-1]]
    assert not play(recordings, sms=16).deadlock
    deadlock = play(recordings, sms=8).deadlock
    assert "rank 0: spAG 1 waits for ranks [1] to begin it" in deadlock
    wanted = "rank 1: spAG 1 on stream 7 waits for 8 multiprocessors, 0 are free beside all-to-all"
    assert wanted in deadlock, deadlock


def test_a_deadlock_of_one_queue_is_named() -> None:
    """Rank 1's transfer stands behind a wait for its compute, which stands behind rank 0's: only queues decide."""
    first = [
        _meeting(7, "spAG"),
        Record(7, 1),
        Wait(0, 1),
        Work(0, "mm"),
        _meeting(8, "all-to-all"),
    ]
    second = [
        _meeting(8, "all-to-all"),
        Record(8, 1),
        Wait(0, 1),
        Work(0, "mm"),
        _meeting(7, "spAG"),
    ]
    assert not play([first, second], queues=32).deadlock
    deadlock = play([first, second], queues=1).deadlock
    assert any(
        "a wait on stream 0 waits for event 1, and behind it in its queue mm, all-to-all" in x
        for x in deadlock
    )


def test_lost_overlap_is_named() -> None:
    """A third stream's wait keeps the transfer from starting before the attention ends, on one queue alone."""
    entries = [
        Work(0, "mm attention", 4.0),
        Record(0, 1),
        Wait(9, 1),
        Work(9, "spread", 0.1),
        Work(7, "spAG", 2.0),
    ]
    recordings = [entries]
    many, one = play(recordings), play(recordings, queues=1)
    assert lost_overlap(recordings, many, _is_transfer, _is_compute) == []
    assert lost_overlap(recordings, one, _is_transfer, _is_compute) == [
        "rank 0: spAG could run beside computing for 2.00"
    ]
    assert (
        many.overlap(_is_transfer, _is_compute) == 1.0
        and one.overlap(_is_transfer, _is_compute) == 0.0
    )
    ordered = [[Work(0, "mm", 4.0), Record(0, 1), Wait(7, 1), Work(7, "spAG", 2.0)]]
    assert not lost_overlap(ordered, play(ordered), _is_transfer, _is_compute), (
        "it could never run beside it"
    )


@pytest.mark.parametrize("settled", [False, True])
@pytest.mark.parametrize("kind", ["write after read", "read after write", "write after write"])
def test_a_hazard_is_named_and_an_event_settles_it(kind: str, settled: bool) -> None:
    memory = ((0, 100, 200),)
    near, far = ((0, 199, 300),), ((0, 200, 300), (1, 100, 200))
    second, first = (word + "s" for word in kind.split(" after "))
    one = Work(0, "mm", **{first: memory})
    waits = [Record(0, 1), Wait(7, 1)] if settled else []
    found = hazards([[one, *waits, Work(7, "spAG", **{second: near})]])
    assert found == (
        [] if settled else [f"{kind}: mm on stream 0 of rank 0, spAG on stream 7 of rank 0"]
    )
    assert not hazards([[one, Work(7, "spAG", **{second: far})]]), "other memory"


@pytest.mark.parametrize("meets", [False, True])
def test_a_hazard_between_ranks(meets: bool) -> None:
    """Rank 1 pulls what rank 0 writes over afterwards, which is right only after both have met."""
    key = ("spAG", BOTH) if meets else ("", frozenset())
    here = [
        Work(7, "spAG", meets=key),
        Record(7, 1),
        Wait(0, 1),
        Work(0, "mm", writes=((0, 0, 8),)),
    ]
    there = [Work(7, "spAG", meets=key, reads=((0, 0, 8),))]
    assert len(hazards([here, there])) == (0 if meets else 1)


def test_ranks_that_do_not_meet() -> None:
    with pytest.raises(ValueError, match="rank 0 comes to spAG; rank 1 comes to spRS"):
        order(
            [[_meeting(7, "spAG"), _meeting(7, "spRS")], [_meeting(7, "spRS"), _meeting(7, "spAG")]]
        )
