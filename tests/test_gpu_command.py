"""`make gpu` and `make gpu-bundle`, as far as they go without a GPU.

Oracles: literal outcomes of stand-in commands, and checksums by ``sha256sum``.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import time
from pathlib import Path

import gpu
import gpu_bundle
import pytest
from gpu import Part

ROOT = Path(__file__).resolve().parent.parent
pytestmark = pytest.mark.fast


def _python(code: str) -> str:
    return f'python -c "{code}"'


def test_the_page_hides_nothing(tmp_path: Path) -> None:
    """One part is fine; others fail, hang with a process of their own, say nothing, are not there, or come too late."""
    pid, out = tmp_path / "pid", tmp_path / "page.md"
    hang = "import subprocess, time; print('begins', flush=True); "
    hang += f"open('{pid}', 'w').write(str(subprocess.Popen(['sleep', '600']).pid)); time.sleep(600)"
    parts = (
        Part("Fine", "a table", _python("print('junk'); print('| a |'); print('|---|'); print('| 7 |')"), 60, r"\| 7"),
        Part("Fails", "an error", _python("import sys; print('the reason'); sys.exit(3)"), 60),
        Part("Hangs", "nothing", _python(hang), 3),
        Part("Silent", "nothing", _python("print('all skipped')"), 60, r"\d+ passed"),
        Part("Absent", "a module", _python("print(1)"), 60, "", ("no_such_module",)),
        Part("No command", "nothing", "no-such-command-anywhere", 60),
    )
    ended = gpu.run_all(parts, minutes=5, out=out, machine=["GPU: none"])
    assert [(one.how, one.is_failure) for one in ended] == [
        ("passed", False),
        ("failed", True),
        ("stopped", True),
        ("failed", True),
        ("left out", False),
        ("failed", True),
    ]
    page = out.read_text()
    for line in (
        "- GPU: none",
        "6 parts, of which 4 failed, were stopped or were not run.",
        "| Fails | **failed** exit status 3 |",
        "the reason",
        "| Hangs | **stopped** after 3 s |",
        "begins",
        "| Silent | **failed** it ended well, but did not say",
        "| Absent | left out no_such_module not installed |",
        "\n| a |\n|---|\n| 7 |\n",
    ):
        assert line in page, f"{line!r} is not in\n{page}"
    assert "\njunk" not in page and "before its turn" not in page
    for _ in range(100):
        if not Path(f"/proc/{pid.read_text()}").exists() or "Z" in Path(f"/proc/{pid.read_text()}/stat").read_text():
            break
        time.sleep(0.05)
    else:
        pytest.fail("what the hanging part had started is still there")


def test_the_whole_has_a_limit(tmp_path: Path) -> None:
    parts = [Part(name, "", _python("import time; time.sleep(60)"), 60) for name in ("First", "Second")]
    began = time.monotonic()
    first, second = gpu.run_all(parts, minutes=2 / 60, out=tmp_path / "page.md", machine=[])
    assert (first.how, second.how) == ("stopped", "not run") and time.monotonic() - began < 30
    assert "**not run** the time for all parts was used up" in (tmp_path / "page.md").read_text()


def test_without_a_gpu_nothing_is_done(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "bench" / "gpu.py"), "--out", str(tmp_path / "page.md")]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    said = "There is no GPU that torch can use here, so nothing was run and nothing was written.\n"
    assert (done.returncode, done.stdout, done.stderr) == (2, "", said)
    assert not (tmp_path / "page.md").exists()


def test_parts_are_of_this_checkout() -> None:
    """Every script and test that a part names is here, and all parts fit into the time with what they may take."""
    for part in gpu.PARTS:
        files = [word for word in part.command.split() if word.endswith(".py")]
        assert all((ROOT / name).exists() for name in files), part
        assert part.says and part.seconds <= 300, part
    assert len({part.name for part in gpu.PARTS}) == len(gpu.PARTS)
    assert sum(part.seconds for part in gpu.PARTS) <= 60 * 25, "every part has its turn"


def test_pieces_join(tmp_path: Path) -> None:
    """As ``install.sh`` checks and joins them, with the machine's own tools; a damaged piece is refused."""
    archive = tmp_path / "gpu-bundle.tar"
    archive.write_bytes(os.urandom(250_001))
    whole = hashlib.sha256(archive.read_bytes()).hexdigest()
    pieces = gpu_bundle.split(archive, tmp_path, size=100_000)
    archive.unlink()
    assert [piece.stat().st_size for piece in pieces] == [100_000, 100_000, 50_001]
    check = "sha256sum --check --quiet SHA256SUMS"
    join = f"{check} && cat gpu-bundle.tar.?? | sha256sum"
    assert check in gpu_bundle.INSTALL and "cat gpu-bundle.tar.?? |" in gpu_bundle.INSTALL
    done = subprocess.run(join, shell=True, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.split()[0] == whole
    pieces[1].write_bytes(bytes(100_000))
    assert subprocess.run(check, shell=True, cwd=tmp_path, capture_output=True).returncode


def test_what_torch_brings_is_not_carried() -> None:
    """Oracle: what pip says is installed, and that a GPU's machine has torch."""
    names = set(gpu_bundle.closure(gpu_bundle.own_requirements()))
    assert {"megatron-core", "numba", "llvmlite"} <= names
    assert not names & {"torch", "triton", "sympy"} and not [name for name in names if name.startswith("nvidia")]
