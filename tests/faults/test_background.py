"""Background threads at the interpreter's exit. Oracle: the exit status of a process without threads.

With daemon threads of CPython's own it is often SIGABRT."""

from __future__ import annotations

import ast
import subprocess
import sys
import time
from pathlib import Path

import pytest

import megatron_hecate

PACKAGE = Path(megatron_hecate.__file__).parent
BUSY = """
import sys, threading, time
import numpy as np
import torch
from megatron_hecate.faults.background import BackgroundThread

ones = torch.ones(8)

def free_tensors():  # torch releases the interpreter's lock to free a tensor
    while True:
        ones.numpy().view(np.int32)[0]
        (ones + 1).sum()
        if stopping():
            return
"""
BACKGROUND = """
import os
stopping = lambda: threading.current_thread().stopping.is_set()
for _ in range(4):
    BackgroundThread("busy", free_tensors).start()
time.sleep(0.05)
if (pid := os.fork()) == 0:  # a child that ends as Python ends, without the threads
    sys.exit(0)
assert os.waitpid(pid, 0)[1] == 0
"""


def _run(code: str, *, seconds: float = 60) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        capture_output=True,
        text=True,
        timeout=seconds,
    )


def test_a_background_thread_in_torch_does_not() -> None:
    """And the exit status of an error stays."""
    for status in (0, 7, 0):
        done = _run(BUSY + BACKGROUND + f"sys.exit({status})")
        assert (done.returncode, done.stderr) == (status, "")


def test_a_thread_without_end_delays_the_exit_by_its_patience() -> None:
    code = BUSY + "BackgroundThread('stuck', lambda: time.sleep(60), patience=0.5).start()"
    plain = time.monotonic()
    assert _run(BUSY).returncode == 0
    began = time.monotonic()
    assert _run(code).returncode == 0
    assert time.monotonic() - began < 2 * (began - plain) + 10, "it sleeps for 60 s"


@pytest.mark.fast
def test_all_threads_of_the_package_are_background_threads() -> None:
    """A daemon thread of CPython's own may abort the process at its exit, see above."""
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            keywords = {key.arg for key in node.keywords} if isinstance(node, ast.Call) else set()
            set_later = isinstance(node, ast.Attribute) and node.attr == "daemon"
            if "daemon" in keywords or set_later:
                found.append(f"{path.relative_to(PACKAGE)}")
    assert found == ["faults/background.py"], found
