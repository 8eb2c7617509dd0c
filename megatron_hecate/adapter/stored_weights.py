"""How an expert's weights are stored, and travel: a home's quantized bytes come to its replicas as they are.

Where parameters are quantized (``fp8_param``), a replica made any other way would compute with other weights than its
home. What TransformerEngine derives from other bytes without rounding does not travel, and is made where it is needed:
the transpose of a tensor with one scale, and the columns of a tensor scaled in square blocks.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def is_quantized(weight: Tensor) -> bool:
    """Whether it is a ``QuantizedTensor`` of TransformerEngine."""
    return hasattr(weight, "get_metadata")


def as_stored(expert: Sequence[Tensor]) -> list[Tensor]:
    """What travels of an expert's parameters, in the order of a chunk: they themselves, or their bytes (uint8)."""
    if not any(map(is_quantized, expert)):
        return list(expert)
    return [part.detach().view(-1).view(torch.uint8) for _, _, part in _parts(expert)]


def stored_bytes(expert: Sequence[Tensor]) -> int:
    """Bytes of `as_stored`."""
    return sum(part.nbytes for part in as_stored(expert))


def weights_in(chunk: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """An expert's parameters in ``chunk`` [`stored_bytes`] uint8, stored as those of ``like``."""
    parts = _parts(like)
    found: list[dict[str, Tensor]] = [{} for _ in like]
    for (index, name, part), data in zip(parts, chunk.split([p.nbytes for _, _, p in parts]), strict=True):
        found[index][name] = data.view(part.dtype).view(part.shape)
    return [_quantized(w, own) if is_quantized(w) else own[""] for w, own in zip(like, found, strict=True)]


def _parts(expert: Sequence[Tensor]) -> list[tuple[int, str, Tensor]]:
    """(parameter, name, tensor) of all that travels. Large ones come first, so that what GEMMs read is aligned."""
    parts = []
    for index, weight in enumerate(expert):
        stored = {"": weight}
        if is_quantized(weight):
            metadata = weight.get_metadata()
            derived = "columnwise" if metadata.get("is_2D_scaled") else "data_transpose"
            stored = {k: v for k, v in metadata.items() if isinstance(v, Tensor) and not k.startswith(derived)}
        parts += [(index, name, part) for name, part in stored.items()]
    return sorted(parts, key=lambda part: -part[2].nbytes)


def _quantized(like: Tensor, stored: dict[str, Tensor]) -> Tensor:
    """A tensor over ``stored``, of the same kind and shape as ``like``."""
    metadata = like.get_metadata()
    metadata.update({name: stored.get(name) for name, value in metadata.items() if isinstance(value, Tensor)})
    return type(like)(shape=like.shape, dtype=like.dtype, requires_grad=False, **metadata)
