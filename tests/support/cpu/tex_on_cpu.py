"""The compiled half of TransformerEngine (``transformer_engine_torch``, "tex") in plain torch.

Functions here do real arithmetic with the arguments TE's own Python passes. Any other name exists, because TE names
many when it is imported, but raises when it is called. `FUNCTIONS` is what the module offers.
"""

from __future__ import annotations

import enum
import types
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

# layout, number of products and accumulate of every grouped GEMM so far
GEMMS: list[tuple[str, int, bool]] = []


_TYPES = {
    "kByte": 0, "kInt32": 2, "kFloat32": 4, "kFloat16": 5, "kBFloat16": 6,
    "kFloat8E4M3": 7, "kFloat8E5M2": 8, "kFloat4E2M1": 10,
}  # fmt: skip
DType = enum.IntEnum("DType", _TYPES)  # as TE numbers them, and compares with its own
TORCH = {
    DType.kFloat32: torch.float32,
    DType.kFloat16: torch.float16,
    DType.kBFloat16: torch.bfloat16,
}

# TE compares its own copies of these with the compiled ones
FP8FwdTensors = enum.IntEnum(
    "FP8FwdTensors",
    [f"GEMM{i}_{what}" for i in (1, 2, 3) for what in ("INPUT", "WEIGHT", "OUTPUT")],
    start=0,
)
FP8BwdTensors = enum.IntEnum(
    "FP8BwdTensors",
    [f"{what}{i}" for i in (1, 2, 3) for what in ("GRAD_OUTPUT", "GRAD_INPUT")],
    start=0,
)
FusedAttnBackend = enum.IntEnum(
    "NVTE_Fused_Attn_Backend",
    {"NVTE_No_Backend": -1, "NVTE_F16_arbitrary_seqlen": 1, "NVTE_FP8": 2},
)
# older TransformerEngines name it; newer ones check that it is no member
FusedAttnBackend.NVTE_F16_max512_seqlen = 0


class _Missing(type):
    """The class of a name that nobody has written yet: good for annotations and comparisons; a call needs `FUNCTIONS`,
    to which further stand-ins may have added it since."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value = _Missing(f"{cls.__name__}.{name}", (), {})
        setattr(cls, name, value)
        return value

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if cls.__name__ in FUNCTIONS:
            return FUNCTIONS[cls.__name__](*args, **kwargs)
        raise NotImplementedError(f"tests/support/cpu/tex_on_cpu.py has no tex.{cls.__name__}")

    def __int__(cls) -> int:
        return 0


class Tex(types.ModuleType):
    """The module itself."""

    __path__: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name not in FUNCTIONS and name not in _missing:
            _missing[name] = _Missing(name, (), {})
        return FUNCTIONS[name] if name in FUNCTIONS else _missing[name]


_missing: dict[str, _Missing] = {}


def operand(tensor: Any, *, columnwise: bool) -> Tensor:
    """What a GEMM multiplies: a plain tensor. `quantizers_on_cpu` has another function here.

    Args:
        tensor: a plain tensor, or one that TE quantized.
        columnwise: whether the GEMM reads the quantized data that runs along columns.
    """
    assert type(tensor) in (Tensor, torch.nn.Parameter), f"{type(tensor)} needs quantizers_on_cpu"
    return tensor.detach()


def product(a: Any, transa: bool, b: Any, transb: bool) -> Tensor:
    """TE counts in columns: layout "TN" is ``b @ a.T``, "NN" ``b @ a``, "NT" ``b.T @ a``."""
    a, b = operand(a, columnwise=not transa), operand(b, columnwise=transb)
    a, b = a.reshape(-1, a.shape[-1]), b.reshape(-1, b.shape[-1])
    return (b.t() if transb else b) @ (a.t() if transa else a)


def write(out: Tensor, value: Tensor, accumulate: bool) -> None:
    if accumulate:
        out.add_(value.to(out.dtype))
    else:
        out.copy_(value)


def te_general_grouped_gemm(
    a: Sequence[Any], transa: bool, b: Sequence[Any], transb: bool, out: Sequence[Tensor], out_dtype: DType,
    m_splits: Sequence[int] | None, bias: Sequence[Tensor], bias_dtype: DType, single_output: bool,
    pre_gelu_out: Sequence[Tensor], grad: bool, workspaces: Any, workspace_bytes: int, accumulate: bool,
    use_split_accumulator: bool, sm_count: int,
) -> Sequence[Tensor]:  # fmt: skip
    """One product for each pair; into rows of one tensor, or each into its own. ``bias`` is added, or in the backward
    (``grad``) takes the sum over rows. The compiled one takes the type of all outputs from the first."""
    layout = ("T" if transa else "N") + ("T" if transb else "N")
    GEMMS.append((layout, len(a), accumulate))
    assert len(a) == len(b) == len(bias), (len(a), len(b), len(bias))
    assert len({o.dtype for o in out}) == 1, f"outputs of several types: {[o.dtype for o in out]}"
    assert TORCH[DType(out_dtype)] is out[0].dtype, (out_dtype, out[0].dtype)
    parts = list(out[0].split(list(m_splits))) if single_output else list(out)
    for x, y, part, own_bias in zip(a, b, parts, bias, strict=True):
        x, y = operand(x, columnwise=not transa), operand(y, columnwise=transb)
        if y.numel() == 0 or x.numel() == 0:
            if not accumulate:
                part.zero_()
            if grad:
                own_bias.zero_()
            continue
        value = product(x, transa, y, transb)
        if own_bias.numel() and not grad:
            value = value + own_bias
        write(part, value, accumulate)
        if own_bias.numel() and grad:
            own_bias.copy_(y.sum(dim=0))
    return bias


def generic_gemm(
    a: Any, transa: bool, b: Any, transb: bool, out: Tensor | None, quantizer: Any, out_dtype: DType | None,
    bias: Tensor | None, bias_dtype: DType, gelu: bool, gelu_in: Any, grad: bool, workspace: Any,
    workspace_bytes: int, accumulate: bool, use_split_accumulator: bool, **options: Any,
) -> tuple[Tensor, Tensor | None, None, None]:  # fmt: skip
    """One product; ``bias`` as in `te_general_grouped_gemm`."""
    if gelu or quantizer is not None or options.get("comm_overlap") is not None:
        raise NotImplementedError(
            f"tests/support/cpu/tex_on_cpu.py: generic_gemm with {gelu=}, {quantizer=}, {options}"
        )
    value = product(a, transa, b, transb)
    bias_grad = None
    if bias is not None and not grad:
        value = value + bias
    elif bias is not None:
        bias_grad = operand(b, columnwise=transb).sum(dim=0).to(bias.dtype)
    if out is None:
        shape = (*b.shape[:-1], value.shape[-1]) if not transb else value.shape
        dtype = value.dtype if out_dtype is None else TORCH[DType(out_dtype)]
        return value.to(dtype).reshape(shape), bias_grad, None, None
    write(out, value.reshape(out.shape), accumulate)
    return out, bias_grad, None, None


def fused_multi_row_padding(
    rows: Tensor, out: Tensor, splits: Sequence[int], padded: Sequence[int]
) -> None:
    """Copy each split of ``rows`` [sum(splits), width] to the start of its longer one in ``out``, and zeros after."""
    for part, place in zip(rows.split(list(splits)), out.split(list(padded)), strict=True):
        place[: len(part)] = part
        place[len(part) :] = 0


def fused_multi_row_unpadding(
    rows: Tensor, out: Tensor, padded: Sequence[int], splits: Sequence[int]
) -> None:
    """The way back: padding is left out."""
    for part, place in zip(rows.split(list(padded)), out.split(list(splits)), strict=True):
        place.copy_(part[: len(place)])


def multi_tensor_l2norm(
    chunk: int, noop: Tensor, lists: list[list[Tensor]], per_tensor: bool
) -> tuple:
    """The norm of all of ``lists[0]``, and of each of them."""
    norms = [t.detach().float().norm() for t in lists[0]]
    return torch.stack(norms).norm().reshape(1), torch.stack(norms) if per_tensor else torch.empty(
        0
    )


def multi_tensor_scale(
    chunk: int, noop: Tensor, lists: list[list[Tensor]], scale: float | Tensor
) -> None:
    """``lists[1]`` becomes ``lists[0]`` times ``scale``."""
    for source, target in zip(*lists, strict=True):
        target.copy_(source * scale)


FUNCTIONS: dict[str, Any] = {
    "DType": DType,
    "FP8FwdTensors": FP8FwdTensors,
    "FP8BwdTensors": FP8BwdTensors,
    "NVTE_Fused_Attn_Backend": FusedAttnBackend,
    "te_general_grouped_gemm": te_general_grouped_gemm,
    "generic_gemm": generic_gemm,
    "fused_multi_row_padding": fused_multi_row_padding,
    "fused_multi_row_unpadding": fused_multi_row_unpadding,
    "multi_tensor_l2norm": multi_tensor_l2norm,
    "multi_tensor_scale": multi_tensor_scale,
    "multi_tensor_scale_tensor": multi_tensor_scale,  # by a tensor that stays on the GPU
    "get_num_cublas_streams": lambda: 1,
    # too old for TE's grouped tensors, whose kernels are not here
    "get_cublasLt_version": lambda: 130200,
    "get_cudnn_version": lambda: 91200,
    "get_stream_priority_range": lambda *_: (0, 0),
}
