"""Experts of static shapes, as a CUDA graph needs them: each computes all rows of HybridEP's budget, of which all but
its own are zeros, before and after. A grouped GEMM with counts on the device does the same with less work.
"""

from __future__ import annotations

import torch
from megatron.core.transformer.moe import token_dispatcher
from megatron.core.transformer.moe.experts import SequentialMLP
from torch import Tensor


def install() -> None:
    """Have ``SequentialMLP`` compute so from now on, over ``moe_expert_rank_capacity_factor``."""
    SequentialMLP.forward = _forward
    # Megatron rounds the budget up to this, which is 0 without fused operators
    token_dispatcher.get_align_size_for_quantization = lambda config: 1


def _forward(
    self: SequentialMLP,
    permuted_local_hidden_states: Tensor,
    tokens_per_expert: Tensor,
    permuted_probs: Tensor,
) -> tuple[Tensor, None]:
    rows, counts, probs = permuted_local_hidden_states, tokens_per_expert, permuted_probs
    index, total = torch.arange(len(rows)), torch.zeros_like(rows)
    for expert, count, end in zip(self.local_experts, counts, counts.cumsum(0), strict=True):
        is_own = (index >= end - count) & (index < end)
        output, _ = expert(rows.where(is_own[:, None], 0.0), probs.where(is_own, 0.0))
        total = total + output.where(is_own[:, None], 0.0)
    return total, None
