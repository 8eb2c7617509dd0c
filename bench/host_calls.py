"""Count the main thread's calls by file, for `bench/host.py` and a test. Steadier than time."""

from __future__ import annotations

import functools
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch.overrides import _pop_mode

FACTORIES = ("tensor", "zeros", "empty", "ones", "arange", "full", "rand", "randn", "randint")
FACTORIES += ("zeros_like", "empty_like", "ones_like")
PACKAGES = ("megatron_hecate", "megatron/core", "transformer_engine", "torch", "tests")


class Phases:
    """Thread CPU time of Megatron's forward and backward of each microbatch, and calls in them when asked for."""

    def __init__(self) -> None:
        from megatron.core.pipeline_parallel import schedules

        self.seconds: Counter[str] = Counter()
        self.calls: Counter[tuple[str, str]] = Counter()  # by file, "Python" or "C"
        self.counts = False
        for phase in ("forward", "backward"):
            setattr(
                schedules, f"{phase}_step", self._timed(phase, getattr(schedules, f"{phase}_step"))
            )

    def clear(self) -> None:
        """Forget what was measured."""
        self.seconds.clear()
        self.calls.clear()

    def _timed(self, phase: str, step: Callable) -> Callable:
        @functools.wraps(step)
        def timed(*args: Any, **kwargs: Any) -> Any:
            if self.counts:
                sys.setprofile(self._count)
            begin = time.thread_time()
            try:
                return step(*args, **kwargs)
            finally:
                self.seconds[phase] += time.thread_time() - begin
                sys.setprofile(None)

        return timed

    def _count(self, frame: FrameType, event: str, _: Any) -> None:
        if frame.f_code.co_filename == __file__:  # what stands in for a GPU here
            return
        if event == "call":
            self.calls[frame.f_code.co_filename, "Python"] += 1
        elif event == "c_call":
            self.calls[frame.f_code.co_filename, "C"] += 1


def use_plain_factories() -> None:
    """Replace the torch function mode of `megatron_on_cpu`, which adds a Python call to every operation, by factories
    that read ``device="cuda"`` as the CPU."""
    _pop_mode()
    for name in FACTORIES:
        setattr(torch, name, _on_cpu(getattr(torch, name)))


def _on_cpu(factory: Callable) -> Callable:
    @functools.wraps(factory)
    def on_cpu(*args: Any, **kwargs: Any) -> torch.Tensor:
        device = kwargs.get("device")
        if device is not None and (isinstance(device, int) or str(device).startswith("cuda")):
            kwargs["device"] = "cpu"
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        return factory(*args, **kwargs)

    return on_cpu


def contributor(file: str) -> str:
    """Of ``file``, what tables call it: a file of ours by its name, others by their package."""
    path = Path(file).as_posix()
    for package in PACKAGES:
        if f"/{package}/" in path:
            return (
                f"{package}/{path.rpartition(f'/{package}/')[2]}"
                if package == PACKAGES[0]
                else package
            )
    return "others"
