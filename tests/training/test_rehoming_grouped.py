"""Grouped experts change homes, computed in bf16 and fp8, and with parameters that are kept in fp8 and fp4.

Oracle: unconverted Megatron on the same ranks: bit for bit without replicas, with the optimizer's state; within a
tolerance with them (`training_with_moves`). What is compiled in TransformerEngine is torch here, as in
`test_quantized`, and only weights are quantized.
"""

from __future__ import annotations

from typing import Any

import pytest
import quantized
from ranks import ranks
from training_with_moves import params

pytestmark = pytest.mark.newest
SHARDED = dict(distributed_optimizer=True, overlap=True)
LAYER = dict(lifetime="layer")
Layout = quantized.Layout
COMPUTED: dict[str, Layout] = {
    "mxfp8": (2, "mxfp8", SHARDED, {}, {}),
    "tensorwise-layer": (2, "tensorwise", {}, {}, LAYER),
    "blockwise": (2, "blockwise", {}, {}, {}),
    "nvfp4": (2, "nvfp4", {}, {}, {}),
    "delayed": (2, "mxfp8", dict(accumulate=4, **SHARDED), quantized.DELAYED, {}),
}
STORED: dict[str, Layout] = {
    "mxfp8": (2, "mxfp8", {}, {}, {}),
    "mxfp8-distopt-overlap": (2, "mxfp8", SHARDED, {}, LAYER),
    "mxfp8-edp2-distopt-overlap": (4, "mxfp8", SHARDED, {}, {}),
    "tensorwise": (2, "tensorwise", {}, {}, {}),
    "tensorwise-blackwell": (2, "tensorwise-blackwell", {}, {}, {}),
    "tensorwise-edp2-distopt-overlap": (4, "tensorwise", SHARDED, {}, {}),
    "blockwise": (2, "blockwise", {}, {}, dict(transport="nvlink")),
    "blockwise-edp2-distopt-overlap": (4, "blockwise", SHARDED, {}, LAYER),
    "nvfp4": (2, "nvfp4", {}, {}, {}),
}


@pytest.mark.parametrize("name", params(COMPUTED, 2))
@ranks(2, preload=lambda name: quantized.packages(COMPUTED[name][1]))
def test_computed_in_fp8(name: str) -> None:
    _compare(COMPUTED[name])


@pytest.mark.parametrize("name", params(STORED, 2))
@ranks(2, preload=lambda name: quantized.packages(STORED[name][1]))
def test_quantized_parameters_of_two_ranks(name: str) -> None:
    _compare(STORED[name], stored=True)


@pytest.mark.parametrize("name", params(STORED, 4))
@ranks(4, preload=lambda name: quantized.packages(STORED[name][1]))
def test_quantized_parameters_of_four_ranks(name: str) -> None:
    _compare(STORED[name], stored=True)


def _compare(layout: Layout, **of_case: Any) -> None:
    case = quantized.case_of(layout, **of_case)
    import training_with_moves

    training_with_moves.compare(
        case, prepare=quantized.hook_of(None), tolerance=1e-2 if case.bf16 else 1e-5, **layout[4]
    )


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
    training_with_moves.compare(case, repeat=True, lifetime="layer")
