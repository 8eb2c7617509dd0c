"""One GPU that is none, for whole commands of `bench/gpu.py`: `gpu_on_cpu`, with graphs that record and replay.

    import kit_on_cpu; kit_on_cpu.install()     # in a process of its own, before anything else uses torch

Launches and copies run over the stand-in for the driver, which checks them; captures run over `graph_capture`, which
refuses what a capture on a GPU would; a stream that sleeps does so until the host synchronizes. Whatever the driver
refused ends the process with a status other than 0. Megatron is not needed.
"""

from __future__ import annotations

import atexit
import functools
import itertools
import os
import sys
from typing import Any

import gpu_on_cpu
import graph_capture
import graphs_on_cpu
import torch
from graph_capture import Graph

NAME = "a GPU on a CPU"
_handles = itertools.count(0x5000, 0x10)
_asleep = [False]


class Stream(graphs_on_cpu.Stream):
    """A stream with a handle of its own, as the driver tells streams apart."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.cuda_stream = next(_handles)

    @staticmethod
    def priority_range() -> tuple[int, int]:
        return 0, -5

    def wait_stream(self, stream: Any) -> None:
        self.wait_event(stream.record_event())

    def record_event(self, event: Any = None) -> Any:
        event = event if event is not None else Event()
        event.record(self)
        return event


class Event(graphs_on_cpu.Event):
    def query(self) -> bool:
        super().query()
        return not _asleep[0]


def install() -> None:
    """Put it all in place, in this process for good."""
    driver = gpu_on_cpu.install()
    cuda, refuse_or_wait = torch.cuda, torch.cuda.synchronize

    def synchronize(*_: Any) -> None:
        graphs_on_cpu._host_waits("torch.cuda.synchronize")
        _asleep[0] = False
        refuse_or_wait()

    def sleep(cycles: int) -> None:
        _asleep[0] = True

    cuda.CUDAGraph, cuda.graph = Graph, graph_capture.Capture
    cuda.is_current_stream_capturing = lambda: Graph.current is not None
    cuda.Stream, cuda.Event, cuda.stream = Stream, Event, graphs_on_cpu._on_stream
    cuda.current_stream, cuda.default_stream = (
        (lambda *_: graphs_on_cpu._streams[-1]),
        lambda *_: graphs_on_cpu._default,
    )
    cuda.set_stream, cuda.synchronize, cuda._sleep = graphs_on_cpu._set_stream, synchronize, sleep
    cuda.is_available, cuda.get_device_name = (lambda: True), (lambda *_: NAME)
    torch.from_numpy = graphs_on_cpu._of_the_host(torch.from_numpy)
    torch.frombuffer = graphs_on_cpu._of_the_host(torch.frombuffer)
    graphs_on_cpu._note_addresses()
    _note_launches()
    atexit.register(_report, driver)


def _note_launches() -> None:
    from megatron_hecate.device.launch import Kernels

    launch = Kernels.launch

    @functools.wraps(launch)
    def noted(kernels: Kernels, *args: Any, **kwargs: Any) -> None:
        if Graph.current is not None:
            Graph.current.launch(functools.partial(launch, kernels), args, kwargs)
        else:
            launch(kernels, *args, **kwargs)

    Kernels.launch = noted


def _report(driver: gpu_on_cpu.Driver) -> None:
    if driver.faults:
        print("the driver refused:", *driver.faults, sep="\n  ", file=sys.stderr, flush=True)
        sys.stdout.flush()
        os._exit(3)
