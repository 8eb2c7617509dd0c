"""Pure planning: numpy in, frozen plans out.

Nothing here knows of ``torch.distributed``, Megatron or the clock, so the same input gives the same plan on every rank
and a plan can be tested, replayed and printed without a cluster.

| module | decides |
|---|---|
| `world` | which ranks share a node, and how fast links and cores are |
| `placement` | what a placement is: homes, guests and physical slots |
| `shard` | which rank is home to which expert, over all layers of a pipeline stage (rarely) |
| `materialize` | which experts become guests, and where (tier 1, from a forecast) |
| `calibrate` | which guests to add or replace after the gate (tier 2, from the true loads) |
| `route` | how many tokens of each source go to each holder (from the true loads) |
| `cost` | what all that costs, in seconds |
| `valid` | what every plan must satisfy |

The rest is the compiled core: tokens as a flow through the graph of holders (`graph`, `links`, `flow`, `origin`,
`nearest`, `assign`), the search for guests through which they can flow (`best` of `search`, `pair`, `swap`) and, where
guests are alone on their ranks, for guests that do so under many loads (`forest`, `regraft`).
"""

from megatron_hecate.plan.calibrate import calibrate
from megatron_hecate.plan.cost import LayerShape
from megatron_hecate.plan.materialize import algorithm1, plan_guests
from megatron_hecate.plan.placement import Placement
from megatron_hecate.plan.ready import compile_planning
from megatron_hecate.plan.route import Quotas, largest_load, split_quotas
from megatron_hecate.plan.shard import moves, place_homes, plan_homes
from megatron_hecate.plan.valid import assert_valid, fingerprint
from megatron_hecate.plan.world import Link, Speeds, World

__all__ = [
    "LayerShape",
    "Link",
    "Placement",
    "Quotas",
    "Speeds",
    "World",
    "algorithm1",
    "assert_valid",
    "calibrate",
    "compile_planning",
    "fingerprint",
    "largest_load",
    "moves",
    "place_homes",
    "plan_guests",
    "plan_homes",
    "split_quotas",
]
