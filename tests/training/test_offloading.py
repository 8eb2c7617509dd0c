"""Megatron's fine-grained activation offloading of experts, over TransformerEngine's own Python (`te_on_cpu`).

Oracle: the same model without FSSDP. "GPU" and host are both the CPU here: what is saved for the backward goes through
Megatron's own offloading all the same, as copies, and the originals are released. Streams and overlap need a GPU.
"""

from __future__ import annotations

from typing import Any

import operators_on_cpu
import pytest
import tiny_gpt
import torch
from ranks import ranks


@pytest.mark.newest
@pytest.mark.parametrize(
    "modules",
    [pytest.param(["expert_fc1", "moe_act"], marks=pytest.mark.slow), ["fused_group_mlp"]],
)
@ranks(2, preload="te")
def test_offloaded_experts(modules: list[str]) -> None:
    operators_on_cpu.install()
    from megatron.core.pipeline_parallel import fine_grained_activation_offload as offload

    tiny_gpt.install_fused_wgrad()  # for the attention
    settings = dict(
        fine_grained_activation_offloading=True,
        offload_modules=modules,
        use_transformer_engine_op_fuser="fused_group_mlp" in modules,
        min_offloaded_tensor_size=1,
        gradient_accumulation_fusion=True,
        num_layers=4,
        hidden_size=136,
        moe_ffn_hidden_size=72,
    )
    case = tiny_gpt.initialized(grouped=True, accumulate=2, settings=settings)
    handler = offload.ChunkOffloadHandler
    handler._can_manage_tensor_for_offload = staticmethod(
        lambda tensor: not isinstance(tensor, torch.nn.Parameter)
    )
    shapes: list[tuple[int, ...]] = []
    copy_away = handler.offload

    def noted(self: Any, tensor: torch.Tensor, *args: Any, **options: Any) -> Any:
        shapes.append(tuple(tensor.shape))
        return copy_away(self, tensor, *args, **options)

    handler.offload = noted

    def train(hook: Any) -> Any:
        offload.PipelineOffloadManager.reset_instance()
        shapes.clear()
        return tiny_gpt.train(case, hook=hook)

    stock = train(None)
    saved = (128, 144 if "fused_group_mlp" in modules else 72)  # before the activation, or after it
    assert saved in shapes, "some rank computes all tokens of a layer"
    for lifetime in ("iteration", "layer"):
        ours = train(tiny_gpt.fssdp_hook(lifetime=lifetime))
        tiny_gpt.assert_trained_alike(stock, ours, lifetime)
        assert shapes and not {(144, 136), (136, 72)} & {*shapes}, "weights are not offloaded"
