"""TransformerEngine's quantize, dequantize, transpose and GEMMs of quantized operands, in torch on a CPU.

They stand in for the compiled functions of ``transformer_engine_torch``: the same bytes in the same places, held by
TE's own tensors and chosen by TE's own quantizers. Two things differ from a GPU: scales stay in the compact layout, which TE permutes
for its GEMMs, and gradients in NVFP4 are rounded to nearest, where TE rounds them stochastically.

A GEMM decodes its operands, from the representation that a GPU would read, and multiplies in fp64: what a token gets
does not depend on the other tokens of the GEMM.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Sequence
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
E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


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
        getattr(module, name).forward = staticmethod(
            _dequantize
        )  # TE moves what is not on a GPU there first


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


def te_general_grouped_gemm(
    a: Sequence[Any], transa: bool, b: Sequence[Any], transb: bool, *rest: Any
) -> Any:
    """Also of plain operands, where a layer is not quantized."""
    left = [decode(x, columnwise=not transa) for x in a]
    right = [decode(x, columnwise=transb) for x in b]
    return tex_on_cpu.te_general_grouped_gemm(left, transa, right, transb, *rest)


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
        codes = torch.stack([data & 15, data >> 4], dim=-1).flatten(1)
        values = torch.cat([E2M1, -E2M1]).double()[codes.long()]
        blocks = scale.view(torch.float8_e4m3fn).double()[: len(values), : values.shape[1] // NV]
        amax = getattr(tensor, f"_amax_{side}").double()
        values = values * blocks.repeat_interleave(NV, dim=1) * (amax / (6.0 * 448.0))
        return values.t() if columnwise else values
    values = data.view(FP8[int(tensor._fp8_dtype)]).double()
    rows, columns = values.shape
    if not hasattr(tensor, "_is_2D_scaled"):  # MXFP8
        powers = torch.exp2(scale.double() - 127)
        if columnwise:
            return values * powers.repeat_interleave(MX, dim=0)[:rows, :columns]
        return values * powers.repeat_interleave(MX, dim=1)[:rows, :columns]
    if tensor._is_2D_scaled:
        wide = (
            scale.double()
            .repeat_interleave(BLOCK, dim=0)
            .repeat_interleave(BLOCK, dim=1)[:rows, :columns]
        )
    else:  # scales of one row's blocks stand in a column
        wide = scale.double().t().repeat_interleave(BLOCK, dim=1)[:rows, :columns]
    return (values * wide).t() if columnwise else values * wide


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


def _mxfp8(x: Tensor, quantizer: Any, rowwise: bool, columnwise: bool) -> dict[str, Tensor | None]:
    dtype = FP8[int(quantizer.dtype)]

    def rows(matrix: Tensor) -> tuple[Tensor, Tensor]:
        blocks = matrix.view(len(matrix), matrix.shape[1] // MX, MX)
        amax = blocks.abs().amax(dim=-1) * torch.tensor(1 / LARGEST[dtype])
        bits = amax.view(torch.int32)
        exponent = ((bits >> 23) + ((bits & 0x7FFFFF) != 0)).clamp(
            max=254
        )  # rounded up to a power of two
        scaled = blocks * torch.where(exponent == 0, 1.0, torch.exp2(127.0 - exponent)).unsqueeze(
            -1
        )
        return _encode(scaled, dtype).view(matrix.shape), exponent.to(torch.uint8)

    parts: dict[str, Tensor | None] = dict.fromkeys(
        ("rowwise_data", "rowwise_scale_inv", "columnwise_data", "columnwise_scale_inv")
    )
    if rowwise:
        data, scale = rows(x)
        parts.update(rowwise_data=data, rowwise_scale_inv=_padded(scale, 128, 4))
    if columnwise:
        data, scale = rows(x.t().contiguous())
        parts.update(
            columnwise_data=data.t().contiguous(),
            columnwise_scale_inv=_padded(scale.t().contiguous(), 4, 128),
        )
    return parts


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
    dtype = FP8[int(quantizer.dtype)]
    flat = quantizer.block_scaling_dim == 2

    def rows(matrix: Tensor) -> tuple[Tensor, Tensor]:
        m, k = matrix.shape
        wide = pad(matrix, (0, -k % BLOCK, 0, -m % BLOCK if flat else 0))
        high = BLOCK if flat else 1
        tiles = wide.view(len(wide) // high, high, wide.shape[1] // BLOCK, BLOCK)
        amax = tiles.abs().amax(dim=(1, 3))
        scale = _scale(amax, quantizer.force_pow_2_scales, quantizer.amax_epsilon, LARGEST[dtype])
        data = _encode(tiles * scale[:, None, :, None], dtype).view(wide.shape)[:m, :k].contiguous()
        inverse = scale.reciprocal()
        return data, _padded(inverse if flat else inverse.t().contiguous(), 1, 4)

    parts: dict[str, Tensor | None] = dict.fromkeys(
        ("rowwise_data", "rowwise_scale_inv", "columnwise_data", "columnwise_scale_inv")
    )
    if rowwise:
        parts["rowwise_data"], parts["rowwise_scale_inv"] = rows(x)
    if columnwise:
        parts["columnwise_data"], parts["columnwise_scale_inv"] = rows(x.t().contiguous())
    return parts


def _nvfp4(x: Tensor, quantizer: Any, rowwise: bool, columnwise: bool) -> dict[str, Tensor | None]:
    def rows(matrix: Tensor, amax: Tensor) -> tuple[Tensor, Tensor]:
        m, k = matrix.shape
        high = NV if quantizer.with_2d_quantization else 1
        wide = pad(matrix, (0, 0, 0, -m % high))
        tiles = wide.view(len(wide) // high, high, k // NV, NV)
        overall = (torch.tensor(448.0 * 6.0) / amax).clamp(max=torch.finfo(torch.float32).max)
        overall = torch.where(overall == 0, 1.0, overall)
        block = tiles.abs().amax(dim=(1, 3)) * (overall * torch.tensor(1 / 6.0))
        block = block.clamp(max=448.0).to(torch.float8_e4m3fn)
        encode = (1.0 / (block.float() * (1.0 / overall))).clamp(max=torch.finfo(torch.float32).max)
        scaled = (tiles * encode[:, None, :, None]).clamp(-6.0, 6.0).reshape(wide.shape)[:m]
        scale = block.view(torch.uint8).repeat_interleave(high, dim=0)[:m]
        return _e2m1(scaled), _padded(scale, 128, 4)

    names = ("data", "scale_inv")
    parts: dict[str, Tensor | None] = {
        f"{side}_{n}": None for side in ("rowwise", "columnwise") for n in names
    }
    parts.update(amax_rowwise=None, amax_columnwise=None)
    for side, used, matrix in (
        ("rowwise", rowwise, x),
        ("columnwise", columnwise, x.t().contiguous()),
    ):
        if used:
            if side == "columnwise" and quantizer.with_rht:
                matrix = _rotate(matrix)
            amax = matrix.abs().amax().view(1) if matrix.numel() else torch.zeros(1)
            parts[f"{side}_data"], parts[f"{side}_scale_inv"] = rows(matrix, amax)
            parts[f"amax_{side}"] = amax
    return parts


def _e2m1(values: Tensor) -> Tensor:
    """Two codes per byte; ties go to the even code."""
    bounds = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    size = values.abs().unsqueeze(-1)
    up = torch.tensor([False, True, False, True, False, True, False])
    code = ((size > bounds) | (up & (size == bounds))).sum(dim=-1).to(torch.uint8)
    code += 8 * ((values < 0) & (size[..., 0] > 0)).to(torch.uint8)
    return code[:, ::2] + code[:, 1::2] * 16


def _rotate(x: Tensor) -> Tensor:
    """The random Hadamard transform of TE over each 16 of a row of ``x`` [M, K], in bf16. It is orthogonal: a product
    over rotated rows is that over the rows themselves."""
    from transformer_engine.pytorch.tensor.nvfp4_tensor import get_rht_matrix

    rotated = x.reshape(-1, NV).double() @ get_rht_matrix(True, "cpu").double()
    return rotated.to(torch.bfloat16).float().view(x.shape)


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
    wide = (
        scale.repeat_interleave(block, dim=0)
        .repeat_interleave(block, dim=1)[:rows, :columns]
        .reshape(-1)
    )
    out.copy_(_encode(part.float().view(-1) * wide[start : start + part.numel()], FP8[int(dtype)]))


tex_on_cpu.FUNCTIONS.update(
    {
        function.__name__: function
        for function in (
            quantize,
            split_quantize,
            bgrad_quantize,
            fp8_transpose,
            te_general_grouped_gemm,
            compute_amax,
            multi_tensor_compute_scale_and_scale_inv,
            fp8_block_scaling_compute_partial_amax,
            fp8_block_scaling_partial_cast,
        )
    }
)
