"""EPLB-style periodic replication (DeepSeek's expert-parallel load balancer, public repository)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megatron_hecate.plan import Placement
from rivals.planner import INTERVAL, Resident, from_holders
from rivals.split import Quotas, even_split


def balanced_packing(weight: np.ndarray, num_packs: int) -> np.ndarray:
    """[n] pack of each object: heaviest first into the lightest pack that has room; every pack gets n / num_packs."""
    pack, total, room = (
        np.empty(len(weight), dtype=int),
        np.zeros(num_packs),
        np.full(num_packs, len(weight) // num_packs),
    )
    for i in np.argsort(-weight, kind="stable"):
        pack[i] = np.where(room > 0, total, np.inf).argmin()
        total[pack[i]] += weight[i]
        room[pack[i]] -= 1
    return pack


def replicate_experts(weight: np.ndarray, num_physical: int, *, most: int) -> np.ndarray:
    """[n] replicas of each expert, ``num_physical`` in all: each further one to the highest load per replica."""
    count = np.ones(len(weight), dtype=int)
    for _ in range(num_physical - len(weight)):
        count[np.where(count < most, weight / count, -1).argmax()] += 1
    return count


class EPLB(Resident):
    """Every 25 steps: experts to nodes, redundant experts within each node, replicas to its ranks, all by load.

    From the mean load since the last plan; tokens split evenly among replicas. EPLB is made for inference; in training
    replicas stay and all-reduce their gradients. Decided here: experts form no groups (each is its own), an expert has
    at most one replica on a rank (two would share its tokens with themselves), so a replica whose only room is beside
    another one is left out, and a home stays where it is if its rank still holds the expert.
    """

    name, when = "eplb", f"every {INTERVAL}"

    def replan(self, history: Sequence[np.ndarray], now: Placement) -> Placement:
        if not history or len(history) % INTERVAL:
            return now
        load = np.mean([step.sum(axis=0) for step in history[-INTERVAL:]], axis=0)
        node = np.asarray(self.setting.world.node)
        nodes = np.unique(node)
        node_of = balanced_packing(load, len(nodes))
        holders = np.zeros((len(load), len(node)), dtype=bool)
        for k, name in enumerate(nodes):
            experts, ranks = np.flatnonzero(node_of == k), np.flatnonzero(node == name)
            num_physical = len(experts) + self.setting.slots * len(ranks)
            count = replicate_experts(load[experts], num_physical, most=len(ranks))
            _pack(
                np.repeat(experts, count), np.repeat(load[experts] / count, count), ranks, holders
            )
        return from_holders(holders, now.home)

    def split(self, load: np.ndarray, placement: Placement) -> Quotas:
        return even_split(load, placement, self.setting.world, nearest="any")


def _pack(replica: np.ndarray, weight: np.ndarray, ranks: np.ndarray, holders: np.ndarray) -> None:
    """Mark in ``holders`` [E, R] who gets which ``replica`` [n]: heaviest first to the lightest rank with room."""
    total, room = np.zeros(len(ranks)), np.full(len(ranks), len(replica) // len(ranks))
    for i in np.argsort(-weight, kind="stable"):
        possible = (room > 0) & ~holders[replica[i], ranks]
        if not possible.any():
            continue
        pack = int(np.where(possible, total, np.inf).argmin())
        holders[replica[i], ranks[pack]] = True
        total[pack] += weight[i]
        room[pack] -= 1
