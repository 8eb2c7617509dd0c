"""Files that are replaced as a whole, so that no reader sees a part and no error leaves one.

Files that others may have damaged are read within bounds.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path

# Mode of a file before the umask.
OPEN_TO_UMASK: int = 0o666
PRIVATE: int = 0o600
# Bytes of a file that is read, at most.
MOST_BYTES: int = 1 << 30


def replace(
    path: str | Path, content: str | bytes | memoryview, *, mode: int = OPEN_TO_UMASK
) -> None:
    """Replace the content of ``path``, or leave it as it is.

    The content is written to a new file of the same folder, synchronized, and renamed. A symbolic
    link is replaced and not followed, because its target may be a file that another user chose.

    Args:
        path: file, which may not exist yet.
        content: whole content; text is encoded as UTF-8.
        mode: mode of the file before the umask.

    Raises:
        OSError: if the folder cannot be written, its disk is full, or ``path`` is a device, a pipe
            or a folder. The error names ``path``; the new file is removed.
    """
    path = Path(path)
    data = content.encode() if isinstance(content, str) else content
    with _new_file(path, mode) as (descriptor, new):
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(descriptor)
        new.replace(path)


def check_writable(path: str | Path) -> None:
    """Raise the error that `replace` would raise for ``path``, unless its disk is full."""
    with _new_file(Path(path), OPEN_TO_UMASK) as (descriptor, _):
        os.close(descriptor)


@contextlib.contextmanager
def _new_file(path: Path, mode: int) -> Iterator[tuple[int, Path]]:
    """Open a new file in the folder of ``path``; remove it after the block if it is still there."""
    if path.exists() and not path.is_file():
        raise FileExistsError(f"{path} is a device, a pipe or a folder; name a file")
    new = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        yield os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, mode), new
    except OSError as error:
        raise type(error)(error.errno, error.strerror, str(path)) from None
    finally:
        with contextlib.suppress(OSError):
            new.unlink()


def read_file(path: Path | str) -> bytes:
    """Read a regular file.

    Raises:
        FileNotFoundError: if there is no such file.
        ValueError: for a file of another kind, with too many bytes, or that cannot be read.
    """
    path = Path(path)
    try:
        # Opening a FIFO does not wait for a writer.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise ValueError(f"{path} cannot be read ({describe(error)})") from error
    # Of the open file: its name may be another file's by now.
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        os.close(descriptor)
        raise ValueError(f"{path} is not a regular file")
    with os.fdopen(descriptor, "rb") as file:
        if status.st_size > MOST_BYTES:
            raise ValueError(f"{path} has {status.st_size:,} bytes, more than {MOST_BYTES:,}")
        # Not at most `MOST_BYTES`, for which memory would be taken at once.
        return file.read(status.st_size)


def describe(error: BaseException) -> str:
    """Format an error as one short line."""
    text = " ".join(f"{type(error).__name__}: {error}".split())
    return text if len(text) <= 300 else f"{text[:300]}..."
