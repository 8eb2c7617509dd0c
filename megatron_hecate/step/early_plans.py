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
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
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
    previous: Placement | None

    @classmethod
    def of(
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


# Entry of a layer that the main thread plans itself.
_TAKEN: tuple[None, None] = (None, None)


class EarlyPlans:
    """Planning thread of one model, for one iteration at a time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # By index of the layer: inputs and result of each plan that the thread has begun, or
        # `_TAKEN`.
        self._plans: dict[int, tuple[PlanInputs | None, Future[Placement] | None]] = {}
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
        # A new object, because a stopped thread may still use the old one.
        self._plans = {}
        history = monitor.history
        # The main thread changes the original.
        meter = copy.copy(meter)
        placed = [(state, state.homes, state.planned) for state in states]

        def inputs(load: np.ndarray, measured: list[int]) -> Iterator[tuple[int, PlanInputs]]:
            meter.agree(measured)
            forecast = monitor.extend_early(history, load).forecast()
            assert forecast is not None
            for state, homes, previous in placed:
                layer_forecast = forecast[state.index, : state.parts.homes_only.num_experts]
                cost = state.copy_cost(microbatches, meter)
                yield state.index, PlanInputs(layer_forecast, homes, state.world, cost, previous)

        prepare = {state.index: state.prepare_transfers for state in states}
        plans = self._plans
        loads = monitor.peek()

        def plan_all() -> None:
            self._plan_all(plans, thread.stopping, loads, inputs, prepare)

        thread = BackgroundThread("plans", plan_all, patience=PATIENCE)
        self._thread = thread
        thread.start()

    def stop(self) -> None:
        """Stop the thread after the layer that it is planning; its plans remain available."""
        if self._thread is not None:
            self._thread.stopping.set()

    def plan(self, index: int, inputs: PlanInputs) -> Placement:
        """Return the thread's plan of layer ``index`` if its inputs are equal, else a new plan."""
        with self._lock:
            guessed, future = self._plans.get(index, _TAKEN)
            self._plans[index] = _TAKEN
        if guessed is None or future is None or not guessed.equal(inputs):
            return inputs.plan()
        if future.exception() is not None:
            # Plan again: an error that is not of the thread alone is then raised here.
            return inputs.plan()
        return future.result()

    def _plan_all(
        self,
        plans: dict[int, tuple[PlanInputs | None, Future[Placement] | None]],
        stopped: threading.Event,
        loads: Callable[[], tuple[np.ndarray, list[int]] | None],
        inputs: Callable[[np.ndarray, list[int]], Iterator[tuple[int, PlanInputs]]],
        prepare: Mapping[int, Callable[[Placement], None]],
    ) -> None:
        while (arrived := loads()) is None:
            if stopped.wait(PAUSE):
                return
        for index, layer_inputs in inputs(*arrived):
            future: Future[Placement] = Future()
            with self._lock:
                if stopped.is_set():
                    return
                if index in plans:
                    continue
                plans[index] = layer_inputs, future
            try:
                future.set_result(layer_inputs.plan())
            except BaseException as error:
                # `plan` waits for the result.
                future.set_exception(error)
                continue
            # An error is raised again where the layer fetches.
            with contextlib.suppress(Exception):
                prepare[index](future.result())
