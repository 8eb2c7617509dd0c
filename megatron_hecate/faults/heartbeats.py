"""Heartbeats of all ranks in the job's store, and the comparison of two snapshots (`watchdog`)."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import torch.distributed as dist

from megatron_hecate.faults.rendezvous import BLOCK

# Ranks that a line names, at most.
NAMED: int = 8
PREFIX = "megatron_hecate/progress"


@dataclasses.dataclass(frozen=True)
class Heartbeat:
    """State of one rank at the time when it posted this heartbeat to the store.

    Args:
        beat: sequence number.
        steps: progress counter of the training thread (see `Position`).
        where: the training thread's position, as text.
        since: time at which the rank reached the position, seconds since 1970.
        host: host name.
        group: first rank of the rank's FSSDP group; -1 without MoE layers.
        left: True in the last heartbeat of a process that has exited.
        line: source line that the main thread executes, if the rank has made no progress since the
            heartbeat before.
    """

    beat: int
    steps: int
    where: str
    since: float
    host: str
    group: int
    left: bool = False
    line: str = ""

    def is_silent_since(self, previous: Heartbeat | None) -> bool:
        """Return True if no heartbeat followed ``previous`` and the process has not exited."""
        return previous is not None and previous.beat == self.beat and not self.left

    def describe(self, *, silent: bool) -> str:
        """Format host, state and position for a line.

        Args:
            silent: result of `is_silent_since`.
        """
        state = ""
        if silent:
            state = "stopped or unreachable; last heartbeat: "
        elif self.left:
            state = "has exited; "
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.since))
        return f"on {self.host} ({state}{self.where}, since {since})"


Snapshot = Sequence[Heartbeat | None]  # by rank; None: no heartbeat yet


def read_heartbeats(store: dist.Store, size: int) -> list[Heartbeat | None]:
    """Read the last heartbeats of ``size`` ranks, by rank."""
    heartbeats: list[Heartbeat | None] = []
    for first in range(0, size, BLOCK):
        keys = [heartbeat_key(rank) for rank in range(first, min(first + BLOCK, size))]
        # `multi_get` waits for missing keys, so they are left out. One check covers a whole block.
        if store.check(keys):
            present = keys
        else:
            present = [key for key in keys if store.check([key])]
        found: dict[str, bytes] = {}
        if present:
            found = dict(zip(present, store.multi_get(present), strict=True))
        heartbeats += [Heartbeat(*json.loads(found[key])) if key in found else None for key in keys]
    return heartbeats


def heartbeat_key(rank: int) -> str:
    """Return the store's key of the heartbeat of ``rank``."""
    return f"{PREFIX}/at/{rank}"


def name_ranks_behind(before: Snapshot, now: Snapshot) -> str:
    """Compare two snapshots, taken more than `Reporter.interval` apart.

    Args:
        before: the earlier heartbeats, by rank.
        now: the later heartbeats, by rank.

    Returns:
        Text about the ranks that are behind their FSSDP groups or whose processes are stopped. If
        no rank is behind and none moves, as when pipeline stages wait for each other: the source
        lines that ranks execute. Empty if all ranks execute the same line.
    """
    behind = _find_ranks_behind(before, now)
    if behind:
        named = ", ".join(f"rank {rank} {text}" for _, rank, text in behind[:NAMED])
        more = ""
        if len(behind) > NAMED:
            more = f", and {len(behind) - NAMED} more"
        return f"Behind: {named}{more}"
    return _describe_lines(before, now)


def list_ranks_behind(before: Snapshot, now: Snapshot) -> list[int]:
    """Return the ranks behind, as in `name_ranks_behind`, the one that stopped first in front."""
    return [rank for _, rank, _ in _find_ranks_behind(before, now)]


def name_silent(before: Snapshot, now: Snapshot) -> str:
    """Describe the ranks that posted no heartbeat between two snapshots; empty if there is none."""
    silent: list[str] = []
    for rank, (previous, heartbeat) in enumerate(zip(before, now, strict=True)):
        if heartbeat is not None and heartbeat.is_silent_since(previous):
            silent.append(f"rank {rank} {heartbeat.describe(silent=True)}")
    return "; ".join(silent[:NAMED])


def _find_ranks_behind(before: Snapshot, now: Snapshot) -> list[tuple[float, int, str]]:
    """Return start of the stall, rank and description of the ranks behind, longest stall first."""
    furthest: dict[int, int] = {}
    for heartbeat in now:
        if heartbeat is not None:
            steps = furthest.get(heartbeat.group, heartbeat.steps)
            furthest[heartbeat.group] = max(steps, heartbeat.steps)
    behind: list[tuple[float, int, str]] = []
    for rank, (previous, heartbeat) in enumerate(zip(before, now, strict=True)):
        if heartbeat is None:
            behind.append((0.0, rank, "(no heartbeat received)"))
        # A rank that moves is slow, not stalled.
        elif previous is None or previous.steps == heartbeat.steps:
            silent = heartbeat.is_silent_since(previous)
            if silent or heartbeat.steps < furthest[heartbeat.group]:
                behind.append((heartbeat.since, rank, heartbeat.describe(silent=silent)))
    # The rank that stopped first may be the cause of the other stalls.
    return sorted(behind)


def _describe_lines(before: Snapshot, now: Snapshot) -> str:
    """Name the source lines of stalled ranks; empty if a rank moves or all lines are equal."""
    lines: dict[str, list[int]] = {}
    for rank, (previous, heartbeat) in enumerate(zip(before, now, strict=True)):
        if previous and heartbeat and previous.steps != heartbeat.steps:
            return ""
        line = heartbeat.line if heartbeat else ""
        lines.setdefault(line, []).append(rank)
    if len(lines) < 2:
        return ""
    # Most ranks wait for a few, so the rarest line is the most informative.
    rarest = sorted(lines.items(), key=lambda item: len(item[1]))[:NAMED]
    named = [
        f"{line or 'unknown'} (rank {', '.join(map(str, ranks[:NAMED]))})" for line, ranks in rarest
    ]
    return f"No rank is behind its group. Ranks are in {'; '.join(named)}"


def running_line() -> str:
    """Return the main thread's innermost source line that is no library's.

    Lines of torch, the standard library and this folder are those in which a rank waits or writes
    an error about it.
    """
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        in_library = path.is_relative_to(Path(os.__file__).parent)
        # Installed packages lie below the folder of the standard library.
        of_python = in_library and "site-packages" not in path.parts
        waits = of_python or "torch" in path.parts or path.parent == Path(__file__).parent
        if not waits and path.is_absolute():
            return f"{path.name}:{frame.f_lineno} {frame.f_code.co_name}"
        frame = frame.f_back
    return ""
