"""Replicas in layers that are not alike. Oracle: the same model without FSSDP; a literal message."""

from __future__ import annotations

import pytest
import tiny_gpt
import torch
from ranks import ranks

from megatron_hecate.replicas.buffers import LIFETIMES


def _narrow_second_layer(chunks: list) -> list:
    for expert in tiny_gpt.moe_layers(chunks)[1].experts.local_experts:
        first, second = expert.linear_fc1, expert.linear_fc2
        first.weight = torch.nn.Parameter(first.weight[:64].clone())
        second.weight = torch.nn.Parameter(second.weight[:, :32].clone())
        first.weight.allreduce = second.weight.allreduce = False  # as of other experts
    return chunks


@pytest.mark.parametrize("lifetime", LIFETIMES)
@ranks(2)
def test_layers_of_different_size_share_buffers(lifetime: str) -> None:
    case = tiny_gpt.initialized(accumulate=2, skew=4, settings=(("num_layers", 4),))
    stock = tiny_gpt.train(case, hook=_narrow_second_layer)
    hook = tiny_gpt.fssdp_hook(lifetime=lifetime)
    ours = tiny_gpt.train(case, hook=lambda chunks: hook(_narrow_second_layer(chunks)))
    tiny_gpt.assert_trained_alike(stock, ours)
    layers = tiny_gpt.moe_layers(ours.chunks)
    replicated = [bool(layer.fssdp.placement.num_replicas) for layer in layers]
    assert replicated[1] and sum(replicated) > 2


@ranks(2)
def test_parameters_that_cannot_be_one_chunk() -> None:
    """An expert that gets another dtype after the first step, on one rank."""
    case = tiny_gpt.initialized()
    run = tiny_gpt.train(case, steps=2, hook=tiny_gpt.fssdp_hook())
    weight = tiny_gpt.moe_layers(run.chunks)[0].experts.local_experts[1].linear_fc1.weight
    weight.data = weight.data.bfloat16()
    types = r"layer 1: expert parameters have dtypes \['torch.bfloat16', 'torch.float32'\].* keeps to torch.float32"
    with pytest.raises(ValueError, match=types):
        run.step(2)
