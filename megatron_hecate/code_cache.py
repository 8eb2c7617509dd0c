"""Folder of machine code that is compiled at first use: the planner's and the kernels'.

Code is compiled once per machine and loaded from then on: where several ranks need the same code,
one compiles it and the others wait. The folder may be read-only or belong to root, as in a
container's image. Its files are executed, so those that another user could have written are not
read.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import os
import stat
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from megatron_hecate import files

# Seconds to wait for the rank that compiles, at most; then this one compiles, too.
LONGEST_WAIT: float = 120.0
_WRITABLE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH


@dataclasses.dataclass(frozen=True)
class CodeCache:
    """Folder of machine code of this user.

    Args:
        variable: environment variable that names the folder. Without it the folder is
            ``$XDG_CACHE_HOME/megatron-hecate`` or ``~/.cache/megatron-hecate``.
    """

    variable: str

    @property
    def folder(self) -> Path:
        """Folder of the files, which may not exist yet.

        Raises:
            FileNotFoundError: if no variable is set and this user has no home folder.
        """
        if named := os.environ.get(self.variable):
            return Path(named).absolute()
        shared = os.environ.get("XDG_CACHE_HOME")
        try:
            return Path(shared or Path.home() / ".cache").absolute() / "megatron-hecate"
        except RuntimeError as error:
            message = f"no folder for compiled code ({error}); name one in ${self.variable}"
            raise FileNotFoundError(message) from None

    def read(self, name: str) -> bytes | None:
        """Return the code of file ``name``; ``None`` if it is missing.

        Raises:
            OSError: if there is no folder or it cannot be read.
            PermissionError: also if other users can write to the folder or to the file.
        """
        path = self.folder / name
        try:
            status = path.stat()
        except (FileNotFoundError, NotADirectoryError):
            return None
        for checked in (self.folder, path):
            self._check_owner(checked)
        if not stat.S_ISREG(status.st_mode):
            raise PermissionError(f"{path} is no regular file; remove it")
        return path.read_bytes()

    def write(self, name: str, code: bytes) -> None:
        """Keep ``code`` as file ``name``, readable by this user alone.

        Raises:
            OSError: if there is no folder, or it cannot be written.
            PermissionError: also if other users can write to it.
        """
        folder = self.folder
        try:
            # The umask decides on the mode of parents, but others must not write there: they could
            # replace the folder.
            for parent in reversed([one for one in folder.parents if not one.exists()]):
                parent.mkdir(mode=0o755, exist_ok=True)
            folder.mkdir(mode=0o700, exist_ok=True)
            self._check_owner(folder)
            files.replace(folder / name, code, mode=files.PRIVATE)
        except OSError as error:
            if error.errno is None:
                raise
            message = f"{folder}: {error.strerror}; name another folder in ${self.variable}"
            raise type(error)(message) from None

    @contextlib.contextmanager
    def turn(self) -> Iterator[None]:
        """Wait until no other process of this machine and user compiles for the folder.

        The lock is a file of the machine and not of the folder, which may be read-only or on a file
        system without locks. It ends with the process that holds it.
        """
        with contextlib.ExitStack() as stack:
            # Without a lock every process compiles: slow, and right.
            with contextlib.suppress(OSError):
                digest = hashlib.sha256(str(self.folder).encode()).hexdigest()[:12]
                name = f"megatron-hecate-{os.getuid()}-{digest}.lock"
                path = Path(tempfile.gettempdir()) / name
                flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
                descriptor = os.open(path, flags, files.PRIVATE)
                stack.callback(os.close, descriptor)
                end = time.monotonic() + LONGEST_WAIT
                while not files.try_lock(descriptor) and time.monotonic() < end:
                    time.sleep(0.05)
            yield

    def _check_owner(self, path: Path) -> None:
        """Raise PermissionError unless only this user, or root, can write to ``path``."""
        status = path.stat()
        is_trusted = status.st_uid in (0, os.getuid())
        if is_trusted and not status.st_mode & _WRITABLE_BY_OTHERS:
            return
        # Only the owner can change the mode.
        is_mine = status.st_uid == os.getuid()
        way_out = f"run chmod go-w {path}, or name" if is_mine else "name"
        raise PermissionError(
            f"{path} belongs to user {status.st_uid}, mode {stat.S_IMODE(status.st_mode):o}: "
            f"compiled code must lie where only this user ({os.getuid()}) or root may write; "
            f"{way_out} another folder in ${self.variable}"
        )


PLANNER = CodeCache("NUMBA_CACHE_DIR")
KERNELS = CodeCache("MEGATRON_HECATE_CACHE")
