"""Memory of one model's replicas on this rank, allocated at its first use."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megatron_hecate.replicas.buffers import BufferPool
from megatron_hecate.step.layer_state import LayerState


class ModelBuffers:
    """Buffers of one model's layers.

    Args:
        states: states of all layers, in the order of the forward.
    """

    def __init__(self, states: Sequence[LayerState]) -> None:
        self._states = states
        # ``None`` before the first use.
        self.allocated: BufferPool | None = None
        # For each layer, class and data type of the parameters for which the buffers have room.
        self._kinds: list[tuple[type, torch.dtype]] = []
        # True if the sizes have been compared with the parameters in this iteration.
        self._are_checked = False

    def pool(self) -> BufferPool:
        """Return the buffers, which are allocated at their first use.

        Parameters have their final type by then. With or without planned replicas the allocation
        precedes the activations, which would use up free memory.
        """
        if self.allocated is None or not self._are_checked:
            self._are_checked = True
            if self.allocated is None or not self._fits(self.allocated):
                self.allocated = self._allocate()
        return self.allocated

    def _fits(self, pool: BufferPool) -> bool:
        """Return whether the buffers have room for the parameters as they are now."""
        # A released pool has no layers.
        if not pool.layers or self._kinds != self._kinds_now():
            return False
        # Bytes of quantized weights depend on more than their class.
        return all(
            layer == state.parts.buffer(layer.slots)
            for state, layer in zip(self._states, pool.layers, strict=True)
            if layer.stored_bytes
        )

    def _kinds_now(self) -> list[tuple[type, torch.dtype]]:
        parameters = [state.parts.experts.first for state in self._states]
        return [(parameter.__class__, parameter.dtype) for parameter in parameters]

    def _allocate(self) -> BufferPool:
        self._kinds = self._kinds_now()
        first = self._states[0]
        return BufferPool(
            first.transport,
            [state.parts.buffer(state.config.slots) for state in self._states],
            first.config.lifetime,
            device=next(first.parts.layer.experts.parameters()).device,
        )

    def begin_iteration(self, ended_because: str) -> None:
        """Drop all content, and compare the sizes at the next use.

        Args:
            ended_because: end of the last iteration, see `BufferPool.reset`.
        """
        self._are_checked = False
        if self.allocated is not None:
            self.allocated.reset(ended_because)

    def unbind(self) -> None:
        """Drop references to the memory of homes and gradients, see `BufferPool.unbind`."""
        if self.allocated is not None:
            self.allocated.unbind()
