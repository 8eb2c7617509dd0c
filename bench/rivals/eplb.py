"""EPLB-style periodic replication (DeepSeek's expert-parallel load balancer, public repository)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megatron_hecate.plan import Placement
from rivals.planner import INTERVAL, Resident, from_holders
from rivals.split import Quotas, even_split


def balanced_packing(weight: np.ndarray, num_packs: int) -> np.ndarray:
    """Pack n objects into packs of n / ``num_packs``, heaviest first into the lightest with room.

    Args:
        weight: weight of each object, [n].
        num_packs: number of packs.

    Returns:
        Pack of each object, [n].
    """
    pack = np.empty(len(weight), dtype=int)
    total = np.zeros(num_packs)
    room = np.full(num_packs, len(weight) // num_packs)
    for i in np.argsort(-weight, kind="stable"):
        pack[i] = np.where(room > 0, total, np.inf).argmin()
        total[pack[i]] += weight[i]
        room[pack[i]] -= 1
    return pack


def replicate_experts(weight: np.ndarray, num_physical: int, *, most: int) -> np.ndarray:
    """Distribute ``num_physical`` replicas, each to the expert with the highest load per replica.

    Args:
        weight: load of each expert, [n].
        num_physical: total number of replicas, homes included.
        most: most replicas of an expert.

    Returns:
        Replicas of each expert, [n].
    """
    count = np.ones(len(weight), dtype=int)
    for _ in range(num_physical - len(weight)):
        count[np.where(count < most, weight / count, -1).argmax()] += 1
    return count


class EPLB(Resident):
    """Planner that packs experts to nodes and their replicas to ranks, every 25 steps.

    Within each node, redundant replicas are added to the most loaded experts.

    All steps use the mean load since the last plan; tokens are split evenly among replicas. EPLB is
    made for inference; in training, replicas stay and all-reduce their gradients. Decided here:
    every expert is its own group; an expert has at most one replica on a rank (two would only share
    tokens on that rank), so a replica is left out if the only rank with room already has one; and a
    home stays on its rank as long as the rank holds the expert.
    """

    name = "eplb"
    when = f"every {INTERVAL}"

    def replan(self, history: Sequence[np.ndarray], now: Placement) -> Placement:
        if not history or len(history) % INTERVAL:
            return now
        load = np.mean([step.sum(axis=0) for step in history[-INTERVAL:]], axis=0)
        node = np.asarray(self.setting.world.node)
        nodes = np.unique(node)
        # Every node gets the same number of experts, then its own redundant replicas.
        node_of = balanced_packing(load, len(nodes))
        holders = np.zeros((len(load), len(node)), dtype=bool)
        for k, name in enumerate(nodes):
            experts = np.flatnonzero(node_of == k)
            ranks = np.flatnonzero(node == name)
            num_physical = len(experts) + self.setting.slots * len(ranks)
            count = replicate_experts(load[experts], num_physical, most=len(ranks))
            weight = np.repeat(load[experts] / count, count)
            _pack(np.repeat(experts, count), weight, ranks, holders)
        return from_holders(holders, now.home)

    def split(self, load: np.ndarray, placement: Placement) -> Quotas:
        return even_split(load, placement, self.setting.world, nearest="any")


def _pack(replica: np.ndarray, weight: np.ndarray, ranks: np.ndarray, holders: np.ndarray) -> None:
    """Pack replicas to the ranks of a node, heaviest first to the lightest rank with room.

    Args:
        replica: expert of each replica, [n].
        weight: load of each replica, [n].
        ranks: ranks of the node.
        holders: holders of each expert, [E, R] bool; updated.
    """
    total = np.zeros(len(ranks))
    room = np.full(len(ranks), len(replica) // len(ranks))
    for i in np.argsort(-weight, kind="stable"):
        possible = (room > 0) & ~holders[replica[i], ranks]
        if not possible.any():
            continue
        pack = int(np.where(possible, total, np.inf).argmin())
        holders[replica[i], ranks[pack]] = True
        total[pack] += weight[i]
        room[pack] -= 1
