"""Straggler watchdog: ranks post heartbeats to the store; a stalled rank reports who is behind.

Where Megatron's own all-to-all waits for a rank, no wait of ours ends with an error. Therefore
every rank posts its progress from a background thread, over a store connection of its own. After a
long stall one of the waiting ranks compares two snapshots of all heartbeats; every waiting rank
prints the result once, and continues to wait for as long as Megatron decides.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import socket
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from megatron_hecate.faults import under_way
from megatron_hecate.faults.attempt import Attempt
from megatron_hecate.faults.background import BackgroundThread
from megatron_hecate.faults.events import Stall
from megatron_hecate.faults.heartbeats import (
    PREFIX,
    Heartbeat,
    Snapshot,
    heartbeat_key,
    list_ranks_behind,
    name_ranks_behind,
    name_silent,
    read_heartbeats,
    running_line,
)
from megatron_hecate.faults.rendezvous import job_timeout
from megatron_hecate.faults.store_thread import StoreThread

# Seconds between two heartbeats of a rank, at least, unless a quarter of the timeout is shorter.
SHORTEST_PAUSE: float = 3.0
# Upper bound for all ranks together: a store serves some 14,500 operations a second.
HEARTBEATS_PER_SECOND: float = 500.0
SILENCE = (
    "The rendezvous store does not answer: rank 0, which hosts it unless torchrun does, is stopped"
)


@dataclasses.dataclass
class Position:
    """Progress of this process's training thread.

    Only the training thread writes, or autograd's thread while the training thread waits for it.

    Args:
        steps: number of places passed. A place is preceded by computation of one rank and followed
            by a wait for other ranks: routers, dispatches and combines of MoE layers, forward and
            backward, and ends of backwards. Ranks of a group pass the same places.
        iteration: number of the running iteration.
        place: the last place; a layer's name, as a rule.
        remark: returns text about ranks that were slow before a stall; empty if none was.
        events: folder of the files of events (`events.Stall`); ``None`` to write none.
    """

    steps: int = 0
    iteration: int = 0
    place: str = ""
    remark: Callable[[], str] = str
    events: str | None = None
    # The last autograd graph task for which the end of the backward was queued.
    _backward: int = -1
    # For each layer, the hook that records its backward.
    _hooks: dict[str, Callable[[Any], None]] = dataclasses.field(default_factory=dict)

    def reach(self, place: str) -> None:
        """Record that the training thread has reached ``place``."""
        self.place = place
        self.steps += 1

    def through(self, layer: str, exchange: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call ``exchange`` and record its forward and its backward as places.

        Args:
            layer: name of the layer.
            exchange: function in which the layer waits for other ranks.
            args: positional arguments of ``exchange``.
            kwargs: keyword arguments of ``exchange``.
        """
        self.place = layer
        self.steps += 1
        exchanged = exchange(*args, **kwargs)
        if layer not in self._hooks:
            self._hooks[layer] = self._make_hook(layer)
        outputs = exchanged if isinstance(exchanged, tuple) else (exchanged,)
        # Each output has an exchange of its own in the backward. One hook suffices: autograd runs
        # nodes that were made later first, so the exchange of the last output begins first.
        for tensor in reversed(outputs):
            if isinstance(tensor, torch.Tensor) and tensor.grad_fn is not None:
                # A hook of the tensor runs at the same time and costs more.
                tensor.grad_fn.register_prehook(self._hooks[layer])
                break
        return exchanged

    def _make_hook(self, layer: str) -> Callable[[Any], None]:
        place = f"backward of {layer}"

        def reach_backward(_: Any) -> None:
            self.place = place
            self.steps += 1
            # Once per backward, including a backward nested in another one.
            backward = torch._C._current_graph_task_id()
            if backward != self._backward:
                self._backward = backward
                torch.autograd.Variable._execution_engine.queue_callback(self._reach_end)

        return reach_backward

    def _reach_end(self) -> None:
        self.reach("after a backward")

    def __str__(self) -> str:
        if not self.steps:
            return "before its first forward"
        return f"iteration {self.iteration}, {self.place}"


here = Position()


class Reporter(StoreThread):
    """Thread that posts this rank's heartbeats, and prints the ranks behind after a stall.

    Args:
        store: clone of the job's store that no other thread uses.
        rank: this rank.
        size: number of ranks of the job.
        group: first rank of this rank's FSSDP group; -1 without MoE layers.
        timeout: returns the seconds without progress after which a line is printed.
        is_over: returns True once the job's process group has been destroyed.
    """

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
        self._rank = rank
        self._size = size
        self._group = group
        self._timeout_now = timeout
        self.is_over = is_over
        self.interval = max(size / HEARTBEATS_PER_SECOND, min(SHORTEST_PAUSE, self._timeout / 4))
        self._beat = 0
        self._host = socket.gethostname()
        self._steps = -1
        self._reset()

    @property
    def _timeout(self) -> float:
        return self._timeout_now()

    def run(self) -> None:
        # The store and the job end together.
        with contextlib.suppress(RuntimeError, OSError):
            self._publish()
            last = time.monotonic()
            while (
                not self.stopping.wait(self.interval)
                and not self.is_over()
                and not self._store_is_closed()
            ):
                self._publish()
                now = time.monotonic()
                self._check_progress(now - last)
                last = now
            if not self._store_is_closed():
                self._publish(left=True)

    def _check_progress(self, passed: float) -> None:
        """Measure the stall of the training thread, and report a long one.

        Args:
            passed: seconds since the last call.
        """
        if here.steps != self._steps:
            self._reset()
            return
        if not self._steps or self._reported:
            return
        # A longer pause means that this whole process was stopped, which is no stall of training.
        self._stalled += min(passed, 2 * self.interval)
        if self._stalled < self._timeout / 2:
            return

        def print_silence() -> None:
            if not silence.stopping.wait(self.interval + self._timeout / 2):
                self._print_stall(SILENCE)

        # A store whose host is stopped blocks this thread, so another one prints the line instead.
        silence = BackgroundThread("silence", print_silence)
        silence.start()
        try:
            self._find_ranks_behind()
        finally:
            silence.stopping.set()

    def _reset(self) -> None:
        """Start to measure a stall from zero."""
        if here.steps != self._steps:
            self._steps = here.steps
            self._since = time.time()
            # True once the line about this stall is printed.
            self._reported = False
        # Seconds without progress.
        self._stalled = 0.0
        # Number of the last comparison in the store at half of the timeout.
        self._compared: int | None = None
        # Attempts to become the rank that compares.
        self._attempt = 0
        # Length of the stall at the first snapshot, and the snapshot.
        self._first_snapshot: tuple[float, list[Heartbeat | None]] | None = None

    def _find_ranks_behind(self) -> None:
        """Compare all heartbeats, or wait for the rank that does, and print the result."""
        if self._compared is None:
            self._compared = self._read_comparison()[0]
        self._claim_comparison(self._compared)
        if self._stalled < self._timeout:
            return
        first = self._first_snapshot
        if first is not None and self._stalled - first[0] > 2 * self.interval:
            now = read_heartbeats(self._store, self._size)
            text = name_ranks_behind(first[1], now)
            ranks = list_ranks_behind(first[1], now)
            self._first_snapshot = None
            self._store.set(f"{PREFIX}/behind", json.dumps([self._compared + 1, text, ranks]))
        number, text, ranks = self._read_comparison()
        if number > self._compared:
            if text:
                self._print_stall(text, ranks)
            else:
                # All ranks are at the same place and line, as in a long evaluation.
                self._reset()

    def _claim_comparison(self, compared: int) -> None:
        """Take the first snapshot if no other rank has claimed the comparison.

        Args:
            compared: number of the last comparison.
        """
        # One attempt per timeout, since the rank with the earlier claim may be gone.
        attempt = int(self._stalled / self._timeout + 0.5)
        if attempt > self._attempt:
            self._attempt = attempt
            if self._store.add(f"{PREFIX}/look/{compared + 1}/{attempt}", 1) == 1:
                self._first_snapshot = (self._stalled, read_heartbeats(self._store, self._size))

    def _print_stall(self, text: str, ranks: Sequence[int] = ()) -> None:
        """Print one line about the present stall, unless training has moved on.

        Args:
            text: the ranks behind, or the store's failure.
            ranks: the ranks behind.
        """
        if here.steps == self._steps and not self._reported:
            self._reported = True
            seconds = time.time() - self._since
            line = f"FSSDP: rank {self._rank} made no progress for {seconds:.0f} s: {here}. {text}"
            transfers = under_way.describe()
            if transfers:
                line += f". {transfers}"
            slow = ""
            # A failure there must not hide the line.
            with contextlib.suppress(Exception):
                if slow := here.remark():
                    line += f". Before: {slow}"
            print(line, flush=True)
            stall = Stall(
                host=self._host,
                rank=self._rank,
                iteration=here.iteration,
                place=here.place,
                seconds=round(seconds, 1),
                cause="store" if text == SILENCE else "ranks",
                ranks_behind=list(ranks),
                transfers=transfers,
                slow=slow,
                message=line,
            )
            stall.append_to(here.events)

    def _publish(self, *, left: bool = False) -> None:
        """Post a heartbeat.

        Args:
            left: True in the last one of this process.
        """
        self._beat += 1
        # Read once: the training thread may move on meanwhile.
        steps = here.steps
        where = str(here)
        since = time.time()
        line = ""
        if steps == self._steps:
            since = self._since
            line = running_line()
        heartbeat = Heartbeat(
            self._beat, steps, where, round(since, 1), self._host, self._group, left, line
        )
        self._store.set(heartbeat_key(self._rank), json.dumps(dataclasses.astuple(heartbeat)))

    def _read_comparison(self) -> tuple[int, str, list[int]]:
        """Return number, text and ranks of the last comparison; 0 before the first."""
        key = f"{PREFIX}/behind"
        if not self._store.check([key]):
            return 0, "", []
        return tuple(json.loads(self._store.get(key)))


def name_silent_ranks() -> str:
    """Name the ranks whose processes post no heartbeats any more. Takes seconds."""
    return _compare_heartbeats(name_silent) or "all ranks still live"


def name_stragglers() -> str:
    """Name the ranks behind after a wait that timed out; may be empty. Takes seconds."""
    return _compare_heartbeats(name_ranks_behind)


def _compare_heartbeats(compare: Callable[[Snapshot, Snapshot], str]) -> str:
    """Return the result of ``compare`` for two snapshots, or text about the store's failure."""
    pause = 2.5 * (SHORTEST_PAUSE if _running is None else _running.interval)
    found: list[str] = []
    # A store whose host is gone blocks for minutes, so a thread queries it.
    query = BackgroundThread("ranks", lambda: found.append(_take_two_snapshots(pause, compare)))
    query.start()
    query.join(3 * pause)
    return found[0] if found else "the rendezvous store does not answer"


def _take_two_snapshots(pause: float, compare: Callable[[Snapshot, Snapshot], str]) -> str:
    """Take two snapshots ``pause`` seconds apart; return the result of ``compare``."""
    # The store fails if the rank that hosts it has exited.
    with contextlib.suppress(RuntimeError, OSError):
        store = _clone_of_store()
        before = read_heartbeats(store, dist.get_world_size())
        time.sleep(pause)
        return compare(before, read_heartbeats(store, len(before)))
    return "the rendezvous store has gone"


def _clone_of_store() -> dist.Store:
    """Return the job's store with a connection of its own."""
    store: Any = _get_default_store()
    return store.clone()


_running: Reporter | None = None


def watch(groups: Sequence[Sequence[int]], *, timeout: float, events: str | None = None) -> None:
    """Start this process's watchdog thread, if it does not run. All ranks call it, once per model.

    The thread runs until the process exits or the job's process group is destroyed. A rank without
    progress prints the ranks behind after ``timeout`` seconds, or after half of the job's timeout
    if that is earlier: after the whole of it torch's watchdog terminates the process.

    Args:
        groups: groups of ranks that compute this rank's layers together.
        timeout: seconds.
        events: folder to which stalls are also written, as JSON (`events.Stall`), if any.
    """
    global _running
    here.events = events or here.events
    attempt = Attempt.current()
    if _running is not None:
        if _running.is_alive() and not _running.is_over():
            return
        _running.abandon()
    vars(here).update(vars(Position(remark=here.remark, events=events)))
    under_way.forget()
    _running = Reporter(
        _clone_of_store(),
        dist.get_rank(),
        dist.get_world_size(),
        group=groups[0][0] if groups else -1,
        timeout=lambda: min(timeout, job_timeout() / 2),
        is_over=lambda: attempt.is_over,
    )
    _running.start()
    attempt.at_end(_running.abandon)
