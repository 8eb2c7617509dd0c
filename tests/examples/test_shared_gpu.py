"""`examples/run_on_shared_gpu.py` on a machine without a GPU: what ranks and MPS get, and what is refused.

torch's count of GPUs, MPS's control program and the NCCL library are stand-ins; torchrun and the ranks are real.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import run_on_shared_gpu
import torch

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "examples" / "run_on_shared_gpu.py"
# put first on the ranks' path, too; each line is one write, because torchrun's ranks write unbuffered
SITE = """
import os, torch
torch.cuda.device_count = lambda: int(os.environ["STAND_IN_GPUS"])
torch.cuda.set_device = lambda gpu: print(f"device {gpu}\\n", end="")
"""
CONTROL = """#!/usr/bin/env bash
echo "$* in $CUDA_MPS_PIPE_DIRECTORY: $([ $# = 0 ] && cat)" >>"$CALLS"
"""
NCCL = "int ncclGetVersion(int *version) { *version = %d; return 0; }"
SHOWN = (
    "RANK LOCAL_RANK NCCL_MULTI_RANK_GPU_ENABLE NCCL_MAX_CTAS CUDA_MPS_ACTIVE_THREAD_PERCENTAGE "
    "CUDA_MPS_PIPE_DIRECTORY LD_PRELOAD TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"
).split()
PRINTS = f"""
import os, sys
words = ["rank", *(os.environ.get(name, "-") for name in {SHOWN}), *sys.argv[1:]]
print(" ".join(words) + "\\n", end="")
"""


def _compile_nccl(folder: Path, version: int) -> Path:
    """Return a library that says it is NCCL of this version."""
    (source := folder / "nccl.c").write_text(NCCL % version)
    library = folder / "libnccl.so.2"
    command = ["gcc", "-shared", "-fPIC", "-o", str(library), str(source)]
    subprocess.run(command, check=True, timeout=60)
    return library


class Machine:
    """A machine with GPUs.

    Args:
        folder: folder of its programs.
        gpus: number of GPUs.
    """

    def __init__(self, folder: Path, *, gpus: int) -> None:
        self.calls = folder / "calls"
        self.calls.touch()
        self.script = folder / "script.py"
        self.script.write_text(PRINTS)
        (folder / "sitecustomize.py").write_text(SITE)
        names = ("HECATE_NCCL", "LD_PRELOAD", "CUDA_MPS_PIPE_DIRECTORY")
        self.environment = {k: v for k, v in os.environ.items() if k not in names}
        self.environment |= {"PYTHONPATH": str(folder), "STAND_IN_GPUS": str(gpus)}
        self.environment |= {"CALLS": str(self.calls), "CUDA_VISIBLE_DEVICES": ""}
        programs = folder / "programs"
        programs.mkdir()
        (programs / "nvidia-cuda-mps-control").write_text(CONTROL)
        (programs / "nvidia-cuda-mps-control").chmod(0o755)
        self.environment["PATH"] = f"{programs}:{os.environ['PATH']}"
        self.library = _compile_nccl(folder, 23007)
        self.environment["HECATE_NCCL"] = str(self.library)

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, str(SCRIPT), *arguments],
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, *arguments: str) -> tuple[int, list[list[str]], str]:
        """Exit status; the words that ranks print, by rank; standard output and error."""
        process = self.start(*arguments)
        try:
            out, err = process.communicate(timeout=120)
        finally:
            process.kill()
        lines = sorted(line.split() for line in out.splitlines() if line.startswith("rank "))
        return process.returncode, lines, out + err


def test_ranks_share_the_gpus_under_mps(tmp_path: Path) -> None:
    machine = Machine(tmp_path, gpus=2)
    code, lines, text = machine.run("--ranks", "4", str(machine.script), "--ranks", "a b")
    assert code == 0, text
    assert [line[1] for line in lines] == ["0", "1", "2", "3"]
    assert [line[2] for line in lines] == ["0", "0", "1", "1"], "two ranks on each GPU"
    assert text.count("device 1") == 2
    for line in lines:
        enabled, blocks, percentage, pipes, preloaded, overlapping, *words = line[3:]
        assert (enabled, blocks, percentage, overlapping) == ("1", "8", "50", "1")
        assert preloaded == str(machine.library)
        assert words == ["--ranks", "a", "b"]
    begun, ended = machine.calls.read_text().splitlines()
    assert begun == f"-d in {pipes}: " and ended == f" in {pipes}: quit -t 5"
    assert not Path(pipes).exists()


def test_mps_ends_with_the_ranks(tmp_path: Path) -> None:
    machine = Machine(tmp_path, gpus=1)
    marks = tmp_path / "marks"
    marks.mkdir()
    line = f"open('{marks}/' + os.environ['RANK'], 'w').write(str(os.getpid()))"
    machine.script.write_text(f"import os, time\n{line}\ntime.sleep(600)\n")
    process = machine.start("--ranks", "2", str(machine.script))
    try:
        _wait_for(lambda: len([p for p in marks.iterdir() if p.read_text()]) == 2)
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 143, err
    assert machine.calls.read_text().endswith("quit -t 5\n")
    for path in marks.iterdir():
        _wait_for(lambda path=path: not Path("/proc", path.read_text()).exists())


def _wait_for(is_so: object) -> None:
    deadline = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_what_cannot_be_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before ranks and MPS start; the script prints the message and ends with status 2."""
    old = _compile_nccl(tmp_path, 22907)
    for gpus, library, ranks, message in (
        (0, old, 4, "there is no GPU that torch can use here; use examples/run_on_cpu.py"),
        (2, old, 3, "--ranks 3 is not a multiple of the 2 GPUs here; use 2, 4 ..."),
        (1, old, 4, "is 2.29; ranks that share a GPU need 2.30 or newer: pip install"),
        (1, tmp_path / "no.so", 4, "no NCCL library: "),
    ):
        monkeypatch.setattr(torch.cuda, "device_count", lambda gpus=gpus: gpus)
        monkeypatch.setenv("HECATE_NCCL", str(library))
        with pytest.raises(ValueError, match=re.escape(message)) as error:
            run_on_shared_gpu.start(ranks, ["script.py"])
        assert "\n" not in str(error.value)
