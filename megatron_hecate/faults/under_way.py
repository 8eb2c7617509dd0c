"""Registry of messages and collectives in flight on GPUs.

On a GPU `wait` blocks the stream, not the host, and never raises: a missing peer becomes an error
only when torch's watchdog terminates the process, with a message that names neither the layer nor
the expected transfer. The straggler watchdog (`watchdog`) prints both before, from this registry.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence

import torch.distributed as dist

from megatron_hecate.device.autograd import is_capturing

# Upper bound on the registered works of a rank, which has several per layer in flight.
KEPT: int = 256
# Works in flight that a line names, at most.
NAMED: int = 4
# For each batch of messages or collective: whether it is over, its text, its start.
_begun: deque[tuple[Callable[[], bool], Callable[[], str], float]] = deque(maxlen=KEPT)


def note(works: Sequence[dist.Work], describe: Callable[[], str]) -> None:
    """Register ``works`` that start now.

    Args:
        works: handles from torch.
        describe: function that returns layer, kind of transfer, ranks, and the expected messages.
            Called only if the works do not complete, so that no time is spent on text in each
            forward. It must not keep tensors, whose memory the registry would keep.
    """
    # Works of a CUDA graph cannot be queried.
    if is_capturing():
        return

    def is_over() -> bool:
        # The query raises if NCCL's communicator has been aborted.
        with contextlib.suppress(RuntimeError):
            return all(work.is_completed() for work in works)
        return False

    _begun.append((is_over, describe, time.monotonic()))


@contextlib.contextmanager
def blocking(describe: Callable[[], str]) -> Iterator[None]:
    """Register the block, which waits for other ranks on the host; ``describe`` as in `note`."""
    entry = (lambda: False, describe, time.monotonic())
    _begun.append(entry)
    try:
        yield
    finally:
        with contextlib.suppress(ValueError):
            _begun.remove(entry)


def forget() -> None:
    """Clear the registry when a new attempt of the job starts: abandoned works never complete."""
    _begun.clear()


def describe() -> str:
    """Describe the oldest works in flight on this rank; empty when there are none.

    Must not be called from the training thread: each registered work costs a query to the GPU.
    """
    in_flight = (entry for entry in tuple(_begun) if not entry[0]())
    moment = time.monotonic()
    return "; ".join(
        f"{text()} (for {moment - begin:.0f} s)"
        for _, text, begin in itertools.islice(in_flight, NAMED)
    )
