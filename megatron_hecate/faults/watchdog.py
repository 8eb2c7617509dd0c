"""Straggler watchdog: ranks post heartbeats to the store; one line names the ranks behind.

Where Megatron's own all-to-all waits for a rank, no wait of ours ends with an error. Therefore
every rank posts its progress from a background thread, over a store connection of its own. After a
long stall rank 0 reads all heartbeats and prints one line for the job; training continues to wait
for as long as Megatron decides.

| rank 0 | who prints |
|---|---|
| waits | rank 0 |
| stopped, moves on, or has no MoE layers | the first rank of each group, or else its other ranks |
| stopped, and serves the store | each rank: the store does not answer |
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import socket
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from megatron_hecate.faults import under_way
from megatron_hecate.faults.attempt import Attempt
from megatron_hecate.faults.background import BackgroundThread
from megatron_hecate.faults.heartbeats import (
    Heartbeat,
    Heartbeats,
    heartbeat_key,
    name_ranks_behind,
    name_silent,
    read_heartbeats,
    running_line,
)
from megatron_hecate.faults.rendezvous import job_timeout

# Seconds between two heartbeats of a rank, at least, unless a quarter of the timeout is shorter.
SHORTEST_PAUSE: float = 3.0
# Upper bound for all ranks together: a store serves some 14,500 operations a second.
HEARTBEATS_PER_SECOND: float = 500.0
NO_ANSWER = (
    "The rendezvous store does not answer: rank 0, which hosts it unless torchrun does, is stopped"
)
T = TypeVar("T")


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
    """

    steps: int = 0
    iteration: int = 0
    place: str = ""
    remark: Callable[[], str] = str
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


class Watchdog(BackgroundThread):
    """Thread that posts this rank's heartbeats, and reports a stall.

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
        store: Any,
        rank: int,
        size: int,
        *,
        group: int,
        timeout: Callable[[], float],
        is_over: Callable[[], bool],
    ) -> None:
        super().__init__("progress")
        self._store = store
        self._rank = rank
        self._size = size
        self._group = group
        self._timeout = timeout
        self.is_over = is_over
        self.interval = max(size / HEARTBEATS_PER_SECOND, min(SHORTEST_PAUSE, timeout() / 4))
        self._host = socket.gethostname()
        # Position and start of the present stall, whether its line is printed, and the seconds
        # since the last report or look at the other ranks.
        self._steps = here.steps
        self._since = time.time()
        self._is_reported = False
        self._stalled = 0.0

    @property
    def silence(self) -> float:
        """Seconds without a heartbeat, or at one position, from which a rank counts as stalled."""
        return self._timeout() / 2

    def run(self) -> None:
        # The store and the job end together.
        with contextlib.suppress(RuntimeError, OSError):
            seconds = 0.0
            while not self.is_over():
                self._check_progress(seconds)
                self._post()
                begin = time.monotonic()
                if self.stopping.wait(self.interval):
                    return
                seconds = time.monotonic() - begin

    def _check_progress(self, seconds: float) -> None:
        """Measure the stall of the training thread, and report a long one.

        Args:
            seconds: seconds since the last call.
        """
        if here.steps != self._steps:
            self._steps = here.steps
            self._since = time.time()
            self._is_reported = False
            self._stalled = 0.0
            return
        # A longer pause means that this whole process was stopped, which is no stall of training.
        self._stalled += min(seconds, 2 * self.interval)
        if self._steps and not self._is_reported and self._stalled >= self._timeout():
            self._stalled = 0.0
            self._report()

    def _post(self) -> None:
        """Post a heartbeat."""
        # Read once: the training thread may move on meanwhile.
        steps = here.steps
        moment = time.time()
        heartbeat = Heartbeat(moment, steps, str(here), moment, self._host, self._group)
        if steps == self._steps:
            is_stalled = moment - self._since > self.silence
            heartbeat = dataclasses.replace(
                heartbeat,
                since=self._since,
                line=running_line(),
                transfers=under_way.describe() if is_stalled else "",
            )
        self._store.set(heartbeat_key(self._rank), json.dumps(dataclasses.astuple(heartbeat)))

    def _report(self) -> None:
        """Print one line about the present stall, unless rank 0 or the group's first rank does."""
        heartbeats = self.ask(self._read_unless_reported)
        if heartbeats is None:
            self._print(NO_ANSWER)
        elif heartbeats:
            text = name_ranks_behind(heartbeats, moment=time.time(), silence=self.silence)
            waiting = [
                f"Under way on rank {rank}: {heartbeat.transfers}"
                for rank, heartbeat in enumerate(heartbeats)
                if heartbeat and heartbeat.transfers
            ]
            # Without a text all ranks are at the same place and line, as in a long evaluation.
            if text:
                self._print(". ".join([text, *waiting[:1]]))

    def _read_unless_reported(self, store: dist.Store) -> list[Heartbeat | None]:
        """Read the heartbeats of all ranks; none if another rank reports the stall."""
        moment = time.time()
        reporters = [rank for rank in (0, self._group) if 0 <= rank < self._rank]
        for reporter in read_heartbeats(store, reporters):
            if (
                reporter is not None
                and reporter.steps
                and reporter.is_stalled(moment, self.silence)
                and not reporter.is_silent(moment, self.silence)
            ):
                return []
        return read_heartbeats(store, range(self._size))

    def _print(self, text: str) -> None:
        """Print one line about the present stall, unless training has moved on.

        Args:
            text: the ranks behind, or the store's failure.
        """
        if here.steps != self._steps:
            return
        self._is_reported = True
        seconds = time.time() - self._since
        line = f"FSSDP: rank {self._rank} made no progress for {seconds:.0f} s: {here}. {text}"
        # A failure there must not hide the line.
        with contextlib.suppress(Exception):
            if slow := here.remark():
                line += f". Before: {slow}"
        print(line, flush=True)

    def ask(self, function: Callable[[dist.Store], T]) -> T | None:
        """Call ``function`` with a new connection to the store; return ``None`` if it is stuck."""
        answers: list[T] = []

        def ask() -> None:
            # The store fails if the rank that hosts it has exited.
            with contextlib.suppress(RuntimeError, OSError):
                answers.append(function(self._store.clone()))

        # A store whose host is stopped blocks for minutes, so a thread of its own asks it.
        question = BackgroundThread("ranks", ask)
        question.start()
        question.join(self.interval + self._timeout() / 2)
        return answers[0] if answers else None

    def describe(self, text: Callable[..., str], silence: float) -> str:
        """Return ``text`` of the heartbeats of all ranks, or text about the store's failure."""
        heartbeats: Heartbeats | None = self.ask(
            lambda store: read_heartbeats(store, range(self._size))
        )
        if heartbeats is None:
            return "the rendezvous store does not answer"
        return text(heartbeats, moment=time.time(), silence=silence)


def name_silent_ranks() -> str:
    """Name the ranks whose processes post no heartbeats any more. Takes seconds."""
    if _running is None:
        return ""
    # A rank that died just now has posted its last heartbeat at most one interval ago.
    time.sleep(2.5 * _running.interval)
    return _running.describe(name_silent, 2 * _running.interval) or "all ranks still live"


def name_stragglers() -> str:
    """Name the ranks behind after a wait that timed out; may be empty."""
    if _running is None:
        return ""
    return _running.describe(name_ranks_behind, _running.silence)


_running: Watchdog | None = None


def watch(groups: Sequence[Sequence[int]], *, timeout: float) -> None:
    """Start this process's watchdog thread, if it does not run. All ranks call it, once per model.

    The thread runs until the process exits or the job's process group is destroyed. A stall is
    reported after ``timeout`` seconds, or after half of the job's timeout if that is earlier: after
    the whole of it torch's watchdog terminates the process.

    Args:
        groups: groups of ranks that compute this rank's layers together.
        timeout: seconds.
    """
    global _running
    attempt = Attempt.current()
    if _running is not None:
        if _running.is_alive() and not _running.is_over():
            return
        _running.stop()
    vars(here).update(vars(Position(remark=here.remark)))
    under_way.forget()
    store: Any = _get_default_store()
    _running = Watchdog(
        store.clone(),
        dist.get_rank(),
        dist.get_world_size(),
        group=groups[0][0] if groups else -1,
        timeout=lambda: min(timeout, job_timeout() / 2),
        is_over=lambda: attempt.is_over,
    )
    _running.start()
    attempt.at_end(_running.stop)
