"""Run what the command line names, behind a script that prepares the process for it."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path


def run_script() -> None:
    """Run the script or ``-m module`` on the command line as ``__main__``, as Python itself would."""
    if sys.argv[1] == "-m":
        sys.argv = sys.argv[2:]
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv = sys.argv[1:]
        sys.path[0] = str(Path(sys.argv[0]).resolve().parent)
        runpy.run_path(sys.argv[0], run_name="__main__")
