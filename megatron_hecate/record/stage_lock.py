"""Lock of a file, by which one job at a time records a stage in a folder."""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path
from typing import IO

from megatron_hecate.files import OPEN_TO_UMASK, try_lock


class StageLock:
    """Locked file, which ends with this process, however it ends.

    A restart in the same process takes over the lock of an abandoned attempt.

    Args:
        path: file of the lock, created if missing. It stays, and names its last owner.

    Raises:
        ValueError: if another process has locked it.
        OSError: if it cannot be written.
    """

    def __init__(self, path: Path) -> None:
        self._owner = f"{socket.gethostname()} {os.getpid()} {time.time()}"
        if (old_lock := _locked.pop(path.absolute(), None)) is not None:
            old_lock.close()
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK
        self._file = os.fdopen(os.open(path, flags, OPEN_TO_UMASK), "r+b", buffering=0)
        try:
            if not try_lock(self._file.fileno()):
                owner = self._read_owner().rpartition(" ")[0]
                raise ValueError(
                    f"another job records into {path.parent} now (host and process {owner}); "
                    "end it, or name another folder"
                )
            self._file.truncate(0)
            self._file.write(self._owner.encode())
        except BaseException:
            self._file.close()
            raise
        _locked[path.absolute()] = self._file

    def check(self) -> None:
        """Raise a RuntimeError if another job has taken over, as where locks do not hold."""
        owner = "a restart in this process" if self._file.closed else self._read_owner()
        if owner != self._owner:
            raise RuntimeError(f"another job writes there: {owner}")

    def close(self) -> None:
        """End the lock."""
        self._file.close()

    def _read_owner(self) -> str:
        self._file.seek(0)
        return self._file.read(1000).decode(errors="replace")


# Files that this process has locked, by path. Forked processes, such as those of data loaders, may
# outlive it, and must not keep the locks.
_locked: dict[Path, IO[bytes]] = {}
os.register_at_fork(after_in_child=lambda: [file.close() for file in _locked.values()])
