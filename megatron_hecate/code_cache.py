"""Folder of machine code that is compiled at first use: the planner's and the kernels'.

Code is compiled once per machine and loaded from then on: where several ranks need the same code,
one compiles it and all other ranks wait. The folder is ``$MEGATRON_HECATE_CACHE``, else
``$XDG_CACHE_HOME/megatron-hecate`` or ``~/.cache/megatron-hecate``. It may be read-only or belong
to root, as in a container's image. Its files are executed, so files that another user could have
written are not read.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from megatron_hecate import files

VARIABLE = "MEGATRON_HECATE_CACHE"
# Seconds to wait for the rank that compiles, at most; then this one compiles, too.
LONGEST_WAIT: float = 120.0
# SHA-256 at the end of each file. What loads machine code ignores bytes after its end.
DIGEST_BYTES: int = 32


def folder() -> Path:
    """Return the folder of the files, which may not exist yet.

    Raises:
        FileNotFoundError: if no variable is set and this user has no home folder.
    """
    if named := os.environ.get(VARIABLE):
        return Path(named).absolute()
    shared = os.environ.get("XDG_CACHE_HOME")
    try:
        return Path(shared or Path.home() / ".cache").absolute() / "megatron-hecate"
    except RuntimeError as error:
        message = f"no folder for compiled code ({error}); name one in ${VARIABLE}"
        raise FileNotFoundError(message) from None


def load_or_build(name: str, build: Callable[[], bytes]) -> Path:
    """Return the path of the code ``name``, which one process of this machine builds.

    Raises:
        OSError: see `read` and `write`.
    """
    if read(name) is None:
        with turn():
            # Another process may have compiled meanwhile.
            if read(name) is None:
                # An error about the folder comes before the compilation.
                _make_folder()
                write(name, build())
    return folder() / name


def read(name: str) -> bytes | None:
    """Return the code of file ``name``; ``None`` if it is missing or damaged.

    Raises:
        OSError: if there is no folder or it cannot be read.
        PermissionError: also if other users can write to the folder or to the file.
    """
    path = folder() / name
    if not path.is_file():
        return None
    _check_owner(path.parent)
    _check_owner(path)
    content = path.read_bytes()
    code, digest = content[:-DIGEST_BYTES], content[-DIGEST_BYTES:]
    if digest != hashlib.sha256(code).digest():
        return None
    return code


def write(name: str, code: bytes) -> None:
    """Keep ``code`` as file ``name``, readable by this user alone.

    Raises:
        OSError: if there is no folder, or it cannot be written.
        PermissionError: also if other users can write to it.
    """
    path = _make_folder() / name
    with _way_out(path.parent):
        files.replace(path, code + hashlib.sha256(code).digest(), mode=files.PRIVATE)


def _make_folder() -> Path:
    """Make the folder, and return it; errors as `write`."""
    path = folder()
    with _way_out(path):
        # The umask decides on the mode of parents, but others must not write there: they could
        # replace the folder.
        for parent in reversed([one for one in path.parents if not one.exists()]):
            parent.mkdir(mode=0o755, exist_ok=True)
        path.mkdir(mode=0o700, exist_ok=True)
        _check_owner(path)
    return path


@contextlib.contextmanager
def _way_out(path: Path) -> Iterator[None]:
    """Name the folder and the way out in an error of the operating system."""
    try:
        yield
    except OSError as error:
        if error.errno is None:
            raise
        message = f"{path}: {error.strerror}; name another folder in ${VARIABLE}"
        raise type(error)(message) from None


@contextlib.contextmanager
def turn() -> Iterator[None]:
    """Wait until no other process of this machine and user compiles for the folder.

    The lock is a file of the machine and not of the folder, which may be read-only or on a file
    system without locks. It ends with the process that holds it.
    """
    with contextlib.ExitStack() as stack:
        # Without a lock every process compiles: slow, and right.
        with contextlib.suppress(OSError):
            digest = hashlib.sha256(str(folder()).encode()).hexdigest()[:12]
            path = Path(tempfile.gettempdir(), f"megatron-hecate-{os.getuid()}-{digest}.lock")
            flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
            descriptor = os.open(path, flags, files.PRIVATE)
            stack.callback(os.close, descriptor)
            end = time.monotonic() + LONGEST_WAIT
            while time.monotonic() < end:
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    time.sleep(0.05)
        yield


def _check_owner(path: Path) -> None:
    """Raise PermissionError unless only this user, or root, can write to ``path``."""
    status = path.stat()
    if status.st_uid in (0, os.getuid()) and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return
    raise PermissionError(
        f"{path} belongs to user {status.st_uid}, mode {stat.S_IMODE(status.st_mode):o}: compiled "
        f"code must lie where only this user ({os.getuid()}) or root may write; run "
        f"chmod go-w {path} as its owner, or name another folder in ${VARIABLE}"
    )
