"""Print GPU, driver, versions and commit as a JSON list, for `gpu.py`; exit if there is no GPU."""

from __future__ import annotations

import contextlib
import datetime
import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def machine() -> list[str]:
    """Describe the GPU, its driver, the versions and the commit, one line each."""
    import torch

    properties = torch.cuda.get_device_properties(0)
    memory = f"{properties.total_memory / 2**30:.0f} GiB"
    memory += f", {properties.multi_processor_count} multiprocessors"
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
    """Return the commit of the checkout; in a tree without git, of its file ``COMMIT``."""
    named = _said(["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=12"])
    file = ROOT / "COMMIT"
    return named or (file.read_text().strip() if file.exists() else "unknown")


def _said(command: list[str]) -> str:
    """Return the first line of the output of ``command``; empty if it cannot be run."""
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
