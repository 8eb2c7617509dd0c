"""What all ranks tell rank 0, and its decision, over a real store. Oracle: what was told, and literal messages."""

from __future__ import annotations

import dataclasses
import json
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from megatron_hecate.faults import rendezvous as module
from megatron_hecate.faults.rendezvous import Question

RANKS = range(6)
WAY_OUT = (
    "to switch FSSDP on; is --moe-fssdp given on every rank, and does every rank build the model?"
)


class Counted:
    """A store that counts its operations."""

    def __init__(self, store: dist.Store, calls: list[str] | None = None) -> None:
        self.store, self.calls = store, [] if calls is None else calls

    def __getattr__(self, name: str) -> Callable[..., Any]:
        operation = getattr(self.store, name)

        def counted(*args: Any) -> Any:
            self.calls.append(name)
            return operation(*args)

        return counted


@pytest.fixture
def store() -> Iterator[dist.TCPStore]:
    server = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    yield server
    del server


def _client(server: dist.TCPStore) -> dist.TCPStore:
    return dist.TCPStore("127.0.0.1", server.port, None, False, wait_for_workers=False)


def _sum(told: list[Any]) -> dict[str, int]:
    return {"sum": sum(told)}


def _question(store: Any, rank: int, size: int, number: int, timeout: float) -> Question:
    if isinstance(store, Counted):
        own: Any = Counted(dist.PrefixStore(str(number), store.store), store.calls)
    else:
        own = dist.PrefixStore(str(number), store)
    return Question(own, rank, size, timeout)


def _ask(
    server: dist.TCPStore,
    number: int,
    *,
    after: dict[int, float],
    timeout: float = 20.0,
    judge: Callable[[list[Any]], Any] = _sum,
) -> dict[int, Any]:
    """Every rank in ``after`` asks, so many seconds after the first; the decision and the notes of ranks 3 and 1, or the
    error, of each."""
    heard: dict[int, Any] = {}

    def run(rank: int) -> None:
        time.sleep(after[rank])
        try:
            question = _question(_client(server), rank, len(RANKS), number, timeout)
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
        judged: list[list[int]] = []

        def judge(told: list[int], judged: list[list[int]] = judged) -> dict[str, int]:
            judged.append(told)
            return _sum(told)

        heard = _ask(
            store, number, after={rank: 0.1 * (rank != first) for rank in RANKS}, judge=judge
        )
        assert heard == dict.fromkeys(RANKS, ({"sum": 111111}, [1000, 10]))
        assert judged == [[1, 10, 100, 1000, 10000, 100000]], "by rank 0 alone"


@pytest.mark.fast
@pytest.mark.parametrize("asked_before", [False, True], ids=["the first question", "a later one"])
def test_ranks_that_do_not_come_are_named_on_all_others(
    store: dist.TCPStore, asked_before: bool
) -> None:
    """Also on a rank that came before rank 0."""
    if asked_before:  # notes of this one must not count
        _ask(store, 1, after=dict.fromkeys(RANKS, 0.0))
    start = time.monotonic()
    heard = _ask(store, 2, after={0: 0.5, 1: 0.0, 3: 1.0, 5: 0.7}, timeout=2.0)
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
    heard = _ask(store, 1, after={1: 0.0, 4: 0.2}, timeout=0.5)
    for rank in (1, 4):
        assert str(heard[rank]) == f"FSSDP: rank {rank} waited 1.5 s for ranks [0] {WAY_OUT}"


@pytest.mark.fast
def test_a_store_that_goes_with_rank_0_before_its_decision_is_read() -> None:
    """Rank 0 hosts it, and exits once it has decided."""
    server = [dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)]
    client = _client(server[0])

    class Goes(Counted):
        def get(self, key: str) -> bytes:
            server.clear()
            return client.get(key)

    question = Question(Goes(client), 1, 2, 20.0)
    question.post("a")
    rank_0 = Question(_client(server[0]), 0, 2, 20.0)
    assert rank_0.ask("b", lambda told: None) is None
    with pytest.raises(RuntimeError, match="FSSDP: rank 1 lost the rendezvous store while it"):
        question.await_decision()


@pytest.mark.fast
def test_a_store_that_is_gone_is_an_error() -> None:
    """It lives with rank 0, which has died."""
    server: list[dist.TCPStore] = [
        dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    ]
    question = Question(_client(server[0]), 3, 6, 20.0)
    threading.Timer(0.5, server.clear).start()
    start = time.monotonic()
    with pytest.raises(
        RuntimeError,
        match="FSSDP: rank 3 lost the rendezvous store while it waited for rank 0, which",
    ):
        question.ask("note", _sum)
    assert time.monotonic() - start < 10


@pytest.mark.fast
@pytest.mark.parametrize("broken", ["raises", "says what JSON cannot hold"])
def test_an_exception_on_rank_0_reaches_all(store: dist.TCPStore, broken: str) -> None:
    def judge(told: list[Any]) -> Any:
        return object() if broken != "raises" else told[99]

    for rank, error in _ask(store, 1, after=dict.fromkeys(RANKS, 0.0), judge=judge).items():
        said = (
            "IndexError: list index out of range"
            if broken == "raises"
            else "TypeError: Object of type object is"
        )
        assert isinstance(error, RuntimeError), rank
        assert str(error).startswith(
            f"FSSDP: rank 0 failed while it evaluated the messages of all ranks: {said}"
        )
    assert _ask(store, 2, after=dict.fromkeys(RANKS, 0.0))[5][0] == {"sum": 111111}, (
        "and it can be asked again"
    )


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
    for rank in range(size):
        _question(store, rank, size, 2, 3.0).post([rank])
    rank_0 = _question(store, 0, size, 2, 1.0)
    rank_0.decide(lambda told: told)
    assert rank_0.await_decision() == [[rank] for rank in range(size)]


@pytest.mark.parametrize("size", [1024, pytest.param(16384, marks=pytest.mark.slow)])
def test_a_large_job_switches_on(
    store: dist.TCPStore, size: int, capsys: pytest.CaptureFixture
) -> None:
    """What the hook tells and hears, of every simulated rank, by the package's own judges: few operations per rank, and
    what a rank reads does not grow with the job. Oracle: the simulated machines, 8 ranks on each, EP 64."""
    from megatron_hecate import HecateConfig
    from megatron_hecate.comm.agreement import Note, _find_problems, shorten
    from megatron_hecate.switch_on import connect as connecting

    of_group = 64
    groups = [tuple(range(first, first + of_group)) for first in range(0, size, of_group)]

    def site(rank: int) -> Any:
        group = groups[rank // of_group]
        return connecting._Site(
            request="p2p",
            first_of=[group] if group[0] == rank else [],
            node=f"node-{rank // 8:05d}.cluster.example",
            domain=f"node-{rank // 8:05d}.cluster.example",
        )

    def note(rank: int) -> Note:
        settings = dataclasses.asdict(HecateConfig(slots=3 if rank == size - 1 else 2))
        return Note(settings, [str(i) for i in range(48)])

    def judge_notes(told: list[Any]) -> Any:
        return shorten(_find_problems([Note(**fields) for fields in told]))

    def judge_sites(told: list[Any]) -> Any:
        return connecting._choose_transport([connecting._Site(**fields) for fields in told])

    start = time.monotonic()
    all_others, rank_0 = Counted(_client(store)), Counted(_client(store))
    decisions, layouts = {}, {}
    for number, (told_by, judge) in enumerate(((site, judge_sites), (note, judge_notes)), start=1):
        own = _question(rank_0, 0, size, number, 300.0)
        thread = threading.Thread(
            target=own.ask, args=(dataclasses.asdict(told_by(0)), judge), daemon=True
        )
        thread.start()
        others = [_question(all_others, rank, size, number, 300.0) for rank in range(1, size)]
        for question in others:
            question.post(dataclasses.asdict(told_by(question.rank)))
        for question in others:
            decisions[number, question.rank] = question.await_decision()
            if number == 1:
                told = question.read(groups[question.rank // of_group])
                layouts[question.rank] = connecting._lay_out(
                    [connecting._Site(**of) for of in told]
                )
        thread.join()
    seconds = time.monotonic() - start

    for rank in (1, size // 2, size - 1):
        said = {
            "name": "p2p",
            "why": "",
            "against": [],
            "go on": True,
            "across": True,
            "one queue": False,
        }
        assert decisions[1, rank] == said
        nodes, domains = layouts[rank]
        assert nodes == tuple(i // 8 for i in range(of_group))
        assert domains == [list(range(i, i + 8)) for i in range(0, of_group, 8)]
        assert decisions[2, rank] == [f"rank {size - 1} has slots=3, rank 0 has slots=2"]
    assert max(len(json.dumps(decision)) for decision in decisions.values()) < 200
    assert len(json.dumps(dataclasses.asdict(site(1)))) < 400
    assert len(json.dumps(dataclasses.asdict(note(1)))) < 1500
    per_rank = len(all_others.calls) / (size - 1)
    total = len(all_others.calls) + len(rank_0.calls)
    with capsys.disabled():
        print(
            f"\n{size} ranks: {per_rank:.2f} operations per rank, {total} in all, {seconds:.1f} s",
            end=" ",
        )
    assert round(per_rank) == 10, "two questions: post, count, wait, read; the group's notes once"
    assert total < 11 * size
    assert seconds < 300, "some 10 s are usual for 16,384 ranks; this is a bound for hangs"


def test_each_operation_is_of_a_kind_that_every_store_has(tmp_path: Any) -> None:
    """Jobs may meet over a file."""
    for number in (1, 2):
        _over_files(str(tmp_path / "store"), number)


def _over_files(path: str, number: int) -> None:
    def stores() -> Iterable[dist.Store]:
        while True:
            yield dist.PrefixStore("job", dist.FileStore(path, len(RANKS)))

    heard: dict[int, Any] = {}

    def run(rank: int, store: dist.Store) -> None:
        store.set_timeout(timedelta(seconds=20))
        question = _question(store, rank, len(RANKS), number, 20.0)
        heard[rank] = question.ask(10**rank, _sum)

    threads = [
        threading.Thread(target=run, args=pair) for pair in zip(RANKS, stores(), strict=False)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert heard == {rank: {"sum": 111111} for rank in RANKS}
