"""What needs a GPU, in processes of its own: ``pytest tests/nvlink/test_on_gpu.py`` (other tests hide GPUs).

Oracle: the dense reference of `one_layer`, and compute-sanitizer. torchrun starts this file again: its processes share
one GPU, and see each other's memory as if each had its own.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from load_exchanges import check_exchanges
from one_layer import Reference, allocate, check, copies, make_transport
from quota_cases import check_every_source

from megatron_hecate.comm.transport import TransferPlan

ROOT = Path(__file__).resolve().parents[2]
SUPPORT = ROOT / "tests" / "support"
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "PYTHONPATH": os.pathsep.join(map(str, [ROOT, SUPPORT, *SUPPORT.glob("*/")])),
}
SHARED = {"TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}
SANITIZER = "compute-sanitizer --report-api-errors no --error-exitcode=99".split()
NEEDS_SANITIZER = pytest.mark.skipif(
    shutil.which(SANITIZER[0]) is None, reason="needs compute-sanitizer on the path"
)
pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs a GPU, and to be run by itself"
)


def _run(*command: str, timeout: float = 600, **environment: str) -> subprocess.CompletedProcess:
    settings = {**os.environ, **ENVIRONMENT, **environment}
    return subprocess.run(
        command, capture_output=True, text=True, timeout=timeout, env=settings, cwd=ROOT
    )


def _said(*command: str, **environment: str) -> str:
    """What ``command`` prints; fails the test when it fails."""
    done = _run(*command, **environment)
    assert done.returncode == 0, f"{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    return done.stdout


def test_processes_that_share_a_gpu() -> None:
    """Contexts take turns on the GPU, so this is slow, and says nothing of speed."""
    said = _said(*TORCHRUN, "--nproc-per-node=4", __file__, "together", **SHARED)
    assert "all as it should be" in said


@NEEDS_SANITIZER
def test_nothing_is_read_or_written_out_of_bounds() -> None:
    """On small chunks; the values are checked as well. Calls that torch makes to see whether they succeed, and that do
    not, are no errors of ours."""
    tests = "-m pytest -q tests/nvlink/test_virtual_ranks.py -k".split()
    command = [*SANITIZER, "--tool=memcheck", sys.executable, *tests, "random_placements and cuda"]
    said = _said(*command)
    assert "ERROR SUMMARY: 0 errors" in said and "2 passed" in said


@NEEDS_SANITIZER
def test_no_race_in_the_quotas() -> None:
    """In shared memory, also where no rank can push; the values are checked as well."""
    said = _said(*SANITIZER, "--tool=racecheck", sys.executable, __file__, "quotas")
    assert "all as it should be" in said and re.search("RACECHECK SUMMARY: 0 hazards", said), said


def test_a_peer_that_does_not_come_is_named() -> None:
    """On the process's standard error, before whatever CUDA says."""
    done = _run(*TORCHRUN, "--nproc-per-node=2", __file__, "alone", timeout=180, **SHARED)
    assert done.returncode != 0
    message = r"FSSDP: layer 1: spAG failed on rank 0 of 2 .*expected rank 1 to finish its steps"
    assert re.search(message, done.stderr)


def _alone(device: torch.device) -> None:
    """Rank 0 waits for rank 1."""
    (layer,) = allocate(make_transport("nvlink", timeout=3.0), device, torch.bfloat16)
    if layer.rank == 1:
        time.sleep(30)
        return
    layer.fetch(TransferPlan(layer.rank, copies("one to all")), Reference(0, torch.bfloat16)).wait()
    torch.cuda.synchronize()


def _main() -> None:
    """Run on every rank, under torchrun; the quotas in one process."""
    if sys.argv[1] == "quotas":
        for seed in range(12):
            check_every_source(seed, torch.device("cuda", 0))
        print("all as it should be")
        return
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))  # control only
    torch.cuda.set_device(0)
    device = torch.device("cuda", 0)
    if sys.argv[1] == "alone":
        _alone(device)
        return
    transport = make_transport("nvlink")
    check(transport, Reference(0, torch.bfloat16), device)
    check_exchanges(transport, device)
    torch.cuda.synchronize()
    dist.barrier()
    if dist.get_rank() == 0:
        print("all as it should be")
    dist.destroy_process_group()


if __name__ == "__main__":
    _main()
