"""Planner of one model's layers: one plan per layer, for an iteration or for a microbatch.

The loads of an iteration are summed when its backward has ended. From then on the host waits for
the norm of the gradients and launches the optimizer's kernels. Meanwhile a thread plans all layers
and prepares their transfers (`EarlyPlans`): planning releases Python's lock for most of its time.
The thread makes no CUDA call, which would break a capture of CUDA graphs in the main thread.

Planning is a pure function. The thread guesses its inputs, and a layer uses a plan only if the
inputs are equal to its own: results depend neither on the progress of the thread nor on its guess.

Late replicas are planned after the gate, where the true loads of a microbatch make them pay.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Protocol

import numpy as np
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from megatron_hecate import trace
from megatron_hecate.comm.overlap import OverlapMeter
from megatron_hecate.faults.attempt import Attempt
from megatron_hecate.faults.background import BackgroundThread
from megatron_hecate.megatron.dispatcher import expert_alignment, rank_budget
from megatron_hecate.megatron.forward_pass import LayerIteration
from megatron_hecate.megatron.training_state import Forward
from megatron_hecate.plan import Placement, add_late_replicas, load_limit, plan_replicas
from megatron_hecate.step.clock import Clock
from megatron_hecate.step.layer_state import LayerState
from megatron_hecate.step.load_monitor import LoadMonitor

# Seconds between two checks for the arrival of the loads.
PAUSE: float = 1e-3
# Seconds that the interpreter's exit waits for the plan of a layer.
PATIENCE: float = 5.0


class PlanInputs:
    """Arguments of `plan_replicas` for one layer in its current state.

    Args:
        state: state of the layer.
        forecast: tokens per expert in an iteration, summed over the group, [E].
        microbatches: number of microbatches in the iteration.
        meter: measured times on which the ranks have agreed.
    """

    def __init__(
        self, state: LayerState, forecast: np.ndarray, microbatches: int, meter: OverlapMeter
    ) -> None:
        self.forecast = forecast
        self.homes = state.homes
        self.world = state.world
        self.cost = state.copy_cost(microbatches, meter)
        self.previous = state.current.planned
        self.limit: float | None = None
        factor = rank_budget(state.stock_dispatcher)
        if factor is not None:
            rows = forecast.sum() / (self.world.num_ranks * microbatches * state.parts.passes)
            alignment = expert_alignment(state.parts.layer.config)
            experts = self.homes.slots_per_rank
            self.limit = load_limit(factor, rows=rows, experts=experts, alignment=alignment)

    def plan(self) -> Placement:
        """Plan the layer's replicas."""
        return plan_replicas(
            self.forecast,
            self.homes,
            self.world,
            cost=self.cost,
            previous=self.previous,
            limit=self.limit,
        )

    def equal(self, other: PlanInputs) -> bool:
        """Return whether both are equal, and therefore give the same plan."""
        return (
            self.homes is other.homes
            and self.previous is other.previous
            and self.world == other.world
            and self.cost == other.cost
            and self.limit == other.limit
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
        # The main thread changes the originals. Their arrays can be shared: none is written to.
        meter = copy.copy(meter)
        history = copy.copy(monitor.history)
        peek = monitor.peek()

        def plan_all() -> None:
            while (sums := peek()) is None:
                if thread.stopping.wait(PAUSE):
                    return
            load, measured = sums
            meter.agree(measured)
            history.append(load)
            forecast = history.forecast()
            for future, state in zip(futures, states, strict=True):
                if thread.stopping.is_set():
                    return
                if not future.set_running_or_notify_cancel():
                    continue
                try:
                    layer_forecast = forecast[state.index, : state.homes.num_experts]
                    inputs = PlanInputs(state, layer_forecast, microbatches, meter)
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


class RoutesForecast(Protocol):
    """Loads that are known before the forward; `routes.known_routes.KnownRoutes`.

    Attributes:
        are_known: for each layer, True if its plan is made for true loads.
    """

    are_known: list[bool]

    def begin_iteration(self) -> None:
        """Forget the loads of the iteration before."""

    def begin_microbatch(self, index: int, iteration: int, microbatches: int | None) -> None:
        """Count what is known of the next microbatch, where layer ``index`` begins a chunk."""

    def forecast(
        self, state: LayerState, forecast: np.ndarray | None, microbatches: int
    ) -> tuple[np.ndarray | None, int]:
        """Return the loads, [E], that a layer is planned for, and their microbatches."""


class LayerPlanner:
    """Planner of the replicas of one model's layers.

    Args:
        states: states of all layers, in the order of the forward.
        clock: clock of the model.
        routes: loads that are known before the forward.
        meter: measured times on which the ranks have agreed.
    """

    def __init__(
        self,
        states: Sequence[LayerState],
        *,
        clock: Clock,
        routes: RoutesForecast,
        meter: OverlapMeter,
    ) -> None:
        self.early = EarlyPlans()
        # True if the running iteration has no replicas.
        self.is_paused = False
        # Number of hooks registered in this process when no logger had any.
        self._unlogged_until = -1
        self._states = states
        self._clock = clock
        self._routes = routes
        self._meter = meter
        chunks = [state.chunk for state in states]
        # Index of each chunk's first layer.
        self._first_layers = {chunks.index(chunk) for chunk in chunks}

    def begin_iteration(self) -> None:
        """Decide whether the iteration has replicas at all.

        Megatron's loggers of activations and data gradients hook into single experts, on all ranks
        in the same iterations. Without replicas their records are stock's.
        """
        if self._unlogged_until != RemovableHandle.next_id:
            self.is_paused = any(state.parts.experts.inside.are_logged() for state in self._states)
            if not self.is_paused:
                self._unlogged_until = RemovableHandle.next_id

    def awaits_late_replicas(self, state: LayerState) -> bool:
        """Return whether the running forward may get late replicas.

        It must be a microbatch's, the first to compute with its layer's replicas, whose plan must
        not be for true loads already.
        """
        if not state.config.late_replicas or state.running.purpose is not Forward.MICROBATCH:
            return False
        if self._routes.are_known[state.index] or self.is_paused:
            return False
        if state.keeps_replicas:
            return self._clock.forwards(state.index) == 0
        return not self._clock.is_within_microbatch(state.index)

    def plan(self, state: LayerState, forecast: np.ndarray | None) -> None:
        """Plan a layer for the iteration, or for the microbatch that it enters, unless it is.

        Args:
            state: state of the layer.
            forecast: expected tokens of the iteration per layer and expert, [L, E].
        """
        iteration = self._clock.iteration
        index = state.index
        if index in self._first_layers and not self._clock.is_within_microbatch(index):
            self._routes.begin_microbatch(index, iteration, self._clock.microbatches)
        if state.current.iteration != iteration:
            with trace.span("plan", state.name):
                placement = self._choose(state, forecast)
                transfers = state.transfers_for(placement)
                state.current = LayerIteration(placement, placement, iteration, transfers)

    def _choose(self, state: LayerState, forecast: np.ndarray | None) -> Placement:
        if self.is_paused:
            return state.homes
        if self._clock.is_repeated and state.current.iteration == self._clock.iteration - 1:
            return state.current.planned
        layer_forecast, microbatches = self._routes.forecast(
            state, forecast, self._clock.microbatches or 1
        )
        if layer_forecast is None or not state.config.slots:
            return state.homes
        inputs = PlanInputs(state, layer_forecast, microbatches, self._meter)
        return self.early.plan(state.index, inputs)


def plan_late(state: LayerState, loads: Tensor) -> Placement:
    """Add replicas to the layer's placement where they pay for one microbatch.

    Args:
        state: state of the layer.
        loads: tokens of the microbatch per source and expert, [N, E].

    Returns:
        The layer's placement itself if no further replica pays.
    """
    shape = dataclasses.replace(state.shape(1), fetches=1, returns=1)
    return add_late_replicas(
        # The host waits for the device: it chooses the copies.
        loads.sum(dim=0).cpu().numpy(),
        state.placement,
        state.world,
        cost=shape.copy_cost(state.world),
        max_copies=state.config.late_replicas,
        # Default speeds do not know the network between the nodes.
        across_nodes=state.config.speeds is not None,
    )
