"""Tokens and chunks on links: tokens on their way to holders, copies fetched, gradients on their way home.

All arrays of a `Traffic` are [R], in chunks. A chunk goes to each other node once and is handed on inside; from
fan-out 3 up, receivers on one node take a share each from the sender and exchange the rest, so that no rank sends a
chunk more than about once (what a pipelined broadcast reaches too). Every planner is priced by the same rules.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from megatron_hecate.plan import LayerShape, Placement, World
from megatron_hecate.routing.quotas import quotas_of_all
from megatron_hecate.routing.tables import GroupShape

SCATTER_FROM: int = 3  # fan-out from which receivers take shares and exchange them


@dataclasses.dataclass(frozen=True, eq=False)
class Traffic:
    """What every rank sends and receives. All arrays [R], in items (tokens, or chunks)."""

    intra_out: np.ndarray
    intra_in: np.ndarray
    inter_out: np.ndarray
    inter_in: np.ndarray

    @property
    def intra(self) -> float:
        return float(self.intra_out.sum())

    @property
    def inter(self) -> float:
        return float(self.inter_out.sum())

    def seconds(self, item_bytes: float, world: World) -> float:
        """How long it takes when every rank sends and receives at once. A node's adapters are shared by its ranks."""
        if not self.intra and not self.inter:
            return 0.0
        node, speeds, ways = world.node_index, world.speeds, (self.inter_out, self.inter_in)
        per_rank = [np.bincount(node, weights=way) * item_bytes / np.bincount(node) for way in ways]
        inside = max(self.intra_out.max(), self.intra_in.max()) * item_bytes
        return max(
            speeds.intra.seconds(inside), speeds.inter.seconds(max(way.max() for way in per_rank))
        )


def no_traffic(num_ranks: int) -> Traffic:
    return Traffic(*(np.zeros(num_ranks) for _ in range(4)))


def token_traffic(flow: np.ndarray, world: World) -> Traffic:
    """Tokens that leave and reach every rank in one dispatch. ``flow``: [R, R] tokens of r that d computes."""
    flow = flow.copy()
    np.fill_diagonal(flow, 0)
    node = world.node_index
    intra = np.where(node[:, None] == node, flow, 0)
    inter = flow - intra
    return Traffic(intra.sum(axis=1), intra.sum(axis=0), inter.sum(axis=1), inter.sum(axis=0))


def fan_out(receives: np.ndarray, source: np.ndarray, world: World) -> Traffic:
    """Chunks from one rank each to several.

    Args:
        receives: [E, R] bool, the ranks that get a copy; never the source itself.
        source: [E] the rank that has the chunk.
        world: node of every rank.
    """
    num_experts, num_ranks = receives.shape
    node, expert = np.asarray(world.node), np.arange(num_experts)
    assert not receives[expert, source].any(), "a rank would send a chunk to itself"
    intra_out, intra_in, inter_out, inter_in = (np.zeros(num_ranks) for _ in range(4))
    for k in np.unique(node):
        ranks = np.flatnonzero(node == k)
        here = receives[:, ranks].copy()
        active = here.any(axis=1)
        if not active.any():
            continue
        root = source.copy()
        arrives = np.flatnonzero(
            active & (node[source] != k)
        )  # experts that enter this node from another
        root[arrives] = ranks[here[arrives].argmax(axis=1)]
        inter_out += np.bincount(source[arrives], minlength=num_ranks)
        inter_in += np.bincount(root[arrives], minlength=num_ranks)
        here[arrives, here[arrives].argmax(axis=1)] = False
        fan = here.sum(axis=1)
        scatters = fan >= SCATTER_FROM
        intra_in[ranks] += here.sum(axis=0)
        intra_out += np.bincount(root, weights=np.where(scatters, 1, fan), minlength=num_ranks)
        intra_out[ranks] += np.where(scatters, (fan - 1) / np.maximum(fan, 1), 0) @ here
    return Traffic(intra_out, intra_in, inter_out, inter_in)


def copies(placement: Placement) -> np.ndarray:
    """[E, R] bool: held, and not as home."""
    held = placement.holders.copy()
    held[np.arange(placement.num_experts), placement.home] = False
    return held


def backwards(traffic: Traffic) -> Traffic:
    """The same chunks on their way back."""
    return Traffic(traffic.intra_in, traffic.intra_out, traffic.inter_in, traffic.inter_out)


def add(*weighted: tuple[Traffic, float]) -> Traffic:
    """Sum of traffics, each times its weight (bytes per chunk, say)."""
    ways = [field.name for field in dataclasses.fields(Traffic)]
    return Traffic(
        *(sum(getattr(traffic, way) * weight for traffic, weight in weighted) for way in ways)
    )


@dataclasses.dataclass(frozen=True, eq=False)
class LayerPlan:
    """What one layer does in one step, whoever planned it.

    Args:
        flow: [R, R] (token, expert) pairs that start on rank r and that rank d computes, of all microbatches.
        early, late: bytes of weights that travel before and after the gate, each time they are fetched.
        back: bytes of gradients, each time they return.
    """

    flow: np.ndarray
    early: Traffic
    late: Traffic
    back: Traffic

    @classmethod
    def of(
        cls, load: np.ndarray, placed: Placement, final: Placement, world: World, shape: LayerShape
    ) -> LayerPlan:
        """FSSDP's: our quotas for ``load`` [R, E], and replicas that come from their homes and return there; those that
        ``final`` has beyond ``placed`` are late."""
        tokens, order = quotas_of_all(load, final, GroupShape.of(world, final))
        by_rank = np.argsort(order.rank, kind="stable")
        ranks, first = np.unique(order.rank[by_rank], return_index=True)
        flow = np.zeros((len(load), world.num_ranks), dtype=np.int64)
        flow[:, ranks] = np.add.reduceat(tokens[:, by_rank], first, axis=1)
        early = fan_out(copies(placed), placed.home, world)
        late = fan_out(copies(final) & ~placed.holders, final.home, world)
        back = backwards(fan_out(copies(final), final.home, world))
        return cls(
            flow,
            add((early, shape.expert_bytes)),
            add((late, shape.expert_bytes)),
            add((back, shape.grad_bytes)),
        )
