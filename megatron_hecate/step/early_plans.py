"""Plans of the next iteration, made while the optimizer steps.

The loads of an iteration are summed when its backward has ended. From then on the host waits for
the norm of the gradients and launches the optimizer's kernels. Meanwhile a thread plans all layers
and prepares their transfers: planning releases Python's lock for most of its time. The thread makes
no CUDA call, which would break a capture of CUDA graphs in the main thread.

Planning is a pure function. The thread guesses its inputs, and a layer uses a plan only if the
inputs are equal to its own: results depend neither on the progress of the thread nor on its guess.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections.abc import Sequence
from concurrent.futures import Future

import numpy as np

from megatron_hecate.comm.overlap import OverlapMeter
from megatron_hecate.faults.attempt import Attempt
from megatron_hecate.faults.background import BackgroundThread
from megatron_hecate.plan import CopyCost, Placement, World, plan_replicas
from megatron_hecate.step.layer_state import LayerState
from megatron_hecate.step.load_monitor import LoadMonitor

# Seconds between two checks for the arrival of the loads.
PAUSE: float = 1e-3
# Seconds that the interpreter's exit waits for the plan of a layer.
PATIENCE: float = 5.0


@dataclasses.dataclass(frozen=True, eq=False)
class PlanInputs:
    """Arguments of `plan_replicas` for one layer."""

    forecast: np.ndarray
    homes: Placement
    world: World
    cost: CopyCost
    previous: Placement

    @classmethod
    def for_layer(
        cls, state: LayerState, forecast: np.ndarray, microbatches: int, meter: OverlapMeter
    ) -> PlanInputs:
        """Return the inputs for a layer in its current state.

        Args:
            state: state of the layer.
            forecast: tokens per expert in an iteration, summed over the group, [E].
            microbatches: number of microbatches in the iteration.
            meter: measured times on which the ranks have agreed.
        """
        cost = state.copy_cost(microbatches, meter)
        return cls(forecast, state.homes, state.world, cost, state.planned)

    def plan(self) -> Placement:
        """Plan the layer's replicas."""
        return plan_replicas(
            self.forecast, self.homes, self.world, cost=self.cost, previous=self.previous
        )

    def equal(self, other: PlanInputs) -> bool:
        """Return whether both are equal, and therefore give the same plan."""
        return (
            self.homes is other.homes
            and self.previous is other.previous
            and self.world == other.world
            and self.cost == other.cost
            and np.array_equal(self.forecast, other.forecast)
        )


class EarlyPlans:
    """Planning thread of one model, for one iteration at a time."""

    def __init__(self) -> None:
        # Inputs and result of each layer's plan. Whoever is first plans a layer: the thread, which
        # sets its future to running, or the main thread, which cancels it.
        self._futures: list[Future[tuple[PlanInputs, Placement]]] = []
        self._thread: BackgroundThread | None = None
        Attempt.current().at_end(self.stop)

    def start(
        self,
        states: Sequence[LayerState],
        monitor: LoadMonitor,
        meter: OverlapMeter,
        microbatches: int,
    ) -> None:
        """Plan the next iteration, assuming this one's number of microbatches.

        Args:
            states: states of all layers, in the order of the forward.
            monitor: load monitor that has started to sum the loads of this iteration.
            meter: meter without the measurements of this iteration.
            microbatches: number of microbatches in this iteration.
        """
        self.stop()
        # A new list, because a stopped thread may still use the old one.
        futures = self._futures = [Future() for _ in states]
        # The main thread changes the original.
        meter = copy.copy(meter)
        history = monitor.history
        peek = monitor.peek()

        def plan_all() -> None:
            while (sums := peek()) is None:
                if thread.stopping.wait(PAUSE):
                    return
            load, measured = sums
            meter.agree(measured)
            forecast = history.extended(load).forecast()
            for future, state in zip(futures, states, strict=True):
                if thread.stopping.is_set():
                    return
                if not future.set_running_or_notify_cancel():
                    continue
                try:
                    layer_forecast = forecast[state.index, : state.homes.num_experts]
                    inputs = PlanInputs.for_layer(state, layer_forecast, microbatches, meter)
                    placement = inputs.plan()
                    future.set_result((inputs, placement))
                except BaseException as error:
                    # `plan` waits for the result.
                    future.set_exception(error)
                    continue
                # An error is raised again where the layer fetches.
                with contextlib.suppress(Exception):
                    state.prepare_transfers(placement)

        thread = self._thread = BackgroundThread("plans", plan_all, patience=PATIENCE)
        thread.start()

    def stop(self) -> None:
        """Stop the thread after the layer that it is planning; its plans remain available."""
        if self._thread is not None:
            self._thread.stopping.set()

    def plan(self, index: int, inputs: PlanInputs) -> Placement:
        """Return the thread's plan of layer ``index`` if its inputs are equal, else a new plan."""
        # After an error in the thread, plan again: one that is not of the thread alone is raised.
        if self._futures:
            future = self._futures[index]
            if not future.cancel() and future.exception() is None:
                guessed, placement = future.result()
                if guessed.equal(inputs):
                    return placement
        return inputs.plan()
