"""Events for operators: one JSON object per line in ``FOLDER/events-{rank}.jsonl``.

A file appears with the first event of its rank. Collectors of logs (OpenTelemetry's ``filelog``
receiver, Vector, Fluent Bit, Promtail) read such files without a parser of their own.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from datetime import UTC, datetime
from pathlib import Path

from megatron_hecate import files


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stall:
    """Line of the watchdog: this rank made no progress for the timeout.

    Args:
        host: name of the host.
        rank: the rank that waits.
        iteration: number of the running iteration.
        place: the last place that the rank has reached, as in the line.
        seconds: length of the stall so far.
        cause: ``ranks``: see ``ranks_behind``; ``store``: the rendezvous store does not answer.
        ranks_behind: the ranks behind, the one that stopped first in front; empty if ranks wait for
            each other.
        transfers: text about transfers in flight, if any.
        slow: text about ranks that were slow before, if any.
        message: the whole line.
    """

    host: str
    rank: int
    iteration: int
    place: str
    seconds: float
    cause: str
    ranks_behind: list[int]
    transfers: str
    slow: str
    message: str

    def append_to(self, folder: str | None) -> None:
        """Append the event, with its name and time, to its rank's file; print an error on failure.

        Args:
            folder: folder of the run, created if missing; ``None`` to write nothing.
        """
        if folder is None:
            return
        now = datetime.now(UTC).isoformat(timespec="milliseconds")
        event = {"event": "fssdp.stall", "time": now, **dataclasses.asdict(self)}
        try:
            path = Path(folder)
            path.mkdir(parents=True, exist_ok=True)
            files.append(path / f"events-{self.rank}.jsonl", json.dumps(event) + os.linesep)
        except OSError as error:
            print(
                f"FSSDP: rank {self.rank} cannot write its event: {error}",
                file=sys.stderr,
                flush=True,
            )
