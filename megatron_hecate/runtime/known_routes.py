"""Loads known before a microbatch runs: replayed routes, and routes of token ids.

Post-training replays the routes of the rollout: before each forward the training loop gives every
router the experts of all tokens. The tokens per expert are counted at the start of a model chunk,
and one all-reduce sums the counts of all its layers over the group. Attribute names are from
Megatron's `RouterReplay` and from patches that training loops apply to Megatron.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Module

from megatron_hecate.job.collectives import wait_collective
from megatron_hecate.megatron.forward_pass import NO_ITERATION
from megatron_hecate.runtime.layer_state import LayerState


class KnownRoutes:
    """Counter of replayed routes of this rank's layers, and forecasts from the counts.

    Collective: every rank of a group calls the methods at the same points.

    Args:
        states: states of all layers, in the order of the forward.
        chunk_of: index of each layer's model chunk.
    """

    def __init__(self, states: Sequence[LayerState], chunk_of: Sequence[int]) -> None:
        self.states = states
        self._chunk_of = chunk_of
        # Routes of the next iteration, see `expect_routes`; ``None`` for layers without.
        self.expected: Sequence[Tensor | None] | None = None
        # For each layer, True if its plan is made for true loads.
        self.are_known = [False] * len(states)
        # For each layer with replayed routes, tokens of the microbatch over the group, [E].
        self._microbatch: list[np.ndarray | None] = [None] * len(states)

    def begin_iteration(self, forecast: np.ndarray | None) -> np.ndarray | None:
        """Replace the forecast of a new iteration by the loads of its expected routes.

        Args:
            forecast: tokens per layer and expert by earlier iterations, [L, E], if any.

        Returns:
            Tokens per layer and expert, summed over the group, [L, E]; those of ``forecast`` for
            layers without expected routes. ``None`` if nothing is known.
        """
        routes = self.expected
        self.expected = None
        self._microbatch = [None] * len(self.states)
        if routes is None:
            self.are_known = [False] * len(self.states)
            return forecast
        self.are_known = [of_layer is not None for of_layer in routes]
        loads = self._sum(self.states, routes)
        if forecast is None:
            return loads
        return np.where(np.array(self.are_known)[:, None], loads, forecast)

    def begin_microbatch(self, index: int, iteration: int, microbatches: int | None) -> None:
        """Count the replayed routes of a microbatch, at the first layer of a model chunk.

        Layers that fetch for every microbatch are then planned again.

        Args:
            index: index of the layer that the microbatch has reached.
            iteration: number of the running iteration.
            microbatches: number of microbatches in the iteration; ``None`` if unknown.
        """
        state = self.states[index]
        chunk = self._chunk_of[index]
        # True if one plan serves all microbatches.
        whole = state.keeps_replicas
        is_planned = whole and (self.are_known[index] or state.current.number == iteration)
        if index != self._chunk_of.index(chunk) or is_planned or not state.config.slots:
            return
        states = self.states[index : index + self._chunk_of.count(chunk)]
        replays = [_replays(state) for state in states]
        routes = [
            state.parts.layer.router.router_replay.target_topk_idx if is_replayed else None
            for state, is_replayed in zip(states, replays, strict=True)
        ]
        loads: list[np.ndarray | None] = [None] * len(states)
        if any(replays):
            loads = [load if load.any() else None for load in self._sum(states, routes)]
        for state, load in zip(states, loads, strict=True):
            is_known = load is not None
            self._microbatch[state.index] = load
            self.are_known[state.index] = is_known and (not whole or microbatches == 1)
            if is_known and not whole:
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
        # A row of zeros: a layer without routes or history, beside layers with expected routes.
        if forecast is not None and forecast[state.index].any():
            expected = forecast[state.index, :experts]
        of_microbatch = self._microbatch[state.index]
        if of_microbatch is None:
            return expected, microbatches
        known = of_microbatch[:experts]
        if not state.keeps_replicas:
            return known, 1
        # Expected tokens of each further microbatch.
        rest = known if expected is None else expected / microbatches
        return known + (microbatches - 1) * rest, microbatches

    def _sum(self, states: Sequence[LayerState], routes: Sequence[Tensor | None]) -> np.ndarray:
        """Count the tokens of the group for ``routes`` of layers, [L, E]. Synchronizes the host."""
        group = states[0].rerouter.sources
        home = next(states[0].parts.layer.experts.parameters())
        experts = max(state.parts.homes_only.num_experts for state in states)
        sums = torch.stack([_count(of_layer, experts).to(home.device) for of_layer in routes])
        work = dist.all_reduce(sums, group=group, async_op=True)
        wait_collective(
            work,
            sums,
            group,
            what="counting replayed routes",
            label=states[0].name,
            timeout=states[0].config.timeout,
        )
        return sums.cpu().numpy()


def _replays(state: LayerState) -> bool:
    """Return whether the layer's next forward replays routes, which a fused router ignores."""
    layer = state.parts.layer
    replay = getattr(layer.router, "router_replay", None)
    action = getattr(replay, "router_replay_action", None)
    is_replayed = getattr(action, "value", None) == "replay_forward"
    return is_replayed and not layer.config.moe_router_fusion


def _count(routes: Tensor | None, experts: int) -> Tensor:
    """Count the tokens per expert, [E], in the way of Megatron's routing map.

    Args:
        routes: experts of each token, [T, k]; below 0 where the expert is not known yet.
        experts: number of experts E.
    """
    if routes is None:
        return torch.zeros(experts, dtype=torch.int64)
    routes = routes.reshape(-1, routes.shape[-1]).long()
    chosen = torch.zeros(len(routes), experts + 1, dtype=torch.bool, device=routes.device)
    return chosen.scatter_(1, routes.where(routes >= 0, experts), True)[:, :experts].sum(dim=0)


def expect_routes(chunks: Iterable[Module], routes: Sequence[Tensor | None]) -> None:
    """Announce the routes of the next iteration. Every rank calls it before each iteration.

    Replayed routes need it only if replicas live for an iteration of several microbatches: routers
    hold the routes of one microbatch at a time.

    Args:
        chunks: model chunks of this rank, wrapped by DDP or not.
        routes: experts of each token, for each MoE layer in order, [T, k], with T the tokens of all
            microbatches of this rank; ``None`` for a layer with unknown routes, on all ranks of
            its group.

    Raises:
        ValueError: if the numbers of routes and layers differ.
    """
    layers = _converted_layers(chunks)
    if len(layers) != len(routes):
        raise ValueError(
            f"routes of {len(routes)} layers, but this rank has {len(layers)} MoE layers"
        )
    for layer in layers:
        layer.prefetcher.routes.expected = routes


def expect_tokens(chunks: Iterable[Module], token_ids: Tensor) -> int:
    """Announce the token ids of the next iteration, for layers that route tokens by their ids.

    Every rank calls it before each iteration. A layer routes by ids if its router has a table
    ``tid2eid`` [vocabulary, k] of experts, as in Megatron. Other layers keep their forecast.

    Args:
        chunks: model chunks of this rank, wrapped by DDP or not.
        token_ids: ids of the tokens that this rank routes in all microbatches, of any shape, in any
            order: with context or sequence parallelism its own part of them.

    Returns:
        Number of layers of this rank that route by ids; 0 on later pipeline stages, as a rule.

    Raises:
        ValueError: if an id is not in a table.
    """
    chunks = list(chunks)
    ids = token_ids.reshape(-1).long()
    tables = [getattr(layer.router, "tid2eid", None) for layer in _converted_layers(chunks)]
    found = [table for table in tables if table is not None]
    if not found:
        return 0
    rows = min(len(table) for table in found)
    if len(ids) and not 0 <= ids.min() <= ids.max() < rows:
        raise ValueError(
            f"token ids from {ids.min()} to {ids.max()}, but router.tid2eid has {rows} rows; pass "
            "ids of the tokenizer's vocabulary"
        )
    expect_routes(
        chunks, [None if table is None else table[ids.to(table.device)] for table in tables]
    )
    return len(found)


def _converted_layers(chunks: Iterable[Module]) -> list[Module]:
    """List the FSSDP layers of model chunks, in the order of the forward."""
    modules = chain.from_iterable(chunk.modules() for chunk in chunks)
    return [module for module in modules if hasattr(module, "fssdp")]
