"""Global torch hook on the steps of all optimizers, with weakly referenced listeners.

There is one permanent hook. A hook per model would have to be removed with the model, and the
garbage collector may do so while torch iterates over its hooks. A listener is not called once its
attempt of the job is over.
"""

from __future__ import annotations

import functools
import weakref
from typing import Any, Protocol

from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from megatron_hecate.faults.attempt import Attempt


class _StepListener(Protocol):
    """Listener to the steps of every optimizer of the process."""

    def before_step(self, optimizer: Optimizer) -> None:
        """``optimizer`` is about to step."""


_listeners: weakref.WeakKeyDictionary[_StepListener, Attempt] = weakref.WeakKeyDictionary()


def listen_to_steps(listener: _StepListener) -> None:
    """Call ``listener.before_step`` before every optimizer step.

    The calls end with the listener's life or its attempt of the job.
    """
    _hook_into_optimizers()
    _listeners[listener] = Attempt.current()


@functools.cache
def _hook_into_optimizers() -> None:
    def hook(optimizer: Optimizer, *_: Any) -> None:
        for listener, attempt in list(_listeners.items()):
            if not attempt.is_over:
                listener.before_step(optimizer)

    register_optimizer_step_pre_hook(hook)
