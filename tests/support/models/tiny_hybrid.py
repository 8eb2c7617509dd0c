"""`tiny_gpt` as one of Megatron's hybrid models (Nemotron's), where attention and experts are layers of their own.

A pattern names the layers: attention (``*``), experts (``E``), Mamba (``M``). A Mamba layer is Megatron's own, but its
mixer, whose kernels need a GPU, is a running mean over the sequence.
"""

from __future__ import annotations

from typing import Any

import tiny_gpt
import torch
from cpu_spec import SequenceParallelNorm
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.hybrid import hybrid_block
from megatron.core.models.hybrid.hybrid_model import HybridModel
from megatron.core.ssm.mamba_layer import MambaLayer, MambaLayerSubmodules
from megatron.core.transformer import multi_token_prediction as mtp
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_layer import (
    MoETransformerLayer,
    TransformerLayer,
    TransformerLayerSubmodules,
)


class _RunningMean(MegatronModule):
    """Stands in for MambaMixer."""

    def __init__(self, config: Any, d_model: int, **_: Any) -> None:
        super().__init__(config)
        self.inner = torch.nn.Linear(d_model, d_model, bias=False, dtype=config.params_dtype)

    def forward(self, hidden: torch.Tensor, **_: Any) -> tuple[torch.Tensor, None]:
        count = torch.arange(1, len(hidden) + 1, device=hidden.device).view(-1, 1, 1)
        return self.inner(hidden).cumsum(dim=0) / count, None


def install(pattern: str, prediction: str = "") -> None:
    """From now on `tiny_gpt` builds hybrid models of ``pattern``, with ``prediction`` in multi-token prediction."""
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
        mamba = MambaLayerSubmodules(
            norm=parts.input_layernorm,
            mixer=ModuleSpec(_RunningMean),
            mamba_bda=get_bias_dropout_add,
        )
        submodules = hybrid_block.HybridStackSubmodules(
            attention_layer=ModuleSpec(TransformerLayer, submodules=attention),
            moe_layer=ModuleSpec(MoETransformerLayer, submodules=experts),
            mamba_layer=ModuleSpec(MambaLayer, submodules=mamba),
        )
        layers = pattern
        if block := arguments.pop("mtp_block_spec", None):
            layers += f"/{prediction}" * config.mtp_num_layers
            submodules.mtp_block_spec = ModuleSpec(mtp.MultiTokenPredictionBlock, submodules=block)
        stack = ModuleSpec(hybrid_block.HybridStack, submodules=submodules)
        return HybridModel(config, stack, hybrid_layer_pattern=layers, **arguments)

    tiny_gpt.GPTModel = build
