"""Planner of one model's layers: one plan per layer, for an iteration or for a microbatch.

Late replicas are planned after the gate, where the true loads of a microbatch make them pay.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Protocol

import numpy as np
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from megatron_hecate import trace
from megatron_hecate.comm.overlap import OverlapMeter
from megatron_hecate.plan import Placement, add_late_replicas
from megatron_hecate.step.clock import Clock
from megatron_hecate.step.early_plans import EarlyPlans, PlanInputs
from megatron_hecate.step.layer_state import LayerState


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

        It must be the first to compute with its layer's replicas, which must not be planned for
        true loads already.
        """
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
        if state.current.number != iteration:
            with trace.span("plan", state.name):
                state.set_placement(self._choose(state, forecast), iteration)

    def _choose(self, state: LayerState, forecast: np.ndarray | None) -> Placement:
        if self.is_paused:
            return state.homes
        if self._clock.is_repeated and state.current.number == self._clock.iteration - 1:
            return state.planned
        layer_forecast, microbatches = self._routes.forecast(
            state, forecast, self._clock.microbatches or 1
        )
        if layer_forecast is None or not state.config.slots:
            return state.homes
        inputs = PlanInputs.for_layer(state, layer_forecast, microbatches, self._meter)
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
        # The only synchronization of the host with the device.
        loads.sum(dim=0).cpu().numpy(),
        state.placement,
        state.world,
        cost=shape.copy_cost(state.world),
        max_copies=state.config.late_replicas,
        across_nodes=state.config.speeds is not None,
    )
