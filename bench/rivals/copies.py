"""Traffic of copies: fetched weights, returned gradients, moved optimizer state.

A chunk (an expert's weights or gradients) is sent once to each other node and forwarded inside it.
From a fan-out of 3 on, each receiver on a node gets a share from the sender and the receivers
exchange their shares, so that no rank sends a chunk more than about once; a pipelined broadcast
reaches the same. Every planner is priced by the same rules.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from megatron_hecate.plan import Placement, World
from megatron_hecate.tools.traffic import Traffic, token_traffic

# smallest fan-out at which receivers get shares and exchange them
SCATTER_FROM: int = 3


def no_traffic(num_ranks: int) -> Traffic:
    """Return zero traffic."""
    return Traffic(*(np.zeros(num_ranks) for _ in range(4)))


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
