"""For whom is everyone waiting? Ranks tell the job's store where they are; ranks that wait for long name those behind.

Where Megatron's own all-to-all waits for a rank, no wait of ours ends with an error. So every rank publishes how far it
has come, from a thread and over a connection of its own. When there is no progress for long, one of the ranks that wait
looks twice who is behind; every rank that waits prints that, once, and goes on waiting as Megatron decides.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import json
import os
import re
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from megatron_hecate.job import under_way
from megatron_hecate.job.attempt import Attempt
from megatron_hecate.job.nccl import job_timeout
from megatron_hecate.job.rendezvous import BLOCK

SHORTEST_PAUSE: float = 3.0  # seconds between two words of a rank
WORDS_PER_SECOND: float = (
    500.0  # of all ranks together: a store serves some 14,500 operations a second
)
NAMED: int = 8  # ranks behind that a line names, at most
PREFIX = "megatron_hecate/progress"
SILENCE = (
    "The rendezvous store does not answer: rank 0, which runs it unless torchrun does, stands still"
)


@dataclasses.dataclass
class Position:
    """Where the training thread of this process is; only it, or autograd's while it waits for that, writes. ``steps``
    counts places in front of which a rank computes and after which ranks wait for each other: routers, dispatches and
    combines of MoE layers, forward and backward, and the ends of backwards. Ranks of a group come to the same ones."""

    steps: int = 0
    iteration: int = 0
    place: str = ""
    _backward: int = -1  # the last one that this came to
    _hooks: dict[str, Callable[[Any], None]] = dataclasses.field(default_factory=dict)  # by layer

    def reach(self, place: str) -> None:
        """The training thread comes to ``place``: a layer, as a rule."""
        self.place = place
        self.steps += 1

    def through(self, layer: str, exchange: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call ``exchange``, in which ``layer`` waits for other ranks; it does so in its backward, too."""
        self.reach(layer)
        exchanged = exchange(*args, **kwargs)
        for tensor in (
            exchanged if isinstance(exchanged, tuple) else (exchanged,)
        ):  # each is exchanged by itself
            if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
                tensor.register_hook(self._hooks.get(layer) or self._make_hook(layer))
        return exchanged

    def _make_hook(self, layer: str) -> Callable[[Any], None]:
        place = f"backward of {layer}"

        def reach_backward(_: Any) -> None:
            self.place = place
            self.steps += 1
            backward = torch._C._current_graph_task_id()
            if backward != self._backward:  # once for each, also for one inside another
                self._backward = backward
                torch.autograd.Variable._execution_engine.queue_callback(self._reach_end)

        self._hooks[layer] = reach_backward
        return reach_backward

    def _reach_end(self) -> None:
        self.reach("after a backward")

    def __str__(self) -> str:
        return (
            f"iteration {self.iteration}, {self.place}"
            if self.steps
            else "before its first forward"
        )


here = Position()


@dataclasses.dataclass(frozen=True)
class Word:
    """What a rank publishes: how often it has done so, how far it has come (see `Position`), where that is, since when
    (seconds since 1970), its host, the first rank of its FSSDP group (-1: no MoE layers), whether it has ended, and
    which line its main thread is in, if that has made no progress since the word before."""

    beat: int
    steps: int
    where: str
    since: float
    host: str
    group: int
    left: bool = False
    line: str = ""

    def is_silent_since(self, was: Word | None) -> bool:
        """Whether its process has said nothing since it said ``was``, and has not ended."""
        return was is not None and was.beat == self.beat and not self.left

    def describe(self, *, silent: bool) -> str:
        state = (
            "stands still, or is cut off; last heard of: "
            if silent
            else "has ended; "
            if self.left
            else ""
        )
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.since))
        return f"on {self.host} ({state}{self.where}, since {since})"


def name_ranks_behind(before: Sequence[Word | None], now: Sequence[Word | None]) -> str:
    """From two looks at the words of all ranks, by rank, more than `Reporter.interval` apart: who has come less far
    than others of its FSSDP group, or stands still as a process. Where nobody does and nobody moves, as when pipeline
    stages wait for each other, which lines ranks are in; empty when all are in the same."""
    furthest = {
        word.group: word.steps for word in sorted(filter(None, now), key=lambda word: word.steps)
    }
    behind: list[tuple[float, int, str]] = []
    for rank, (was, word) in enumerate(zip(before, now, strict=True)):
        if word is None:
            behind.append((0.0, rank, "(nothing was ever heard of it)"))
        elif was is None or was.steps == word.steps:  # else it moves
            silent = word.is_silent_since(was)
            if silent or word.steps < furthest[word.group]:
                behind.append((word.since, rank, word.describe(silent=silent)))
    behind.sort()  # who stopped first may be why the others did
    more = f", and {len(behind) - NAMED} more" if len(behind) > NAMED else ""
    if behind:
        return (
            "Behind: " + ", ".join(f"rank {rank} {what}" for _, rank, what in behind[:NAMED]) + more
        )
    lines: dict[str, list[int]] = {}
    for rank, word in enumerate(now):
        lines.setdefault(word.line if word else "", []).append(rank)
    if len(lines) < 2 or any(
        was and word and was.steps != word.steps for was, word in zip(before, now, strict=True)
    ):
        return ""
    rarest = sorted(lines.items(), key=lambda found: len(found[1]))[:NAMED]  # most wait for few
    named = [
        f"{line or 'unknown'} (rank {', '.join(map(str, found[:NAMED]))})" for line, found in rarest
    ]
    return f"No rank is behind its group. They are in {'; '.join(named)}"


def _running_line() -> str:
    """The main thread's, outside of torch and of Python's own library."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        own = path.is_relative_to(Path(os.__file__).parent) and "site-packages" not in path.parts
        if not own and "torch" not in path.parts and path.is_absolute():
            return f"{path.name}:{frame.f_lineno} {frame.f_code.co_name}"
        frame = frame.f_back
    return ""


class StoreThread(threading.Thread):
    """Works beside training, over the connection of ``store``, which nobody else uses."""

    def __init__(self, name: str, store: dist.Store) -> None:
        super().__init__(name=f"fssdp {name}", daemon=True)
        self._store, self._ends, self._pid = store, threading.Event(), os.getpid()
        self._is_abandoned = False  # no more work, whatever waits for it
        while isinstance(store, dist.PrefixStore):
            store = store.underlying_store
        found = re.search(
            r"SocketImpl\(fd=(\d+)", repr(store)
        )  # of a TCPStore, which tells it in its name only
        self._connection = socket.socket(fileno=os.dup(int(found[1]))) if found else None

    def stop(self, patience: float = 1.0) -> None:
        """Have it end, and wait for that so many seconds. Does nothing in a forked process."""
        if os.getpid() == self._pid and self.is_alive():
            self._ends.set()
            self.join(patience)

    def abandon(self) -> None:
        """Have it end without what it still has to do, and close its connection."""
        self._is_abandoned = True
        atexit.unregister(self.stop)
        self.stop()
        if self._connection is not None and not self.is_alive():
            self._connection.close()
            self._connection = None

    def _store_has_gone(self) -> bool:
        """Whether its server has closed the connection: torch would print a page of warnings if it were used."""
        try:
            return self._connection is not None and not self._connection.recv(
                1, socket.MSG_PEEK | socket.MSG_DONTWAIT
            )
        except BlockingIOError:
            return False


class Reporter(StoreThread):
    """Publishes where ``rank`` is, of so many, and prints for whom it waits after ``timeout()`` seconds without
    progress. ``group`` is the first rank of its FSSDP group, or -1, and ``is_over`` tells whether the job's process
    group has gone."""

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        size: int,
        *,
        group: int,
        timeout: Callable[[], float],
        is_over: Callable[[], bool],
    ) -> None:
        super().__init__("progress", store)
        self._rank, self._size, self._group, self._timeout_now = rank, size, group, timeout
        self.is_over = is_over
        self.interval = max(size / WORDS_PER_SECOND, min(SHORTEST_PAUSE, self._timeout / 4))
        self._beat, self._host = 0, socket.gethostname()
        self._steps = -1
        self._start_anew()

    @property
    def _timeout(self) -> float:
        return self._timeout_now()

    def run(self) -> None:
        with contextlib.suppress(RuntimeError, OSError):  # the store has gone, and with it the job
            self._publish()
            last = time.monotonic()
            while (
                not self._ends.wait(self.interval)
                and not self.is_over()
                and not self._store_has_gone()
            ):
                self._publish()
                passed, last = time.monotonic() - last, time.monotonic()
                if here.steps != self._steps:
                    self._start_anew()
                elif self._steps and not self._told:
                    self._stalled += min(
                        passed, 2 * self.interval
                    )  # this process may have stood still itself
                    if self._stalled >= self._timeout / 2:
                        silence = threading.Timer(
                            self.interval + self._timeout / 2, self._say, [SILENCE]
                        )
                        silence.daemon = True
                        silence.start()
                        try:
                            self._see_who_is_behind()
                        finally:
                            silence.cancel()
            if not self._store_has_gone():
                self._publish(left=True)

    def _start_anew(self) -> None:
        if here.steps != self._steps:
            self._steps, self._since, self._told = (
                here.steps,
                time.time(),
                False,
            )  # told: this wait's line is printed
        self._stalled = 0.0  # seconds without progress
        self._seen: int | None = (
            None  # number of the last verdict, when half of the timeout had passed
        )
        self._attempt = 0  # to be the rank that looks
        self._first_look: tuple[float, list[Word | None]] | None = None

    def _see_who_is_behind(self) -> None:
        """Or hear it from the rank that looks."""
        if self._seen is None:
            self._seen = self._verdict()[0]
        if (
            attempt := int(self._stalled / self._timeout + 0.5)
        ) > self._attempt:  # who looked first may be gone
            self._attempt = attempt
            if self._store.add(f"{PREFIX}/look/{self._seen + 1}/{attempt}", 1) == 1:
                self._first_look = (self._stalled, _look(self._store, self._size))
        if self._stalled < self._timeout:
            return
        if self._first_look is not None and self._stalled - self._first_look[0] > 2 * self.interval:
            text = name_ranks_behind(self._first_look[1], _look(self._store, self._size))
            self._first_look = None
            self._store.set(f"{PREFIX}/behind", json.dumps([self._seen + 1, text]))
        number, text = self._verdict()
        if number > self._seen and text:
            self._say(text)
        elif (
            number > self._seen
        ):  # all have come as far and are in one line, as in a long evaluation
            self._start_anew()

    def _say(self, text: str) -> None:
        if here.steps == self._steps and not self._told:
            self._told = True
            stands = f"made no progress for {time.time() - self._since:.0f} s: {here}"
            transfers = under_way.describe()
            print(
                f"FSSDP: rank {self._rank} {stands}. {text}{transfers and f'. {transfers}'}",
                flush=True,
            )

    def _publish(self, *, left: bool = False) -> None:
        self._beat += 1
        steps, where = here.steps, str(here)
        since = self._since if steps == self._steps else time.time()
        line = "" if steps != self._steps else _running_line()
        word = Word(self._beat, steps, where, round(since, 1), self._host, self._group, left, line)
        self._store.set(f"{PREFIX}/at/{self._rank}", json.dumps(dataclasses.astuple(word)))

    def _verdict(self) -> tuple[int, str]:
        """The last one: its number, and who is behind."""
        there = self._store.check([f"{PREFIX}/behind"])
        return tuple(json.loads(self._store.get(f"{PREFIX}/behind"))) if there else (0, "")


def _look(store: dist.Store, size: int) -> list[Word | None]:
    """The last words of all ranks, by rank."""
    words: list[Word | None] = []
    for first in range(0, size, BLOCK):
        keys = [f"{PREFIX}/at/{rank}" for rank in range(first, min(first + BLOCK, size))]
        there = keys if store.check(keys) else [key for key in keys if store.check([key])]
        found = dict(zip(there, store.multi_get(there), strict=True)) if there else {}
        words += [Word(*json.loads(found[key])) if key in found else None for key in keys]
    return words


def name_silent_ranks() -> str:
    """Those whose processes say nothing any more, for an error after which training does not go on: takes seconds."""
    pause, found = 2.5 * (SHORTEST_PAUSE if _running is None else _running.interval), list[str]()
    looks = threading.Thread(target=lambda: found.append(_silent_ranks(pause)), daemon=True)
    looks.start()
    looks.join(3 * pause)  # a store whose host has gone is asked for minutes
    return found[0] if found else "the rendezvous store does not answer"


def _silent_ranks(pause: float) -> str:
    with contextlib.suppress(RuntimeError, OSError):  # the store may have gone with a rank
        store, size = _clone_of_store(), dist.get_world_size()
        before = _look(store, size)
        time.sleep(pause)
        pairs = enumerate(zip(before, _look(store, size), strict=True))
        silent = [
            (rank, now)
            for rank, (was, now) in pairs
            if now is not None and now.is_silent_since(was)
        ]
        named = [f"rank {rank} {now.describe(silent=True)}" for rank, now in silent[:NAMED]]
        return "; ".join(named) or "all ranks still live"
    return "the rendezvous store has gone"


def _clone_of_store() -> dist.Store:
    """The job's store, over a connection of its own."""
    store: Any = _get_default_store()
    return store.clone()


_running: Reporter | None = None


def watch(groups: Sequence[Sequence[int]], *, timeout: float) -> None:
    """Have one thread tell where this process is, until it ends or the job's process group is destroyed. All ranks call
    it, once per model, with the groups of ranks that compute their layers together.

    A rank that makes no progress prints for whom it waits after ``timeout`` seconds, or after half of the job's timeout
    where that is earlier: after the whole of it torch's watchdog ends the process.
    """
    global _running
    attempt = Attempt.current()
    if _running is not None:
        if _running.is_alive() and not _running.is_over():
            return
        _running.abandon()
    vars(here).update(vars(Position()))
    under_way.forget()
    patience = lambda: min(timeout, job_timeout() / 2)  # noqa: E731
    settings: dict[str, Any] = dict(timeout=patience, is_over=lambda: attempt.is_over)
    first = groups[0][0] if groups else -1
    _running = Reporter(
        _clone_of_store(), dist.get_rank(), dist.get_world_size(), group=first, **settings
    )
    atexit.register(_running.stop)
    _running.start()
    attempt.at_end(_running.abandon)
