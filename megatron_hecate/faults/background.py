"""Background threads that end before the interpreter does."""

from __future__ import annotations

import atexit
import threading
import time
from collections.abc import Callable


class BackgroundThread(threading.Thread):
    """Daemon thread that is stopped and joined when the interpreter exits.

    CPython up to 3.13 ends a daemon thread that needs the interpreter's lock during finalization,
    by ``pthread_exit``. torch releases the lock even to free a tensor, and C++ does not allow such
    an end inside a destructor: the process aborts with "terminate called without an active
    exception", and a job that has trained to its end exits with SIGABRT (pytorch issue 38228).

    Args:
        name: suffix of the thread's name.
        run: function of the thread, which returns soon after ``stopping`` is set; `run` is
            overridden without one.
        patience: seconds that the exit waits for the thread after ``stopping`` is set.
    """

    def __init__(
        self,
        name: str,
        run: Callable[[], object] | None = None,
        *,
        patience: float = 1.0,
    ) -> None:
        super().__init__(target=run, name=f"fssdp {name}", daemon=True)
        self.stopping = threading.Event()
        self._patience = patience

    def stop(self, patience: float | None = None) -> None:
        """Signal the thread to stop and join it for up to ``patience`` seconds.

        No effect in a forked process, which does not run the thread.
        """
        if self.is_alive():
            self.stopping.set()
            self.join(self._patience if patience is None else patience)


@atexit.register
def _end_all() -> None:
    """Stop all threads, then join each for up to its patience."""
    alive = [
        thread
        for thread in threading.enumerate()
        if isinstance(thread, BackgroundThread) and thread.is_alive()
    ]
    begin = time.monotonic()
    for thread in alive:
        thread.stopping.set()
    for thread in alive:
        thread.join(max(0.0, begin + thread._patience - time.monotonic()))
