"""Pure planning: numpy in, frozen plans out.

Nothing here knows of ``torch.distributed``, Megatron or the clock, so the same input gives the same plan on every rank
and a plan can be tested, replayed and printed without a cluster.

| module | decides |
|---|---|
| `world` | which ranks share a node |
| `placement` | what a placement is: homes, guests and physical slots |
| `materialize` | which experts become guests, and where (tier 1, from a forecast) |
| `route` | how many tokens of each source go to each holder (from the true loads) |
"""

from megatron_hecate.plan.materialize import plan_guests
from megatron_hecate.plan.placement import Placement
from megatron_hecate.plan.route import Quotas, split_quotas
from megatron_hecate.plan.world import World

__all__ = ["Placement", "Quotas", "World", "plan_guests", "split_quotas"]
