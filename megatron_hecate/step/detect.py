"""Inference of a model's iterations from Megatron, for loops that do not say where they begin.

| observed | consequence |
|---|---|
| DDP reduces gradients | gradients of replicas return first; then the iteration ends |
| DDP zeroes gradients | gradients of replicas are dropped; the iteration ends |
| an optimizer steps | the iteration ends |
| a schedule's call, or a forward outside of one | weights may have changed, without a trace |
| version counters of weights have grown | weights have changed |

Where one CUDA graph holds iterations, DDP's zeroing begins the next one (`graphs`).

A loop with neither Megatron's DDP nor an optimizer of torch says itself where iterations begin.
"""

from __future__ import annotations

import operator
import weakref
from typing import Protocol

from torch.optim.optimizer import Optimizer

from megatron_hecate.megatron.events import listen_to_steps
from megatron_hecate.step.clock import Clock
from megatron_hecate.step.gradient_returns import GradientReturns
from megatron_hecate.step.layer_state import LayerState


class GraphedIterations(Protocol):
    """Iterations that one CUDA graph may hold; `graphs.iteration`, for example."""

    @property
    def is_waiting(self) -> bool:
        """True if nothing has run since the last call of `prepare`."""

    def prepare(self) -> None:
        """Begin the next iteration. Collective."""


class Detector:
    """Adapter that tells a model's clock what Megatron's DDP, optimizers and schedules do.

    Args:
        clock: clock of the model.
        returns: gradients of the model's replicas.
    """

    def __init__(self, clock: Clock, returns: GradientReturns) -> None:
        self._clock = clock
        self._returns = returns
        # For each chunk, the schedule's call that ran its last forward.
        self._calls: list[int | None] = [None] * len(clock.epochs)
        # Each optimizer that has stepped, by its id, with the last iteration that had begun.
        self._stepped: dict[int, tuple[weakref.ref[Optimizer], int]] = {}
        # Where a CUDA graph holds whole iterations.
        self.graphed: GraphedIterations | None = None
        listen_to_steps(self)

    def forward_begins(self, chunk: int) -> bool:
        """Note that a training forward of a model chunk begins.

        Returns:
            True if one of Megatron's schedules runs the forward.
        """
        data_parallel = self._returns.data_parallel
        call = None if data_parallel is None else data_parallel.schedule_call(chunk)
        if call != self._calls[chunk] or (call is None and not self._clock.is_told):
            self._clock.weights_changed(chunk)
        self._calls[chunk] = call
        return call is not None

    def note_writes(self, state: LayerState) -> None:
        """Compare the version counters of a layer's weights with those at the last fetch.

        Raises:
            RuntimeError: if only some weights were written: other ranks may have written none, and
                would not fetch.
        """
        written = list(map(operator.ne, state.versions(), state.fetched_versions))
        if not any(written):
            return
        if not all(written):
            raise RuntimeError(
                f"{state.name}: {sum(written)} of {len(written)} weights of experts were written "
                "within a call of Megatron's schedule, after replicas had been fetched; write them "
                "between calls, or write all of them on all ranks, or call "
                "megatron_hecate.weights_changed(model) on all ranks after the writes"
            )
        self._clock.weights_changed(state.chunk)

    def gradients_wanted(self, chunk: int) -> None:
        """Return waiting gradients of ``chunk`` to their homes, before DDP reduces gradients."""
        self._returns.complete(chunk)

    def gradients_reduced(self) -> None:
        """End the iteration after DDP has reduced gradients."""
        self._clock.gradients_reduced()

    def gradients_dropped(self, chunk: int) -> None:
        """End the iteration when DDP zeroes gradients; drop waiting gradients of replicas."""
        self._returns.drop()
        graphed = self.graphed
        # An evaluation that Megatron runs again zeroes gradients, too.
        if graphed is not None and graphed.is_waiting:
            return
        self._clock.end_iteration("DDP zeroed gradients")
        # Megatron zeroes all chunks in turn, then runs the iteration, or replays it by a graph.
        if graphed is not None and chunk == len(self._calls) - 1:
            graphed.prepare()

    def gradients_replaced(self) -> None:
        """End the iteration: its replicas' gradients may have another data type than DDP's next."""
        self._returns.drop()
        self._clock.end_iteration("DDP wrapped the model")

    def before_step(self, optimizer: Optimizer) -> None:
        """End the iteration before a step of ``optimizer``, even if it steps another model.

        Raises:
            RuntimeError: if it steps experts whose replicas' gradients have not returned.
        """
        clock = self._clock
        self._stepped[id(optimizer)] = (weakref.ref(optimizer), clock.begun)
        clock.has_stepped = True
        clock.end_iteration(f"{type(optimizer).__name__} stepped, of this model or of another one")
        if not self._returns.wait_for(optimizer):
            return
        # Drop the gradients, so that a loop which catches the error can continue.
        waiting = self._returns.drop()
        if waiting:
            raise RuntimeError(
                f"FSSDP: {type(optimizer).__name__} steps while gradients of replicas wait "
                f"({', '.join(waiting)}): the last backward ran in DDP's no_sync(), and nothing "
                "has reduced gradients since; leave it and call finish_grad_sync() of every model "
                "chunk before the step, as finalize_model_grads does"
            )

    def optimizers(self) -> list[Optimizer]:
        """Return the live optimizers that have stepped.

        Sorted by the iteration of the last step, latest first; ties in the order of the first step.
        """
        newest = sorted(self._stepped.values(), key=lambda stepped: -stepped[1])
        return [optimizer for reference, _ in newest if (optimizer := reference()) is not None]
