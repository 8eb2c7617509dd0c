"""What is compiled when FSSDP is switched on: ranks that cannot would leave others waiting in the first forward."""

from __future__ import annotations

import socket
import threading

import torch.distributed as dist

from megatron_hecate.device.launch import Kernels
from megatron_hecate.job.device import device_of_rank
from megatron_hecate.plan import compile_planner
from megatron_hecate.plan.compiled import cache_folder

QUIET: float = 3.0  # seconds of compiling after which rank 0 says what takes so long


def compile_all(*, plans: bool) -> list[str]:
    """Compile the kernels and, where anything will be planned, the planner; what went wrong comes back as lines of
    text."""
    return (_compile_planner() if plans else []) + _compile_kernels()


def _compile_planner() -> list[str]:
    text = f"FSSDP: compiling the planner, some 20 seconds; the result is kept in {cache_folder()}"
    said = threading.Timer(QUIET, print, [text])
    try:
        if dist.get_rank() == 0:
            said.start()
        compile_planner()
    except Exception as error:  # every rank must hear of it, whatever it is
        return [f"planning cannot be compiled: {type(error).__name__}: {error}"]
    finally:
        said.cancel()
    return []


def _compile_kernels() -> list[str]:
    """The first forward needs them: a rank without them would leave the others waiting there."""
    try:
        Kernels(device_of_rank())
    except Exception as error:  # every rank must hear of it, whatever it is
        return [
            f"{socket.gethostname()}: the kernels cannot be compiled: {error or type(error).__name__}"
        ]
    return []
