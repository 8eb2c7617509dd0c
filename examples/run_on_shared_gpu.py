"""Run a Megatron script on one rank or several of each GPU, over NCCL: one GPU can be a node.

    python examples/run_on_shared_gpu.py --ranks 4 pretrain_gpt.py ...            stock Megatron
    python examples/run_on_shared_gpu.py --ranks 4 -m megatron_hecate run --moe-fssdp -- \
        pretrain_gpt.py ...                                                       with FSSDP

It replaces torchrun on one machine. NCCL 2.30 and newer accept ranks that share a GPU. MPS, where
its control program is found, gives each rank multiprocessors of its own, so that a rank with more
work is a real straggler. Without MPS ranks take turns on the GPU: values are right, step times mean
nothing. Step times are not those of separate GPUs: links are the GPU's own memory.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

NCCL_NEEDED: tuple[int, int] = (2, 30)
# environment variable: path of an NCCL library that replaces torch's
LIBRARY_VARIABLE = "HECATE_NCCL"
PIPE_VARIABLE = "CUDA_MPS_PIPE_DIRECTORY"
CONTROL = "nvidia-cuda-mps-control"
# NCCL's thread blocks per collective on a whole GPU; the ranks of a GPU share them. With more they
# would fill the multiprocessors of a rank.
NCCL_BLOCKS: int = 16
# folders with MPS's control program where it is not on the PATH
MPS_FOLDERS = ("/usr", "/opt")
# seconds that MPS waits for the ranks when it stops
MPS_TIMEOUT: int = 5


def nccl_version(library: str) -> tuple[int, int]:
    """Return the major and minor version of an NCCL library.

    Raises:
        OSError: when the library cannot be loaded.
    """
    number = ctypes.c_int()
    status = ctypes.CDLL(library).ncclGetVersion(ctypes.byref(number))
    if status:
        raise OSError(f"{library}: ncclGetVersion returned {status}")
    # 2.30.7 is 23007.
    return number.value // 10000, number.value // 100 % 100


def nccl_environment() -> dict[str, str]:
    """Return the variables with which ranks that share a GPU use NCCL.

    Raises:
        ValueError: when neither torch's library nor the named one is new enough.
    """
    needed = ".".join(map(str, NCCL_NEEDED))
    named = os.environ.get(LIBRARY_VARIABLE, "")
    # Importing torch loads its library, which is then found by name.
    import torch

    try:
        version = nccl_version(named or "libnccl.so.2")
    except (OSError, AttributeError) as error:
        raise ValueError(f"{LIBRARY_VARIABLE}={named!r}: no NCCL library: {error}") from error
    if version < NCCL_NEEDED:
        library = named or "torch's NCCL"
        cuda = f"cu{(torch.version.cuda or '13').split('.')[0]}"
        install = f"pip install --no-deps --target FOLDER 'nvidia-nccl-{cuda}>={needed}'"
        raise ValueError(
            f"{library} is {version[0]}.{version[1]}; ranks that share a GPU need {needed} or "
            f"newer: {install}, then set {LIBRARY_VARIABLE}=FOLDER/nvidia/nccl/lib/libnccl.so.2"
        )
    variables = {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_NVLS_ENABLE": "0"}
    if named:
        preloaded = [named, os.environ.get("LD_PRELOAD", "")]
        variables["LD_PRELOAD"] = ":".join(filter(None, preloaded))
    return variables


def rank_environment(per_gpu: int) -> dict[str, str]:
    """Return the variables of the ranks.

    Args:
        per_gpu: ranks of each GPU.

    Raises:
        ValueError: see `nccl_environment`.
    """
    # Ranks share the cores.
    variables = {"OMP_NUM_THREADS": "1"}
    if per_gpu == 1:
        return variables
    return {
        **variables,
        **nccl_environment(),
        "NCCL_MAX_CTAS": str(max(1, NCCL_BLOCKS // per_gpu)),
        # Symmetric memory refuses ranks that share a GPU by default.
        "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1",
        "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
        "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": str(100 // per_gpu),
    }


def _mps_control() -> str:
    """Return the path of MPS's control program; empty if there is none."""
    if control := shutil.which(CONTROL):
        return control
    # Images put the driver's programs into folders of their own.
    search = ["find", *MPS_FOLDERS, "-name", CONTROL, "-print", "-quit"]
    return subprocess.run(search, capture_output=True, text=True, check=False).stdout.strip()


@contextlib.contextmanager
def mps() -> Iterator[dict[str, str]]:
    """Run MPS inside the block; yields the variables by which ranks find it.

    A running MPS that ``$CUDA_MPS_PIPE_DIRECTORY`` names is used as it is.
    """
    if PIPE_VARIABLE in os.environ:
        yield {}
        return
    control = _mps_control()
    if not control:
        print(f"{CONTROL} not found: ranks take turns on the GPU, step times mean nothing")
        yield {}
        return
    # A name in /tmp, because the path of a socket has at most 108 characters.
    # The daemon may remove its files at the same time.
    with tempfile.TemporaryDirectory(
        prefix="mps-", dir="/tmp", ignore_cleanup_errors=True
    ) as folder:
        variables = {PIPE_VARIABLE: folder, "CUDA_MPS_LOG_DIRECTORY": folder}
        environment = {**os.environ, **variables}
        subprocess.run([control, "-d"], env=environment, check=True, timeout=60)
        try:
            yield variables
        finally:
            _quit_mps(control, environment)


def _quit_mps(control: str, environment: Mapping[str, str]) -> None:
    """Stop MPS and wait until it has ended, because a second one cannot start beside it."""
    number = Path(environment[PIPE_VARIABLE], f"{CONTROL}.pid")
    process = Path("/proc", number.read_text().strip()) if number.exists() else None
    subprocess.run(
        [control],
        input=f"quit -t {MPS_TIMEOUT}\n",
        env=environment,
        text=True,
        stdout=subprocess.DEVNULL,
        timeout=60,
        check=False,
    )
    deadline = time.monotonic() + 2 * MPS_TIMEOUT
    while process is not None and process.exists() and time.monotonic() < deadline:
        time.sleep(0.1)


def take_gpu() -> None:
    """Select this rank's GPU; call it on every rank before the first use of CUDA."""
    import torch

    local = int(os.environ["LOCAL_RANK"])
    gpu = local * torch.cuda.device_count() // int(os.environ["LOCAL_WORLD_SIZE"])
    # It would start CUDA, whose flags a script may still want to set; 0 is the default.
    if gpu:
        torch.cuda.set_device(gpu)
    # Megatron takes the GPU with this index.
    os.environ["LOCAL_RANK"] = str(gpu)


def torchrun(ranks: int, script: list[str]) -> list[str]:
    """Return the command that starts ``script`` on ``ranks`` processes of this machine."""
    return [
        *(sys.executable, "-m", "torch.distributed.run"),
        *(f"--nproc-per-node={ranks}", "--standalone"),
        *script,
    ]


def _parse(words: list[str]) -> tuple[int, list[str]]:
    """Return the number of ranks, and the words of the script."""
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], usage="%(prog)s --ranks N SCRIPT ..."
    )
    parser.add_argument("--ranks", type=int, required=True, help="processes, over all GPUs")
    # The script may begin with an option, -m; argparse would take it for its own.
    size = 1 if words[:1] and "=" in words[0] else 2
    ranks = parser.parse_args(words[:size]).ranks
    if not words[size:]:
        parser.error("name the script to run")
    return ranks, words[size:]


def ranks_per_gpu(ranks: int) -> int:
    """Return how many of ``ranks`` ranks share each GPU of this machine.

    Raises:
        ValueError: without a GPU, or when ``ranks`` is no multiple of the GPUs.
    """
    import torch

    gpus = torch.cuda.device_count()
    if not gpus:
        raise ValueError("there is no GPU that torch can use here; use examples/run_on_cpu.py")
    if ranks < gpus or ranks % gpus:
        raise ValueError(
            f"--ranks {ranks} is not a multiple of the {gpus} GPUs here; use {gpus}, {2 * gpus} "
            "..., or hide GPUs with CUDA_VISIBLE_DEVICES"
        )
    return ranks // gpus


def start(ranks: int, script: list[str]) -> int:
    """Run ``script`` on ``ranks`` ranks over all GPUs of this machine; returns the exit status.

    Raises:
        ValueError: see `ranks_per_gpu` and `nccl_environment`.
    """
    per_gpu = ranks_per_gpu(ranks)
    variables = rank_environment(per_gpu)
    with mps() if per_gpu > 1 else contextlib.nullcontext({}) as of_mps:
        process = subprocess.Popen(
            torchrun(ranks, [__file__, *script]), env={**os.environ, **variables, **of_mps}
        )
        try:
            return process.wait()
        finally:
            # torchrun passes it on to the ranks; MPS would wait for them.
            process.terminate()
            process.wait()


def main() -> int:
    """Start the ranks or, on a rank, run the script of the command line."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        from plain_wgrad import use_plain_wgrad
        from run_script import run_script

        take_gpu()
        use_plain_wgrad()
        run_script()
        return 0
    # An exception, so that ranks and MPS are stopped.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        return start(*_parse(sys.argv[1:]))
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
