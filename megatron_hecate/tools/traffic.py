"""Traffic of an all-to-all on the links of a group, and its duration.

Letters in shapes: R ranks, K nodes; ``...`` stands for any leading axes.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from megatron_hecate.plan import Link, World


@dataclasses.dataclass(frozen=True, eq=False)
class Traffic:
    """Items (tokens, chunks or bytes) that ranks send and receive; all arrays are [..., R]."""

    intra_out: np.ndarray
    intra_in: np.ndarray
    inter_out: np.ndarray
    inter_in: np.ndarray

    @property
    def intra(self) -> np.ndarray:
        """Items sent inside nodes, all ranks together, [...]."""
        return self.intra_out.sum(axis=-1)

    @property
    def inter(self) -> np.ndarray:
        """Items sent between nodes, all ranks together, [...]."""
        return self.inter_out.sum(axis=-1)

    def seconds(self, item_bytes: float, world: World) -> np.ndarray:
        """Model the duration when all ranks send and receive at once, [...].

        The ranks of a node share its network adapters.

        Args:
            item_bytes: bytes per item.
            world: nodes of the ranks, and the speeds between ranks.
        """
        # [R, K] share of a rank in the mean of its node
        members = world.node_index[:, None] == np.arange(world.num_nodes)
        mean_of_node = members / members.sum(axis=0)
        node_seconds = np.maximum(self.inter_out @ mean_of_node, self.inter_in @ mean_of_node)
        inside = np.maximum(self.intra_out, self.intra_in)
        speeds = world.speeds
        return np.maximum(
            _link_seconds(speeds.intra, inside.max(axis=-1) * item_bytes),
            _link_seconds(speeds.inter, node_seconds.max(axis=-1) * item_bytes),
        )

    def sent_once(self, pairs: np.ndarray, world: World, top_k: int) -> Traffic:
        """Reduce pairs to messages of a dispatcher that sends a token to a node, or rank, once.

        The reduction assumes pairs spread evenly over tokens, and over the other nodes and their
        ranks. A token then misses one of n destinations with probability (1 - share / n) ** top_k.

        Args:
            pairs: (token, expert) pairs of all ranks, also those that are not sent, [...].
            world: ranks and their nodes.
            top_k: experts per token.
        """

        def messages_per_pair(tokens: np.ndarray, destinations: float) -> np.ndarray:
            destinations = max(destinations, 1)
            share = np.maximum(tokens, 1e-9) / np.maximum(pairs, 1)
            reached = destinations * (1 - (1 - share / destinations) ** top_k)
            return (reached / (top_k * share))[..., None]

        near = messages_per_pair(self.intra, world.num_ranks / world.num_nodes - 1)
        far = messages_per_pair(self.inter, world.num_nodes - 1)
        return Traffic(
            self.intra_out * near, self.intra_in * near, self.inter_out * far, self.inter_in * far
        )


def _link_seconds(link: Link, num_bytes: np.ndarray) -> np.ndarray:
    """Return the seconds of messages of ``num_bytes``, like `Link.seconds`."""
    return num_bytes / link.bandwidth + link.latency * (num_bytes > 0)


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


def traffic_of_loads(
    loads: np.ndarray, world: World, *, crossing: np.ndarray | None = None
) -> Traffic:
    """Count the tokens of one dispatch from the loads of ranks; all sources send equally.

    Args:
        loads: tokens computed by each rank, [..., R].
        world: ranks and their nodes.
        crossing: tokens computed on another node than their source's, [...]; ``None``: as many as
            if all sources send alike.
    """
    num_ranks = world.num_ranks
    node = world.node_index
    members = node[:, None] == np.arange(world.num_nodes)
    # [R] ranks of a rank's node
    size = members.sum(axis=0)[node]
    total = loads.sum(axis=-1, keepdims=True)
    # [..., R] tokens computed on a rank's node
    on_node = (loads @ members)[..., node]
    inter_in = loads * (1 - size / num_ranks)
    inter_out = np.maximum(total - on_node, 0) / num_ranks
    if crossing is not None:
        alike = inter_in.sum(axis=-1)
        share = np.divide(crossing, alike, out=np.ones_like(alike), where=alike > 0)[..., None]
        inter_in = inter_in * share
        inter_out = inter_out * share
    return Traffic(
        intra_out=(on_node - loads) / num_ranks,
        intra_in=loads * (size - 1) / num_ranks,
        inter_out=inter_out,
        inter_in=inter_in,
    )
