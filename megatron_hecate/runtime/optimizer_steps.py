"""One hook of the process on all optimizers' steps.

The hook stays registered: one that is removed while an optimizer iterates over its hooks, which the garbage collector
may do at any time, breaks that optimizer's step.
"""

from __future__ import annotations

import functools
import weakref
from typing import Any, Protocol

from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook


class StepListener(Protocol):
    """An object that wants to know of optimizer steps."""

    def before_step(self, optimizer: Optimizer) -> None:
        """``optimizer`` is about to step."""


# in the order of registration, which is the same on all ranks: listeners may start collectives
_listeners: list[weakref.ref[StepListener]] = []


def listen(listener: StepListener) -> None:
    """Call ``listener`` before each step of any optimizer, as long as something else references it."""
    _register_once()
    _listeners[:] = [reference for reference in _listeners if reference() is not None]
    _listeners.append(weakref.ref(listener))


@functools.cache
def _register_once() -> None:
    register_optimizer_step_pre_hook(_before_step)


def _before_step(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    for reference in list(_listeners):
        listener = reference()
        if listener is not None:
            listener.before_step(optimizer)
