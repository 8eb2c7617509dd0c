"""Algorithm 2 of the Hecate paper (arXiv 2502.02581), heterogeneous sharding, as printed. No planner of one layer:
`bench/homes.py` compares it."""

from __future__ import annotations

import numpy as np

from megatron_hecate.plan import EMPTY, Placement, World


def algorithm2(loads: np.ndarray, world: World, *, overlap_degree: int) -> np.ndarray:
    """[L, E] the rank that owns each expert: L * E / R of them for every rank, any number of them in a layer.

    The ``overlap_degree`` hottest experts of each layer count as overloaded: they get replicas wherever they live, and
    fill the room that is left in the end. Before them come the others, layer by layer, the layer with the largest load
    of such an expert first, and in each the largest load first: to the least loaded node, and on it to the least loaded
    rank; of equals to the one with less room.

    The paper leaves some cases open. Decided here: load is that of the expert's own layer; a node's is its ranks'
    mean; where no rank of a node has room, the next node is taken; overloaded experts are placed by load, by the same
    rule; the last ties go to the lowest index.

    Args:
        loads: [L, E] tokens per layer and expert.

    Raises:
        ValueError: if homes cannot be shared evenly.
    """
    num_layers, num_experts = loads.shape
    room, odd = np.divmod(num_layers * num_experts, world.num_ranks)
    if odd:
        raise ValueError(
            f"{num_layers} x {num_experts} experts are not divisible by {world.num_ranks} ranks"
        )
    free, node = np.full(world.num_ranks, room), world.node_index
    home, placed = np.full(loads.shape, EMPTY), np.zeros((num_layers, world.num_ranks))
    ranked = np.argsort(-loads, axis=1, kind="stable")
    cold, hot = ranked[:, overlap_degree:], ranked[:, :overlap_degree]
    largest = loads[np.arange(num_layers), cold[:, 0]] if cold.size else np.zeros(num_layers)
    layers = np.argsort(-largest, kind="stable").tolist()
    queue = [(i, int(e)) for part in (cold, hot) for i in layers for e in part[i]]
    for layer, expert in queue:
        by_node = np.bincount(node, weights=placed[layer]) / np.bincount(node)
        ranks = [r for r in range(world.num_ranks) if free[r]]
        rooms = np.bincount(node, weights=free)
        chosen = min(
            ranks,
            key=lambda r: (by_node[node[r]], rooms[node[r]], node[r], placed[layer, r], free[r], r),
        )
        home[layer, expert] = chosen
        placed[layer, chosen] += loads[layer, expert]
        free[chosen] -= 1
    return home


def with_homes(home: np.ndarray, num_ranks: int, *, num_slots: int) -> Placement:
    """Homes of one layer, [E] ranks, in any numbers, and room for ``num_slots`` replicas on the rank with most."""
    count = np.bincount(home, minlength=num_ranks)
    table = np.full((num_ranks, int(count.max()) + num_slots), EMPTY)
    for rank in range(num_ranks):
        table[rank, : count[rank]] = np.flatnonzero(home == rank)
    return Placement(home=home, table=table)
