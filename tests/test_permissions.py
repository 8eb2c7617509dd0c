"""Who may read what is written: records, pages and speeds by the umask; machine code by this user alone.

Oracle: the operating system's modes of all that a process with this umask has left in an empty folder.
"""

from __future__ import annotations

import stat
from pathlib import Path

import pytest
from pretraining import python

WRITES = """
import os, sys
from pathlib import Path
os.umask(int(sys.argv[1], 8))
folder = Path(sys.argv[2])
(compiler := folder / "compiler").write_text('''#!/bin/sh
while [ "$1" != -o ]; do shift; done
echo compiled > "$2"
''')
compiler.chmod(0o700)
os.environ["CXX"] = str(compiler)
os.environ["MEGATRON_HECATE_CACHE"] = str(folder / "new" / "user" / "code")
from megatron_hecate.device.compile import host_library
from megatron_hecate.tools import report
from megatron_hecate.plan import H100
from megatron_hecate.plan.compiled import compiled
from megatron_hecate.record.run_folder import RunInfo
from megatron_hecate.record.run_writer import RunWriter

info = RunInfo(mode="observe", layers=("layer 1",), num_experts=4, ranks=2, node=(0, 1), top_k=2)
run = folder / "runs" / "one"
writer = RunWriter(run, info)
for iteration in (1, 2):
    writer.append(iteration, load=[[5, 1, 1, 1]])
writer.close()
assert report.main([str(run)]) == 0
H100.save(folder / "speeds.json", origin="a test")
host_library()
compiled(lambda a: a + 1)(1)
"""
WRITTEN = {
    "runs", "runs/one", "runs/one/stage-000.rows", "runs/one/report.html", "speeds.json",
}  # fmt: skip


def _modes(umask: str, folder: Path) -> dict[str, int]:
    """Modes of all that was written, by its path."""
    done = python("-c", WRITES, umask, str(folder), timeout=120)
    assert done.returncode == 0, done.stderr
    (folder / "compiler").unlink()
    return {
        str(path.relative_to(folder)): stat.S_IMODE(path.stat().st_mode)
        for path in folder.rglob("*")
    }


@pytest.mark.parametrize(
    ("umask", "of_file", "of_folder"),
    [("077", 0o600, 0o700), ("000", 0o666, 0o777)],
)
def test_records_follow_the_umask_and_machine_code_is_private(
    umask: str, of_file: int, of_folder: int, tmp_path: Path
) -> None:
    modes = _modes(umask, tmp_path)
    assert {name for name in modes if not name.startswith("new")} == WRITTEN
    for name in WRITTEN:
        assert modes[name] == (of_folder if (tmp_path / name).is_dir() else of_file), name
    caches = {name: mode for name, mode in modes.items() if name.startswith("new")}
    code = [Path(name) for name in caches if (tmp_path / name).is_file()]
    assert [str(path.parent) for path in code] == ["new/user/code"] * 2
    for path in code:
        assert (modes[str(path)], modes[str(path.parent)]) == (0o600, 0o700), path
    for name in ("new", "new/user"):
        # read by others if the umask says so, and never written, also without a umask
        assert modes[name] == of_folder & 0o755, name
