"""Files that are replaced as a whole: where anything fails, the old content is there and nothing else.

Oracle: content and names in the folder, as the operating system gives them.
"""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import megatron_hecate
from megatron_hecate import __main__ as command_line
from megatron_hecate import files
from megatron_hecate.record.run_folder import RunInfo
from megatron_hecate.record.run_writer import RunWriter


def _names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.fast
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


@pytest.mark.fast
def test_a_link_is_replaced_and_not_followed(tmp_path: Path) -> None:
    target = tmp_path / "precious"
    target.write_text("old")
    (tmp_path / "link").symlink_to(target)
    files.replace(tmp_path / "link", "new")
    assert target.read_text() == "old" and (tmp_path / "link").read_text() == "new"


@pytest.mark.fast
@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, lambda path: path.symlink_to("/dev/null")])
def test_what_is_no_file_is_refused(make: Callable[[Path], None], tmp_path: Path) -> None:
    path = tmp_path / "out"
    make(path)
    for action in (files.check_writable, lambda one: files.replace(one, "new")):
        with pytest.raises(OSError, match=f"{path} is a device, a pipe or a folder; name a file"):
            action(path)
    assert _names(tmp_path) == ["out"]


@pytest.mark.fast
@pytest.mark.parametrize("name", ["missing/out", "file/out"])
def test_a_folder_that_is_none(name: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("old")
    for action in (files.check_writable, lambda one: files.replace(one, "new")):
        with pytest.raises(OSError, match=f"{tmp_path / name}"):
            action(tmp_path / name)
    assert _names(tmp_path) == ["file"]


def _report(folder: Path) -> tuple[list[str], list[Path]]:
    outputs = [folder / "report.html", folder / "figures.json"]
    return ["report", str(folder), "--export", str(outputs[1])], outputs


def _what_if(folder: Path) -> tuple[list[str], list[Path]]:
    outputs = [folder / "found.json"]
    loads = np.random.default_rng(0).integers(1, 1000, (3, 2, 8, 16))
    np.savez(folder / "loads.npz", counts=loads)
    job = ["--model", "olmoe,experts=16,layers=4", "--cluster", "h100x8", "--ranks", "8"]
    return ["what-if", str(folder / "loads.npz"), *job, "--save", str(outputs[0])], outputs


WITHOUT_ROOM = """
import resource, signal, sys
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
from megatron_hecate.__main__ import main
resource.setrlimit(resource.RLIMIT_FSIZE, (16, 16))
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.parametrize("command_of", [_report, _what_if])
def test_outputs_of_commands(
    command_of: Callable[[Path], tuple[list[str], list[Path]]], tmp_path: Path
) -> None:
    """A disk without room, by a limit on files, leaves the good files of before; a link is not followed."""
    folder = tmp_path / "run"
    info = RunInfo(mode="observe", layers=("layer 1",), num_experts=4, ranks=2, node=(0, 0))
    writer = RunWriter(folder, info)
    for iteration in (1, 2):
        writer.append(iteration, load=[[5, 1, 1, 1]])
    writer.close()
    command, outputs = command_of(folder)
    for path in outputs:
        path.write_text("good, from before")
    before = _names(folder)
    root = str(Path(megatron_hecate.__file__).parents[1])
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_ROOM, *command],
        env=os.environ | {"PYTHONPATH": root},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode and "File too large" in done.stderr and "Traceback" not in done.stderr
    assert [path.read_text() for path in outputs] == ["good, from before"] * len(outputs)
    assert _names(folder) == before
    target = tmp_path / "precious"
    target.write_text("old")
    for path in outputs:
        path.unlink()
        path.symlink_to(target)
    assert command_line.main(command) == 0
    assert target.read_text() == "old"
    assert all(path.is_file() and not path.is_symlink() for path in outputs)
