"""Loads that are known before a microbatch runs, because its routes are replayed (``moe_enable_routing_replay``).

Post-training replays the routes of the rollout: before each forward the training loop gives every router the experts of
all its tokens. They are counted where a model chunk begins, and summed over the group by one all-reduce for all its
layers. The attribute names are those of Megatron's `RouterReplay` and of the patches that training loops bring along.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Module

from megatron_hecate.job.collectives import wait_collective
from megatron_hecate.megatron.forward_pass import NO_ITERATION
from megatron_hecate.runtime.layer_state import LayerState


class KnownRoutes:
    """Counts the routes of this rank's layers, and makes forecasts of them; every rank of a group calls it at the same
    points. ``states`` are those of all layers in the order of the forward, ``chunk_of`` the model chunk of each."""

    def __init__(self, states: Sequence[LayerState], chunk_of: Sequence[int]) -> None:
        self.states, self._chunk_of = states, chunk_of
        self.expected: Sequence[Tensor] | None = (
            None  # routes of the next iteration, see `expect_routes`
        )
        # of each layer, whether its plan is made for true loads
        self.are_known = [False] * len(states)
        # of each layer, [E] tokens of the microbatch over the group, where its routes are replayed
        self._microbatch: list[np.ndarray | None] = [None] * len(states)

    def begin_iteration(self) -> np.ndarray | None:
        """[L, E] tokens over the group in the iteration that begins, where routes are expected."""
        routes, self.expected = self.expected, None
        self.are_known = [routes is not None] * len(self.states)
        self._microbatch = [None] * len(self.states)
        return None if routes is None else self._sum(self.states, routes)

    def begin_microbatch(self, index: int, iteration: int, microbatches: int | None) -> None:
        """A microbatch comes to layer ``index`` in an ``iteration`` of so many (``None``: the loop does not say). Where
        routes are replayed and it is the first layer of a chunk, they become known; layers that fetch for every
        microbatch are then planned anew."""
        state, chunk = self.states[index], self._chunk_of[index]
        whole = state.keeps_replicas  # one plan for all microbatches
        is_planned = whole and (self.are_known[index] or state.current.number == iteration)
        if index != self._chunk_of.index(chunk) or is_planned or not state.config.slots:
            return
        states = self.states[index : index + self._chunk_of.count(chunk)]
        routes = [
            s.parts.layer.router.router_replay.target_topk_idx if _replays(s) else None
            for s in states
        ]
        loads = self._sum(states, routes) if any(map(_replays, states)) else None
        for row, state in enumerate(states):
            is_known = loads is not None and bool(loads[row].any())
            self._microbatch[state.index] = loads[row] if loads is not None and is_known else None
            self.are_known[state.index] = is_known and (not whole or microbatches == 1)
            if is_known and not whole:
                state.current.number = NO_ITERATION

    def forecast(
        self, state: LayerState, forecast: np.ndarray | None, microbatches: int
    ) -> tuple[np.ndarray | None, int]:
        """[E] tokens for which a layer is planned, ``None`` where nothing is known, and in how many microbatches.
        ``forecast`` [L, E] is that of an iteration of ``microbatches``."""
        experts = state.parts.homes_only.num_experts
        expected = None if forecast is None else forecast[state.index, :experts]
        of_microbatch = self._microbatch[state.index]
        if of_microbatch is None:
            return expected, microbatches
        known = of_microbatch[:experts]
        if not state.keeps_replicas:
            return known, 1
        rest = (
            known if expected is None else expected / microbatches
        )  # of each microbatch that is not known yet
        return known + (microbatches - 1) * rest, microbatches

    def _sum(self, states: Sequence[LayerState], routes: Sequence[Tensor | None]) -> np.ndarray:
        """[L, E] tokens of the group for ``routes`` of these layers. The host waits for the device."""
        group, home = states[0].rerouter.sources, next(states[0].parts.layer.experts.parameters())
        experts = max(state.parts.homes_only.num_experts for state in states)
        sums = torch.stack([_count(of_layer, experts).to(home.device) for of_layer in routes])
        work = dist.all_reduce(sums, group=group, async_op=True)
        names, timeout = (
            dict(what="counting replayed routes", label=states[0].name),
            states[0].config.timeout,
        )
        wait_collective(work, sums, group, **names, timeout=timeout)
        return sums.cpu().numpy()


def _replays(state: LayerState) -> bool:
    """Whether the layer's next forward replays routes. A fused router would not heed them."""
    action = getattr(
        getattr(state.parts.layer.router, "router_replay", None), "router_replay_action", None
    )
    return (
        getattr(action, "value", None) == "replay_forward"
        and not state.parts.layer.config.moe_router_fusion
    )


def _count(routes: Tensor | None, experts: int) -> Tensor:
    """[E] tokens per expert. ``routes`` [T, k] are the experts of each token, as Megatron makes a routing map of them;
    an expert below 0 is not known yet."""
    if routes is None:
        return torch.zeros(experts, dtype=torch.int64)
    routes = routes.reshape(-1, routes.shape[-1]).long()
    chosen = torch.zeros(len(routes), experts + 1, dtype=torch.bool, device=routes.device)
    return chosen.scatter_(1, routes.where(routes >= 0, experts), True)[:, :experts].sum(dim=0)


def expect_routes(chunks: Iterable[Module], routes: Sequence[Tensor]) -> None:
    """Say which experts the tokens of the next iteration will go to. Only needed where replicas live for an iteration
    of several microbatches: routers show one at a time. Every rank calls it before each iteration. Raises a ValueError
    when there are not as many routes as layers.

    Args:
        chunks: the model chunks of this rank, wrapped by DDP or not.
        routes: of each of their MoE layers, in order, [tokens of all microbatches of this rank, k] experts.
    """
    layers = [module for chunk in chunks for module in chunk.modules() if hasattr(module, "fssdp")]
    if len(layers) != len(routes):
        raise ValueError(
            f"routes of {len(routes)} layers, but this rank has {len(layers)} MoE layers"
        )
    for layer in layers:
        layer.prefetcher.routes.expected = routes
