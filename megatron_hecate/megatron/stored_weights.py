"""Storage of an expert's weights, and their layout in transfers, quantized parameters included.

Where parameters are quantized (``fp8_param``), a replica gets its home's quantized bytes unchanged:
after another quantization it would compute with other weights than its home. Bytes that
TransformerEngine derives from other bytes without rounding are not transferred but derived again:
the transpose of a tensor with one scale, and the columns of a tensor scaled in square blocks.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_hecate.device.autograd import lasting_tensors

# Bytes; the alignment of CUDA's own allocations. cuBLAS multiplies in fp8 and fp4 only where data
# and scales begin at multiples of 16.
ALIGNMENT = 256


def is_quantized(weight: Tensor) -> bool:
    """Whether ``weight`` is a ``QuantizedTensor`` of TransformerEngine (see `assumptions`)."""
    return type(weight).__module__.startswith("transformer_engine.")


class StoredWeights:
    """Parameters of one expert and their layout in a chunk.

    A chunk holds the parameters unchanged, or the bytes of all parameters if any is quantized.

    Args:
        expert: parameters of the expert.
    """

    def __init__(self, expert: Sequence[Tensor]) -> None:
        self._expert = expert
        self.quantized = any(map(is_quantized, expert))

    def tensors(self) -> list[Tensor]:
        """List the tensors of a chunk in order: the parameters, or their bytes (uint8).

        The bytes of each tensor are padded, so that all tensors are aligned in a chunk.
        """
        if not self.quantized:
            return list(self._expert)
        parts: list[Tensor] = []
        for _, _, part in self._stored():
            parts.append(part.detach().view(-1).view(torch.uint8))
            if padding := _padded(part) - part.nbytes:
                parts.append(_padding(part.device)[:padding])
        return parts

    def weights_in(self, chunk: Tensor) -> list[Tensor]:
        """View ``chunk`` [nbytes] uint8 as another expert's parameters of the same kinds."""
        tensors: list[dict[str, Tensor]] = [{} for _ in self._expert]
        begin = 0
        for index, name, part in self._stored():
            data = chunk[begin : begin + part.nbytes]
            tensors[index][name] = data.view(part.dtype).view(part.shape)
            begin += _padded(part)
        weights: list[Tensor] = []
        for weight, weight_tensors in zip(self._expert, tensors, strict=True):
            if is_quantized(weight):
                weights.append(_quantized_like(weight, weight_tensors))
            else:
                weights.append(weight_tensors[""])
        return weights

    def drop_derived(self) -> None:
        """Drop derived bytes after a write, so that TransformerEngine derives the bytes again."""
        for weight in filter(is_quantized, self._expert):
            metadata = weight.get_metadata()  # type: ignore[attr-defined]
            if metadata.get("is_2D_scaled") or "data_transpose" in metadata:
                usage = dict(rowwise_usage=True, columnwise_usage=False)
                weight.update_usage(**usage)  # type: ignore[attr-defined]

    def _stored(self) -> list[tuple[int, str, Tensor]]:
        """List all tensors to transfer as (parameter, name, tensor)."""
        stored = []
        for index, weight in enumerate(self._expert):
            tensors = {"": weight}
            if is_quantized(weight):
                metadata = weight.get_metadata()  # type: ignore[attr-defined]
                derived = "columnwise" if metadata.get("is_2D_scaled") else "data_transpose"
                tensors = {
                    k: v
                    for k, v in metadata.items()
                    if isinstance(v, Tensor) and not k.startswith(derived)
                }
            stored += [(index, name, part) for name, part in tensors.items()]
        return stored


def _padded(part: Tensor) -> int:
    """Bytes of ``part`` and the padding after it."""
    return -(-part.nbytes // ALIGNMENT) * ALIGNMENT


@functools.cache
def _padding(device: torch.device) -> Tensor:
    """Zeros, [ALIGNMENT] uint8."""
    with lasting_tensors():
        return torch.zeros(ALIGNMENT, dtype=torch.uint8, device=device)


def _quantized_like(weight: Tensor, stored: dict[str, Tensor]) -> Tensor:
    """Make a tensor of the kind and shape of ``weight`` over the memory of ``stored``."""
    metadata = weight.get_metadata()  # type: ignore[attr-defined]
    metadata.update(
        {name: stored.get(name) for name, value in metadata.items() if isinstance(value, Tensor)}
    )
    return type(weight)(shape=weight.shape, dtype=weight.dtype, requires_grad=False, **metadata)
