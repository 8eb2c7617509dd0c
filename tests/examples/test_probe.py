"""What the demo's probe counts. Oracle: the placement, and the experts' own parameters."""

from __future__ import annotations

import probe
import tiny_gpt
import torch.distributed as dist
from ranks import ranks


@ranks(2)
def test_bytes_of_replicas() -> None:
    run = tiny_gpt.train(tiny_gpt.initialized(skew=2.5), hook=tiny_gpt.fssdp_hook())
    assert run.replicas > 0
    for layer in tiny_gpt.moe_layers(run.chunks):
        replicas = int(layer.fssdp.placement.is_replica[dist.get_rank()].sum())
        homes = list(layer.experts.parameters())
        each = sum(p.numel() for p in homes) // layer.experts.num_local_experts
        padded = -(-each * 4 // 256) * 256  # fp32, weights and gradients; copies are aligned
        assert probe._replica_bytes(layer) == replicas * 2 * padded
