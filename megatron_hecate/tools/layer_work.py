"""Work of MoE layers in one step: tokens of the fullest rank, all-to-alls, copies.

Letters in shapes: T steps, L layers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from megatron_hecate.plan import LayerShape, World
from megatron_hecate.tools.traffic import LayerPlan, Traffic, no_traffic, token_traffic


@dataclasses.dataclass(frozen=True, eq=False)
class Work:
    """Work of all layers, as far as the critical path depends on it; all arrays are [T, L].

    Args:
        peak: pairs of the fullest rank in one microbatch.
        trip: seconds of one all-to-all.
        fetch, back: seconds of one fetch and of one return of a layer on an idle network.
        late: seconds of the copies after the gate.
        routing: seconds per microbatch of routing to replicas.
        computing: seconds per microbatch of replicas beside their tokens, forward and backward.
        out, home: bytes sent by one fetch (with a late one) and by one return, all ranks together.
    """

    peak: np.ndarray
    trip: np.ndarray
    fetch: np.ndarray
    back: np.ndarray
    late: np.ndarray
    routing: np.ndarray
    computing: np.ndarray
    out: np.ndarray
    home: np.ndarray

    @classmethod
    def of(
        cls, plans: Sequence[Sequence[LayerPlan]], world: World, shape: LayerShape, *, once: int = 0
    ) -> Work:
        """Compute the work of the plans of every step and, within it, every layer.

        Args:
            plans: plans by step and layer.
            world: ranks, nodes and speeds.
            shape: sizes of a layer.
            once: experts per token, where the dispatcher sends a token once to a node, and once
                to a rank of its own node; 0: once per expert.
        """
        rows = []
        for step in plans:
            rows.append([_layer_work(plan, world, shape, once) for plan in step])
        return cls(*np.moveaxis(rows, -1, 0))

    @classmethod
    def balanced(cls, pairs: float, world: World, shape: LayerShape, *, once: int = 0) -> Work:
        """Compute the work [1, 1] of forced balance: each rank sends the same to every rank.

        Args:
            pairs: pairs per rank, of all microbatches.
            world: ranks, nodes and speeds.
            shape: sizes of a layer.
            once: experts per token, see `of`.
        """
        flow = np.full((world.num_ranks,) * 2, pairs / world.num_ranks)
        none = no_traffic(world.num_ranks)
        return cls.of([[LayerPlan(flow, none, none, none)]], world, shape, once=once)

    def layers(self, of: Sequence[int]) -> Work:
        """Select layers: column l is the old column ``of[l]``."""
        return Work(*(getattr(self, field.name)[:, list(of)] for field in dataclasses.fields(self)))


def _layer_work(plan: LayerPlan, world: World, shape: LayerShape, once: int) -> tuple[float, ...]:
    """Compute the fields of `Work`, in order, for one layer in one step."""
    tokens = token_traffic(plan.flow, world)
    if once and plan.flow.any():
        tokens = _sent_once(tokens, float(plan.flow.sum()), world, once)
    peak = float(plan.flow.sum(axis=0).max()) / shape.microbatches
    trip = tokens.seconds(shape.token_bytes / shape.microbatches, world)
    early_bytes = plan.early.intra + plan.early.inter
    late_bytes = plan.late.intra + plan.late.inter
    out = early_bytes + late_bytes
    # A layer without copies runs stock code, which does not route to replicas.
    routing = world.speeds.routing if out else 0.0
    return (
        peak,
        trip,
        plan.early.seconds(1, world),
        plan.back.seconds(1, world),
        plan.late.seconds(1, world),
        routing,
        plan.most * shape.expert_seconds(world),
        out,
        plan.back.intra + plan.back.inter,
    )


def _sent_once(tokens: Traffic, pairs: float, world: World, once: int) -> Traffic:
    """Reduce traffic of pairs to messages, where a token reaches a node, or rank, only once.

    The reduction assumes pairs spread evenly over tokens, and over the other nodes and their
    ranks. A token then misses one of n destinations with probability (1 - share / n) ** once.

    Args:
        tokens: traffic with one message per pair.
        pairs: number of pairs of all ranks.
        world: ranks and their nodes.
        once: experts per token.
    """
    destinations = np.maximum([world.num_ranks / world.num_nodes - 1, world.num_nodes - 1], 1)
    share = np.maximum([tokens.intra, tokens.inter], 1e-9) / pairs
    reached = destinations * (1 - (1 - share / destinations) ** once)
    # messages per pair, inside nodes and between nodes
    near, far = reached / (once * share)
    return Traffic(
        tokens.intra_out * near,
        tokens.intra_in * near,
        tokens.inter_out * far,
        tokens.inter_in * far,
    )


def work_of_ranks(
    loads: np.ndarray,
    world: World,
    shape: LayerShape,
    *,
    crossing: np.ndarray | None = None,
    once: int = 0,
) -> Work:
    """Compute the work of recorded rank loads, without copies; sources send alike.

    Args:
        loads: pairs computed by each rank, all microbatches, [T, L, N].
        world: ranks, nodes and speeds.
        shape: sizes of a layer.
        crossing: pairs computed on another node than their source's, [T, L]; ``None``: as many as
            if all sources send alike.
        once: experts per token, see `Work.of`.
    """
    ranks = world.num_ranks
    node = world.node_index
    nodes = np.bincount(node)
    total = loads.sum(axis=2)
    of_nodes = np.stack([loads[..., node == one].sum(axis=2) for one in range(len(nodes))], axis=2)
    alike = (of_nodes * (1 - nodes / ranks)).sum(axis=2)
    kept = np.ones_like(alike)
    if crossing is not None:
        kept = np.divide(crossing, alike, out=kept, where=alike > 0)
    inter_in = loads * (1 - nodes[node] / ranks) * kept[..., None]
    inter_out = np.maximum(total[..., None] - of_nodes[..., node], 0) / ranks * kept[..., None]
    intra_in = loads * (nodes[node] - 1) / ranks
    intra_out = (of_nodes[..., node] - loads) / ranks
    near = np.ones_like(total, dtype=float)
    far = near
    if once:
        near = _messages_per_pair(intra_out.sum(axis=2), total, ranks / len(nodes) - 1, once)
        far = _messages_per_pair(inter_out.sum(axis=2), total, len(nodes) - 1, once)
    inside = np.maximum(intra_out, intra_in).max(axis=2) * near
    between = np.zeros_like(inside)
    for items in (inter_out, inter_in):
        for one in range(len(nodes)):
            per_rank = items[..., node == one].mean(axis=2) * far
            between = np.maximum(between, per_rank)
    scale = shape.token_bytes / shape.microbatches
    trip = np.zeros_like(inside)
    for link, items in ((world.speeds.intra, inside), (world.speeds.inter, between)):
        seconds = items * scale / link.bandwidth + link.latency * (items > 0)
        trip = np.maximum(trip, seconds)
    none = np.zeros_like(trip)
    peak = loads.max(axis=2) / shape.microbatches
    return Work(peak, trip, *(none,) * 7)


def _messages_per_pair(
    pairs: np.ndarray, total: np.ndarray, destinations: float, once: int
) -> np.ndarray:
    """Return the messages per pair of a dispatcher that sends a token once, see `_sent_once`."""
    destinations = max(destinations, 1)
    share = np.maximum(pairs, 1e-9) / np.maximum(total, 1)
    return destinations * (1 - (1 - share / destinations) ** once) / (once * share)
