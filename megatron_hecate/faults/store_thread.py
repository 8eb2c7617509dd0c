"""Background thread with a store connection of its own."""

from __future__ import annotations

import contextlib
import os
import re
import socket

import torch.distributed as dist

from megatron_hecate.faults.background import BackgroundThread


class StoreThread(BackgroundThread):
    """Thread outside of training that owns the connection of ``store``.

    Args:
        name: suffix of the thread's name.
        store: clone of the job's store that no other thread uses.
        patience: seconds that the interpreter's exit waits for the thread.
    """

    def __init__(self, name: str, store: dist.Store, *, patience: float = 1.0) -> None:
        super().__init__(name, patience=patience)
        self._store = store
        # True once pending work must be dropped.
        self._is_abandoned = False
        while isinstance(store, dist.PrefixStore):
            store = store.underlying_store
        # A TCPStore exposes its file descriptor in its representation only.
        found = re.search(r"SocketImpl\(fd=(\d+)", repr(store))
        self._connection: socket.socket | None = None
        if found:
            self._connection = socket.socket(fileno=os.dup(int(found[1])))

    def stop(self, patience: float = 1.0) -> None:
        """Signal the thread to stop and join it for up to ``patience`` seconds.

        No effect in a forked process, which does not run the thread.
        """
        if self.is_alive():
            self.stopping.set()
            self.join(patience)

    def abandon(self) -> None:
        """Stop the thread, drop its pending work, and close its connection."""
        self._is_abandoned = True
        self.stop()
        if self._connection is not None and not self.is_alive():
            self._connection.close()
            self._connection = None

    def interrupt(self) -> None:
        """Shut the connection down, so that a call of the store raises an error."""
        if self._connection is not None:
            with contextlib.suppress(OSError):
                self._connection.shutdown(socket.SHUT_RDWR)

    def _store_is_closed(self) -> bool:
        """Return True if the store's server has closed the connection.

        torch prints a page of warnings when a closed connection is used.
        """
        if self._connection is None:
            return False
        try:
            return not self._connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
