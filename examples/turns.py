"""Alternate two jobs on one machine every few steps, so that other load slows both equally."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path

import torch.distributed as dist

# steps per turn
STEPS: int = 3
# seconds between two polls of the file that names the running job
POLL: float = 0.01
# environment variable: folder that both jobs share, name of this job, name of the other job
VARIABLE = "HECATE_TURNS"


class Turns:
    """One job's side of the alternation; all ranks of the job make the same calls.

    Args:
        folder: folder that both jobs share.
        own, other: names of the jobs.
    """

    def __init__(self, folder: Path, own: str, other: str) -> None:
        self._turn = folder / "turn"
        self._own = own
        self._other = other
        self._other_ended = folder / f"{other} ended"
        self._ended = folder / f"{own} ended"

    @classmethod
    def of(cls, environment: Mapping[str, str] = os.environ) -> Turns | None:
        """Read the environment variable `VARIABLE`; ``None`` where it is not set."""
        words = environment.get(VARIABLE, "").split(os.pathsep)
        if len(words) != 3:
            return None
        return cls(Path(words[0]), *words[1:])

    @staticmethod
    def begin(folder: Path, first: str, second: str) -> list[str]:
        """Give the first turn to ``first``; returns the value of `VARIABLE` for both jobs."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "turn").write_text(first)
        return [
            os.pathsep.join([str(folder), *names]) for names in ((first, second), (second, first))
        ]

    def before_step(self, step: int) -> None:
        """Wait for this job's turn if ``step``, counted from 0, begins one."""
        if step % STEPS:
            return
        if step:
            self._pass_on()
        while self._turn.read_text() != self._own and not self._other_ended.exists():
            time.sleep(POLL)

    def end(self) -> None:
        """Leave all turns to the other job."""
        if dist.get_rank() == 0:
            self._ended.touch()
        self._pass_on()

    def _pass_on(self) -> None:
        """Give the turn to the other job."""
        # All ranks must have ended their step before the other job begins.
        dist.barrier()
        if dist.get_rank() == 0:
            # Replaced in one operation, so that the other job never reads a half-written name. Each
            # job has a draft of its own: once a job has ended, both may pass on at the same time.
            draft = self._turn.with_name(f"turn of {self._own}")
            draft.write_text(self._other)
            draft.replace(self._turn)
        dist.barrier()
