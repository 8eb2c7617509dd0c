"""An attempt of the job: from the creation of this process's default process group until that group is destroyed.

A job may restart in the same process: after an error, process groups are destroyed and a model is built anew, while
objects of the abandoned attempt may live on (a traceback holds them, or the garbage collector has not run). So whatever
acts by itself or is numbered alike on all ranks belongs to the attempt, not to the process or to a model: threads,
listeners of torch's global hooks, counters. It ends with the attempt's process group, wherever the attempt died.
Several models of one attempt (a policy and a critic) share it.
"""

from __future__ import annotations

import sys
import threading
import time
import traceback
import weakref
from collections import Counter
from collections.abc import Callable

import torch.distributed as dist

LOOK: float = 0.5  # seconds between two looks at the default process group
LINGER: float = 5.0  # seconds after which an attempt ends whose group has gone: the process may be about to exit


class Attempt:
    """The running attempt of this process is `current`."""

    def __init__(self) -> None:
        world = dist.group.WORLD
        self._world = None if world is None else weakref.ref(world)
        self._at_end: list[weakref.WeakMethod[Callable[[], None]]] = []
        self._counts: Counter[str] = Counter()
        self._lock, self._closed = threading.Lock(), threading.Event()
        self._watch: threading.Thread | None = None

    @staticmethod
    def current() -> Attempt:
        """The attempt of the default process group that exists now. The one before is closed first."""
        global _current
        if _current is None or _current.is_over:
            if _current is not None:
                _current.close()
            _current = Attempt()
        return _current

    @property
    def is_over(self) -> bool:
        """Whether the default process group is another one, or none."""
        world = dist.group.WORLD
        if self._closed.is_set() or self._world is None:
            return self._closed.is_set() or world is not None
        return world is None or world is not self._world()

    def count(self, what: str) -> int:
        """The number of a further ``what`` in this attempt, from 1: the same on ranks that count alike, also where some
        of them are new processes."""
        self._counts[what] += 1
        return self._counts[what]

    def at_end(self, method: Callable[[], None]) -> None:
        """Call the bound ``method`` when the attempt ends, perhaps in a thread, if its object still lives."""
        with self._lock:
            self._at_end = [known for known in self._at_end if known() is not None]
            self._at_end.append(weakref.WeakMethod(method))
            if self._watch is None and self._world is not None:
                self._watch = threading.Thread(
                    target=self._close_when_over, name="fssdp attempt", daemon=True
                )
                self._watch.start()

    def close(self) -> None:
        """End all that belongs to the attempt, the newest first; again does nothing."""
        with self._lock:
            self._closed.set()
            while self._at_end:
                method = self._at_end.pop()()
                try:
                    if method is not None:
                        method()
                except Exception:  # the others must end all the same
                    print("FSSDP: an abandoned attempt could not be ended:", file=sys.stderr)
                    traceback.print_exc()

    def _close_when_over(self) -> None:
        gone_since: float | None = None
        while not self._closed.wait(LOOK):
            if not self.is_over:
                continue
            gone_since = gone_since or time.monotonic()
            if dist.group.WORLD is not None or time.monotonic() - gone_since > LINGER:
                self.close()


_current: Attempt | None = None
