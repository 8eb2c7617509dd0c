"""What needs a GPU, in processes of its own: ``pytest tests/test_on_gpu.py`` (other tests hide GPUs)."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}
SHARED = {"TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU, and to be run by itself")


def _run(command: list[str], *, timeout: float = 600, **environment: str) -> str:
    """What ``command`` prints; fails the test when it fails."""
    settings = {**os.environ, **ENVIRONMENT, **environment}
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, env=settings, cwd=ROOT)
    assert done.returncode == 0, f"{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    return done.stdout


@pytest.mark.parametrize("transport", ["sm", "ce"])
def test_processes_that_share_a_gpu(transport: str) -> None:
    """Oracle: as of ``one_layer``. Contexts take turns on the GPU, so this is slow, and says nothing of speed."""
    said = _run([*TORCHRUN, "--nproc-per-node=4", "tests/one_gpu.py", transport], **SHARED)
    assert "all as it should be" in said


@pytest.mark.skipif(shutil.which("compute-sanitizer") is None, reason="needs compute-sanitizer on the path")
def test_nothing_is_read_or_written_out_of_bounds() -> None:
    """Oracle: compute-sanitizer, on small chunks; the values are checked as well."""
    tests = [sys.executable, "-m", "pytest", "-q", "tests/test_virtual_ranks.py", "-k", "random_placements and cuda"]
    said = _run(["compute-sanitizer", "--tool=memcheck", "--error-exitcode=99", *tests])
    assert "ERROR SUMMARY: 0 errors" in said and "4 passed" in said


def test_a_peer_that_does_not_come_is_named() -> None:
    """On the process's standard error, before whatever CUDA says."""
    command = [*TORCHRUN, "--nproc-per-node=2", "tests/one_gpu.py", "alone"]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=180, env={**os.environ, **ENVIRONMENT, **SHARED}, cwd=ROOT
    )
    assert done.returncode != 0
    assert re.search(r"FSSDP: rank 0 of 2: layer 3: spAG failed .*expected rank 1 to finish \d+ steps", done.stderr)


def test_the_demo_with_one_rank(tmp_path: Path) -> None:
    """Oracle: stock Megatron, by the demo's own comparison of losses and checkpoints."""
    pytest.importorskip("megatron.training")
    command = [sys.executable, "examples/demo.py", "--gpus", "1", "--steps", "10", "--out", str(tmp_path / "demo")]
    assert "FSSDP trained the same model as stock Megatron." in _run(command)
