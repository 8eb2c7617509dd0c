"""What all ranks tell rank 0, and its decision, over a real store. Oracle: what was told, and literal messages."""

from __future__ import annotations

import dataclasses
import json
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from megatron_hecate import HecateConfig
from megatron_hecate.comm.agreement import Note, _find_problems
from megatron_hecate.faults import rendezvous as module
from megatron_hecate.faults.rendezvous import Question

RANKS = range(6)
NOBODY_LATE = dict.fromkeys(RANKS, 0.0)
WAY_OUT = (
    "to switch FSSDP on; is --moe-fssdp given on every rank, and does every rank build the model?"
)


class Counted:
    """A store that counts its operations."""

    def __init__(self, store: dist.Store) -> None:
        self.store, self.count = store, 0

    def __getattr__(self, name: str) -> Callable[..., Any]:
        self.count += 1
        return getattr(self.store, name)


def _server() -> dist.TCPStore:
    return dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)


@pytest.fixture
def store() -> Iterator[dist.TCPStore]:
    server = _server()
    yield server
    del server


def _client(server: dist.TCPStore) -> dist.TCPStore:
    return dist.TCPStore("127.0.0.1", server.port, None, False, wait_for_workers=False)


def _sum(told: list[Any]) -> dict[str, int]:
    return {"sum": sum(told)}


def _question(store: Any, rank: int, size: int, number: int, timeout: float) -> Question:
    return Question(dist.PrefixStore(str(number), store), rank, size, timeout)


def _ask(
    number: int,
    connect: Callable[[], dist.Store],
    *,
    after: dict[int, float] = NOBODY_LATE,
    timeout: float = 20.0,
    judge: Callable[[list[Any]], Any] = _sum,
) -> dict[int, Any]:
    """Every rank in ``after`` asks, so many seconds after the first; the decision and the notes of ranks 3 and 1, or the
    error, of each."""
    heard: dict[int, Any] = {}

    def run(rank: int) -> None:
        time.sleep(after[rank])
        try:
            question = _question(connect(), rank, len(RANKS), number, timeout)
            heard[rank] = question.ask(10**rank, judge), question.read([3, 1])
        except Exception as error:
            heard[rank] = error

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in after]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert heard.keys() == after.keys(), "some rank still waits"
    return heard


@pytest.mark.fast
def test_every_rank_hears_the_decision_and_can_read_notes(store: dist.TCPStore) -> None:
    for number in range(1, 5):
        first = RANKS[-number]  # also rank 0 may come late
        judge = mock.Mock(side_effect=_sum)
        after = {rank: 0.1 * (rank != first) for rank in RANKS}
        heard = _ask(number, lambda: _client(store), after=after, judge=judge)
        assert heard == dict.fromkeys(RANKS, ({"sum": 111111}, [1000, 10]))
        judge.assert_called_once_with([1, 10, 100, 1000, 10000, 100000])  # by rank 0 alone


@pytest.mark.fast
@pytest.mark.parametrize("asked_before", [False, True], ids=["the first question", "a later one"])
def test_ranks_that_do_not_come_are_named_on_all_others(
    store: dist.TCPStore, asked_before: bool
) -> None:
    """Also on a rank that came before rank 0."""
    if asked_before:  # notes of this one must not count
        _ask(1, lambda: _client(store))
    start, after = time.monotonic(), {0: 0.5, 1: 0.0, 3: 1.0, 5: 0.7}
    heard = _ask(2, lambda: _client(store), after=after, timeout=2.0)
    assert time.monotonic() - start < 8
    for error in heard.values():
        assert isinstance(error, TimeoutError)
        assert str(error) == f"FSSDP: rank 0 waited 2 s for ranks [2, 4] {WAY_OUT}"


@pytest.mark.fast
def test_rank_0_that_does_not_come_is_named(
    store: dist.TCPStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others wait for as long as rank 0 may take to come, and then to wait for others."""
    monkeypatch.setattr(module, "PATIENCE", 0.5)
    for rank, error in _ask(1, lambda: _client(store), after={1: 0.0, 4: 0.2}, timeout=0.5).items():
        assert str(error) == f"FSSDP: rank {rank} waited 1.5 s for ranks [0] {WAY_OUT}"


@pytest.mark.fast
@pytest.mark.parametrize("has_decided", [False, True])
def test_a_store_that_goes_with_rank_0_is_an_error(has_decided: bool) -> None:
    """Rank 0 hosts it, and dies, or exits once it has decided."""
    server = [_server()]
    losing = mock.Mock(wraps=(client := dist.PrefixStore("1", _client(server[0]))))
    if has_decided:
        _question(_client(server[0]), 0, 1, 1, 20.0).ask("note", lambda told: None)
        losing.get.side_effect = lambda key: (server.clear(), client.get(key))
    else:
        threading.Timer(0.5, server.clear).start()
    start = time.monotonic()
    with pytest.raises(
        RuntimeError,
        match="FSSDP: rank 3 lost the rendezvous store while it waited for rank 0, which",
    ):
        Question(losing, 3, 6, 20.0).ask("note", _sum)
    assert time.monotonic() - start < 10


@pytest.mark.fast
@pytest.mark.parametrize(
    ("judge", "said"),
    [
        (lambda told: told[99], "IndexError: list index out of range"),
        (lambda told: object(), "TypeError: Object of type object is"),  # nothing for JSON
    ],
)
def test_an_exception_on_rank_0_reaches_all(
    store: dist.TCPStore, judge: Callable[[list[Any]], Any], said: str
) -> None:
    for error in _ask(1, lambda: _client(store), judge=judge).values():
        assert isinstance(error, RuntimeError)
        failed = "FSSDP: rank 0 failed while it evaluated the messages of all ranks: "
        assert str(error).startswith(failed + said)
    assert _ask(2, lambda: _client(store))[5][0] == {"sum": 111111}, "and it can be asked again"


@pytest.mark.fast
def test_of_many_missing_ranks_the_first_are_named(store: dist.TCPStore) -> None:
    """More than a block of notes; one comes late."""
    size, present = 700, [0, *range(1, 256), 300, 699]
    for rank in present[:-1]:
        _question(store, rank, size, 1, 3.0).post(rank)
    threading.Timer(0.3, _question(_client(store), 699, size, 1, 3.0).post, ["late"]).start()
    rank_0 = _question(store, 0, size, 1, 1.0)
    rank_0.decide(len)
    with pytest.raises(TimeoutError) as error:
        rank_0.await_decision()
    missing = [rank for rank in range(size) if rank not in present][: module.NAMED]
    assert str(error.value) == f"FSSDP: rank 0 waited 1 s for ranks {missing} and more {WAY_OUT}"


@pytest.mark.parametrize("size", [1024, pytest.param(16384, marks=pytest.mark.slow)])
def test_a_large_job_switches_on(
    store: dist.TCPStore, size: int, capsys: pytest.CaptureFixture
) -> None:
    """What the hook tells and hears, of every simulated rank, by the package's own judges: few operations per rank, and
    what a rank reads does not grow with the job. Oracle: the simulated machines, 8 ranks on each, EP 64."""
    from megatron_hecate.switch_on.connect import _choose_transport, _lay_out, _Site

    groups = [tuple(range(first, first + 64)) for first in range(0, size, 64)]

    def site(rank: int) -> dict[str, Any]:
        node, group = f"node-{rank // 8:05d}.cluster.example", groups[rank // 64]
        first_of = group if group[0] == rank else ()
        return vars(_Site(request="p2p", group=first_of, node=node, domain=node))

    def note(rank: int) -> dict[str, Any]:
        settings = dataclasses.asdict(HecateConfig(slots=3 if rank == size - 1 else 2))
        return vars(Note(settings, [str(i) for i in range(48)]))

    start, others, rank_0 = time.monotonic(), [], []

    def ask(number: int, told: Callable[[int], Any], judge: Callable[[list[Any]], Any]) -> list:
        """Questions of the other ranks, once rank 0 has decided."""
        counted = Counted(dist.PrefixStore(str(number), _client(store)))
        own = Counted(dist.PrefixStore(str(number), _client(store)))
        others.append(counted)
        rank_0.append(own)
        ask_all = Question(own, 0, size, 300.0).ask
        thread = threading.Thread(target=ask_all, args=(told(0), judge), daemon=True)
        thread.start()
        questions = [Question(counted, rank, size, 300.0) for rank in range(1, size)]
        for question in questions:
            question.post(told(question.rank))
        thread.join(300)
        return questions

    for question in ask(1, site, _choose_transport):
        decision, told = question.await_decision(), question.read(groups[question.rank // 64])
        assert decision.pop("name") == "p2p" and len(json.dumps(decision)) < 200
        assert (decision["against"], decision["go on"]) == ([], True)
        if question.rank in (1, size // 2, size - 1):
            nodes, domains = _lay_out([_Site(**of) for of in told])
            assert nodes == tuple(i // 8 for i in range(64))
            assert domains == [list(range(i, i + 8)) for i in range(0, 64, 8)]
    for question in ask(2, note, lambda told: list(_find_problems([Note(**of) for of in told]))):
        expected = [f"rank {size - 1} has slots=3, rank 0 has slots=2"]
        assert question.await_decision() == expected
    seconds = time.monotonic() - start
    assert len(json.dumps(site(1))) < 400 and len(json.dumps(note(1))) < 1500
    per_rank = sum(counted.count for counted in others) / (size - 1)
    total = sum(counted.count for counted in (*others, *rank_0))
    with capsys.disabled():
        print(
            f"\n{size} ranks: {per_rank:.2f} operations per rank, {total} in all, {seconds:.1f} s"
        )
    assert round(per_rank) == 10, "two questions: post, count, wait, read; the group's notes once"
    assert total < 11 * size
    assert seconds < 300, "some 10 s are usual for 16,384 ranks; this is a bound for hangs"


def test_each_operation_is_of_a_kind_that_every_store_has(tmp_path: Path) -> None:
    """Jobs may meet over a file."""
    for number in (1, 2):
        heard = _ask(number, lambda: dist.FileStore(str(tmp_path / "store"), len(RANKS)))
        assert heard == dict.fromkeys(RANKS, ({"sum": 111111}, [1000, 10]))
