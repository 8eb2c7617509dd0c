"""Traffic on links: dispatched tokens, fetched replicas and returned gradients.

A chunk (an expert's weights or gradients) is sent once to each other node and forwarded inside it.
From a fan-out of 3 on, each receiver on a node gets a share from the sender and the receivers
exchange their shares, so that no rank sends a chunk more than about once; a pipelined broadcast
reaches the same. Every planner is priced by the same rules.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from megatron_hecate.plan import LayerShape, Placement, World
from megatron_hecate.routing.quotas import quotas_of_all
from megatron_hecate.routing.tables import GroupShape

# smallest fan-out at which receivers get shares and exchange them
SCATTER_FROM: int = 3


@dataclasses.dataclass(frozen=True, eq=False)
class Traffic:
    """Items (tokens, chunks or bytes) that every rank sends and receives; all arrays are [R]."""

    intra_out: np.ndarray
    intra_in: np.ndarray
    inter_out: np.ndarray
    inter_in: np.ndarray

    @property
    def intra(self) -> float:
        """Items sent inside nodes, all ranks together."""
        return float(self.intra_out.sum())

    @property
    def inter(self) -> float:
        """Items sent between nodes, all ranks together."""
        return float(self.inter_out.sum())

    def seconds(self, item_bytes: float, world: World) -> float:
        """Model the duration when all ranks send and receive at once.

        The ranks of a node share its network adapters.

        Args:
            item_bytes: bytes per item.
            world: nodes of the ranks, and the speeds between ranks.
        """
        if not self.intra and not self.inter:
            return 0.0
        node = world.node_index
        ranks_of_node = np.bincount(node)
        between = 0.0
        for items in (self.inter_out, self.inter_in):
            per_rank = np.bincount(node, weights=items) * item_bytes / ranks_of_node
            between = max(between, per_rank.max())
        inside = max(self.intra_out.max(), self.intra_in.max()) * item_bytes
        return max(world.speeds.intra.seconds(inside), world.speeds.inter.seconds(between))


def no_traffic(num_ranks: int) -> Traffic:
    """Return zero traffic."""
    return Traffic(*(np.zeros(num_ranks) for _ in range(4)))


def token_traffic(flow: np.ndarray, world: World) -> Traffic:
    """Count the tokens that every rank sends and receives in one dispatch.

    Args:
        flow: tokens by source and computing rank, [R, R].
        world: ranks and their nodes.
    """
    flow = flow.copy()
    np.fill_diagonal(flow, 0)
    node = world.node_index
    intra = np.where(node[:, None] == node, flow, 0)
    inter = flow - intra
    return Traffic(intra.sum(axis=1), intra.sum(axis=0), inter.sum(axis=1), inter.sum(axis=0))


def fan_out(
    receives: np.ndarray, source: np.ndarray, world: World, *, scatters: bool = True
) -> Traffic:
    """Count the chunks sent and received when each source sends its chunk to several ranks.

    Args:
        receives: whether a rank gets a copy of an expert's chunk, [E, R] bool; never the source.
        source: rank with the original chunk, [E].
        world: ranks and their nodes.
        scatters: whether receivers share the work of copying, as with transport ``nvlink``;
            otherwise the source sends every copy, as with ``p2p``.
    """
    num_experts, num_ranks = receives.shape
    node = np.asarray(world.node)
    expert = np.arange(num_experts)
    assert not receives[expert, source].any(), "a rank would send a chunk to itself"
    if not scatters:
        flow = np.zeros((num_ranks, num_ranks))
        np.add.at(flow, source, receives)
        return token_traffic(flow, world)
    intra_out, intra_in, inter_out, inter_in = np.zeros((4, num_ranks))
    for k in np.unique(node):
        ranks = np.flatnonzero(node == k)
        # Receivers on this node, [E, ranks of the node]; entry ranks are cleared below.
        here = receives[:, ranks].copy()
        active = here.any(axis=1)
        if not active.any():
            continue
        # A chunk of another node is received once, by the first of its receivers here, which
        # forwards it.
        root = source.copy()
        arrives = np.flatnonzero(active & (node[source] != k))
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
    """Return whether a rank holds a replica of an expert, [E, R] bool; homes are not replicas."""
    held = placement.holders.copy()
    held[np.arange(placement.num_experts), placement.home] = False
    return held


def backwards(traffic: Traffic) -> Traffic:
    """Reverse the direction of all items."""
    return Traffic(traffic.intra_in, traffic.intra_out, traffic.inter_in, traffic.inter_out)


def add(*weighted: tuple[Traffic, float]) -> Traffic:
    """Sum traffics, each times its weight, for example its bytes per chunk."""
    sums = {}
    for field in dataclasses.fields(Traffic):
        sums[field.name] = sum(
            getattr(traffic, field.name) * weight for traffic, weight in weighted
        )
    return Traffic(**sums)


@dataclasses.dataclass(frozen=True, eq=False)
class LayerPlan:
    """Tokens and copies of one layer in one step, independent of the planner.

    Args:
        flow: (token, expert) pairs of all microbatches by source and computing rank, [R, R].
        early, late: bytes of weights fetched before and after the gate, per fetch.
        back: bytes of gradients, per return.
        most: replicas of the rank with most.
    """

    flow: np.ndarray
    early: Traffic
    late: Traffic
    back: Traffic
    most: int = 0

    @classmethod
    def of(
        cls,
        load: np.ndarray,
        placed: Placement,
        final: Placement,
        world: World,
        shape: LayerShape,
        *,
        scatters: bool = True,
    ) -> LayerPlan:
        """Build the plan of FSSDP: our quotas, replicas fetched from homes and returned to homes.

        Args:
            load: pairs by source and expert, [R, E].
            placed: placement before the gate.
            final: placement after the gate; its further replicas are late.
            world: ranks and their nodes.
            shape: sizes of the layer.
            scatters: see `fan_out`.
        """
        tokens, order = quotas_of_all(load, final, GroupShape.of(world, final))
        # Physical experts sorted by rank: segments of equal rank are summed.
        by_rank = np.argsort(order.rank, kind="stable")
        ranks, first = np.unique(order.rank[by_rank], return_index=True)
        flow = np.zeros((len(load), world.num_ranks), dtype=np.int64)
        flow[:, ranks] = np.add.reduceat(tokens[:, by_rank], first, axis=1)
        early = fan_out(copies(placed), placed.home, world, scatters=scatters)
        late = fan_out(copies(final) & ~placed.holders, final.home, world, scatters=scatters)
        back = backwards(fan_out(copies(final), final.home, world, scatters=scatters))
        return cls(
            flow,
            add((early, shape.expert_bytes)),
            add((late, shape.expert_bytes)),
            add((back, shape.grad_bytes)),
            int(copies(final).sum(axis=0).max()),
        )
