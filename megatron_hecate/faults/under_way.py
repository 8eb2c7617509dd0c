"""Registry of messages and collectives in flight on GPUs.

On a GPU `wait` blocks the stream, not the host, and never raises: a missing peer becomes an error
only when torch's watchdog terminates the process, with a message that names neither the layer nor
the expected transfer. The straggler watchdog (`watchdog`) prints both before, from this registry.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

# Upper bound on the registered works of a rank, which has several per layer in flight.
KEPT: int = 256
# Works in flight that a line names, at most.
NAMED: int = 4


class _Work(Protocol):
    """The part of torch's ``Work`` that is used here."""

    def is_completed(self) -> bool: ...


class _Call:
    """Handle of a call that blocks the host, see `blocking`."""

    def __init__(self) -> None:
        self.is_over = False

    def is_completed(self) -> bool:
        return self.is_over


@dataclasses.dataclass(frozen=True)
class _UnderWay:
    """One batch of messages, or one collective.

    Args:
        works: handles from torch.
        describe: returns layer, kind of transfer, ranks, and the expected messages.
        started: start time, seconds of `time.monotonic`.
    """

    works: Sequence[_Work]
    describe: Callable[[], str]
    started: float

    @property
    def is_over(self) -> bool:
        # The query raises if NCCL's communicator has been aborted.
        with contextlib.suppress(RuntimeError):
            return all(work.is_completed() for work in self.works)
        return False


_begun: deque[_UnderWay] = deque(maxlen=KEPT)


def note(works: Sequence[_Work], describe: Callable[[], str]) -> None:
    """Register ``works`` that start now.

    Args:
        works: handles from torch.
        describe: function that returns layer, kind of transfer, ranks, and the expected messages.
            Called only if the works do not complete, so that no time is spent on text in each
            forward. It must not keep tensors, whose memory the registry would keep.
    """
    _begun.append(_UnderWay(tuple(works), describe, time.monotonic()))


@contextlib.contextmanager
def blocking(describe: Callable[[], str]) -> Iterator[None]:
    """Register the block, which waits for other ranks on the host; ``describe`` as in `note`."""
    call = _Call()
    note([call], describe)
    try:
        yield
    finally:
        call.is_over = True


def forget() -> None:
    """Clear the registry when a new attempt of the job starts: abandoned works never complete."""
    _begun.clear()


def describe() -> str:
    """Describe the works in flight on this rank, the oldest first; empty when there are none.

    Must not be called from the training thread: each registered work costs a query to the GPU.
    """
    waiting = [entry for entry in tuple(_begun) if not entry.is_over]
    if not waiting:
        return ""
    moment = time.monotonic()
    named = [
        f"{entry.describe()} (for {moment - entry.started:.0f} s)" for entry in waiting[:NAMED]
    ]
    text = "; ".join(named)
    if len(waiting) > NAMED:
        text += f", and {len(waiting) - NAMED} more"
    return text
