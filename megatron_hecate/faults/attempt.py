"""Lifetime of one attempt of the job: from creation to destruction of the default process group.

A job may restart in the same process: after an error, process groups are destroyed and the model
is built again, while objects of the abandoned attempt may live on (a traceback references an
object, or the garbage collector has not run). Therefore everything that acts on its own or is
numbered consistently across ranks belongs to the attempt, not to the process or to a model:
threads, listeners of torch's global hooks, counters. All of it ends with the attempt's process
group, wherever the attempt failed. Several models of one attempt (a policy and a critic) share the
attempt.
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

from megatron_hecate.faults.background import BackgroundThread

# Seconds between two polls of the default process group.
POLL_PAUSE: float = 0.5
# Seconds between the destruction of the process group and the end of the attempt, unless a new
# group is created before. A process that is about to exit needs no cleanup.
LINGER: float = 5.0


class Attempt:
    """Resources and counters of one attempt; the running one is `current`."""

    def __init__(self) -> None:
        world = dist.group.WORLD
        # A strong reference would keep the process group alive.
        self._world = None if world is None else weakref.ref(world)
        self._at_end: list[weakref.WeakMethod[Callable[[], None]]] = []
        self._counts: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._watch: BackgroundThread | None = None

    @staticmethod
    def current() -> Attempt:
        """Return the attempt of the present default process group; close the previous one."""
        global _current
        if _current is None or _current.is_over:
            if _current is not None:
                _current.close()
            _current = Attempt()
        return _current

    @property
    def is_over(self) -> bool:
        """True once the attempt's default process group has been destroyed or replaced."""
        if self._closed.is_set():
            return True
        world = dist.group.WORLD
        # An attempt that started without a process group ends when one is created.
        if self._world is None:
            return world is not None
        return world is None or world is not self._world()

    def count(self, what: str) -> int:
        """Increment and return the counter ``what`` of this attempt, starting at 1.

        Ranks that count the same events get the same numbers, even when some of the ranks are new
        processes after a restart.
        """
        self._counts[what] += 1
        return self._counts[what]

    def at_end(self, method: Callable[[], None]) -> None:
        """Register a bound ``method`` for the end of the attempt.

        It may run in another thread, and is dropped if its object is garbage-collected before.
        """
        with self._lock:
            self._at_end = [reference for reference in self._at_end if reference() is not None]
            self._at_end.append(weakref.WeakMethod(method))
            if self._watch is None and self._world is not None:
                self._watch = BackgroundThread("attempt", self._close_when_over)
                self._watch.start()

    def close(self) -> None:
        """Run all registered methods, the newest first. Idempotent."""
        with self._lock:
            self._closed.set()
            if self._watch is not None:
                self._watch.stopping.set()
            while self._at_end:
                method = self._at_end.pop()()
                try:
                    if method is not None:
                        method()
                # An error in one method must not keep the other resources alive.
                except Exception:
                    print("FSSDP: an abandoned attempt could not be ended:", file=sys.stderr)
                    traceback.print_exc()

    def _close_when_over(self) -> None:
        over_since: float | None = None
        assert self._watch is not None
        while not self._watch.stopping.wait(POLL_PAUSE):
            if not self.is_over:
                continue
            over_since = over_since or time.monotonic()
            if dist.group.WORLD is not None or time.monotonic() - over_since > LINGER:
                self.close()


_current: Attempt | None = None
