"""Straggler watchdog: ranks post heartbeats to the store; one line names the ranks behind.

Where Megatron's own all-to-all waits for a rank, no wait of ours ends with an error. Therefore
every rank posts its progress from a background thread, over a store connection of its own. After a
long stall the first rank of an FSSDP group (the second, if the first is stopped) reads the group's
heartbeats, and prints one line if a rank is behind. In a stall of the whole job that is the group
of the rank that the other ranks wait for. Training continues to wait for as long as Megatron
decides.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from megatron_hecate.faults import under_way
from megatron_hecate.faults.attempt import Attempt
from megatron_hecate.faults.background import BackgroundThread
from megatron_hecate.faults.rendezvous import job_timeout, read_keys

# Seconds between two heartbeats of a rank, at least, unless a quarter of the timeout is shorter.
SHORTEST_PAUSE: float = 3.0
# Upper bound for all ranks together: a store serves some 14,500 operations a second.
HEARTBEATS_PER_SECOND: float = 500.0
# Ranks that a line names, at most.
NAMED: int = 8


@dataclasses.dataclass
class Position:
    """Progress of this process's training thread.

    Only the training thread writes, or autograd's thread while the training thread waits for it.

    Args:
        steps: number of places passed. A place is preceded by computation of one rank and followed
            by a wait for other ranks: begins of iterations; routers, dispatches and combines of MoE
            layers, forward and backward; ends of backwards. Ranks of a group pass the same places.
        iteration: number of the running iteration.
        place: the last place; a layer's name, as a rule.
    """

    steps: int = 0
    iteration: int = 0
    place: str = ""
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
        self.reach(layer)
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
            self.reach(place)
            # Once per backward, including a backward nested in another one.
            backward = torch._C._current_graph_task_id()
            if backward != self._backward:
                self._backward = backward
                reach_end = functools.partial(self.reach, "after a backward")
                torch.autograd.Variable._execution_engine.queue_callback(reach_end)

        return reach_backward

    def __str__(self) -> str:
        if not self.steps:
            return "before its first forward"
        return f"iteration {self.iteration}, {self.place}"


here = Position()


@dataclasses.dataclass(frozen=True)
class Heartbeat:
    """State of one rank at the time when it posted this heartbeat to the store.

    Args:
        posted: time of the heartbeat, seconds since 1970.
        steps: progress counter of the training thread (see `Position`).
        where: the training thread's position, as text.
        since: time at which the rank reached the position, seconds since 1970.
        host: host name.
        transfers: transfers of experts in flight, if the rank makes no progress.
    """

    posted: float
    steps: int
    where: str
    since: float
    host: str
    transfers: str = ""


def name_ranks_behind(
    heartbeats: Mapping[int, Heartbeat | None], *, moment: float, silence: float
) -> str:
    """Describe the ranks that their group waits for; empty without such ranks.

    Args:
        heartbeats: by rank; ``None`` without a heartbeat yet.
        moment: time of the reading, seconds since 1970. Clocks agree within ``silence``.
        silence: age in seconds from which a process without a heartbeat counts as stopped, and a
            rank as stalled at its position. A slow rank moves.
    """
    furthest = max((beat.steps for beat in heartbeats.values() if beat is not None), default=0)
    behind: list[tuple[float, str]] = []
    for rank, beat in heartbeats.items():
        if beat is None:
            behind.append((0.0, f"rank {rank} (no heartbeat received)"))
            continue
        is_silent = moment - beat.posted > silence
        if is_silent or (beat.steps < furthest and moment - beat.since > silence):
            state = "stopped, exited or unreachable; last heartbeat: " if is_silent else ""
            since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(beat.since))
            text = f"rank {rank} on {beat.host} ({state}{beat.where}, since {since})"
            behind.append((beat.since, text))
    # A process may be busy before its first forward.
    if not (behind and furthest):
        return ""
    # The rank that stopped first may be the cause of the other stalls.
    named = ", ".join(text for _, text in sorted(behind)[:NAMED])
    ending = f", and {len(behind) - NAMED} more" if len(behind) > NAMED else ""
    return f"Behind: {named}{ending}"


class Watchdog(BackgroundThread):
    """Thread that posts this rank's heartbeats, and reports a stall of its group.

    Args:
        store: clone of the job's store that no other thread uses.
        rank: this rank.
        ranks: ranks that pass the same places as this rank, which is one of them.
        interval: seconds between two heartbeats.
        timeout: returns the seconds without progress after which a line is printed.
    """

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        ranks: Sequence[int],
        *,
        interval: float,
        timeout: Callable[[], float],
    ) -> None:
        super().__init__("progress")
        self._store = store
        self._rank = rank
        self._ranks = ranks
        self._interval = interval
        self._timeout = timeout
        # It stops the thread a little after the store's server may be gone.
        self._attempt = Attempt.current()
        self._host = socket.gethostname()
        # Steps and start of the present stall, and whether its line is printed.
        self._steps = here.steps
        self._since = time.time()
        self._is_reported = False

    def run(self) -> None:
        # The store and the job end together.
        with contextlib.suppress(RuntimeError, OSError):
            self._post()
            while not (self.stopping.wait(self._interval) or self._attempt.is_over):
                self._post()
                seconds = time.time() - self._since
                if not self._is_reported and seconds >= self._timeout() and self._is_reporter():
                    self._report()

    def _post(self) -> None:
        """Post a heartbeat."""
        # Read once: the training thread may move on meanwhile.
        steps = here.steps
        moment = time.time()
        if steps != self._steps:
            self._steps = steps
            self._since = moment
            self._is_reported = False
        is_stalled = moment - self._since > self._timeout() / 2
        transfers = under_way.describe() if is_stalled else ""
        beat = Heartbeat(moment, steps, str(here), self._since, self._host, transfers)
        self._store.set(heartbeat_key(self._rank), json.dumps(dataclasses.astuple(beat)))

    def _is_reporter(self) -> bool:
        """Return whether this rank reports for its group: the first, or else the second one."""
        first, *others = self._ranks
        if self._rank != first and self._rank in others[:1]:
            beat = self._read([first])[first]
            return beat is None or time.time() - beat.posted > self._timeout() / 2
        return self._rank == first

    def _report(self) -> None:
        """Print one line about the present stall, if a rank is behind.

        Otherwise all ranks of the group are at the same place, as in a long evaluation.
        """
        beats = self._read(self._ranks)
        moment = time.time()
        behind = name_ranks_behind(beats, moment=moment, silence=self._timeout() / 2)
        # Training may have moved on.
        if not behind or here.steps != self._steps:
            return
        self._is_reported = True
        seconds = moment - self._since
        line = f"FSSDP: rank {self._rank} made no progress for {seconds:.0f} s: {here}. {behind}"
        for rank, beat in beats.items():
            if beat is not None and beat.transfers:
                line += f". Under way on rank {rank}: {beat.transfers}"
                break
        print(line, flush=True)

    def _read(self, ranks: Sequence[int]) -> dict[int, Heartbeat | None]:
        """Read the last heartbeats of ``ranks``."""
        texts = read_keys(self._store, [heartbeat_key(rank) for rank in ranks])
        beats = [None if text is None else Heartbeat(*json.loads(text)) for text in texts]
        return dict(zip(ranks, beats, strict=True))


def heartbeat_key(rank: int) -> str:
    """Return the store's key of the heartbeat of ``rank``."""
    return f"megatron_hecate/progress/{rank}"


def watch(group: Sequence[int], *, timeout: float) -> None:
    """Start the watchdog thread of this attempt, if it has none. All ranks call it, once per model.

    The thread ends with the attempt. A stall is reported after ``timeout`` seconds, or after half
    of the job's timeout if that is earlier: after the whole of it torch's watchdog terminates the
    process.

    Args:
        group: ranks that compute this rank's layers together; without layers, nothing starts.
        timeout: seconds.
    """
    attempt = Attempt.current()
    if not group or attempt.count("watchdog") > 1:
        return
    # In place: other modules hold the object.
    vars(here).update(vars(Position()))
    under_way.forget()
    bound = min(timeout, job_timeout() / 2)
    store: Any = _get_default_store()
    watchdog = Watchdog(
        store.clone(),
        dist.get_rank(),
        group,
        interval=max(dist.get_world_size() / HEARTBEATS_PER_SECOND, min(SHORTEST_PAUSE, bound / 4)),
        # The job may change its timeout after its first iteration.
        timeout=lambda: min(timeout, job_timeout() / 2),
    )
    watchdog.start()
    attempt.at_end(watchdog.stop)
