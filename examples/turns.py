"""Two jobs on one machine take turns, a few steps each, so that whatever else runs there slows both alike."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path

import torch.distributed as dist

STEPS: int = 3  # of a turn
POLL: float = 0.01  # seconds between two looks at whose turn it is
VARIABLE = (
    "HECATE_TURNS"  # the folder that the jobs share, the name of this one and of the other one
)


class Turns:
    """One job's side of it. All its ranks make the same calls.

    Args:
        folder: which both jobs see.
        own, other: names of the jobs.
    """

    def __init__(self, folder: Path, own: str, other: str) -> None:
        self._turn, self._own, self._other = folder / "turn", own, other
        self._other_ended = folder / f"{other} ended"
        self._ended = folder / f"{own} ended"

    @classmethod
    def of(cls, environment: Mapping[str, str] = os.environ) -> Turns | None:
        """Read from the variable `VARIABLE`; ``None`` where it is not set."""
        words = environment.get(VARIABLE, "").split(os.pathsep)
        return cls(Path(words[0]), *words[1:]) if len(words) == 3 else None

    @staticmethod
    def begin(folder: Path, first: str, second: str) -> list[str]:
        """Let ``first`` begin; returns the value of `VARIABLE` for both jobs."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "turn").write_text(first)
        return [
            os.pathsep.join([str(folder), *names]) for names in ((first, second), (second, first))
        ]

    def before_step(self, step: int) -> None:
        """Wait for this job's turn where one begins with ``step``, counted from 0."""
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
        dist.barrier()  # every rank has ended its step
        if dist.get_rank() == 0:
            draft = self._turn.with_suffix(".new")
            draft.write_text(self._other)
            draft.replace(self._turn)
        dist.barrier()
