"""LAER-MoE's re-layout of fully sharded experts (arXiv 2602.11686)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megatron_hecate.offline.traffic import Traffic, backwards, no_traffic
from megatron_hecate.plan import Placement, World
from rivals.planner import Moves, Planner, Setting, from_holders
from rivals.split import Quotas, even_split


class LAER(Planner):
    """Every expert is cut over all ranks; each step every rank restores C of them, chosen from the last step's load.

    Replicas: each expert one per node where that fits, else one; further ones to the highest load per replica, one at
    a time up to one per node, from there one on every node at once. Layout: replicas by load, each to the node with
    fewest replicas of its expert, then to the least loaded rank with room. Tokens: evenly among the holders on their
    node, else among all. Decided here: C = homes + slots, the memory that everyone gets; at most one replica of an
    expert per rank; no random perturbations of the counts; before the first load, plain expert parallelism.

    There is no home, so all C experts travel in every step, from all ranks, and their gradients back; ``home`` in its
    placements is a name for one holder and owns nothing.
    """

    name, when, lifetime = "laer", "history", "layer"

    @classmethod
    def memory(cls, setting: Setting) -> dict[str, int | str]:
        """Beside its shard, which is as large as homes: all C experts of two layers."""
        return dict(slots=setting.homes_per_rank + setting.slots, lifetime=cls.lifetime)

    def place(self, history: Sequence[np.ndarray]) -> Placement:
        homes = self.setting.homes
        if not history:
            return homes
        load = history[-1].sum(axis=0).astype(float)
        world = self.setting.world
        capacity = self.setting.homes_per_rank + self.setting.slots
        return from_holders(
            _lay_out(load, _replicas(load, world, capacity), self.setting), homes.home
        )

    def split(self, load: np.ndarray, placement: Placement) -> Quotas:
        return even_split(load, placement, self.setting.world, nearest="node")

    def moves(self, placed: Placement, final: Placement) -> Moves:
        none = no_traffic(self.setting.num_ranks)
        early = gather_shards(placed.holders, self.setting.world)
        return Moves(early=early, late=none, grads=backwards(early), state=none)


def _replicas(load: np.ndarray, world: World, capacity: int) -> np.ndarray:
    """[E] replicas of each expert, at most one per rank and ``num_ranks * capacity`` in all."""
    total, num_nodes = world.num_ranks * capacity, world.num_nodes
    count = np.full(len(load), num_nodes if num_nodes * len(load) <= total else 1)
    open_ = np.ones(len(load), dtype=bool)
    while count.sum() < total and open_.any():
        e = int(np.where(open_, load / count, -1).argmax())
        more = num_nodes if count[e] >= num_nodes else 1
        if count[e] + more > world.num_ranks or count.sum() + more > total:
            open_[e] = False
        else:
            count[e] += more
    return count


def _lay_out(load: np.ndarray, count: np.ndarray, setting: Setting) -> np.ndarray:
    """[E, R] bool: who restores which expert. A replica whose only room is beside another one is left out."""
    world, capacity = setting.world, setting.homes_per_rank + setting.slots
    node = np.unique(np.asarray(world.node), return_inverse=True)[1]
    holders = np.zeros((len(load), len(node)), dtype=bool)
    on_node = np.zeros((len(load), world.num_nodes), dtype=int)  # replicas of an expert on a node
    rank_load, room = np.zeros(len(node)), np.full(len(node), capacity)
    replica = np.repeat(np.arange(len(load)), count)
    weight = (load / count)[replica]
    for i in np.argsort(-weight, kind="stable").tolist():
        e = int(replica[i])
        possible = np.flatnonzero((room > 0) & ~holders[e])
        if not len(possible):
            continue
        near = on_node[e, node[possible]]
        possible = possible[near == near.min()]
        rank = int(possible[rank_load[possible].argmin()])
        holders[e, rank] = True
        on_node[e, node[rank]] += 1
        rank_load[rank] += weight[i]
        room[rank] -= 1
    return holders


def gather_shards(held: np.ndarray, world: World) -> Traffic:
    """Chunks cut over all ranks: a holder gets one share from every rank. ``held``: [E, R] bool."""
    node = np.asarray(world.node)
    same = (node[:, None] == node[None, :]) & ~np.eye(len(node), dtype=bool)
    other = node[:, None] != node[None, :]
    chunks = held.sum(axis=0) / len(node)
    return Traffic(
        same @ chunks, same.sum(axis=0) * chunks, other @ chunks, other.sum(axis=0) * chunks
    )
