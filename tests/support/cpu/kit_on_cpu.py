"""One GPU that is none, for whole commands of `bench/gpu.py`: `gpu_on_cpu`, with graphs that record and replay.

    import kit_on_cpu; kit_on_cpu.install()     # in a process of its own, before anything else uses torch

Launches and copies run over the stand-in for the driver, which checks them; captures run over `graph_capture`, which
refuses what a capture on a GPU would; a stream that sleeps does so until the host synchronizes. Whatever the driver
refused ends the process with a status other than 0. Megatron is not needed.
"""

from __future__ import annotations

import atexit
import os
import sys
from typing import Any

import gpu_on_cpu
import graphs_on_cpu
import run_on_shared_gpu
import streams_on_cpu
import torch
import torch.distributed as dist

NAME = "a GPU on a CPU"
_asleep = [False]


class Event(streams_on_cpu.Event):
    def query(self) -> bool:
        super().query()
        return not _asleep[0]


def install() -> None:
    """Put it all in place, in this process for good."""
    driver = gpu_on_cpu.install()
    cuda, refuse_or_wait = torch.cuda, torch.cuda.synchronize

    def synchronize(*_: Any) -> None:
        streams_on_cpu.host_waits("torch.cuda.synchronize")
        _asleep[0] = False
        refuse_or_wait()

    def sleep(cycles: int) -> None:
        _asleep[0] = True

    graphs_on_cpu.install_graphs()
    graphs_on_cpu.collectives_end()
    # ranks may share what NCCL there is, and their groups are gloo's
    run_on_shared_gpu.nccl_version = lambda library: run_on_shared_gpu.NCCL_NEEDED
    start = dist.init_process_group
    dist.init_process_group = lambda backend, **settings: start("gloo", **settings)
    cuda.Event, cuda.synchronize, cuda._sleep = Event, synchronize, sleep
    cuda.is_available, cuda.get_device_name = (lambda: True), (lambda *_: NAME)
    atexit.register(_report, driver)


def _report(driver: gpu_on_cpu.Driver) -> None:
    if driver.faults:
        print("the driver refused:", *driver.faults, sep="\n  ", file=sys.stderr, flush=True)
        sys.stdout.flush()
        os._exit(3)
