"""`make gpu` and `make gpu-bundle`, as far as they go without a GPU.

Oracles: literal outcomes of stand-in commands, and what pip says is installed.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import gpu
import gpu_bundle
import pytest
from gpu import Part

ROOT = Path(__file__).resolve().parents[2]


def _python(code: str, *, bench: bool = False) -> str:
    """A command that runs ``code``; ``bench``: which imports modules of benchmarks."""
    path = f"import sys; sys.path.insert(0, '{ROOT / 'bench'}'); " if bench else ""
    return f'python -c "{path}{code}"'


def _pages(folder: Path) -> str:
    return (folder / "page.md").read_text()


def _is_gone(pid: int) -> bool:
    """Whether a process ends within some seconds."""
    for _ in range(100):
        stat = Path(f"/proc/{pid}/stat")
        if not stat.exists() or " Z " in stat.read_text():
            return True
        time.sleep(0.05)
    return False


def test_the_page_hides_nothing(tmp_path: Path) -> None:
    """One part is fine; others fail, hang with a process of their own, say nothing, are not there, or come too late."""
    pid = tmp_path / "pid"
    hang = "import subprocess, time; print('begins', flush=True); "
    hang += (
        # in a session of its own, as torchrun starts ranks
        f"p = subprocess.Popen(['sleep', '600'], start_new_session=True); "
        f"open('{pid}', 'w').write(str(p.pid)); time.sleep(600)"
    )
    table = "import rows; rows.Table('of numbers').add(a=7, b_c=0.25)"
    parts = (
        Part("fine", "a table", _python(f"{table}; print('junk')", bench=True), 60, r"\| 7"),
        Part("fails", "an error", _python("import sys; print('the reason'); sys.exit(3)"), 60),
        Part("hangs", "nothing", _python(hang), 3),
        Part("silent", "nothing", _python("print('all skipped')"), 60, r"\d+ passed"),
        Part("absent", "a module", _python("print(1)"), 60, "", ("no_such_module",)),
        Part("no command", "nothing", "no-such-command-anywhere", 60),
        Part(
            "another status",
            "which is as good",
            _python("import sys; print('done'); sys.exit(1)"),
            60,
            "done",
            (),
            (0, 1),
        ),
    )
    ended = gpu.run_all(parts, gpu.Folder(tmp_path), minutes=5)
    assert [(one.how, one.is_failure) for one in ended] == [
        ("passed", False),
        ("failed", True),
        ("stopped", True),
        ("failed", True),
        ("left out", False),
        ("failed", True),
        ("passed", False),
    ]
    page = _pages(tmp_path)
    for line in (
        "7 parts, of which 4 failed, were stopped or were not run.",
        "| fails | **failed** exit status 3 |",
        "the reason",
        "| hangs | **stopped** after 3 s |",
        "begins",
        "| silent | **failed** it ended well, but did not say",
        "| absent | left out no_such_module not installed |",
        "**of numbers**\n\n| a | b c |\n|---|---|\n| 7 | 0.25 |\n",
    ):
        assert line in page, f"{line!r} is not in\n{page}"
    assert "\njunk" not in page and "before its turn" not in page
    assert "junk" in (tmp_path / "log.txt").read_text()
    assert _is_gone(int(pid.read_text())), "what the hanging part had started is still there"


def test_nothing_is_lost_by_a_kill(tmp_path: Path) -> None:
    """Killed in the midst of a part: its rows so far are on the page, parts that did not run are named, nobody goes on
    to use the GPU. The next call with this folder goes on in its files."""
    slow = "import os, time, rows; t = rows.Table('so far'); t.add(row=1); t.add(row=2)"
    slow += f"; open('{tmp_path}/pid', 'w').write(str(os.getpid())); time.sleep(600)"
    code = "import gpu; from gpu import Part; from pathlib import Path; folder = gpu.Folder(Path({folder!r})); "
    code += "gpu.run_all([Part('slow', 'rows', {command!r}, 600), Part('later', '', 'true', 9)], folder, minutes=5)"
    code = code.format(folder=str(tmp_path), command=_python(slow, bench=True))
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "bench")}
    with subprocess.Popen(
        [sys.executable, "-c", code], env=environment, stdout=subprocess.DEVNULL
    ) as process:
        for _ in range(600):
            if (tmp_path / "pid").exists() and "| 2 |" in _pages(tmp_path):
                break
            time.sleep(0.05)
        process.kill()
    page = _pages(tmp_path)
    assert "| row |\n|---|\n| 1 |\n| 2 |" in page
    assert "| slow | **running** when this page was written" in page
    assert "| later | **not run** this page was written before its turn" in page
    assert _is_gone(int((tmp_path / "pid").read_text()))
    gpu.run_all([Part("later", "", "true", 9)], gpu.Folder(tmp_path), minutes=5)
    assert "| 2 |" in _pages(tmp_path) and "| later | passed |" in _pages(tmp_path)


def test_without_a_gpu_nothing_is_done(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "bench" / "gpu.py"), "--out", str(tmp_path / "results")]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    said = "There is no GPU that torch can use here, so nothing was run and nothing was written.\n"
    assert (done.returncode, done.stdout, done.stderr) == (2, "", said)
    assert not (tmp_path / "results").exists()


@pytest.mark.fast
def test_parts_are_of_this_checkout() -> None:
    """Every script and test that a part names is here, and the parts of a command fit into its time with what they may
    take, which is less than ten minutes."""
    parts = [part for command in gpu.COMMANDS.values() for part in command]
    for part in parts:
        files = [word for word in part.command.split() if word.endswith(".py")]
        assert all((ROOT / name).exists() for name in files), part
        assert part.says, part
    assert len({part.name for part in parts}) == len(parts)
    for number, command in gpu.COMMANDS.items():
        assert sum(part.seconds for part in command) <= 60 * gpu.MINUTES[number] <= 560, (
            "every part has its turn"
        )
    assert gpu.MINUTES["1"] <= 6


@pytest.mark.fast
def test_what_an_image_brings_is_not_carried() -> None:
    """Oracle: what pip says is installed, and that a GPU's machine has torch, with all that torch needs."""
    image = gpu_bundle.read_image("torch\nnumpy==2.5.0  # newer than any bound of ours\n")
    assert image == {"torch": "", "numpy": "2.5.0"}
    names = set(gpu_bundle.missing(["torch", "numpy<2.5", "megatron-core", "numba"], image))
    assert {"megatron-core", "numba", "llvmlite", "numpy"} <= names
    assert not names & {"torch", "triton", "sympy"} and not [
        name for name in names if name.startswith("nvidia")
    ]
    assert set(gpu_bundle.missing(["numpy>=2.5"], image)) == set()
