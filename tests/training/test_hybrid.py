"""Megatron's hybrid models (Nemotron's), where attention and experts are layers of their own. Oracle: the unconverted
model on the same ranks and data. Mamba layers need a GPU; the pattern here has attention (``*``) and experts (``E``).
"""

from __future__ import annotations

from typing import Any

import pytest
from ranks import ranks

PATTERN, PREDICTION = "*EE*E", "*EEE"  # three layers of experts share two buffers


def install() -> None:
    """`tiny_gpt` builds hybrid models."""
    import tiny_gpt
    from cpu_spec import SequenceParallelNorm
    from megatron.core.models.hybrid import hybrid_block
    from megatron.core.models.hybrid.hybrid_model import HybridModel
    from megatron.core.transformer import multi_token_prediction as mtp
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.transformer_layer import (
        MoETransformerLayer,
        TransformerLayer,
        TransformerLayerSubmodules,
    )

    hybrid_block.TENorm = SequenceParallelNorm

    def build(config: Any, spec: Any, **arguments: Any) -> HybridModel:
        parts = spec.layer_specs[0].submodules
        attention = TransformerLayerSubmodules(
            input_layernorm=parts.input_layernorm,
            self_attention=parts.self_attention,
            self_attn_bda=parts.self_attn_bda,
        )
        experts = TransformerLayerSubmodules(
            pre_mlp_layernorm=parts.pre_mlp_layernorm, mlp=parts.mlp, mlp_bda=parts.mlp_bda
        )
        submodules = hybrid_block.HybridStackSubmodules(
            attention_layer=ModuleSpec(TransformerLayer, submodules=attention),
            moe_layer=ModuleSpec(MoETransformerLayer, submodules=experts),
        )
        pattern = PATTERN
        if block := arguments.pop("mtp_block_spec", None):
            pattern += f"/{PREDICTION}" * config.mtp_num_layers
            submodules.mtp_block_spec = ModuleSpec(mtp.MultiTokenPredictionBlock, submodules=block)
        stack = ModuleSpec(hybrid_block.HybridStack, submodules=submodules)
        return HybridModel(config, stack, hybrid_layer_pattern=pattern, **arguments)

    tiny_gpt.GPTModel = build


@pytest.mark.newest
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("lifetime", ["iteration", "microbatch", "layer"])
@ranks(2)
def test_multi_token_prediction_by_one_repeated_layer(lifetime: str, recompute: bool) -> None:
    install()
    import tiny_gpt
    from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionBlock

    settings = dict(num_layers=5, mtp_num_layers=2, mtp_use_repeated_layer=True, mtp_loss_scaling_factor=0.3)
    if recompute:
        settings |= dict(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)
    case = tiny_gpt.Case(accumulate=2, settings=tuple(settings.items()))
    tiny_gpt.initialize(case)
    stock = tiny_gpt.train(case)
    assert any(isinstance(module, MultiTokenPredictionBlock) for module in stock.chunks[0].modules())
    ours = tiny_gpt.train(case, hook=tiny_gpt.fssdp_hook(lifetime=lifetime))
    tiny_gpt.assert_trained_alike(stock, ours)
    assert [layer.fssdp.parts.passes for layer in tiny_gpt.moe_layers(ours.chunks)] == [1, 1, 1, 2, 2, 2]
