"""Calls of Python and of C functions that a layer adds to the main thread, forward and backward, beyond stock Megatron.

Oracle: the interpreter's own events (``sys.setprofile``). Bounds are a little above what was counted when they were
set: who adds calls to every microbatch finds out here, who saves some lowers them. `bench/host.py` has times.
"""

from __future__ import annotations

from typing import Any

import pytest
import tiny_gpt
import torch.distributed as dist
from ranks import ranks

from megatron_hecate import HecateConfig, fssdp

pytestmark = pytest.mark.newest

LAYERS, MICROBATCHES = 2, 4
# expert modules: calls that FSSDP may add per layer and microbatch without replicas; and with them on rank 0, whose
# experts the replicas are of, and on rank 1, whose two slots they fill
MOST = {"TEGroupedMLP": (166, (340, 590)), "SequentialMLP": (170, (365, 800))}


@pytest.mark.parametrize("experts", MOST)
@ranks(2, preload="te")
def test_few_calls_are_added(experts: str) -> None:
    from host_calls import Phases, use_plain_factories

    use_plain_factories()
    tiny_gpt.install_fused_wgrad()
    grouped = experts == "TEGroupedMLP"
    settings = dict(hidden_size=16, moe_ffn_hidden_size=16, gradient_accumulation_fusion=grouped)
    case = tiny_gpt.initialized(
        experts=16, accumulate=MICROBATCHES, skew=2.0, grouped=grouped, settings=settings
    )
    phases = Phases()
    hooks: tuple[Any, ...] = (None, fssdp(HecateConfig(slots=2)), tiny_gpt.fssdp_hook())
    calls, replicas = [], []
    for hook in hooks:
        trained = tiny_gpt.train(case, steps=3, hook=hook)
        dist.barrier()
        phases.clear()
        phases.counts = True
        trained.step(3)
        phases.counts = False
        calls.append(phases.calls.total() / LAYERS / MICROBATCHES)
        replicas.append(trained.replicas)
    assert replicas[:2] == [0, 0] and replicas[2] >= LAYERS
    stock, *ours = calls
    added = [count - stock for count in ours]
    assert stock > 1000 and added[0] > 0, (stock, added)
    without, with_replicas = MOST[experts]
    for count, most in zip(added, (without, with_replicas[dist.get_rank()]), strict=True):
        assert count <= most, (
            f"{experts}: {added} calls are added to {stock:.0f}, {MOST[experts]} may be"
        )
    dist.barrier()
