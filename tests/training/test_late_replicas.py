"""Late replicas from other machines. Oracle: stock Megatron on the same ranks.

Plans before the gate are replaced by ones that are wrong on purpose, so that there is something to do after it.
`test_layouts` trains layouts with late replicas.
"""

from __future__ import annotations

import socket

import tiny_gpt
import torch.distributed as dist
from planners import coldest_experts, replace_planner
from ranks import ranks

from megatron_hecate.plan import Speeds
from megatron_hecate.record.metrics import layer_metrics


@ranks(4)
def test_late_replicas_come_from_other_machines_where_speeds_are_measured() -> None:
    """Every rank is a machine of its own, and copies cost nothing, whether that was measured or not."""
    from megatron_hecate.switch_on import convert

    socket.gethostname = lambda: f"machine {dist.get_rank()}"
    convert.CPU = Speeds.load(tiny_gpt.FREE)
    case = tiny_gpt.initialized(ep=4, accumulate=2)
    stock = tiny_gpt.train(case)
    replace_planner(coldest_experts)
    for speeds in (tiny_gpt.FREE, None):
        ours = tiny_gpt.train(case, hook=tiny_gpt.fssdp_hook(late_replicas=4, speeds=speeds))
        tiny_gpt.assert_trained_alike(stock, ours)
        metrics = layer_metrics(ours.chunks)
        assert all(m.late <= 4 and m.computed <= m.routed for m in metrics), metrics
        assert (sum(m.late for m in metrics) > 0) == (speeds is not None)
