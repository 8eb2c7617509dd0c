"""Files that are replaced as a whole: where anything fails, the old content is there and nothing else.

Oracle: content and names in the folder, as the operating system gives them.
"""

from __future__ import annotations

import os
import resource
import signal
import stat
from pathlib import Path

import pytest

from megatron_hecate import files

pytestmark = pytest.mark.fast


def _names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("content", ["text: µ", b"\0bytes"])
def test_content_and_mode(content: str | bytes, tmp_path: Path) -> None:
    path = tmp_path / "file"
    for mode, right in ((files.OPEN_TO_UMASK, 0o666), (files.PRIVATE, 0o600)):
        files.replace(path, content, mode=mode)
        assert path.read_bytes() == (content.encode() if isinstance(content, str) else content)
        umask = os.umask(0)
        os.umask(umask)
        assert stat.S_IMODE(path.stat().st_mode) == right & ~umask
    assert _names(tmp_path) == ["file"]


def test_a_link_is_replaced_and_not_followed(tmp_path: Path) -> None:
    target = tmp_path / "precious"
    target.write_text("old")
    (tmp_path / "link").symlink_to(target)
    files.replace(tmp_path / "link", "new")
    assert target.read_text() == "old" and (tmp_path / "link").read_text() == "new"


@pytest.mark.parametrize("name", ["pipe", "folder", "link", "missing/out", "file/out"])
def test_what_is_no_file_is_refused(name: str, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to("/dev/null")
    (tmp_path / "file").write_text("old")
    path, names = tmp_path / name, _names(tmp_path)
    reason = "" if "/" in name else " is a device, a pipe or a folder; name a file"
    for action in (files.check_writable, lambda one: files.replace(one, "new")):
        with pytest.raises(OSError, match=f"{path}{reason}"):
            action(path)
    assert _names(tmp_path) == names and (tmp_path / "file").read_text() == "old"


def test_a_disk_without_room_leaves_the_old_file(tmp_path: Path) -> None:
    """By a limit on files, as a full disk refuses to write."""
    path = tmp_path / "file"
    path.write_text("good, from before")
    hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (16, hard))
    try:
        with pytest.raises(OSError, match="File too large"):
            files.replace(path, "x" * 100_000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
        signal.signal(signal.SIGXFSZ, handler)
    assert path.read_text() == "good, from before" and _names(tmp_path) == ["file"]
