"""Messages and collectives under way on GPUs.

There `wait` lets the stream wait, not the host, and never raises: a peer that does not come becomes an error when
torch's watchdog ends the process, which knows neither layer nor what was expected. The straggler watchdog prints that
before (`runtime.progress`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections import deque
from collections.abc import Sequence

import torch.distributed as dist

KEPT: int = 256  # what a rank may have in flight: some per layer
NAMED: int = 4  # of those that a line names


@dataclasses.dataclass(frozen=True)
class _UnderWay:
    """Works of one batch of messages, or of a collective.

    Args:
        works: as torch returned them.
        text: layer, what is moved, ranks, and what was expected of them.
        started: seconds of `time.monotonic`.
    """

    works: Sequence[dist.Work]
    text: str
    started: float

    @property
    def is_over(self) -> bool:
        with contextlib.suppress(RuntimeError):  # NCCL's communicator may have been aborted
            return all(work.is_completed() for work in self.works)
        return False


_begun: deque[_UnderWay] = deque(maxlen=KEPT)


def note(works: Sequence[dist.Work], text: str) -> None:
    """Remember ``works``, which began now, for `describe`: layer, ranks and what was expected of them."""
    _begun.append(_UnderWay(tuple(works), text, time.monotonic()))


def forget() -> None:
    """Drop all: another attempt of the job begins, and works of the abandoned one never end."""
    _begun.clear()


def describe() -> str:
    """What is under way on this rank, the oldest first; empty when nothing is. For other threads than training's: it
    asks the GPU about each work that was noted."""
    waiting = [one for one in tuple(_begun) if not one.is_over]
    now = time.monotonic()
    named = [f"{one.text} (for {now - one.started:.0f} s)" for one in waiting[:NAMED]]
    more = f", and {len(waiting) - NAMED} more" if len(waiting) > NAMED else ""
    return f"Under way on this rank: {'; '.join(named)}{more}" if named else ""
