"""Loads known before a microbatch runs: those of replayed routes.

The routes that routers replay next are counted at the start of a model chunk, and one all-reduce
sums the counts of all its layers over the group. The tokens per expert are the forecast of a plan;
the routes themselves are not held. Letter in shapes: E experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Module

from megatron_hecate.comm.collectives import wait_collective
from megatron_hecate.megatron.forward_pass import NO_ITERATION
from megatron_hecate.routes.router_replay import may_replay, next_routes, replays
from megatron_hecate.step.layer_state import LayerState


class _ReplayedLoads(NamedTuple):
    """Loads of one layer by replayed routes.

    Args:
        tokens: tokens per expert, summed over the group, [E].
        microbatches: number of microbatches that the loads cover, as a mean over the group.
    """

    tokens: np.ndarray
    microbatches: float


class KnownRoutes:
    """Counter of the routes that routers of this rank's layers replay, and forecasts from them.

    Collective: every rank of a group calls the methods at the same points.

    Args:
        states: states of all layers, in the order of the forward.
    """

    def __init__(self, states: Sequence[LayerState]) -> None:
        self._states = states
        # Stored, because lookups of submodules are slow.
        self._routers: list[Module] = [state.parts.layer.router for state in states]
        self.begin_iteration()

    def begin_iteration(self) -> None:
        """Forget the loads of the iteration before."""
        # For each layer, True if its plan is made for true loads.
        self.are_known = [False] * len(self._states)
        # For each layer with replayed routes, the loads of its next microbatches.
        self._replayed: list[_ReplayedLoads | None] = [None] * len(self._states)

    def begin_microbatch(self, index: int, iteration: int, microbatches: int | None) -> None:
        """Count the replayed routes of a microbatch, at the first layer of a model chunk.

        If one plan serves all microbatches, routes of later ones are counted, too, as far as the
        routers hold them. Layers that fetch for every microbatch are planned again.

        Args:
            index: index of the chunk's first layer.
            iteration: number of the running iteration.
            microbatches: number of microbatches in the iteration; ``None`` if unknown.
        """
        first = self._states[index]
        # True if one plan serves all microbatches.
        serves_all = first.keeps_replicas
        is_planned = serves_all and first.current.iteration == iteration
        if is_planned or not first.config.slots:
            return
        states = [state for state in self._states[index:] if state.chunk == first.chunk]
        planned = (microbatches or 1) if serves_all else 1
        for state, loads in zip(states, self._count_replayed(states, planned), strict=True):
            self._replayed[state.index] = loads
            if loads is None:
                self.are_known[state.index] = False
            elif serves_all:
                is_complete = microbatches is not None and loads.microbatches >= microbatches
                self.are_known[state.index] = is_complete
            else:
                self.are_known[state.index] = True
                state.current.iteration = NO_ITERATION

    def forecast(
        self, state: LayerState, forecast: np.ndarray | None, microbatches: int
    ) -> tuple[np.ndarray | None, int]:
        """Return the loads for which a layer is planned.

        Args:
            state: state of the layer.
            forecast: expected tokens of an iteration per layer and expert, [L, E].
            microbatches: number of microbatches in the iteration.

        Returns:
            Tokens per expert [E], ``None`` without any forecast; and the number of their
            microbatches.
        """
        experts = state.parts.homes_only.num_experts
        expected = None
        # A row of zeros: a layer without history, where other layers have some.
        if forecast is not None and forecast[state.index].any():
            expected = forecast[state.index, :experts]
        replayed = self._replayed[state.index]
        if replayed is None:
            return expected, microbatches
        tokens = replayed.tokens[:experts]
        if not state.keeps_replicas:
            return tokens, 1
        num_unknown = microbatches - replayed.microbatches
        if num_unknown <= 0:
            return tokens, microbatches
        # Expected tokens of each further microbatch.
        mean = tokens / replayed.microbatches if expected is None else expected / microbatches
        return tokens + num_unknown * mean, microbatches

    def _count_replayed(
        self, states: Sequence[LayerState], microbatches: int
    ) -> list[_ReplayedLoads | None]:
        """Count the tokens of the next microbatches by replayed routes. Collective.

        Synchronizes the host.

        Args:
            states: states of a chunk's layers.
            microbatches: upper bound on microbatches.

        Returns:
            For each layer, loads summed over the group; ``None`` without replayed routes.
        """
        layers = [state.parts.layer for state in states]
        if not may_replay(self._routers) or not any(map(replays, layers)):
            return [None] * len(states)
        first = states[0]
        experts = max(state.parts.homes_only.num_experts for state in states)
        device = next(layers[0].experts.parameters()).device
        sums = torch.zeros(len(states), experts + 1, dtype=torch.int64, device=device)
        for state, layer, layer_sums in zip(states, layers, sums, strict=True):
            routes_by_forward = next_routes(layer, microbatches * state.parts.passes)
            for routes in routes_by_forward:
                layer_sums[:-1] += count_tokens(routes.to(device), experts)
            # Ranks may hold routes of different numbers of forwards, and must make equal plans.
            layer_sums[-1] = len(routes_by_forward)
        group = first.rerouter.sources
        work = dist.all_reduce(sums, group=group, async_op=True)
        timeout = first.config.timeout
        what = "counting known routes"
        wait_collective(work, sums, group, what=what, label=first.name, timeout=timeout)
        replayed: list[_ReplayedLoads | None] = []
        for state, layer_sum in zip(states, sums.cpu().numpy(), strict=True):
            passes = group.size() * state.parts.passes
            loads = _ReplayedLoads(layer_sum[:-1], layer_sum[-1] / passes)
            replayed.append(loads if loads.tokens.any() else None)
        return replayed


def count_tokens(routes: Tensor, experts: int) -> Tensor:
    """Count tokens per expert, in the way of Megatron's routing map.

    Args:
        routes: experts of each token, [T, k]; below 0 where the expert is not known. Experts from
            E on, which stop Megatron's router, are not counted either.
        experts: number of experts E.

    Returns:
        Tokens per expert, [E] int64.
    """
    sorted_experts = routes.long().sort(dim=1).values
    # A token that names an expert twice is routed to it once.
    repeated = sorted_experts[:, 1:] == sorted_experts[:, :-1]
    sorted_experts[:, 1:].masked_fill_(repeated, -1)
    # Numbers that name no expert are counted at both ends.
    index = sorted_experts.clamp_(-1, experts).add_(1).flatten()
    counts = index.new_zeros(experts + 2)
    return counts.scatter_add_(0, index, torch.ones_like(index))[1:-1]
