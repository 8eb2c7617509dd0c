"""The thread that names the ranks behind, by itself: what it says of words, and what it asks of a real store.

Oracle: literal cases and lines, exit codes, and operations counted at the store.
"""

from __future__ import annotations

import dataclasses
import json
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from megatron_hecate.faults import watchdog
from megatron_hecate.faults.events import Stall
from megatron_hecate.faults.heartbeats import Heartbeat, name_ranks_behind, read_heartbeats
from megatron_hecate.faults.watchdog import Reporter, here


def _word(**changed: Any) -> Heartbeat:
    fields = dict(beat=5, steps=40, where="iteration 2, layer 3", since=0.0, host="a", group=0)
    return Heartbeat(**{**fields, **changed})


@pytest.mark.fast
def test_who_is_behind_is_told_from_two_looks() -> None:
    """Literal cases: two groups of an FSSDP job, ranks 0-3 and 4-5, and rank 6 without MoE layers."""
    alive = [_word(), _word(), _word(), _word(), _word(group=4, steps=7), _word(group=4, steps=7)]
    alive += [_word(group=-1, steps=0, where="before its first forward")]
    later = [dataclasses.replace(word, beat=6) for word in alive]

    def named(
        changes: dict[int, Heartbeat | None], first: dict[int, Heartbeat | None] | None = None
    ) -> list[int]:
        before, now = list(alive), list(later)
        for rank, word in (first or {}).items():
            before[rank] = word
        for rank, word in changes.items():
            now[rank] = word
        return [int(rank) for rank in re.findall(r"rank (\d+) ", name_ranks_behind(before, now))]

    assert named({}) == [], "all have come as far as their group"
    assert named({2: alive[2]}) == [2], "it stands still as a process"
    assert named({6: alive[6]}) == [6], "without MoE layers, too"
    assert named({2: _word(beat=6, steps=39)}, {2: _word(steps=39)}) == [2], (
        "its training thread does"
    )
    assert named({2: _word(beat=6, steps=39)}, {2: _word(steps=30)}) == [], "it moves"
    assert named({5: dataclasses.replace(alive[5], left=True)}) == [], (
        "it has ended, as far as the others"
    )
    assert named({5: _word(beat=6, steps=6, group=4, left=True)}, {5: _word(steps=6, group=4)}) == [
        5
    ]
    assert named({3: None}, {3: None}) == [3], "nothing was heard of it"
    assert named({1: _word(since=9.0), 4: _word(group=4, steps=7, since=8.0)}) == [4, 1], (
        "who stopped first"
    )
    many = name_ranks_behind([_word()] * 100, [_word()] * 100)
    assert many.count("rank ") == 8 and many.endswith(", and 92 more")


@pytest.mark.fast
def test_large_jobs_ask_little_of_the_store() -> None:
    """Words of all ranks together: at most 500 a second, of some 14,500 operations (docs/scale.md); a look at 1,024
    ranks takes two operations for 128 of them. Counted at a real store."""
    server = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    for size in (2, 1_000, 16_384):
        reporter = Reporter(server, 0, size, group=0, timeout=lambda: 600.0, is_over=lambda: False)
        assert size / reporter.interval <= 500
    assert (
        Reporter(server, 0, 2, group=0, timeout=lambda: 600.0, is_over=lambda: False).interval == 3
    )
    reporter = Reporter(server, 0, 1_024, group=0, timeout=lambda: 600.0, is_over=lambda: False)
    for rank in range(1_023):
        reporter._rank = rank
        reporter._publish()
    counted = mock.Mock(wraps=server)
    reporter._store = counted
    words = read_heartbeats(counted, 1_024)
    assert [rank for rank, word in enumerate(words) if word is None] == [1_023]
    assert len(counted.method_calls) == 2 * 8 + 128, (
        "the last block is not complete, and asked for one by one"
    )
    reporter._rank = 1_023
    reporter._publish()
    counted.reset_mock()
    assert None not in read_heartbeats(counted, 1_024)
    assert len(counted.method_calls) == 2 * 8


@pytest.fixture
def waiting() -> Iterator[Callable[[dist.Store], Reporter]]:
    """What starts the reporter of rank 0 of two, which has come to a layer and waits there, with a timeout of 1 s."""
    started: list[Reporter] = []

    def start(store: dist.Store) -> Reporter:
        reporter = Reporter(store, 0, 2, group=0, timeout=lambda: 1.0, is_over=lambda: False)
        started.append(reporter)
        reporter.start()
        return reporter

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


def test_when_the_rank_that_looks_is_gone_another_one_does(
    waiting: Callable[[dist.Store], Reporter], capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Somebody has claimed to look, and never says a word. The line is also an event for collectors of logs."""
    here.events = str(tmp_path / "run")
    server = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    server.add(f"{watchdog.PREFIX}/look/1/1", 1)
    word = dataclasses.astuple(_word(steps=0, where="before its first forward", host="b"))
    server.set(f"{watchdog.PREFIX}/at/1", json.dumps(word))
    out: list[str] = []
    reporter = waiting(server.clone())
    _until(lambda: out.append(capfd.readouterr().out) or "".join(out))
    reporter.stop()
    assert re.fullmatch(
        r"FSSDP: rank 0 made no progress for \d+ s: iteration 4, layer 2\. Behind: rank 1 on b \("
        r"stopped or unreachable; last heartbeat: before its first forward, since [\d: -]+\)\n",
        "".join(out),
    ), out
    (file,) = (tmp_path / "run").iterdir()
    (line,) = file.read_text().splitlines()
    event = json.loads(line)
    assert file.name == "events-0.jsonl" and event["message"] + "\n" == "".join(out)
    assert abs(datetime.now(UTC) - datetime.fromisoformat(event.pop("time"))) < timedelta(minutes=5)
    assert event.pop("seconds") >= 1 and event.pop("host") == socket.gethostname()
    del event["message"]
    assert event == dict(
        event="fssdp.stall",
        rank=0,
        iteration=4,
        place="layer 2",
        cause="ranks",
        ranks_behind=[1],
        transfers="",
        slow="",
    )


def test_a_store_that_stands_still_is_named_and_one_that_goes_away_is_not(
    waiting: Callable[[dist.Store], Reporter], capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Rank 0 serves the store and is stopped: the others say so. Later it ends before them: so does the thread, without
    a word of ours or torch's."""
    code = (
        "import time, torch.distributed as dist\n"
        "server = dist.TCPStore('127.0.0.1', 0, None, True, wait_for_workers=False)\n"
        "print(server.port, flush=True)\ntime.sleep(60)"
    )
    here.events = str(tmp_path)
    server = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        port = int(server.stdout.readline())
        client = dist.TCPStore("127.0.0.1", port, None, False, wait_for_workers=False)
        reporter = waiting(client)
        client.clone().wait([f"{watchdog.PREFIX}/at/0"])
        server.send_signal(signal.SIGSTOP)
        out: list[str] = []
        _until(lambda: out.append(capfd.readouterr().out) or "".join(out))
        assert re.fullmatch(
            r"FSSDP: rank 0 made no progress for \d+ s: iteration 4, layer 2\. The rendezvous store does not answer: "
            r"rank 0, which hosts it unless torchrun does, is stopped\n",
            "".join(out),
        ), out
        (line,) = (tmp_path / "events-0.jsonl").read_text().splitlines()
        event = json.loads(line)
        assert (event["cause"], event["ranks_behind"]) == ("store", [])
        server.send_signal(signal.SIGCONT)
        beat = reporter._beat
        _until(lambda: reporter._beat > beat + 1)
        capfd.readouterr()
        server.kill()
        reporter.join(20)
        assert not reporter.is_alive() and capfd.readouterr() == ("", "")
    finally:
        server.kill()
        server.wait()


@pytest.mark.fast
def test_an_event_that_cannot_be_written_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fields = dict(host="a", rank=3, iteration=1, place="layer 2", seconds=1.0, cause="ranks")
    stall = Stall(**fields, ranks_behind=[1], transfers="", slow="", message="line")
    stall.append_to(None)
    assert capsys.readouterr().err == ""
    (tmp_path / "run").touch()
    stall.append_to(str(tmp_path / "run"))
    assert re.fullmatch("FSSDP: rank 3 cannot write its event: .*\n", capsys.readouterr().err)


def test_a_process_ends_as_if_there_were_no_thread() -> None:
    """Also with a forked child that ends as Python ends, and of which nobody hears; the last word says that the rank
    has ended. Oracle: exit codes, and what is in the store."""
    server = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    code = """
import atexit, os, sys, time
import torch.distributed as dist
from megatron_hecate.faults.watchdog import Reporter
store = dist.TCPStore("127.0.0.1", int(sys.argv[1]), None, False, wait_for_workers=False)
reporter = Reporter(store, 0, 2, group=0, timeout=lambda: 600.0, is_over=lambda: False)
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
    assert done.stdout.startswith("child 0 True ") and "false" in done.stdout
    assert Heartbeat(*json.loads(server.get(f"{watchdog.PREFIX}/at/0"))).left


def test_a_store_that_does_not_answer_delays_an_error_by_seconds_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(watchdog, "SHORTEST_PAUSE", 0.1)
    monkeypatch.setattr(watchdog, "_get_default_store", lambda: time.sleep(60))
    begin = time.monotonic()
    assert watchdog.name_silent_ranks() == "the rendezvous store does not answer"
    assert time.monotonic() - begin < 10
