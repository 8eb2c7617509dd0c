"""Planning of placements: numpy in, frozen plans out.

The package uses neither ``torch.distributed`` nor Megatron nor a clock: equal input gives the same
plan on every rank.
The modules, in the order of an iteration:

| module | task |
|---|---|
| `world` | topology: the node of every rank, and the speed of links and cores |
| `placement` | data structure of a placement: homes, replicas and physical slots |
| `cost` | cost model of replicas, in tokens |
| `replicas` | before the gate, from a forecast: number and choice of replicas |
| `search` | greedy fill of the slots, and the cost of a plan |
| `late` | after the gate, from true loads: replicas to add or overwrite; also a local search |
| `maxflow` | smallest possible largest rank load |
| `compiled` | compilation of functions by numba, and the cache of their machine code |

The holder of each token is chosen on the device, in `routing`.
"""

from collections.abc import Callable

import numpy as np

from megatron_hecate.plan.compiled import in_turn
from megatron_hecate.plan.cost import CopyCost, LayerShape, load_limit, worst_padding
from megatron_hecate.plan.late import add_late_replicas
from megatron_hecate.plan.maxflow import largest_load
from megatron_hecate.plan.placement import EMPTY, Placement
from megatron_hecate.plan.replicas import plan_replicas
from megatron_hecate.plan.world import CPU, H100, Link, Speeds, World

__all__ = [
    "CPU",
    "EMPTY",
    "H100",
    "CopyCost",
    "LayerShape",
    "Link",
    "Placement",
    "Speeds",
    "World",
    "add_late_replicas",
    "compile_planner",
    "largest_load",
    "load_limit",
    "plan_replicas",
    "worst_padding",
]


def compile_planner(notice: Callable[[], None] = lambda: None) -> None:
    """Compile the functions of the planner by planning one small layer.

    Afterwards no iteration waits for a compiler.

    Args:
        notice: called first if code is not cached, so that compiling takes seconds.
    """
    world = World(node=(0, 0, 1, 1))
    homes = Placement.initial(8, 4, num_slots=1)
    load = np.array([90, 1, 30, 1, 5, 0, 2, 0])
    cost = CopyCost(near=1.0, far=1.0, crossing=1.0)
    with in_turn(notice):
        placement = plan_replicas(load, homes, world, cost=cost, limit=1.0)
        largest_load(load, placement)
        add_late_replicas(load, homes, world, cost=cost, max_copies=2, across_nodes=True)
