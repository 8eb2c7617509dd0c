"""Planner of one model's layers: one plan per layer, for an iteration or for a microbatch."""

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
from megatron_hecate.step.early_plans import EarlyPlans, PlanInputs
from megatron_hecate.step.iteration_tracker import IterationTracker
from megatron_hecate.step.layer_state import LayerState

# Layers planned one after another. The first layer has cold caches and takes up to twice the time
# of a further one; a larger number would delay the first layer's fetch.
PLANNED_TOGETHER: int = 4


class RoutesForecast(Protocol):
    """Loads that are known before the forward; `routes.known_routes.KnownRoutes`.

    Attributes:
        are_known: for each layer, True if its plan is made for true loads.
    """

    are_known: list[bool]

    def begin_iteration(self, forecast: np.ndarray | None) -> np.ndarray | None:
        """Replace the forecast of a new iteration, [L, E], where loads are known."""

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
        chunk_of: index of each layer's model chunk.
        tracker: tracker of the running iteration.
        routes: loads that are known before the forward.
        meter: measured times on which the ranks have agreed.
    """

    def __init__(
        self,
        states: Sequence[LayerState],
        chunk_of: Sequence[int],
        *,
        tracker: IterationTracker,
        routes: RoutesForecast,
        meter: OverlapMeter,
    ) -> None:
        self.early = EarlyPlans()
        # True if the running iteration repeats the plans of the last one.
        self.keeps_plans = False
        # True if the running iteration has no replicas.
        self.is_paused = False
        # Number of hooks registered in this process when no logger had any.
        self._unlogged_until = -1
        self._states = states
        self._chunk_of = chunk_of
        self._tracker = tracker
        self._routes = routes
        self._meter = meter
        # Index of each chunk's first layer.
        self._first_layers = {chunk_of.index(chunk) for chunk in chunk_of}

    def begin_iteration(self, *, keeps_plans: bool) -> None:
        """Decide whether the iteration repeats plans, and whether it has replicas at all.

        Megatron's loggers of activations and data gradients hook into single experts, on all ranks
        in the same iterations. Without replicas their records are stock's.

        Args:
            keeps_plans: whether the iteration repeats the plans of the last one.
        """
        self.keeps_plans = keeps_plans
        if self._unlogged_until != RemovableHandle.next_id:
            self.is_paused = any(state.parts.experts.inside.are_logged() for state in self._states)
            if not self.is_paused:
                self._unlogged_until = RemovableHandle.next_id

    def plan_from(self, index: int, forecast: np.ndarray | None, *, is_alone: bool = False) -> None:
        """Plan layer ``index`` and the next layers of its chunk, unless the layer is planned.

        Args:
            index: index of the layer.
            forecast: expected tokens of the iteration per layer and expert, [L, E].
            is_alone: whether to plan this layer only.
        """
        iteration = self._tracker.iteration
        if index in self._first_layers and not self._tracker.is_within_microbatch(index):
            self._routes.begin_microbatch(index, iteration, self._tracker.microbatches)
        if self._states[index].current.number == iteration:
            return
        together = 1 if is_alone else PLANNED_TOGETHER
        for state in self._states[index : index + together]:
            if (
                self._chunk_of[state.index] == self._chunk_of[index]
                and state.current.number != iteration
            ):
                with trace.span("plan", state.name):
                    self._plan(state, forecast)

    def _plan(self, state: LayerState, forecast: np.ndarray | None) -> None:
        kept = state.homes if self.is_paused else None
        if kept is None and self.keeps_plans:
            kept = state.next_kept_plan()
        if kept is not None:
            state.set_plan(kept, self._tracker.iteration)
            state.plans.append(kept)
            return
        of_layer, microbatches = self._routes.forecast(
            state, forecast, self._tracker.microbatches or 1
        )
        if of_layer is None or not state.config.slots:
            state.set_plan(state.homes, self._tracker.iteration)
            state.plans.append(state.homes)
            return
        inputs = PlanInputs.of(state, of_layer, microbatches, self._meter)
        plan = self.early.plan(state.index, inputs)
        state.check_agreement(plan)
        state.set_plan(plan, self._tracker.iteration)
        state.plans.append(plan)

    def plan_late(self, state: LayerState, loads: Tensor) -> Placement:
        """Add replicas to the layer's placement where they pay for one microbatch.

        Args:
            state: state of the layer.
            loads: tokens of the microbatch per source and expert, [N, E].

        Returns:
            The layer's placement itself if no further replica pays.
        """
        shape = dataclasses.replace(state.shape(1), fetches=1, returns=1)
        placement = add_late_replicas(
            # The only synchronization of the host with the device.
            loads.sum(dim=0).cpu().numpy(),
            state.placement,
            state.world,
            cost=shape.copy_cost(state.world),
            most=state.config.late_replicas,
            across_nodes=state.config.speeds is not None,
        )
        state.check_agreement(placement)
        return placement
