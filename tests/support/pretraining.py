"""Run the example script on CPU ranks, stock or by a launcher, and read its log."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from launch import torchrun

ROOT = Path(__file__).resolve().parents[2]

SUPPORT = ROOT / "tests" / "support"

SCRIPT = ROOT / "examples" / "pretrain_gpt.py"


def _environment(**variables: str) -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", **variables}


def python(*arguments: str, timeout: float = 150, cwd: Path = ROOT) -> subprocess.CompletedProcess:
    command, pipes = [sys.executable, *arguments], dict(text=True, capture_output=True)
    return subprocess.run(command, cwd=cwd, env=_environment(), timeout=timeout, **pipes)


def prepare_text(folder: Path) -> Path:
    """Write a small dataset of this project's own sources; returns its prefix."""
    prefix = folder / "text"
    done = python("examples/prepare_bytes.py", str(ROOT / "megatron_hecate"), str(prefix))
    assert done.returncode == 0, done.stderr
    return prefix


def pretrain(text: Path, *arguments: str, launcher: list[str], **run: Any) -> str:
    """Train the demo's model, smaller; returns the log, or raises with it. ``run`` is as of `run_script`."""
    code, log = run_script(text, *arguments, launcher=launcher, **run)
    assert code == 0, log[-6000:]
    return log


def pretrain_arguments(text: Path) -> list[str]:
    """Return the script's arguments: the demo's model, smaller, for six iterations."""
    import demo

    flags = "--hidden-size 32 --moe-ffn-hidden-size 64 --micro-batch-size 1 --global-batch-size 4 --train-iters 6"
    data = ["--data-path", str(text), "--data-cache-path", f"{text}-cache"]
    return [*demo.megatron_flags(), *flags.split(), *data]


def run_script(
    text: Path,
    *arguments: str,
    launcher: list[str],
    before: list[str] | None = None,
    script: Path = SCRIPT,
    settings: str = "",
    ranks: int = 2,
) -> tuple[int, str]:
    """Exit status and log of a run on so many processes, after which none of them lives.

    ``launcher`` stands behind the script that makes a GPU of the CPU, ``before`` in front of it, as torchrun's target.
    """
    command = [*torchrun(ranks), *(before or [])]
    command += [str(ROOT / "examples" / "run_on_cpu.py"), *launcher, str(script)]
    command += [*pretrain_arguments(text), *settings.split(), *arguments]
    path = os.pathsep.join(map(str, [ROOT, ROOT / "examples", *SUPPORT.glob("*/"), SUPPORT]))
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    with subprocess.Popen(
        command, cwd=ROOT, env=_environment(PYTHONPATH=path), start_new_session=True, **pipes
    ) as process:
        try:
            log, _ = process.communicate(timeout=300)
        except subprocess.TimeoutExpired:
            for pid in _descendants(process.pid):
                os.kill(pid, signal.SIGKILL)
            process.kill()
            raise
    return process.returncode, log


def losses(log: str) -> list[float]:
    return [float(x) for x in re.findall(r"lm loss: ([\d.E+-]+)", log)]


def _descendants(pid: int) -> list[int]:
    import psutil

    return [child.pid for child in psutil.Process(pid).children(recursive=True)]
