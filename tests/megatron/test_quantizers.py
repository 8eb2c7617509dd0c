"""The stand-ins for TransformerEngine's compiled quantizers give its bytes.

Oracles: TE's own references in Python for NVFP4 and for one scale per tensor; for MXFP8 and square blocks, where it has
none, the formats' definitions, computed in another way.
"""

from __future__ import annotations

from typing import Any

import pytest
from ranks import ranks

pytestmark = pytest.mark.newest


def _install(packages: str) -> Any:
    import quantizers_on_cpu
    import te_on_cpu
    import torch

    te_on_cpu.install(packages=packages)
    quantizers_on_cpu.install()
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(160, 96, generator=generator) * torch.exp(
        2 * torch.randn(160, 1, generator=generator)
    )
    x[32:64, :32] = 0
    return x.to(torch.bfloat16)


@ranks(1, preload="te")
def test_nvfp4_and_one_scale_are_those_of_the_references() -> None:
    x = _install("te")
    import torch
    from transformer_engine.pytorch.custom_recipes.reference_current_scaling import (
        CurrentScalingQuantizerRef,
    )
    from transformer_engine.pytorch.custom_recipes.reference_nvfp4 import NVFP4QuantizerRef
    from transformer_engine.pytorch.custom_recipes.reference_utils import Fp4Formats
    from transformer_engine.pytorch.tensor.float8_tensor import Float8CurrentScalingQuantizer
    from transformer_engine.pytorch.tensor.nvfp4_tensor import NVFP4Quantizer

    rows, columns = x.shape
    for square, rotated in ((True, False), (False, False), (False, True)):
        tile = (16, 16) if square else (1, 16)
        ref = NVFP4QuantizerRef(Fp4Formats.E2M1, quant_tile_shape=tile, with_rht=rotated).quantize(
            x
        )
        own = NVFP4Quantizer(
            with_2d_quantization=square, with_rht=rotated, with_post_rht_amax=rotated
        )(x)
        assert torch.equal(own._rowwise_data, ref.data) and torch.equal(
            own._columnwise_data, ref.data_t
        )
        scales, scales_t = (
            s.view(torch.float8_e4m3fn) for s in (own._rowwise_scale_inv, own._columnwise_scale_inv)
        )
        assert torch.equal(scales[:rows, : columns // 16].float(), ref.scale.float())
        assert torch.equal(scales_t[:columns, : rows // 16].float(), ref.scale_t.float())
        assert torch.equal(own._amax_rowwise, ref.global_amax_row)
        assert torch.equal(own._amax_columnwise, ref.global_amax_col)
    import tex_on_cpu

    for number, dtype in (("kFloat8E4M3", torch.float8_e4m3fn), ("kFloat8E5M2", torch.float8_e5m2)):
        ref = CurrentScalingQuantizerRef(dtype).quantize(x)
        own = Float8CurrentScalingQuantizer(tex_on_cpu.DType[number], device="cpu")(x)
        assert torch.equal(own._data, ref.data.view(torch.uint8)) and torch.equal(
            own._scale_inv, ref.scale
        )
        assert torch.equal(own._transpose, ref.data_t.view(torch.uint8))


@ranks(1, preload="te-blackwell")
def test_mxfp8_is_the_format_of_the_standard() -> None:
    """A block of 32 has the smallest power of two with which its largest element is a number of the format, and each
    element is the nearest number."""
    x = _install("te-blackwell")
    import quantizers_on_cpu
    import tex_on_cpu
    import torch
    from transformer_engine.pytorch.tensor.mxfp8_tensor import MXFP8Quantizer

    own = MXFP8Quantizer(tex_on_cpu.DType.kFloat8E4M3)(x)
    numbers = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).double()
    numbers = numbers[numbers.isfinite()]
    sides = (
        (x.double(), own._rowwise_data, own._rowwise_scale_inv),
        (x.double().t(), own._columnwise_data.t(), own._columnwise_scale_inv.t()),
    )
    for values, data, scales in sides:
        blocks = values.unflatten(1, (-1, 32))
        powers = scales[: len(values), : blocks.shape[1]].long()
        assert torch.equal(powers == 0, blocks.abs().amax(-1) == 0)
        scale = torch.ldexp(torch.ones(()).double(), powers - 127)
        largest = blocks.abs().amax(-1) / scale
        assert ((largest <= 448) & ((largest > 224) | (powers == 0))).all()
        decoded = data.contiguous().view(torch.float8_e4m3fn).double().unflatten(1, (-1, 32))
        distance = (blocks / scale.unsqueeze(-1) - decoded).abs()
        nearest = (blocks / scale.unsqueeze(-1)).unsqueeze(-1).sub(numbers).abs().amin(-1)
        assert torch.equal(distance[powers > 0], nearest[powers > 0])
    for columnwise in (False, True):
        error = quantizers_on_cpu.decode(own, columnwise=columnwise) - x.double()
        assert error.norm() < 0.03 * x.double().norm()


@ranks(1, preload="te")
def test_blocks_have_the_scales_of_the_reference_and_te_decodes_them() -> None:
    x = _install("te")
    import quantizers_on_cpu
    import tex_on_cpu
    import torch
    from transformer_engine.pytorch.custom_recipes.reference_current_scaling import (
        CurrentScalingQuantizerRef,
    )
    from transformer_engine.pytorch.tensor.float8_blockwise_tensor import Float8BlockQuantizer

    for dim in (1, 2):
        make = Float8BlockQuantizer(
            tex_on_cpu.DType.kFloat8E4M3, rowwise=True, columnwise=True, block_scaling_dim=dim
        )
        own = make(x)
        rows = make.get_scale_shape(x.shape, columnwise=False)
        assert tuple(own._rowwise_scale_inv.shape) == rows
        assert tuple(own._columnwise_scale_inv.shape) == make.get_scale_shape(
            x.shape, columnwise=True
        )
        assert torch.equal(
            own.dequantize(dtype=torch.float32),
            quantizers_on_cpu.decode(own, columnwise=False).float(),
        )
        first = x[:128] if dim == 2 else x[:1]
        ref = CurrentScalingQuantizerRef(torch.float8_e4m3fn, pow_2_scales=True).quantize(first)
        assert torch.equal(own._rowwise_data[: len(first)], ref.data.view(torch.uint8))
        assert own._rowwise_scale_inv[0, 0] == ref.scale
        own.update_usage(rowwise_usage=False, columnwise_usage=True)
        decoded = quantizers_on_cpu.decode(own, columnwise=True)
        assert torch.equal(own.dequantize(dtype=torch.float32), decoded.float())
