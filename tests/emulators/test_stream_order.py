"""The simulator of streams finds what is planted. Oracle: each recording's outcome is worked out by hand."""

from __future__ import annotations

import pytest
from stream_order import HostWait, Record, Wait, Work, beside, crowds, hazards, play

pytestmark = pytest.mark.fast
BOTH = frozenset({0, 1})


def _is_transfer(work: Work) -> bool:
    return work.name.startswith("spAG")


def _meeting(stream: int, name: str, *, blocks: int = 16) -> Work:
    return Work(stream, name, blocks, (name, BOTH))


def test_streams_and_events_order_work_and_the_host() -> None:
    entries = [Work(0, "a"), Work(0, "b"), Record(0, 1), Work(0, "c"), Work(7, "d"), Wait(7, 1)]
    works = play([[*entries, Work(7, "e"), Record(7, 2), HostWait(2), Work(9, "f")]])
    pairs = {
        one.work.name + other.work.name for one in works for other in works if one.is_before(other)
    }
    assert pairs == {"ab", "ac", "ae", "af", "bc", "be", "bf", "de", "df", "ef"}
    assert [other.work.name for other in beside(works[2], works, _is_any)] == ["d", "e", "f"]
    # waited for before it was recorded
    one, other = play([[Wait(7, 5), Work(7, "a"), Record(0, 5), Work(0, "b")]])
    assert one.is_beside(other)


def _is_any(work: Work) -> bool:
    return True


def test_a_meeting_ends_when_all_have_begun() -> None:
    late = [Work(0, "slow"), Record(0, 1), Wait(7, 1), _meeting(7, "spAG")]
    works = play([[_meeting(7, "spAG"), Work(7, "next"), Work(8, "other")], late])
    slow, *after = (
        next(one for one in works if one.work.name == name) for name in ("slow", "next", "other")
    )
    assert [slow.is_before(one) for one in after] == [True, False]


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
