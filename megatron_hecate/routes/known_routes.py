"""Loads known before a microbatch runs: replayed and announced routes.

Routes are only counted: the tokens per expert are the forecast of a plan, and the routes themselves
are neither held nor copied as a whole. The routes that a router replays are counted at the start of
a model chunk, announced routes when they are announced. One all-reduce sums the counts of all
layers over the group.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from itertools import chain, starmap

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Module

from megatron_hecate.comm.collectives import wait_collective
from megatron_hecate.megatron.forward_pass import NO_ITERATION
from megatron_hecate.megatron.router_replay import as_routed, may_replay, next_routes, replays
from megatron_hecate.routes.route_counts import Routes, count_tokens, parts_of
from megatron_hecate.step.layer_state import LayerState


@dataclasses.dataclass(frozen=True, eq=False)
class _ReplayedLoads:
    """Loads of one layer by replayed routes.

    Args:
        loads: tokens per expert, summed over the group, [E].
        microbatches: number of microbatches that the loads cover, as a mean over the group.
    """

    loads: np.ndarray
    microbatches: float


class KnownRoutes:
    """Counter of replayed routes of this rank's layers, and forecasts from the counts.

    Collective: every rank of a group calls the methods at the same points.

    Args:
        states: states of all layers, in the order of the forward.
    """

    def __init__(self, states: Sequence[LayerState]) -> None:
        self.states = states
        # Stored, because lookups of submodules are slow.
        self._routers: list[Module] = [state.parts.layer.router for state in states]
        # Tokens of this rank in the next iteration by announced routes, [L, E], if any, and for
        # each layer, True if its routes have been announced.
        self._announced: np.ndarray | None = None
        self._is_announced = [False] * len(states)
        # For each layer, True if its plan is made for true loads.
        self.are_known = [False] * len(states)
        # For each layer with replayed routes, the loads of its next microbatches.
        self._replayed: list[_ReplayedLoads | None] = [None] * len(states)

    def announce(self, parts: Sequence[Iterable[Tensor] | None], *, add: bool) -> None:
        """Count the routes of the next iteration on this rank, for `begin_iteration`.

        Args:
            parts: for each layer, experts of each token, [t, k] each; ``None`` for unknown routes.
            add: add the counts to routes announced for the same iteration.

        Raises:
            ValueError: for numbers of experts that a layer does not have.
        """
        experts = _most_experts(self.states)
        device = _device(self.states[0])
        counted = [count_tokens(() if part is None else part, experts, device) for part in parts]
        counts = torch.stack(counted).cpu().numpy()
        for state, layer_counts in zip(self.states, counts, strict=True):
            num_experts = state.parts.homes_only.num_experts
            if num_wrong := int(layer_counts[num_experts:].sum()):
                raise ValueError(
                    f"{num_wrong} announced routes of {state.name} name no expert from 0 to "
                    f"{num_experts - 1}; give one [tokens, k] array for each MoE layer of this "
                    "rank, in the order of the forward, with -1 for unknown experts"
                )
        if not add or self._announced is None:
            self._announced = np.zeros((len(counts), experts), dtype=np.int64)
            self._is_announced = [False] * len(counts)
        self._announced += counts[:, :-1]
        for index, layer_counts in enumerate(parts):
            self._is_announced[index] |= layer_counts is not None

    def begin_iteration(self, forecast: np.ndarray | None) -> np.ndarray | None:
        """Replace the forecast of a new iteration by the loads of its announced routes.

        Args:
            forecast: tokens per layer and expert by earlier iterations, [L, E], if any.

        Returns:
            Tokens per layer and expert, summed over the group, [L, E]; those of ``forecast`` for
            layers without announced routes. ``None`` if nothing is known.
        """
        announced = self._announced
        self._announced = None
        self._replayed = [None] * len(self.states)
        if announced is None:
            self.are_known = [False] * len(self.states)
            return forecast
        self.are_known = list(self._is_announced)
        loads = self._sum(self.states, torch.from_numpy(announced))
        if forecast is None:
            return loads
        return np.where(np.array(self.are_known)[:, None], loads, forecast)

    def begin_microbatch(self, index: int, iteration: int, microbatches: int | None) -> None:
        """Count the replayed routes of a microbatch, at the first layer of a model chunk.

        If one plan serves all microbatches, routes of later ones are counted, too, as far as the
        routers hold them. Layers that fetch for every microbatch are planned again.

        Args:
            index: index of the layer that the microbatch has reached.
            iteration: number of the running iteration.
            microbatches: number of microbatches in the iteration; ``None`` if unknown.
        """
        state = self.states[index]
        # True if one plan serves all microbatches.
        serves_all = state.keeps_replicas
        is_planned = serves_all and (self.are_known[index] or state.current.number == iteration)
        if is_planned or not state.config.slots:
            return
        states = [layer for layer in self.states[index:] if layer.chunk == state.chunk]
        planned = (microbatches or 1) if serves_all else 1
        replayed = self._count_replayed(states, planned)
        for state, loads in zip(states, replayed, strict=True):
            self._replayed[state.index] = loads
            if loads is None:
                self.are_known[state.index] = False
            elif serves_all:
                is_complete = microbatches is not None and loads.microbatches >= microbatches
                self.are_known[state.index] = is_complete
            else:
                self.are_known[state.index] = True
                state.current.number = NO_ITERATION

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
        # A row of zeros: a layer without routes or history, where other layers have some.
        if forecast is not None and forecast[state.index].any():
            expected = forecast[state.index, :experts]
        replayed = self._replayed[state.index]
        if replayed is None:
            return expected, microbatches
        loads = replayed.loads[:experts]
        if not state.keeps_replicas:
            return loads, 1
        num_unknown = microbatches - replayed.microbatches
        if num_unknown <= 0:
            return loads, microbatches
        # Expected tokens of each further microbatch.
        mean = loads / replayed.microbatches if expected is None else expected / microbatches
        return loads + num_unknown * mean, microbatches

    def _count_replayed(
        self, states: Sequence[LayerState], microbatches: int
    ) -> list[_ReplayedLoads | None]:
        """Count the tokens of the next microbatches by replayed routes. Collective.

        Args:
            states: states of a chunk's layers.
            microbatches: upper bound on microbatches.

        Returns:
            For each layer, loads summed over the group; ``None`` without replayed routes.
        """
        if not may_replay(self._routers) or not any(replays(s.parts.layer) for s in states):
            return [None] * len(states)
        experts = _most_experts(states)
        counts = []
        for state in states:
            layer = state.parts.layer
            routes = next_routes(layer, microbatches * state.parts.passes)
            parts = chain.from_iterable(starmap(parts_of, routes))
            parts = (as_routed(layer, part) for part in parts)
            counted = count_tokens(parts, experts, _device(states[0]))
            # The last number counts experts that do not exist, which stop Megatron's router, too.
            # Ranks may hold routes of different numbers of forwards, and must make equal plans.
            counted[-1] = len(routes)
            counts.append(counted)
        replayed: list[_ReplayedLoads | None] = []
        ranks = states[0].rerouter.sources.size()
        for state, summed in zip(states, self._sum(states, torch.stack(counts)), strict=True):
            forwards = summed[-1] / ranks
            loads = _ReplayedLoads(summed[:-1], forwards / state.parts.passes)
            replayed.append(loads if loads.loads.any() else None)
        return replayed

    def _sum(self, states: Sequence[LayerState], counts: Tensor) -> np.ndarray:
        """Sum the counts of layers over the group, [L, n]. Synchronizes the host."""
        group = states[0].rerouter.sources
        sums = counts.to(_device(states[0]))
        work = dist.all_reduce(sums, group=group, async_op=True)
        wait_collective(
            work,
            sums,
            group,
            what="counting known routes",
            label=states[0].name,
            timeout=states[0].config.timeout,
        )
        return sums.cpu().numpy()


def _most_experts(states: Sequence[LayerState]) -> int:
    """Return the largest number of experts of a layer."""
    return max(state.parts.homes_only.num_experts for state in states)


def _device(state: LayerState) -> torch.device:
    """Return the device of the layer's experts."""
    return next(state.parts.layer.experts.parameters()).device


def expect_routes(
    chunks: Iterable[Module], routes: Sequence[Routes | None] | Routes, *, add: bool = False
) -> None:
    """Announce the routes of the next iteration. Every rank calls it before each iteration.

    The routes are counted at once, a small part at a time, and not held: they may be of any integer
    dtype, on any device, views of a larger array, or mapped from a file. Wrong routes cost balance
    only: results do not depend on them.

    Replayed routes need it only if replicas live for an iteration of several microbatches, and
    routers hold the routes of one microbatch at a time.

    Args:
        chunks: model chunks of this rank, wrapped by DDP or not.
        routes: experts of each token, [T, k], for each MoE layer of this rank in order, or
            [T, layers, k] for all of them; below 0 where an expert is not known. T are tokens that
            this rank routes in the next iteration: with context or sequence parallelism its own
            part of them. ``None`` for a layer with unknown routes, on all ranks of its group.
        add: add to routes that were announced for the same iteration, for a loop that has them by
            microbatch or by sample.

    Raises:
        ValueError: if the numbers of routes and layers differ, or the routes are no integers or
            name other experts.
    """
    modules = chain.from_iterable(chunk.modules() for chunk in chunks)
    layers = [module for module in modules if hasattr(module, "fssdp")]
    if isinstance(routes, np.ndarray | Tensor):
        if routes.ndim != 3:
            raise ValueError(
                f"routes of shape {tuple(routes.shape)}; give [tokens, layers, k], or a list with "
                "one [tokens, k] array for each layer"
            )
        routes = [routes[:, layer] for layer in range(routes.shape[1])]
    if len(layers) != len(routes):
        raise ValueError(
            f"routes of {len(routes)} layers, but this rank has {len(layers)} MoE layers"
        )
    if layers:
        parts = [
            None if layer_routes is None else parts_of(layer_routes) for layer_routes in routes
        ]
        layers[0].prefetcher.routes.announce(parts, add=add)
