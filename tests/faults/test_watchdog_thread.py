"""The thread that names the ranks behind, by itself: what it says of heartbeats, and what it asks of a real store.

Oracle: literal cases and lines, exit codes, and operations counted at the store.
"""

from __future__ import annotations

import dataclasses
import json
import re
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from megatron_hecate.faults import under_way, watchdog
from megatron_hecate.faults.rendezvous import read_keys
from megatron_hecate.faults.watchdog import Heartbeat, Watchdog, here, name_ranks_behind

NOW = 1000.0
SILENCE = 10.0


def _word(**changed: Any) -> Heartbeat:
    """A live rank that stands still."""
    fields = dict(posted=999.0, steps=40, where="iteration 2, layer 3", since=900.0, host="a")
    return Heartbeat(**{**fields, **changed})


def _server() -> dist.TCPStore:
    return dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)


@pytest.mark.fast
def test_who_is_behind_is_told_from_one_look() -> None:
    """Literal cases of a group of four ranks."""

    def named(changes: dict[int, Heartbeat | None]) -> list[int]:
        words = {rank: changes.get(rank, _word()) for rank in range(4)}
        text = name_ranks_behind(words, moment=NOW, silence=SILENCE)
        return [int(rank) for rank in re.findall(r"rank (\d+) ", text)]

    assert named({}) == [], "all have come as far"
    assert named({2: _word(posted=985.0)}) == [2], "it stands still as a process"
    assert named({2: _word(steps=39)}) == [2], "its training thread does"
    assert named({2: _word(steps=39, since=995.0)}) == [], "it moves"
    assert named({3: None}) == [3], "nothing was heard of it"
    stopped = {1: _word(posted=985.0, since=950.0), 3: _word(posted=900.0, since=890.0)}
    assert named(stopped) == [3, 1], "who stopped first"
    everyone = dict.fromkeys(range(100), _word(posted=0.0))
    many = name_ranks_behind(everyone, moment=NOW, silence=SILENCE)
    assert many.count("rank ") == 8 and many.endswith(", and 92 more")


@pytest.mark.fast
def test_a_look_at_many_ranks_asks_little_of_the_store() -> None:
    """Two operations for 128 of 1,024 ranks. Counted at a real store."""
    server = _server()
    keys = [watchdog.heartbeat_key(rank) for rank in range(1_024)]
    for key in keys[:-1]:
        server.set(key, key)
    counted = mock.Mock(wraps=server)
    words = read_keys(counted, keys)
    assert words == [*map(str.encode, keys[:-1]), None]
    assert len(counted.method_calls) == 2 * 8 + 128, (
        "the last block is not complete, and asked for one by one"
    )
    server.set(keys[-1], "")
    counted.reset_mock()
    assert None not in read_keys(counted, keys)
    assert len(counted.method_calls) == 2 * 8


@pytest.fixture
def waiting() -> Iterator[Callable[..., Watchdog]]:
    """What starts the thread of a rank of a group, which has come to a layer and waits there, with a timeout of 1 s."""
    started: list[Watchdog] = []

    def start(store: dist.Store, rank: int, ranks: range) -> Watchdog:
        started.append(Watchdog(store, rank, ranks, interval=0.25, timeout=lambda: 1.0))
        started[-1].start()
        return started[-1]

    before = dataclasses.replace(here)
    here.iteration = 4
    here.reach("layer 2")
    yield start
    for reporter in started:
        reporter.stop()
    vars(here).update(vars(before))


def _until(true: Callable[[], object]) -> None:
    deadline = time.monotonic() + 120
    while not true():
        assert time.monotonic() < deadline, "it did not happen within 120 s"
        time.sleep(0.05)


def _post(server: dist.Store, rank: int, **changed: Any) -> None:
    """Post a heartbeat of now of a rank that has waited for long."""
    word = _word(**{"posted": time.time() + 60, "since": time.time() - 60, "steps": 1, **changed})
    server.set(watchdog.heartbeat_key(rank), json.dumps(dataclasses.astuple(word)))


def test_the_first_rank_says_who_is_behind_and_what_is_under_way(
    waiting: Callable[..., Watchdog], capfd: pytest.CaptureFixture[str]
) -> None:
    """Rank 1 has never come to a forward, and is stopped; rank 0 tells what it waits for."""
    server = _server()
    work = mock.Mock(**{"is_completed.return_value": False})
    under_way.note([work], lambda: "layer 2: spRS")
    first = "before its first forward"
    _post(server, 1, posted=0.0, since=0.0, steps=0, where=first, host="b")
    for other in (2, 3):
        _post(server, other)
    out: list[str] = []
    reporter = waiting(server.clone(), 0, range(4))
    _until(lambda: out.append(capfd.readouterr().out) or "".join(out))
    time.sleep(1.5)
    reporter.stop()
    under_way.forget()
    out.append(capfd.readouterr().out)
    assert re.fullmatch(
        r"FSSDP: rank 0 made no progress for \d+ s: iteration 4, layer 2\. Behind: rank 1 on b \("
        r"stopped, exited or unreachable; last heartbeat: before its first forward, since [\d: -]+\)\. "
        r"Under way on rank 0: layer 2: spRS \(for \d s\)\n",
        "".join(out),
    ), out


@pytest.mark.parametrize(
    ("rank", "stopped", "speaks"),
    [(4, False, True), (5, False, False), (5, True, True), (6, True, False)],
)
def test_one_rank_of_a_group_speaks(
    rank: int,
    stopped: bool,
    speaks: bool,
    waiting: Callable[..., Watchdog],
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Of ranks 4 to 7, of which 7 hangs: the first, or the second if the first is stopped."""
    server = _server()
    for other in range(4, 8):
        _post(server, other, steps=int(other < 7))
    if stopped:
        _post(server, 4, posted=0.0)
    reporter = waiting(server.clone(), rank, range(4, 8))
    time.sleep(2.0)
    reporter.stop(10)
    out = capfd.readouterr().out
    assert ("rank 7 on a" in out) is speaks and ("rank 4 on a" in out) is (speaks and stopped), out
