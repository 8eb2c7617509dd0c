"""Count the main thread's calls by file, for `bench/host.py` and a test.

Counts vary less between runs than times.
"""

from __future__ import annotations

import functools
import sys
import time
from collections import Counter
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
from torch.overrides import _pop_mode

FACTORIES = ("tensor", "zeros", "empty", "ones", "arange", "full", "rand", "randn", "randint")
FACTORIES += ("zeros_like", "empty_like", "ones_like")
# Python in place of compiled code: a file for TransformerEngine, a function for torch's factories.
COMPILED = "tex_on_cpu.py"
FACTORY = "on_cpu"


class Phases:
    """Timer of Megatron's forward and backward of each microbatch, in thread CPU seconds.

    With ``counts`` it also counts the calls in forward and backward. A call of a stand-in for
    compiled code counts as one C call, whatever it calls itself.
    """

    def __init__(self) -> None:
        from megatron.core.pipeline_parallel import schedules

        self.seconds: Counter[str] = Counter()
        # keys: file and function of the caller, or of the callee in Python; "Python" or "C"
        self.calls: Counter[tuple[str, str, str]] = Counter()
        self.counts = False
        # the outermost running frame of a stand-in
        self._stand_in: FrameType | None = None
        for phase in ("forward", "backward"):
            step = getattr(schedules, f"{phase}_step")
            setattr(schedules, f"{phase}_step", self._timed(phase, step))

    def clear(self) -> None:
        """Reset times and counts."""
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
        if self._stand_in is not None:
            if event == "return" and frame is self._stand_in:
                self._stand_in = None
            return
        if event == "call" and _stands_in(frame):
            self._stand_in = frame
            caller = frame if frame.f_back is None else frame.f_back
            self._add(caller, "C")
        elif event == "call":
            self._add(frame, "Python")
        elif event == "c_call" and frame.f_code.co_filename != __file__:
            self._add(frame, "C")

    def _add(self, frame: FrameType, kind: str) -> None:
        self.calls[frame.f_code.co_filename, frame.f_code.co_qualname, kind] += 1


def _stands_in(frame: FrameType) -> bool:
    """Return whether the function of ``frame`` is Python in place of compiled code."""
    code = frame.f_code
    return code.co_name == FACTORY or code.co_filename.endswith(COMPILED)


def use_plain_factories() -> None:
    """Replace the torch function mode of `megatron_on_cpu` by tensor factories on the CPU.

    The mode adds a Python call to every operation. The factories map ``device="cuda"`` to the CPU.
    """
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
