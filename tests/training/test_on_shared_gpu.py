"""Training over NCCL and TransformerEngine's own kernels, on ranks that share one GPU.

    pytest tests/training/test_on_shared_gpu.py

Oracle: the same model without FSSDP, on the same ranks and data. FSSDP without replicas has the same bits, unless
stock Megatron does not repeat its own; with replicas, by both transports, it agrees up to the order of sums.
`run_on_shared_gpu` starts `shared_gpu_cases`, once for each group of cases; other tests hide GPUs.
`test_shared_gpu_rehearsal` runs cases on CPU ranks.
"""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import shared_gpu_cases
import torch
from launch import FOLDERS, ROOT
from shared_gpu_cases import CASES, RANKS, SAYS


def _is_missing() -> str:
    if not torch.cuda.is_available():
        return "needs a GPU, and to be run by itself"
    try:  # its compiled half is no module that could be found
        importlib.metadata.version("transformer_engine_torch")
        importlib.metadata.version("megatron_core")
    except importlib.metadata.PackageNotFoundError as missing:
        return f"needs {missing.name}"
    return ""


@pytest.mark.skipif(bool(_is_missing()), reason=_is_missing())
@pytest.mark.parametrize("group", CASES)
def test_a_shared_gpu(group: str, tmp_path: Path) -> None:
    """Cases of a group train one after another in the same processes."""
    folders = (*FOLDERS, "bench")
    environment = dict(
        PYTHONPATH=os.pathsep.join(
            [*(str(ROOT / f) for f in folders), os.environ.get("PYTHONPATH", "")]
        ),
        PYTHONWARNINGS="ignore",
        TEST_FOLDER=str(tmp_path),
        TORCHDYNAMO_DISABLE="1",  # compiling takes longer than these cases
        CUBLAS_WORKSPACE_CONFIG=":4096:8",
        NVTE_ALLOW_NONDETERMINISTIC_ALGO="0",
        NVIDIA_TF32_OVERRIDE="0",  # else fp32 is as rough as bf16: a last bit of an activation becomes its tenth
    )
    names = list(CASES[group])
    script = str(ROOT / "examples" / "run_on_shared_gpu.py")
    process = subprocess.Popen(
        [sys.executable, script, f"--ranks={RANKS}", shared_gpu_cases.__file__, group],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | environment,
        cwd=ROOT,
    )
    # it ends ranks and MPS
    timer = threading.Timer(400, process.terminate)
    timer.start()
    said = ""
    # printed at once: a limit on the whole test loses no case that has ended
    for line in process.stdout or ():
        print(line, end="", flush=True)
        said += line
    timer.cancel()
    failed = [name for name in names if f"{name}: {SAYS}" not in said]
    assert not failed and process.wait() == 0, f"{failed}:\n{said[-5000:]}"
