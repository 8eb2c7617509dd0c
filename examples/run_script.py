"""Run the script of the command line in a process that the caller has prepared."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path


def run_script() -> None:
    """Run the script or ``-m module`` of the command line as ``__main__``, like Python itself."""
    if sys.argv[1] == "-m":
        sys.argv = sys.argv[2:]
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv = sys.argv[1:]
        # Python puts the folder of the script first, so that its imports find modules next to it.
        sys.path[0] = str(Path(sys.argv[0]).resolve().parent)
        runpy.run_path(sys.argv[0], run_name="__main__")
