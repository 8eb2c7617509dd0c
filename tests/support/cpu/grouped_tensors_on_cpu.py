"""TransformerEngine's GroupedLinear over grouped tensors, whose token counts stay on the GPU, in torch on a CPU.

`install` lets TE's own Python take this path, also in fp32: its forward, its backward, what it saves and when it adds
to ``main_grad``. The grouped GEMM, the kernel that makes offsets and the one that sums biases are torch here. Call it
after ``te_on_cpu.install()``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tex_on_cpu
import torch
from torch import Tensor


class _OnGpu(Tensor):
    """Counts that say they are on a GPU, where this path requires them."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    @property
    def device(self) -> torch.device:
        return torch.device("cuda", 0)


def install() -> None:
    from transformer_engine.pytorch.module import grouped_linear

    forward = grouped_linear.GroupedLinear.forward

    def forward_on_gpu(module: Any, inp: Tensor, m_splits: Any, *args: Any, **kwargs: Any) -> Any:
        if module.use_grouped_tensor:
            m_splits = torch.as_tensor(m_splits, dtype=torch.int64).as_subclass(_OnGpu)
        return forward(module, inp, m_splits, *args, **kwargs)

    grouped_linear.GroupedLinear.forward = forward_on_gpu
    grouped_linear.is_module_grouped_tensor_path_supported = lambda recipe, dtype: recipe is None
    grouped_linear.general_grouped_gemm_for_grouped_tensor = _grouped_gemm
    grouped_linear.compute_grouped_dbias = _dbias
    tex_on_cpu.FUNCTIONS["splits_to_offsets_multi"] = _offsets


def _offsets(
    splits: Tensor, device: Any, *, strides: Sequence[int], **settings: Any
) -> tuple[Tensor, list[Tensor]]:
    splits = splits.as_subclass(Tensor)
    ends = torch.cat([splits.new_zeros(1), splits.cumsum(0)])
    return splits, [ends * stride for stride in strides]


def _parts(grouped: Any) -> tuple[Tensor, ...]:
    """Rows of each group; rows after the last group's belong to none."""
    rows = grouped.rowwise_data.view(grouped.logical_shape)
    counts = grouped.first_dims.tolist()
    return rows[: sum(counts)].split(counts)


def _grouped_gemm(
    a: Any, b: Any, out: Any, *, layout: str, accumulate: bool = False, bias: Any = None, **_: Any
) -> None:
    """Weights, or for their gradients inputs, are ``a``; results go into rows of ``out``, or into each weight's."""
    tex_on_cpu.GEMMS.append((f"grouped {layout}", b.num_tensors, accumulate))
    transa, transb = (letter == "T" for letter in layout)
    lefts = _parts(a) if transb else a
    results = out if transb else _parts(out)
    assert len({result.dtype for result in results}) == 1, "the kernel takes one type of outputs"
    biases = None if bias is None else bias.rowwise_data.view(b.num_tensors, -1)
    for i, (left, right, result) in enumerate(zip(lefts, _parts(b), results, strict=True)):
        value = tex_on_cpu.product(left, transa, right, transb)
        tex_on_cpu.write(result, value if biases is None else value + biases[i], accumulate)


def _dbias(dy: Tensor, offsets: Tensor, groups: int) -> Tensor:
    sums = [dy[start:end].float().sum(dim=0) for start, end in offsets.unfold(0, 2, 1).tolist()]
    assert len(sums) == groups
    return torch.stack(sums)
