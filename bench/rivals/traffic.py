"""Chunks on links when copies are fetched and gradients go home.

All arrays of a `Traffic` are [R], in chunks. A chunk goes to each other node once and is handed on inside; from
fan-out 3 up, receivers on one node take a share each from the sender and exchange the rest, so that no rank sends a
chunk more than about once (what a pipelined broadcast reaches too). Every planner is priced by the same rules.
"""

from __future__ import annotations

import numpy as np

from megatron_hecate.plan import World
from megatron_hecate.plan.cost import SCATTER_FROM, Traffic


def no_traffic(num_ranks: int) -> Traffic:
    return Traffic(*(np.zeros(num_ranks) for _ in range(4)))


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
        arrives = np.flatnonzero(active & (node[source] != k))  # experts that enter this node from another
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


def gather_shards(held: np.ndarray, world: World) -> Traffic:
    """Chunks cut over all ranks: a holder gets one share from every rank. ``held``: [E, R] bool."""
    node = np.asarray(world.node)
    same = (node[:, None] == node[None, :]) & ~np.eye(len(node), dtype=bool)
    other = node[:, None] != node[None, :]
    chunks = held.sum(axis=0) / len(node)
    return Traffic(same @ chunks, same.sum(axis=0) * chunks, other @ chunks, other.sum(axis=0) * chunks)


def backwards(traffic: Traffic) -> Traffic:
    """The same chunks on their way back."""
    return Traffic(traffic.intra_in, traffic.intra_out, traffic.inter_in, traffic.inter_out)


def add(*weighted: tuple[Traffic, float]) -> Traffic:
    """Sum of traffics, each times its weight (bytes per chunk, say)."""
    return Traffic(
        *(
            sum(getattr(traffic, way) * weight for traffic, weight in weighted)
            for way in ("intra_out", "intra_in", "inter_out", "inter_in")
        )
    )
