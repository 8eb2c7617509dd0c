"""Events of a step of training, for the parts that listen to them."""

from __future__ import annotations

from typing import Protocol


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

    def gradients_dropped(self) -> None:
        """DDP is about to zero gradients."""
