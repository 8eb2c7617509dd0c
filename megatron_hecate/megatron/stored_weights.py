"""How an expert's weights are stored, and travel: a home's quantized bytes come to its replicas as they are.

Where parameters are quantized (``fp8_param``), a replica made any other way would compute with other weights than its
home. What TransformerEngine derives from other bytes without rounding does not travel, and is made where it is needed:
the transpose of a tensor with one scale, and the columns of a tensor scaled in square blocks.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_hecate.device.lasting import lasting_tensors

# Bytes. cuBLAS multiplies in fp8 and fp4 only where data and scales begin at multiples of 16. This is what CUDA's own
# allocations begin at multiples of.
ALIGNMENT = 256


class StoredWeights:
    """The parameters of one expert, and how they lie in a chunk: as they are, or where some are quantized as bytes.

    Args:
        expert: its parameters.
    """

    def __init__(self, expert: Sequence[Tensor]) -> None:
        self._expert = expert
        self.quantized = any(map(_is_quantized, expert))

    @property
    def nbytes(self) -> int:
        """Bytes of a chunk."""
        return sum(part.nbytes for part in self.parts())

    def parts(self) -> list[Tensor]:
        """What travels, in the order of a chunk: the parameters themselves, or all their bytes (uint8).

        Bytes of each tensor are padded, so that all of them are aligned in a chunk.
        """
        if not self.quantized:
            return list(self._expert)
        parts: list[Tensor] = []
        for _, _, part in self._stored():
            parts.append(part.detach().view(-1).view(torch.uint8))
            if missing := _padded(part) - part.nbytes:
                parts.append(_padding(part.device)[:missing])
        return parts

    def weights_in(self, chunk: Tensor) -> list[Tensor]:
        """Another expert's parameters in ``chunk`` [nbytes] uint8, of the same kinds and shapes."""
        found: list[dict[str, Tensor]] = [{} for _ in self._expert]
        begin = 0
        for index, name, part in self._stored():
            data = chunk[begin : begin + part.nbytes]
            found[index][name] = data.view(part.dtype).view(part.shape)
            begin += _padded(part)
        pairs = zip(self._expert, found, strict=True)
        return [_quantized_like(w, own) if _is_quantized(w) else own[""] for w, own in pairs]

    def drop_derived(self) -> None:
        """Have TransformerEngine derive anew what does not travel, from bytes that have changed."""
        for weight in filter(_is_quantized, self._expert):
            metadata = weight.get_metadata()  # type: ignore[attr-defined]
            if metadata.get("is_2D_scaled") or "data_transpose" in metadata:
                weight.update_usage(rowwise_usage=True, columnwise_usage=False)  # type: ignore[attr-defined]

    def _stored(self) -> list[tuple[int, str, Tensor]]:
        """(parameter, name, tensor) of all that travels."""
        stored = []
        for index, weight in enumerate(self._expert):
            own = {"": weight}
            if _is_quantized(weight):
                metadata = weight.get_metadata()  # type: ignore[attr-defined]
                derived = "columnwise" if metadata.get("is_2D_scaled") else "data_transpose"
                own = {
                    k: v
                    for k, v in metadata.items()
                    if isinstance(v, Tensor) and not k.startswith(derived)
                }
            stored += [(index, name, part) for name, part in own.items()]
        return stored


def _padded(part: Tensor) -> int:
    """Bytes from where ``part`` begins in a chunk to where the next one does."""
    return -(-part.nbytes // ALIGNMENT) * ALIGNMENT


@functools.cache
def _padding(device: torch.device) -> Tensor:
    """[ALIGNMENT] uint8 zeros."""
    with lasting_tensors():
        return torch.zeros(ALIGNMENT, dtype=torch.uint8, device=device)


def _is_quantized(weight: Tensor) -> bool:
    """Whether it is a ``QuantizedTensor`` of TransformerEngine; `compat` says what we assume of those."""
    return type(weight).__module__.startswith("transformer_engine.")


def _quantized_like(weight: Tensor, stored: dict[str, Tensor]) -> Tensor:
    """A tensor over ``stored``, of the same kind and shape as ``weight``."""
    metadata = weight.get_metadata()  # type: ignore[attr-defined]
    metadata.update(
        {name: stored.get(name) for name, value in metadata.items() if isinstance(value, Tensor)}
    )
    return type(weight)(shape=weight.shape, dtype=weight.dtype, requires_grad=False, **metadata)
