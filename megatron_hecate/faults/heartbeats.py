"""Heartbeats of all ranks in the job's store, and the ranks behind by them (`watchdog`)."""

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
        posted: time of the heartbeat, seconds since 1970.
        steps: progress counter of the training thread (see `Position`).
        where: the training thread's position, as text.
        since: time at which the rank reached the position, seconds since 1970.
        host: host name.
        group: first rank of the rank's FSSDP group; -1 without MoE layers.
        line: source line that the main thread executes, if the rank makes no progress.
        transfers: transfers of experts in flight, if the rank makes no progress.
    """

    posted: float
    steps: int
    where: str
    since: float
    host: str
    group: int
    line: str = ""
    transfers: str = ""

    def is_silent(self, moment: float, silence: float) -> bool:
        """Return True if the heartbeat is older than ``silence`` seconds."""
        return moment - self.posted > silence

    def is_stalled(self, moment: float, silence: float) -> bool:
        """Return True if the rank has not moved for ``silence`` seconds. A slow rank moves."""
        return moment - self.since > silence

    def describe(self, *, silent: bool) -> str:
        """Format host, state and position for a line.

        Args:
            silent: result of `is_silent`.
        """
        state = "stopped, exited or unreachable; last heartbeat: " if silent else ""
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.since))
        return f"on {self.host} ({state}{self.where}, since {since})"


# By rank; None: no heartbeat yet.
Heartbeats = Sequence[Heartbeat | None]


def read_heartbeats(store: dist.Store, ranks: Sequence[int]) -> list[Heartbeat | None]:
    """Read the last heartbeats of ``ranks``."""
    heartbeats: list[Heartbeat | None] = []
    for first in range(0, len(ranks), BLOCK):
        keys = [heartbeat_key(rank) for rank in ranks[first : first + BLOCK]]
        # `multi_get` waits for missing keys, so they are left out. One check covers a whole block.
        if store.check(keys):
            present = keys
        else:
            present = [key for key in keys if store.check([key])]
        texts: dict[str, bytes] = {}
        if present:
            texts = dict(zip(present, store.multi_get(present), strict=True))
        heartbeats += [Heartbeat(*json.loads(texts[key])) if key in texts else None for key in keys]
    return heartbeats


def heartbeat_key(rank: int) -> str:
    """Return the store's key of the heartbeat of ``rank``."""
    return f"{PREFIX}/at/{rank}"


def name_ranks_behind(heartbeats: Heartbeats, *, moment: float, silence: float) -> str:
    """Describe the ranks that others wait for.

    Args:
        heartbeats: by rank.
        moment: time of the reading, seconds since 1970. Clocks agree within ``silence``.
        silence: age in seconds from which a heartbeat is silent and a position stalled.

    Returns:
        Text about the ranks that are behind their FSSDP groups or whose processes are stopped. If
        no rank is behind and none moves, as when pipeline stages wait for each other: the source
        lines that ranks execute. Empty if all ranks execute the same line.
    """
    furthest: dict[int, int] = {}
    for heartbeat in heartbeats:
        if heartbeat is not None:
            steps = furthest.get(heartbeat.group, heartbeat.steps)
            furthest[heartbeat.group] = max(steps, heartbeat.steps)
    behind: list[tuple[float, int, str]] = []
    for rank, heartbeat in enumerate(heartbeats):
        if heartbeat is None:
            behind.append((0.0, rank, "(no heartbeat received)"))
        elif heartbeat.is_stalled(moment, silence):
            silent = heartbeat.is_silent(moment, silence)
            if silent or heartbeat.steps < furthest[heartbeat.group]:
                behind.append((heartbeat.since, rank, heartbeat.describe(silent=silent)))
    if not behind:
        return _describe_lines(heartbeats, moment=moment, silence=silence)
    # The rank that stopped first may be the cause of the other stalls.
    named = ", ".join(f"rank {rank} {text}" for _, rank, text in sorted(behind)[:NAMED])
    ending = f", and {len(behind) - NAMED} more" if len(behind) > NAMED else ""
    return f"Behind: {named}{ending}"


def name_silent(heartbeats: Heartbeats, *, moment: float, silence: float) -> str:
    """Describe the ranks without a heartbeat for ``silence`` seconds; empty if there is none."""
    silent = [
        f"rank {rank} {heartbeat.describe(silent=True)}"
        for rank, heartbeat in enumerate(heartbeats)
        if heartbeat is not None and heartbeat.is_silent(moment, silence)
    ]
    return "; ".join(silent[:NAMED])


def _describe_lines(heartbeats: Heartbeats, *, moment: float, silence: float) -> str:
    """Name the source lines of stalled ranks; empty if a rank moves or all lines are equal."""
    lines: dict[str, list[int]] = {}
    for rank, heartbeat in enumerate(heartbeats):
        if heartbeat and not heartbeat.is_stalled(moment, silence):
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
        is_python = in_library and "site-packages" not in path.parts
        waits = is_python or "torch" in path.parts or path.parent == Path(__file__).parent
        if not waits and path.is_absolute():
            return f"{path.name}:{frame.f_lineno} {frame.f_code.co_name}"
        frame = frame.f_back
    return ""
