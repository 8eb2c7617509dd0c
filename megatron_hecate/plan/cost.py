"""What one layer's iteration costs: the slowest rank's experts, all-to-all, exposed spAG and spRS, routing to guests.

A plan is worth its copies when the sum falls. Everything is counted per rank and direction; a phase lasts as long as
its busiest rank, and traffic inside nodes and between nodes runs side by side.

    forward   dispatch -> experts -> combine            token bytes twice, FLOPs once
    backward  the same in reverse                       token bytes twice, FLOPs twice
    spAG, spRS as often as guests are fetched           what exceeds the time they can hide behind is exposed
"""

from __future__ import annotations

import dataclasses

import numpy as np

from megatron_hecate.plan.placement import Placement
from megatron_hecate.plan.route import Quotas
from megatron_hecate.plan.world import Link, World

BACKWARD: float = 2.0  # FLOPs of a GEMM's backward over its forward: gradients of input and of weight
SCATTER_FROM: int = 3  # fan-out from which receivers take shares and exchange them, where the transport can


@dataclasses.dataclass(frozen=True)
class LayerShape:
    """Sizes of one MoE layer on one rank.

    Args:
        expert_bytes: one expert's weights as spAG moves them.
        grad_bytes: one expert's gradient as spRS moves it.
        token_bytes: one token's hidden state on the wire.
        token_flops: forward FLOPs of one token in one expert.
        microbatches: microbatches per iteration.
        fetches: how often guests are fetched per iteration.
        returns: how often their gradients go home.
        hidden_seconds: compute before the layer behind which one spAG hides (and, in the backward, one spRS).
    """

    expert_bytes: int
    grad_bytes: int
    token_bytes: int
    token_flops: float
    microbatches: int = 1
    hidden_seconds: float = 0.0
    fetches: int = 1
    returns: int = 1

    @classmethod
    def swiglu(cls, hidden: int, ffn: int, *, microbatches: int = 1, hidden_seconds: float = 0.0) -> LayerShape:
        """A gated expert of three ``hidden x ffn`` matrices in bf16, with fp32 gradients."""
        elements = 3 * hidden * ffn
        return cls(
            expert_bytes=2 * elements,
            grad_bytes=4 * elements,
            token_bytes=2 * hidden,
            token_flops=2.0 * elements,
            microbatches=microbatches,
            hidden_seconds=hidden_seconds,
        )

    def token_seconds(self, world: World) -> float:
        """Forward and backward of one token in one expert."""
        return (1 + BACKWARD) * self.token_flops / world.speeds.flops

    def copy_seconds(self, world: World, link: Link | None = None) -> float:
        """One guest's ways out and back in an iteration, unhidden; over the slowest link of the group, or ``link``."""
        link = link or world.slowest_link
        return self.fetches * _phase(self.expert_bytes, link) + self.returns * _phase(self.grad_bytes, link)

    def fetch_seconds(self, world: World) -> float:
        """One guest's way out, over the slowest link."""
        return _phase(self.expert_bytes, world.slowest_link)

    def copy_tokens(self, world: World, link: Link | None = None) -> float:
        """Tokens the slowest rank must be spared, over all microbatches, for one unhidden copy to pay."""
        return self.copy_seconds(world, link) / self.token_seconds(world)

    def routing_tokens(self, world: World) -> float:
        """Tokens the slowest rank must be spared, over all microbatches, for routing to guests to pay at all."""
        return world.speeds.routing * self.microbatches / self.token_seconds(world)


@dataclasses.dataclass(frozen=True)
class LayerSeconds:
    """Seconds of one layer in one iteration, all microbatches, forward and backward."""

    experts: float
    all_to_all: float
    exposed_copies: float
    routing: float

    @property
    def total(self) -> float:
        return self.experts + self.all_to_all + self.exposed_copies + self.routing


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
        """How long it takes when every rank sends and receives at once. A node's NICs are shared by its ranks."""
        if not self.intra and not self.inter:
            return 0.0
        per_node = np.bincount(np.unique(world.node, return_inverse=True)[1])
        nodes = np.unique(world.node, return_inverse=True)[1]
        inter = [
            np.bincount(nodes, weights=way) * item_bytes / (per_node * world.speeds.inter.bandwidth)
            for way in (self.inter_out, self.inter_in)
        ]
        return max(
            _phase(max(self.intra_out.max(), self.intra_in.max()) * item_bytes, world.speeds.intra),
            max(way.max() for way in inter) + (world.speeds.inter.latency if self.inter else 0.0),
        )


def _phase(num_bytes: float, link: Link) -> float:
    return num_bytes / link.bandwidth + link.latency if num_bytes else 0.0


def token_traffic(quotas: Quotas, world: World) -> Traffic:
    """Tokens that leave and reach every rank in one dispatch; the sources must be the ranks."""
    num_ranks = world.num_ranks
    assert len(quotas.tokens) == num_ranks, (quotas.tokens.shape, num_ranks)
    flow = np.zeros((num_ranks, num_ranks), dtype=np.int64)
    np.add.at(flow.T, quotas.rank, quotas.tokens.T)
    return _traffic(flow, world)


def copy_traffic(placement: Placement, world: World, *, scatter: bool = False) -> Traffic:
    """Chunks that leave and reach every rank in one spAG (spRS is the same with directions swapped).

    One copy of a chunk goes to each other node and is handed on inside; from fan-out 3 up, with ``scatter``, receivers
    on one node take a share each from the sender and exchange the rest.
    """
    num_ranks = placement.num_ranks
    flow = np.zeros((num_ranks, num_ranks))
    node = np.asarray(world.node)
    for expert in {e for e, _, _ in placement.guests}:
        home = int(placement.home[expert])
        holders = np.flatnonzero(placement.holders[expert])
        for k in np.unique(node[holders]):
            there = [int(r) for r in holders if node[r] == k and r != home]
            root = home
            if node[home] != k:
                root = there.pop(0)
                flow[home, root] += 1
            if scatter and len(there) >= SCATTER_FROM:
                share = 1 / len(there)
                for r in there:
                    flow[root, r] += share
                    flow[r, [q for q in there if q != r]] += share
            else:
                flow[root, there] += 1
    return _traffic(flow, world)


def _traffic(flow: np.ndarray, world: World) -> Traffic:
    node = np.asarray(world.node)
    flow = flow.copy()
    np.fill_diagonal(flow, 0)
    intra = np.where(node[:, None] == node[None, :], flow, 0)
    inter = flow - intra
    return Traffic(intra.sum(axis=1), intra.sum(axis=0), inter.sum(axis=1), inter.sum(axis=0))


def layer_seconds(
    quotas: Quotas, placement: Placement, world: World, shape: LayerShape, *, late: int = 0, scatter: bool = False
) -> LayerSeconds:
    """Price one layer's iteration.

    Args:
        quotas: of one microbatch; the others are taken to be alike. Its sources are the ranks.
        placement: homes and guests.
        world: links and speed.
        shape: the layer's sizes.
        late: the busiest rank's guests that were fetched after the gate, on the critical path, per microbatch.
        scatter: whether the transport scatters and exchanges (`copy_traffic`).
    """
    load = quotas.rank_load(placement.num_ranks)
    experts = float(load.max()) * shape.token_seconds(world) * shape.microbatches
    tokens = token_traffic(quotas, world)
    all_to_all = 4 * tokens.seconds(shape.token_bytes, world) * shape.microbatches
    copies = copy_traffic(placement, world, scatter=scatter)
    exposed = sum(
        often * max(0.0, copies.seconds(size, world) - shape.hidden_seconds)
        for size, often in ((shape.expert_bytes, shape.fetches), (shape.grad_bytes, shape.returns))
    )
    exposed += late * shape.microbatches * dataclasses.replace(shape, fetches=1, returns=1).copy_seconds(world)
    routing = world.speeds.routing * shape.microbatches if placement.num_guests else 0.0
    return LayerSeconds(experts=experts, all_to_all=all_to_all, exposed_copies=exposed, routing=routing)
