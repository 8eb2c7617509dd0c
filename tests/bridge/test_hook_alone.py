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
        (
            ("dist.use_torch_fsdp2=true",),
            r"use_torch_fsdp2=True: .* set dist.use_torch_fsdp2=false or leave out",
        ),
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
    from bridge_on_cpu import recipe
    from megatron.bridge.peft.lora import LoRA

    from megatron_hecate import HecateConfig, fssdp

    config = recipe()
    config.model.register_pre_wrap_hook(
        lambda chunks: LoRA(target_modules=["linear_fc1"])(chunks, training=True)
    )
    config.model.register_pre_wrap_hook(fssdp(HecateConfig()))
    with pytest.raises(ValueError, match=r"peft='\w+': adapters wrap .* set its peft to None"):
        train(config)
