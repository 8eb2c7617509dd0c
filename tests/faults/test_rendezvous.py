"""What all ranks tell rank 0, and its verdict, over a real store. Oracle: what was told, and literal messages."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from megatron_hecate.faults import rendezvous as module
from megatron_hecate.faults.rendezvous import Question, Verdict

RANKS = range(6)
WAY_OUT = (
    "to switch FSSDP on; is --moe-fssdp given on every rank, and does every rank build the model?"
)


class Counted:
    """A store that counts its operations."""

    def __init__(self, store: dist.Store) -> None:
        self.store, self.operations = store, 0

    def __getattr__(self, name: str) -> Callable[..., Any]:
        operation = getattr(self.store, name)

        def counted(*args: Any) -> Any:
            self.operations += 1
            return operation(*args)

        return counted


@pytest.fixture
def store() -> Iterator[dist.TCPStore]:
    server = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    yield server
    del server


def _client(server: dist.TCPStore) -> dist.TCPStore:
    return dist.TCPStore("127.0.0.1", server.port, None, False, wait_for_workers=False)


def _halves(told: list[Any]) -> Verdict:
    return Verdict({"sum": sum(told)}, {"low": told[:3], "high": told[3:]})


def _ask(
    stores: dist.TCPStore | Callable[[], dist.Store],
    number: int,
    *,
    after: dict[int, float],
    timeout: float = 20.0,
    judge: Callable[[list[Any]], Verdict] = _halves,
) -> dict[int, Any]:
    """Every rank in ``after`` asks, so many seconds after the first; the verdict, or the error, of each.

    ``stores`` is the server, or makes the store of a rank.
    """
    heard: dict[int, Any] = {}

    def run(rank: int) -> None:
        time.sleep(after[rank])
        try:
            store = stores() if callable(stores) else _client(stores)
            question = Question(store, rank, len(RANKS), number, timeout)
            heard[rank] = question.ask(10**rank, judge, groups=["low" if rank < 3 else "high"])
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
def test_every_rank_hears_the_verdict_and_its_groups_part(store: dist.TCPStore) -> None:
    """And however often it is asked, the store holds as many keys."""
    keys = []
    for number in range(1, 5):
        first = RANKS[-number]  # also rank 0 may come late
        judged: list[list[int]] = []

        def judge(told: list[int], judged: list[list[int]] = judged) -> Verdict:
            judged.append(told)
            return _halves(told)

        heard = _ask(
            store, number, after={rank: 0.1 * (rank != first) for rank in RANKS}, judge=judge
        )
        low, high = [1, 10, 100], [1000, 10000, 100000]
        for rank in RANKS:
            assert heard[rank] == Verdict(
                {"sum": 111111}, {"low": low} if rank < 3 else {"high": high}
            )
        assert judged == [low + high], "by rank 0 alone"
        keys.append(store.num_keys())
    assert len(set(keys)) == 1, keys
    silent = _ask(store, 5, after=dict.fromkeys(RANKS, 0.0), judge=lambda told: Verdict("no"))
    assert set(map(repr, silent.values())) == {"Verdict(job='no', groups={})"}, (
        "parts of earlier verdicts are over"
    )


@pytest.mark.fast
def test_each_operation_is_of_a_kind_that_every_store_has(tmp_path: Path) -> None:
    """Jobs may meet over a file."""

    def store() -> dist.Store:
        return dist.PrefixStore("job", dist.FileStore(str(tmp_path / "store"), len(RANKS)))

    for number in (1, 2):
        for verdict in _ask(store, number, after=dict.fromkeys(RANKS, 0.0)).values():
            assert verdict.job == {"sum": 111111}


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

    question = Question(Goes(client), 1, 2, 1, 20.0)
    question.post("a")
    rank_0 = Question(_client(server[0]), 0, 2, 1, 20.0)
    assert rank_0.ask("b", lambda told: Verdict(None)) == Verdict(None)
    with pytest.raises(RuntimeError, match="FSSDP: rank 1 lost the rendezvous store while it"):
        question.await_decision()


@pytest.mark.fast
def test_a_store_that_is_gone_is_an_error() -> None:
    """It lives with rank 0, which has died."""
    server: list[dist.TCPStore] = [
        dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    ]
    question = Question(_client(server[0]), 3, 6, 1, 20.0)
    threading.Timer(0.5, server.clear).start()
    start = time.monotonic()
    with pytest.raises(
        RuntimeError,
        match="FSSDP: rank 3 lost the rendezvous store while it waited for rank 0, which",
    ):
        question.ask("note", _halves)
    assert time.monotonic() - start < 10


@pytest.mark.fast
def test_of_many_missing_ranks_the_first_are_named(store: dist.TCPStore) -> None:
    """More than a block of notes; one comes late."""
    size, present = 700, [0, *range(1, 256), 300, 699]
    for rank in present[:-1]:
        Question(store, rank, size, 1, 3.0).post(rank)
    threading.Timer(0.3, Question(_client(store), 699, size, 1, 3.0).post, ["late"]).start()
    rank_0 = Question(store, 0, size, 1, 1.0)
    rank_0.decide(lambda told: Verdict(len(told)))
    with pytest.raises(TimeoutError) as error:
        rank_0.await_decision()
    missing = [rank for rank in range(size) if rank not in present][: module.NAMED]
    assert str(error.value) == f"FSSDP: rank 0 waited 1 s for ranks {missing} and more {WAY_OUT}"
    for rank in range(size):
        Question(store, rank, size, 2, 3.0).post([rank])
    rank_0 = Question(store, 0, size, 2, 1.0)
    rank_0.decide(Verdict)
    assert rank_0.await_decision().job == [[rank] for rank in range(size)]


@pytest.mark.parametrize("size", [1024, pytest.param(16384, marks=pytest.mark.slow)])
def test_a_large_job_switches_on(store: dist.TCPStore, size: int) -> None:
    """What the hook tells and hears, of every simulated rank, by the package's own judges: few operations per rank, and
    what a rank reads does not grow with the job. Oracle: the simulated machines, 8 ranks on each, EP 64."""
    from megatron_hecate import HecateConfig
    from megatron_hecate.comm.agreement import Note, _find_problems, shorten
    from megatron_hecate.switch_on import connect as connecting

    of_group = 64
    groups = [tuple(range(first, first + of_group)) for first in range(0, size, of_group)]
    names = [connecting._name_of(group) for group in groups]

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

    def judge_notes(told: list[Any]) -> Verdict:
        return Verdict(shorten(_find_problems([Note(**fields) for fields in told])))

    def judge_sites(told: list[Any]) -> Verdict:
        return connecting._choose_transport([connecting._Site(**fields) for fields in told])

    start = time.monotonic()
    all_others, rank_0 = Counted(_client(store)), Counted(_client(store))
    questions = (
        (site, judge_sites, lambda rank: [names[rank // of_group]]),
        (note, judge_notes, lambda rank: []),
    )
    keys, verdicts = [], {}
    for number, (told_by, judge, groups_of) in enumerate(questions, start=1):
        own = Question(rank_0, 0, size, number, 300.0)
        thread = threading.Thread(
            target=own.ask, args=(dataclasses.asdict(told_by(0)), judge), daemon=True
        )
        thread.start()
        others = [Question(all_others, rank, size, number, 300.0) for rank in range(1, size)]
        for question in others:
            question.post(dataclasses.asdict(told_by(question.rank)))
        for question in others:
            verdicts[number, question.rank] = question.await_decision(groups_of(question.rank))
        thread.join()
        keys.append(store.num_keys())
    for rank in (1, size // 2, size - 1):
        part = verdicts[1, rank].groups[names[rank // of_group]]
        transport = {"name": "p2p", "why": "", "against": []}
        rest = {"go on": True, "across": True, "one queue": False}
        assert verdicts[1, rank].job == transport | rest
        assert part["nodes"] == [i // 8 for i in range(of_group)]
        assert verdicts[2, rank].job == [f"rank {size - 1} has slots=3, rank 0 has slots=2"]
    assert max(len(module._pack(verdict.job)) for verdict in verdicts.values()) < 200
    assert len(module._pack(verdicts[1, 1].groups)) < 10 * of_group
    assert len(module._pack(dataclasses.asdict(note(1)))) < 1500
    assert keys[0] == keys[1]
    per_rank, total = all_others.operations / (size - 1), all_others.operations + rank_0.operations
    seconds = time.monotonic() - start
    print(f"{size} ranks: {per_rank:.2f} operations per rank, {total} in all, {seconds:.1f} s")
    assert round(per_rank) == 9, "two questions: post, count, wait, read; the group's part once"
    assert total < 10 * size
