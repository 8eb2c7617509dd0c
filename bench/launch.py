"""Restart a benchmark on several ranks of this machine, one thread each, on CPUs or on GPUs."""

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


def python_path() -> str:
    """Return ``PYTHONPATH`` with the folders of tests and examples that benchmarks use."""
    folders = [str(ROOT / folder) for folder in FOLDERS]
    return os.pathsep.join(filter(None, [*folders, os.environ.get("PYTHONPATH")]))


def again_on_gpus(script: str, ranks: int) -> int:
    """Run ``script`` with this process's arguments on ranks that share the GPUs here, over NCCL.

    Returns:
        Exit status, 2 where ranks cannot share the GPUs.
    """
    sys.path.append(str(ROOT / "examples"))
    import run_on_shared_gpu

    # Compilation by TorchDynamo would take longer than the measured steps.
    settings = {"PYTHONWARNINGS": "ignore", "TORCHDYNAMO_DISABLE": "1"}
    os.environ |= {"PYTHONPATH": python_path(), **settings}
    try:
        return run_on_shared_gpu.start(ranks, [script, *sys.argv[1:]])
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2


def again_on_ranks(script: str, ranks: int) -> int:
    """Run ``script`` with this process's arguments on CPUs, for at most half an hour.

    Args:
        script: path of the script.
        ranks: number of processes.

    Returns:
        Exit status of torchrun.
    """
    settings = {
        # Threads of several ranks would compete for the cores.
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": python_path(),
        "PYTHONWARNINGS": "ignore",
        "CUDA_VISIBLE_DEVICES": "",
    }
    command = [*torchrun(ranks), script, *sys.argv[1:]]
    return subprocess.run(command, env={**os.environ, **settings}, timeout=1800).returncode
