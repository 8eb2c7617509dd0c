"""The thread that names the ranks behind, by itself: what it says of heartbeats, and what it asks of a real store.

Oracle: literal cases and lines, exit codes, and operations counted at the store.
"""

from __future__ import annotations

import dataclasses
import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from megatron_hecate.faults import heartbeats, watchdog
from megatron_hecate.faults.heartbeats import Heartbeat, name_ranks_behind, read_heartbeats
from megatron_hecate.faults.watchdog import Watchdog, here

NOW = 1000.0
SILENCE = 10.0


def _word(**changed: Any) -> Heartbeat:
    """A live rank that stands still."""
    fields = dict(posted=999.0, steps=40, where="iteration 2, layer 3", since=900.0, host="a")
    return Heartbeat(**{**fields, "group": 0, **changed})


@pytest.mark.fast
def test_who_is_behind_is_told_from_one_look() -> None:
    """Literal cases: two groups of an FSSDP job, ranks 0-3 and 4-5, and rank 6 without MoE layers."""
    alive = [_word(), _word(), _word(), _word(), _word(group=4, steps=7), _word(group=4, steps=7)]
    alive += [_word(group=-1, steps=0, where="before its first forward")]

    def named(changes: dict[int, Heartbeat | None]) -> list[int]:
        words = [changes.get(rank, word) for rank, word in enumerate(alive)]
        text = name_ranks_behind(words, moment=NOW, silence=SILENCE)
        return [int(rank) for rank in re.findall(r"rank (\d+) ", text)]

    assert named({}) == [], "all have come as far as their group"
    assert named({2: _word(posted=985.0)}) == [2], "it stands still as a process"
    assert named({6: dataclasses.replace(alive[6], posted=985.0)}) == [6], "without MoE layers, too"
    assert named({2: _word(steps=39)}) == [2], "its training thread does"
    assert named({2: _word(steps=39, since=995.0)}) == [], "it moves"
    assert named({5: _word(steps=6, group=4)}) == [5]
    assert named({3: None}) == [3], "nothing was heard of it"
    stopped = {
        1: _word(posted=985.0, since=950.0),
        4: _word(group=4, steps=7, posted=900.0, since=890.0),
    }
    assert named(stopped) == [4, 1], "who stopped first"
    many = name_ranks_behind([_word(posted=0.0)] * 100, moment=NOW, silence=SILENCE)
    assert many.count("rank ") == 8 and many.endswith(", and 92 more")


@pytest.mark.fast
def test_large_jobs_ask_little_of_the_store() -> None:
    """Words of all ranks together: at most 500 a second, of some 14,500 operations (docs/scale.md); a look at 1,024
    ranks takes two operations for 128 of them. Counted at a real store."""
    server = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)

    def thread(size: int) -> Watchdog:
        return Watchdog(server, 0, size, group=0, timeout=lambda: 600.0, is_over=lambda: False)

    for size in (2, 1_000, 16_384):
        assert size / thread(size).interval <= 500
    assert thread(2).interval == 3
    reporter = thread(1_024)
    for rank in range(1_023):
        reporter._rank = rank
        reporter._post()
    counted = mock.Mock(wraps=server)
    words = read_heartbeats(counted, range(1_024))
    assert [rank for rank, word in enumerate(words) if word is None] == [1_023]
    assert len(counted.method_calls) == 2 * 8 + 128, (
        "the last block is not complete, and asked for one by one"
    )
    reporter._rank = 1_023
    reporter._post()
    counted.reset_mock()
    assert None not in read_heartbeats(counted, range(1_024))
    assert len(counted.method_calls) == 2 * 8


@pytest.fixture
def waiting() -> Iterator[Callable[..., Watchdog]]:
    """What starts the thread of a rank of four, which has come to a layer and waits there, with a timeout of 1 s."""
    started: list[Watchdog] = []

    def start(store: dist.Store, *, rank: int = 0, group: int = 0) -> Watchdog:
        settings = dict(group=group, timeout=lambda: 1.0, is_over=lambda: False)
        started.append(Watchdog(store, rank, 4, **settings))
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
    server.set(heartbeats.heartbeat_key(rank), json.dumps(dataclasses.astuple(word)))


def test_rank_0_says_who_is_behind_and_what_is_under_way(
    waiting: Callable[..., Watchdog], capfd: pytest.CaptureFixture[str]
) -> None:
    """Rank 1 has never come to a forward, and is stopped; rank 3 tells what it waits for."""
    server = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    first = "before its first forward"
    _post(server, 1, posted=0.0, since=0.0, steps=0, where=first, host="b")
    _post(server, 2)
    _post(server, 3, transfers="layer 2: spAG (for 9 s)")
    out: list[str] = []
    reporter = waiting(server.clone())
    _until(lambda: out.append(capfd.readouterr().out) or "".join(out))
    time.sleep(1.5)
    reporter.stop()
    out.append(capfd.readouterr().out)
    assert re.fullmatch(
        r"FSSDP: rank 0 made no progress for \d+ s: iteration 4, layer 2\. Behind: rank 1 on b \("
        r"stopped, exited or unreachable; last heartbeat: before its first forward, since [\d: -]+\)\. "
        r"Under way on rank 3: layer 2: spAG \(for 9 s\)\n",
        "".join(out),
    ), out


# State of rank 0; state of the first rank of the group; whether rank 3 speaks.
OTHERS = {
    "rank 0 waits": ({}, {}, False),
    "rank 0 is stopped": ({"posted": 0.0}, {}, False),
    "rank 0 has no layer": ({"steps": 0}, {}, False),
    "rank 0 moves": ({"since": 2e10}, {}, False),
    "both are stopped": ({"posted": 0.0}, {"posted": 0.0}, True),
}


@pytest.mark.parametrize("case", OTHERS)
def test_another_rank_speaks_where_rank_0_does_not(
    case: str, waiting: Callable[..., Watchdog], capfd: pytest.CaptureFixture[str]
) -> None:
    """Of a group of ranks 2 and 3, rank 3 leaves it to rank 2 as long as that one lives."""
    server = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    rank_0, rank_2, speaks = OTHERS[case]
    _post(server, 0, **rank_0)
    _post(server, 1, steps=0)
    _post(server, 2, group=2, **rank_2)
    reporter = waiting(server.clone(), rank=3, group=2)
    looks = mock.Mock(wraps=reporter._report)
    reporter._report = looks
    _until(lambda: looks.call_count)
    reporter.stop(10)
    out = capfd.readouterr().out
    assert ("Behind: rank 0" in out and "rank 2 on a" in out) is speaks, out
    assert bool(out) is speaks, out


def test_a_store_that_stands_still_is_named_and_one_that_goes_away_ends_the_thread(
    waiting: Callable[..., Watchdog], capfd: pytest.CaptureFixture[str]
) -> None:
    """Rank 0 serves the store and is stopped: the others say so. Later it ends before them: so does the thread."""
    code = (
        "import time, torch.distributed as dist\n"
        "server = dist.TCPStore('127.0.0.1', 0, None, True, wait_for_workers=False)\n"
        "print(server.port, flush=True)\ntime.sleep(60)"
    )
    server = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        port = int(server.stdout.readline())
        client = dist.TCPStore("127.0.0.1", port, None, False, wait_for_workers=False)
        key = heartbeats.heartbeat_key(0)
        reporter = waiting(client)
        other = client.clone()
        other.wait([key])
        server.send_signal(signal.SIGSTOP)
        out: list[str] = []
        _until(lambda: out.append(capfd.readouterr().out) or "".join(out))
        assert re.fullmatch(
            r"FSSDP: rank 0 made no progress for \d+ s: iteration 4, layer 2\. The rendezvous store does not answer: "
            r"rank 0, which hosts it unless torchrun does, is stopped\n",
            "".join(out),
        ), out
        server.send_signal(signal.SIGCONT)
        posted = other.get(key)
        _until(lambda: other.get(key) != posted)
        server.kill()
        reporter.join(20)
        assert not reporter.is_alive() and capfd.readouterr().out == ""
    finally:
        server.kill()
        server.wait()


def test_a_process_ends_as_if_there_were_no_thread() -> None:
    """Also with a forked child that ends as Python ends, and of which nobody hears. Oracle: exit codes."""
    server = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    code = """
import atexit, os, sys, time
import torch.distributed as dist
from megatron_hecate.faults.watchdog import Watchdog
store = dist.TCPStore("127.0.0.1", int(sys.argv[1]), None, False, wait_for_workers=False)
reporter = Watchdog(store, 0, 2, group=0, timeout=lambda: 600.0, is_over=lambda: False)
reporter.start()
atexit.register(reporter.stop)
time.sleep(0.5)
if (pid := os.fork()) == 0:
    sys.exit(0)
status = os.waitpid(pid, 0)[1]
time.sleep(0.5)
print("child", status, reporter.is_alive(), store.get("megatron_hecate/progress/at/0"))
"""
    command = [sys.executable, "-W", "ignore", "-c", code, str(server.port)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and done.stderr == ""
    assert done.stdout.startswith("child 0 True ")


def test_a_store_that_does_not_answer_delays_an_error_by_seconds_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = mock.Mock()
    store.clone = lambda: time.sleep(60)
    settings = dict(group=0, timeout=lambda: 2.0, is_over=lambda: False)
    monkeypatch.setattr(watchdog, "_running", Watchdog(store, 0, 2, **settings))
    begin = time.monotonic()
    assert watchdog.name_silent_ranks() == "the rendezvous store does not answer"
    assert watchdog.name_stragglers() == "the rendezvous store does not answer"
    assert time.monotonic() - begin < 10
