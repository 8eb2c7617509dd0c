"""Restart a benchmark on several ranks of this machine, one thread each, without a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SUPPORT = ("tests/support", "tests/support/cpu", "tests/support/models", "tests/support/scripts")
FOLDERS = ("", *SUPPORT, "examples")


def torchrun(ranks: int) -> list[str]:
    """Return the command that starts a script on ``ranks`` processes of this machine."""
    flags = [f"--nproc-per-node={ranks}", "--standalone"]
    return [sys.executable, "-m", "torch.distributed.run", *flags]


def again_on_ranks(script: str, ranks: int, **environment: str) -> int:
    """Run ``script`` with this process's arguments under torchrun, for at most half an hour.

    Args:
        script: path of the script.
        ranks: number of processes.
        environment: additional environment variables.

    Returns:
        Exit status of torchrun.
    """
    folders = [str(ROOT / folder) for folder in FOLDERS]
    path = os.pathsep.join(filter(None, [*folders, os.environ.get("PYTHONPATH")]))
    settings = {
        # Threads of several ranks would compete for the cores.
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": path,
        "PYTHONWARNINGS": "ignore",
        "CUDA_VISIBLE_DEVICES": "",
    }
    command = [*torchrun(ranks), script, *sys.argv[1:]]
    variables = {**os.environ, **settings, **environment}
    return subprocess.run(command, env=variables, timeout=1800).returncode
