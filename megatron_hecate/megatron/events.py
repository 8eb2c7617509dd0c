"""Events of a step of training, for the parts that listen to them."""

from __future__ import annotations

import weakref
from typing import Any, Protocol

from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from megatron_hecate.faults.attempt import Attempt


class StepEvents:
    """Listener to the steps of one model; an event does nothing unless a listener overrides it.

    `step.clock.Clock` calls its listeners in their order, on all ranks at the same points.
    """

    def iteration_begins(self, iteration: int) -> None:
        """The first forward of an iteration begins.

        Args:
            iteration: number of the iteration in the job's log.
        """

    def gradients_reduced(self) -> None:
        """DDP has reduced the gradients of the iteration; the optimizer steps next."""


class GradientEvents(Protocol):
    """Receiver of what DDP does with the gradients of model chunks."""

    def gradients_wanted(self, chunk: int) -> None:
        """DDP is about to reduce the gradients of ``chunk``, or the loop may read them."""

    def gradients_reduced(self) -> None:
        """DDP has reduced gradients."""

    def gradients_dropped(self, chunk: int) -> None:
        """DDP is about to zero the gradients of ``chunk``."""

    def gradients_replaced(self) -> None:
        """A new DDP is about to allocate the gradients of a chunk."""


class OptimizerEvents(Protocol):
    """Listener to the steps of every optimizer of the process."""

    def before_step(self, optimizer: Optimizer) -> None:
        """``optimizer`` is about to step."""


_listeners: weakref.WeakKeyDictionary[OptimizerEvents, Attempt] = weakref.WeakKeyDictionary()


def listen_to_steps(listener: OptimizerEvents) -> None:
    """Call ``listener.before_step`` before every optimizer step.

    The calls end with the listener's life or its attempt of the job. There is one permanent hook: a
    hook per model would have to be removed with the model, and the garbage collector may do so
    while torch iterates over its hooks.
    """
    _listeners[listener] = Attempt.current()


def _before_step(optimizer: Optimizer, *_: Any) -> None:
    for listener, attempt in list(_listeners.items()):
        if not attempt.is_over:
            listener.before_step(optimizer)


register_optimizer_step_pre_hook(_before_step)
