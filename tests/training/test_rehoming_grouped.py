"""Grouped experts change homes, in bf16 and with fused weight gradients; `test_layouts` has those in fp8 and fp4.

Oracle: unconverted Megatron on the same ranks: bit for bit without replicas, with the optimizer's state; within a
tolerance with them (`training_with_moves`). What is compiled in TransformerEngine is torch here.
"""

from __future__ import annotations

import pytest
from layouts import SHARDED
from ranks import ranks

pytestmark = pytest.mark.newest


@pytest.mark.slow
@ranks(2, preload="te")
def test_in_bf16_with_biases() -> None:
    import te_on_cpu

    te_on_cpu.install()
    import tiny_gpt
    import training_with_moves

    case = tiny_gpt.Case(
        grouped=True, bf16=True, accumulate=2, settings=(("add_bias_linear", True),), **SHARDED
    )
    tiny_gpt.initialize(case)
    training_with_moves.compare(case, tolerance=tiny_gpt.BF16_TOLERANCE)


@pytest.mark.parametrize("ep", [2, 4])
@pytest.mark.slow
@ranks(4, preload="te")
def test_fused_weight_gradients(ep: int) -> None:
    import te_on_cpu

    te_on_cpu.install()
    import tiny_gpt
    import training_with_moves

    tiny_gpt.install_fused_wgrad()
    fused = (("gradient_accumulation_fusion", True),)
    case = tiny_gpt.Case(ep=ep, grouped=True, accumulate=2, settings=fused, **SHARDED)
    tiny_gpt.initialize(case)
    training_with_moves.compare(case, lifetime="layer")
