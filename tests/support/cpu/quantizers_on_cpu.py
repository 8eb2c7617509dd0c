"""TransformerEngine's quantize, dequantize, transpose and GEMMs of quantized operands, in torch on a CPU.

They stand in for the compiled functions of ``transformer_engine_torch``: the same bytes in the same places, held by
TE's own tensors and chosen by TE's own quantizers. Two things differ from a GPU: scales stay in the compact layout,
which TE permutes for its GEMMs, and gradients in NVFP4 are rounded to nearest, where TE rounds them stochastically.

A GEMM decodes its operands, from the representation that a GPU would read, and multiplies in fp64: what a token gets
does not depend on the other tokens of the GEMM.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tex_on_cpu
import torch
from torch import Tensor
from torch.nn.functional import pad

# Whether inputs and gradients of a GEMM stay as they are. Blocks of 32 tokens and whole tensors share a scale, so which
# tokens meet on a rank changes the last bits of results; without it only the weights' bytes can differ.
exact_activations = False

FP8 = {7: torch.float8_e4m3fn, 8: torch.float8_e5m2}  # by TE's number
LARGEST = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}
MX, BLOCK, NV = 32, 128, 16  # elements that share a scale
KINDS = {  # by the quantizer: where TE keeps the tensor's class, and its name
    "MXFP8Quantizer": ("mxfp8", "MXFP8Tensor"),
    "Float8BlockQuantizer": ("float8_blockwise", "Float8BlockwiseQTensor"),
    "NVFP4Quantizer": ("nvfp4", "NVFP4Tensor"),
}
PARTS = ("rowwise_data", "rowwise_scale_inv", "columnwise_data", "columnwise_scale_inv")


def install() -> None:
    """Let TE dequantize on a CPU; after ``te_on_cpu.install()``. Import this module before it."""
    for stem, name in (
        ("mxfp8", "_FromMXFP8Func"),
        ("nvfp4", "_FromNVFP4Func"),
        ("float8", "_FromFloat8Func"),
    ):
        module = importlib.import_module(
            f"transformer_engine.pytorch.tensor.storage.{stem}_tensor_storage"
        )
        # TE moves what is not on a GPU there first
        getattr(module, name).forward = staticmethod(_dequantize)


def quantize(tensor: Tensor, quantizer: Any, output: Any = None, noop: Tensor | None = None) -> Any:
    """``tensor`` as ``quantizer`` says, in ``output`` where there is one."""
    if output is None:
        usages = bool(quantizer.rowwise_usage), bool(quantizer.columnwise_usage)
    else:
        usages = _has(output, "rowwise"), _has(output, "columnwise")
    matrix = tensor.detach().reshape(-1, tensor.shape[-1]).float()
    encode = {
        "MXFP8Quantizer": _mxfp8,
        "Float8BlockQuantizer": _blockwise,
        "NVFP4Quantizer": _nvfp4,
    }
    parts = encode.get(type(quantizer).__name__, _per_tensor)(matrix, quantizer, *usages)
    if noop is not None and noop.item():
        return output
    if output is None:
        return _build(tensor, quantizer, parts)
    for name, part in parts.items():
        held = getattr(output, f"_{name}")
        if held is None or part is None:
            setattr(output, f"_{name}", part)
        else:
            held.copy_(part.view(held.shape))
    if hasattr(output, "_transpose"):
        output._transpose_invalid = output._transpose is None
    return output


def split_quantize(
    tensor: Tensor, splits: Sequence[int], quantizers: Sequence[Any], **_: Any
) -> list:
    parts = torch.split(tensor, list(splits))
    if exact_activations:
        for part in parts:
            part.update_usage = lambda **_: None  # which operators of TE call
        return list(parts)
    return [quantize(part, quantizer) for part, quantizer in zip(parts, quantizers, strict=True)]


def bgrad_quantize(tensor: Tensor, quantizer: Any) -> tuple[Tensor, Any]:
    return tensor.sum(dim=0), tensor if exact_activations else quantize(tensor, quantizer)


def _dequantize(_: Any, tensor: Any, dtype: torch.dtype) -> Tensor:
    return decode(tensor, columnwise=not _has(tensor, "rowwise")).reshape(tensor.size()).to(dtype)


def fp8_transpose(data: Tensor, dtype: Any, *, out: Tensor | None = None) -> Tensor:
    transposed = data.view(-1, data.shape[-1]).t().contiguous()
    return transposed if out is None else out.copy_(transposed)


def _check_alignment(*read: Tensor) -> None:
    """As cuBLAS does for data and scales of GEMMs in fp8 and fp4."""
    for tensor in read:
        if tensor.numel() and tensor.data_ptr() % 16:
            raise RuntimeError(
                f"cuBLAS Error: the requested functionality is not supported, {tensor.data_ptr():#x}"
            )


def decode(tensor: Any, *, columnwise: bool) -> Tensor:
    """[M, K] fp64: what a GEMM reads of ``tensor``, from its columnwise representation or the other."""
    if isinstance(tensor, Tensor) and not hasattr(tensor, "_quantizer"):
        return tensor.detach().reshape(-1, tensor.shape[-1]).double()
    side = "columnwise" if columnwise else "rowwise"
    if hasattr(tensor, "_scale_inv"):  # one scale for all
        data = tensor._transpose if columnwise and tensor._transpose is not None else tensor._data
        _check_alignment(data, tensor._scale_inv)
        values = _flat(data).view(FP8[int(tensor._fp8_dtype)]).double() * tensor._scale_inv.double()
        return values.t() if data is tensor._transpose else values
    data, scale = _flat(getattr(tensor, f"_{side}_data")), getattr(tensor, f"_{side}_scale_inv")
    _check_alignment(data, scale)
    if hasattr(tensor, "_fp4_dtype"):
        from transformer_engine.pytorch.custom_recipes.reference_nvfp4 import cast_from_fp4x2

        amax = getattr(tensor, f"_amax_{side}").double() / (6.0 * 448.0)
        values = cast_from_fp4x2(data, torch.float64) * amax
        values *= _spread(scale.view(torch.float8_e4m3fn), (1, NV), values)
        return values.t() if columnwise else values
    values = data.view(FP8[int(tensor._fp8_dtype)]).double()
    if not hasattr(tensor, "_is_2D_scaled"):  # MXFP8
        powers = torch.exp2(scale.double() - 127)
        return values * _spread(powers, (MX, 1) if columnwise else (1, MX), values)
    if tensor._is_2D_scaled:
        values *= _spread(scale, (BLOCK, BLOCK), values)
    else:  # scales of one row's blocks stand in a column
        values *= _spread(scale.t(), (1, BLOCK), values)
    return values.t() if columnwise else values


def _spread(scale: Tensor, tile: tuple[int, int], values: Tensor) -> Tensor:
    """The scale of each of ``values`` [M, K], from those of its tiles."""
    for dim, length in enumerate(tile):
        scale = scale.repeat_interleave(length, dim=dim)
    return scale[: values.shape[0], : values.shape[1]].to(values.dtype)


def _flat(data: Tensor) -> Tensor:
    return data.detach().flatten(0, -2)


def _has(tensor: Any, side: str) -> bool:
    if hasattr(tensor, "_scale_inv"):
        return (tensor._data if side == "rowwise" else tensor._transpose) is not None
    return getattr(tensor, f"_{side}_data") is not None


def _build(tensor: Tensor, quantizer: Any, parts: dict[str, Tensor | None]) -> Any:
    """TE's own tensor, or its lighter storage where the quantizer is internal."""
    stem, name = KINDS.get(type(quantizer).__name__, ("float8", "Float8Tensor"))
    where, end = ("storage.", "Storage") if quantizer.internal else ("", "")
    module = importlib.import_module(
        f"transformer_engine.pytorch.tensor.{where}{stem}_tensor{end and '_storage'}"
    )
    cls = getattr(module, name + end)
    rename = (
        {"scale_inv": "fp8_scale_inv", "transpose": "data_transpose"} if stem == "float8" else {}
    )
    fields: dict[str, Any] = {rename.get(key, key): part for key, part in parts.items()}
    number = "fp4_dtype" if stem == "nvfp4" else "fp8_dtype"
    fields.update({number: quantizer.dtype, "quantizer": quantizer})
    if stem == "float8_blockwise":
        fields["is_2D_scaled"] = quantizer.block_scaling_dim == 2
    bases = [base for base in cls.__mro__ if base.__module__.startswith("transformer_engine")]
    known = {name for base in bases for name in inspect.signature(base.__new__).parameters}
    newer = {"fake_dtype": tensor.dtype, "with_gemm_swizzled_scales": False}  # than the oldest TE
    if not quantizer.internal:
        fields.update(shape=tensor.shape, dtype=tensor.dtype, requires_grad=False)
        newer["device"] = tensor.device
    fields.update({name: value for name, value in newer.items() if name in known})
    if "data_format" in known:  # of the oldest
        fields["data_format"] = sys.modules[
            "transformer_engine_torch"
        ].Float8BlockScaleTensorFormat.GEMM_READY
    return cls(**fields)


def _encode(values: Tensor, dtype: torch.dtype) -> Tensor:
    return values.clamp(-LARGEST[dtype], LARGEST[dtype]).to(dtype).view(torch.uint8)


def _encode_tiles(
    x: Tensor, tile: tuple[int, int], quantizer: Any, scale_of: Callable[[Tensor], Tensor]
) -> tuple[Tensor, Tensor]:
    """``x`` [M, K] in bytes, and the scale by which each tile was multiplied, from its largest value."""
    (m, k), (high, wide), dtype = x.shape, tile, FP8[int(quantizer.dtype)]
    whole = pad(x, (0, -k % wide, 0, -m % high))
    tiles = whole.view(len(whole) // high, high, whole.shape[1] // wide, wide)
    scale = scale_of(tiles.abs().amax(dim=(1, 3)))
    data = _encode(tiles * scale[:, None, :, None], dtype)
    return data.view(whole.shape)[:m, :k].contiguous(), scale


def _mxfp8(x: Tensor, quantizer: Any, rowwise: bool, columnwise: bool) -> dict[str, Tensor | None]:
    largest = LARGEST[FP8[int(quantizer.dtype)]]

    def scale_of(amax: Tensor) -> Tensor:
        """A power of two, rounded up, whose biased exponent is stored."""
        mantissa, exponent = torch.frexp(amax * torch.tensor(1 / largest))
        biased = (exponent + 127 - (mantissa == 0.5).int()).clamp(0, 254) * (amax > 0)
        return torch.exp2(127.0 - biased)

    parts: dict[str, Tensor | None] = dict.fromkeys(PARTS)
    for side, matrix in _sides(x, rowwise, columnwise):
        data, scale = _encode_tiles(matrix, (1, MX), quantizer, scale_of)
        exponents = _padded((127 - torch.log2(scale)).round().to(torch.uint8), 128, 4)
        if side == "columnwise":
            data, exponents = data.t().contiguous(), exponents.t().contiguous()
        parts[f"{side}_data"], parts[f"{side}_scale_inv"] = data, exponents
    return parts


def _sides(x: Tensor, rowwise: bool, columnwise: bool) -> Iterator[tuple[str, Tensor]]:
    """The matrices whose rows are quantized."""
    if rowwise:
        yield "rowwise", x
    if columnwise:
        yield "columnwise", x.t().contiguous()


def _per_tensor(
    x: Tensor, quantizer: Any, rowwise: bool, columnwise: bool
) -> dict[str, Tensor | None]:
    from transformer_engine.pytorch.utils import is_non_tn_fp8_gemm_supported

    dtype = FP8[int(quantizer.dtype)]
    amax = x.abs().amax().view(1) if x.numel() else torch.zeros(1)
    if type(quantizer).__name__ == "Float8Quantizer":  # as the distributed optimizer uses it
        scale = quantizer.scale.float().view(1)
    else:
        scale = _scale(amax, quantizer.force_pow_2_scales, quantizer.amax_epsilon, LARGEST[dtype])
    data = _encode(x * scale, dtype)
    both = is_non_tn_fp8_gemm_supported()  # the GPU then needs no transpose
    return {
        "data": data if rowwise or both else None,
        "transpose": data.t().contiguous() if columnwise and not both else None,
        "scale_inv": scale.reciprocal(),
    }


def _scale(amax: Tensor, power_of_two: bool, least: float, largest: float) -> Tensor:
    amax = amax.clamp(min=least)
    scale = largest / amax
    scale = torch.where(scale.isinf(), torch.finfo(torch.float32).max, scale)
    if power_of_two:
        scale = torch.exp2(torch.frexp(scale).exponent - 1.0)
    return torch.where(amax == 0, 1.0, scale)


def _blockwise(
    x: Tensor, quantizer: Any, rowwise: bool, columnwise: bool
) -> dict[str, Tensor | None]:
    largest, is_2d = LARGEST[FP8[int(quantizer.dtype)]], quantizer.block_scaling_dim == 2

    def scale_of(amax: Tensor) -> Tensor:
        return _scale(amax, quantizer.force_pow_2_scales, quantizer.amax_epsilon, largest)

    parts: dict[str, Tensor | None] = dict.fromkeys(PARTS)
    for side, matrix in _sides(x, rowwise, columnwise):
        tile = (BLOCK if is_2d else 1, BLOCK)
        parts[f"{side}_data"], scale = _encode_tiles(matrix, tile, quantizer, scale_of)
        inverse = scale.reciprocal()
        parts[f"{side}_scale_inv"] = _padded(inverse if is_2d else inverse.t(), 1, 4)
    return parts


def _nvfp4(x: Tensor, quantizer: Any, rowwise: bool, columnwise: bool) -> dict[str, Tensor | None]:
    """By the reference in TE's own tests."""
    from transformer_engine.pytorch.custom_recipes.reference_nvfp4 import NVFP4QuantizerRef
    from transformer_engine.pytorch.custom_recipes.reference_utils import Fp4Formats

    reference = NVFP4QuantizerRef(
        Fp4Formats.E2M1,
        rowwise,
        columnwise,
        quant_tile_shape=(NV if quantizer.with_2d_quantization else 1, NV),
        with_rht=quantizer.with_rht,
    )
    *sides, amax_rowwise, amax_columnwise = reference._quantize(x)
    for i in (1, 3):
        sides[i] = None if sides[i] is None else _padded(sides[i].view(torch.uint8), 128, 4)
    return {
        **dict(zip(PARTS, sides, strict=True)),
        "amax_rowwise": amax_rowwise if rowwise else None,
        "amax_columnwise": amax_columnwise if columnwise else None,
    }


def _padded(scale: Tensor, rows: int, columns: int) -> Tensor:
    return pad(scale, (0, -scale.shape[1] % columns, 0, -scale.shape[0] % rows)).contiguous()


# What TE's part of the distributed optimizer calls: each rank has a part of each weight's elements, from `start`.


def compute_amax(part: Tensor, amax: Tensor) -> None:
    amax.copy_(part.abs().max())


def multi_tensor_compute_scale_and_scale_inv(
    chunk: int,
    noop: Tensor,
    lists: list[list[Tensor]],
    largest: float,
    power_of_two: bool,
    least: float,
) -> None:
    for amax, scale, inverse in zip(*lists, strict=True):
        scale.copy_(_scale(amax, power_of_two, least, largest))
        inverse.copy_(scale.reciprocal())


def fp8_block_scaling_compute_partial_amax(
    part: Tensor, amax: Tensor, rows: int, columns: int, start: int, block: int
) -> None:
    whole = torch.zeros(rows * columns)
    whole[start : start + part.numel()] = part.float().abs().view(-1)
    wide = pad(whole.view(rows, columns), (0, -columns % block, 0, -rows % block))
    found = wide.view(len(wide) // block, block, -1, block).amax(dim=(1, 3))
    amax[:, : found.shape[1]] = found


def fp8_block_scaling_partial_cast(
    part: Tensor,
    out: Tensor,
    scale: Tensor,
    rows: int,
    columns: int,
    start: int,
    block: int,
    dtype: Any,
) -> None:
    wide = _spread(scale, (block, block), torch.empty(rows, columns)).reshape(-1)
    out.copy_(_encode(part.float().view(-1) * wide[start : start + part.numel()], FP8[int(dtype)]))


tex_on_cpu.operand = decode
tex_on_cpu.FUNCTIONS.update(
    {
        function.__name__: function
        for function in (
            quantize,
            split_quantize,
            bgrad_quantize,
            fp8_transpose,
            compute_amax,
            multi_tensor_compute_scale_and_scale_inv,
            fp8_block_scaling_compute_partial_amax,
            fp8_block_scaling_partial_cast,
        )
    }
)
