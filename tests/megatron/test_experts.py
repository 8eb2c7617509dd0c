"""Replicas under Megatron's own gradient-accumulation fusion. Oracle: the same model without FSSDP."""

from __future__ import annotations

import pytest
import tiny_gpt
from ranks import ranks


@pytest.mark.parametrize(
    ("overlap", "calculator"),
    [
        (False, True),
        (True, False),
        pytest.param(False, False, marks=pytest.mark.slow),
        pytest.param(True, True, marks=pytest.mark.slow),
    ],
)
@ranks(2)
def test_gradient_accumulation_fusion(overlap: bool, calculator: bool) -> None:
    """The default on GPUs: GEMMs add weight gradients into ``main_grad``, autograd carries a placeholder."""
    from megatron.core import num_microbatches_calculator

    settings = (("gradient_accumulation_fusion", True), ("add_bias_linear", True))
    tiny_gpt.install_fused_wgrad()
    case = tiny_gpt.initialized(
        accumulate=3, overlap=overlap, distributed_optimizer=overlap, settings=settings
    )
    if not calculator:
        num_microbatches_calculator.unset_num_microbatches_calculator()
    stock = tiny_gpt.train(case)
    ours = tiny_gpt.train(case, hook=tiny_gpt.fssdp_hook())
    assert all(
        any(layer.experts.physical.layout.fused) for layer in tiny_gpt.moe_layers(ours.chunks)
    )
    tiny_gpt.assert_trained_alike(stock, ours)
