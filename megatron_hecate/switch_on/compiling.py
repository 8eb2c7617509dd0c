"""Compilation of kernels and planner when FSSDP is switched on.

A rank on which compilation fails in the first forward would leave all other ranks waiting there.
"""

from __future__ import annotations

import contextlib
import os
import socket
import warnings
from collections.abc import Iterator

import torch.distributed as dist

from megatron_hecate.comm.device import device_of_rank
from megatron_hecate.comm.problems import collect
from megatron_hecate.config import HecateConfig
from megatron_hecate.device.launch import Kernels
from megatron_hecate.homes.compiling import compile_home_planner
from megatron_hecate.nvlink.program import compile_programs
from megatron_hecate.plan import compile_planner


def compile_all(config: HecateConfig) -> list[str]:
    """Compile the kernels, and what ``config`` needs of the planner.

    Returns:
        One line of text per failure. Nothing is raised, because all ranks must agree on the result.
    """
    problems: list[str] = []
    if config.slots or config.rehome:
        with collect(problems, "planning cannot be compiled"), _one_warning():
            compile_planner(_notice, late=bool(config.late_replicas))
            if config.rehome:
                compile_home_planner(_notice)
    with collect(problems, f"{socket.gethostname()}: the kernels cannot be compiled"):
        Kernels(device_of_rank())
    return problems


def compile_transfers() -> list[str]:
    """Compile the schedules and programs of transport ``nvlink``; returns problems as text."""
    problems: list[str] = []
    with collect(problems, "transfers cannot be compiled"), _one_warning():
        compile_programs(_notice)
    return problems


def _notice() -> None:
    """Print on rank 0 why the job does not begin yet."""
    if dist.get_rank() == 0:
        text = "compiling, for less than a minute; megatron-hecate check compiles ahead"
        print(f"FSSDP: {text}", flush=True)


@contextlib.contextmanager
def _one_warning() -> Iterator[None]:
    """Hide the warnings of the block on all ranks of a machine but one: they share a folder."""
    with warnings.catch_warnings():
        if os.environ.get("LOCAL_RANK", "0") != "0":
            warnings.simplefilter("ignore")
        yield
