"""Prints what the numbers of `gpu.py` are of, as a list in JSON; exits with 2 where torch can use no GPU."""

from __future__ import annotations

import contextlib
import datetime
import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def machine() -> list[str]:
    """The GPU, its driver, versions and the commit, a line each."""
    import torch

    properties = torch.cuda.get_device_properties(0)
    memory = f"{properties.total_memory / 2**30:.0f} GiB, {properties.multi_processor_count} multiprocessors"
    asked = [
        "nvidia-smi",
        "--query-gpu=name,driver_version,power.limit,mig.mode.current",
        "--format=csv,noheader",
    ]
    date = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC")
    return [
        f"GPU: {properties.name}, {memory}, {torch.cuda.device_count()} of them here, one is used",
        f"nvidia-smi (name, driver, power limit, MIG): {_said(asked) or 'cannot be run'}",
        f"torch {torch.__version__}, CUDA {torch.version.cuda}, Python {sys.version.split()[0]}",
        f"commit {_commit()}, {date}",
    ]


def _commit() -> str:
    """Of the checkout, or of the bundle that the sources came in."""
    named = _said(["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=12"])
    bundled = ROOT / "COMMIT"
    return named or (bundled.read_text().strip() if bundled.exists() else "unknown")


def _said(command: list[str]) -> str:
    """The first line of what ``command`` prints; empty when it cannot be run."""
    with contextlib.suppress(OSError, subprocess.SubprocessError, IndexError):
        return subprocess.run(
            command, capture_output=True, text=True, timeout=30, check=True
        ).stdout.splitlines()[0]
    return ""


if __name__ == "__main__":
    import torch

    if not torch.cuda.is_available():
        sys.exit(
            "There is no GPU that torch can use here, so nothing was run and nothing was written."
        )
    print(json.dumps(machine()))
