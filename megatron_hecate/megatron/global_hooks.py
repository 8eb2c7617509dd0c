"""Global torch hooks on all optimizers and modules, with weakly referenced listeners.

There is one permanent hook of each kind. A hook per model would have to be removed with the model,
and the garbage collector may do so while torch iterates over its hooks. A listener is not called
once its attempt of the job is over.
"""

from __future__ import annotations

import functools
import weakref
from typing import Any, Protocol

from torch.nn import Module
from torch.nn.modules.module import register_module_module_registration_hook
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from megatron_hecate.faults.attempt import Attempt


class _StepListener(Protocol):
    """Listener to the steps of every optimizer of the process."""

    def before_step(self, optimizer: Optimizer) -> None:
        """``optimizer`` is about to step."""


class _PartListener(Protocol):
    """Listener to every registration of a module as part of another one."""

    def added(self, module: Module, part: Module | None) -> None:
        """``part`` becomes part of ``module``."""


_of_steps: weakref.WeakKeyDictionary[_StepListener, Attempt] = weakref.WeakKeyDictionary()
_of_parts: weakref.WeakKeyDictionary[_PartListener, Attempt] = weakref.WeakKeyDictionary()


def listen_to_steps(listener: _StepListener) -> None:
    """Call ``listener.before_step`` before every optimizer step.

    The calls end with the listener's life or its attempt of the job.
    """
    _hook_into_optimizers()
    _of_steps[listener] = Attempt.current()


def listen_to_parts(listener: _PartListener) -> None:
    """Call ``listener.added`` for every module that gets a part.

    The calls end with `stop_listening_to_parts`, the listener's life or its attempt of the job.
    """
    _hook_into_modules()
    _of_parts[listener] = Attempt.current()


def stop_listening_to_parts(listener: _PartListener) -> None:
    """Stop the calls of ``listener.added``; idempotent."""
    _of_parts.pop(listener, None)


@functools.cache
def _hook_into_optimizers() -> None:
    def hook(optimizer: Optimizer, *_: Any) -> None:
        for listener, attempt in list(_of_steps.items()):
            if not attempt.is_over:
                listener.before_step(optimizer)

    register_optimizer_step_pre_hook(hook)


@functools.cache
def _hook_into_modules() -> None:
    def hook(module: Module, _: str, part: Module | None) -> None:
        for listener, attempt in list(_of_parts.items()):
            if not attempt.is_over:
                listener.added(module, part)

    register_module_module_registration_hook(hook)
