"""The hook as a provider's pre-wrap hook, without `megatron_hecate.bridge`: it refuses what Bridge would do next.

Oracle: literal messages.
"""

from __future__ import annotations

import pytest
from ranks import ranks
from recipe_runs import train


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("dist.use_torch_fsdp2=true",), r"use_torch_fsdp2=True: .* set dist.use_torch_fsdp2=false or leave out"),
        (
            ("dist.use_megatron_fsdp=true", "model.gradient_accumulation_fusion=false"),
            r"use_megatron_fsdp=True: .* set ddp.use_megatron_fsdp=false and dist.use_megatron_fsdp=false",
        ),
    ],
    ids=["FSDP2", "Megatron-FSDP"],
)
@ranks(2)
def test_wrappers(overrides: tuple[str, ...], message: str) -> None:
    from bridge_on_cpu import recipe

    from megatron_hecate import HecateConfig, fssdp

    config = recipe(*overrides)
    config.model.register_pre_wrap_hook(fssdp(HecateConfig()))
    with pytest.raises(ValueError, match="FSSDP cannot be switched on:\n.*" + message):
        train(config)


@ranks(2)
def test_adapters_of_experts() -> None:
    """Bridge's own adapter, put by hand where ``LoRA`` would put it: that asks for TransformerEngine's layers."""
    import torch
    from bridge_on_cpu import recipe
    from megatron.bridge.peft.lora_layers import LoRALinear

    from megatron_hecate import HecateConfig, fssdp

    def adapt(chunks: list) -> list:
        experts = chunks[0].decoder.layers[1].mlp.experts
        experts.linear_fc1 = LoRALinear(experts.linear_fc1, torch.nn.Identity())
        return chunks

    config = recipe()
    config.model.register_pre_wrap_hook(adapt)
    config.model.register_pre_wrap_hook(fssdp(HecateConfig()))
    with pytest.raises(ValueError, match="peft='LoRALinear': adapters wrap the linears of the experts; set peft=null"):
        train(config)
