"""Layout of an expert's parameters in a chunk."""

from __future__ import annotations

import dataclasses
from functools import cached_property

import numpy as np
import torch
from torch import Tensor


@dataclasses.dataclass(frozen=True)
class ChunkLayout:
    """Layout of one expert's parameters, end to end in a chunk.

    Args:
        shapes: shape of every parameter, in the order of the expert's module.
        fused: True for each parameter whose gradient a GEMM adds straight into ``main_grad``
            (Megatron's ``gradient_accumulation_fusion``); autograd then carries a placeholder.
        uniform: True if all weights must require gradients where some do, weights of empty slots
            included.
        is_grouped: True if one GEMM computes all experts, and gradients of all weights or of none.
    """

    shapes: tuple[torch.Size, ...]
    fused: tuple[bool, ...]
    uniform: bool = False
    is_grouped: bool = False

    @cached_property
    def elements(self) -> int:
        return sum(self.sizes)

    @cached_property
    def sizes(self) -> list[int]:
        """Elements of every parameter."""
        return [shape.numel() for shape in self.shapes]

    @cached_property
    def fuses_any(self) -> bool:
        """True if the gradient of at least one parameter is fused."""
        return any(self.fused)

    @property
    def has_biases(self) -> bool:
        """True if any parameter is a vector."""
        return any(len(shape) == 1 for shape in self.shapes)

    def computed(self, requires_grad: np.ndarray) -> np.ndarray:
        """Return which parameters get gradients, from ``requires_grad`` [..., H, parts].

        TransformerEngine's grouped GEMM computes no gradients if its first weight is frozen. If its
        gradients are fused and the first weight is trained, it computes those of frozen weights,
        too.
        """
        if not self.is_grouped:
            return requires_grad
        first = requires_grad[..., :1, :]
        return np.where(self.fused, first, requires_grad & first)

    def views(self, chunk: Tensor) -> list[Tensor]:
        """Return the parameters in one ``chunk`` [elements], as views."""
        # `Tensor.split` runs Python around this method
        parts = chunk.split_with_sizes(self.sizes)
        return [part.view(shape) for part, shape in zip(parts, self.shapes, strict=True)]
