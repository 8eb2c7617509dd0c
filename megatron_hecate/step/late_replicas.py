"""Late replicas: fetched after the gate, where the true loads of a microbatch make them pay."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from torch import Tensor

from megatron_hecate.plan import Placement, add_late_replicas
from megatron_hecate.replicas.layer_replicas import Replicas
from megatron_hecate.step.clock import Clock
from megatron_hecate.step.layer_planner import LayerPlanner
from megatron_hecate.step.layer_state import LayerState


class LateReplicas:
    """Late replicas of one model's layers.

    Args:
        fetch: begins to fetch the planned replicas of a layer that has none yet.
        planner: planner of the layers, which may have planned for true loads.
        clock: clock of the model.
    """

    def __init__(
        self, fetch: Callable[[LayerState], Replicas], planner: LayerPlanner, clock: Clock
    ) -> None:
        self._fetch = fetch
        self._planner = planner
        self._clock = clock

    def are_due(self, state: LayerState) -> bool:
        """Return whether the running forward is the first to compute with its layer's replicas."""
        if self._planner.knows_loads(state.index):
            return False
        if state.keeps_replicas:
            return self._clock.forwards(state.index) == 0
        return not self._clock.is_within_microbatch(state.index)

    def add(self, state: LayerState, loads: Tensor) -> Replicas | None:
        """Fetch more replicas of a layer if its true loads make further copies pay.

        Replicas that microbatches have computed with stay unchanged until the iteration ends.

        Args:
            state: state of the layer.
            loads: tokens of the microbatch per source and expert, [N, E].

        Returns:
            The replicas of the running forward.
        """
        current = state.current
        placement = _plan(state, loads)
        if placement is not current.placement:
            state.extend_placement(placement)
            if current.replicas is None:
                current.replicas = self._fetch(state)
            else:
                current.replicas.add_late(placement, current.transfers)
        return current.replicas


def _plan(state: LayerState, loads: Tensor) -> Placement:
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
        max_copies=state.config.late_replicas,
        across_nodes=state.config.speeds is not None,
    )
    state.check_agreement(placement)
    return placement
