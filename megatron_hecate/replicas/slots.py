"""Replica slots of one layer, and the protocol of the experts whose weights fill them."""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable
from functools import cached_property
from itertools import chain
from operator import attrgetter
from typing import Protocol

from torch import Tensor
from torch.nn import Parameter

from megatron_hecate.comm.transport import LayerBuffer
from megatron_hecate.replicas.autograd import PendingGradients
from megatron_hecate.replicas.buffers import BufferPool
from megatron_hecate.replicas.chunk_layout import ChunkLayout

# For each backward with delayed weight gradients: the placeholders that autograd carried, and the
# callback that takes the gradients once they are computed.
Delayed = deque[tuple[list[Tensor | None], Callable[[list[Tensor | None]], PendingGradients]]]


class ExpertWeights(Protocol):
    """Weights of one layer's own experts, and how a replica's weights lie in a chunk.

    Args:
        layout: layout of an expert's gradients in a chunk.
        delayed: queue of backwards whose weight gradients are computed later; ``None`` if no weight
            gradients are delayed.
    """

    layout: ChunkLayout
    delayed: Delayed | None

    def homes(self) -> list[list[Parameter]]:
        """Look up the parameters of this rank's own experts, expert by expert."""

    def home(self, index: int) -> list[Parameter]:
        """Look up the parameters of one of this rank's own experts."""

    def wait_for_values(self) -> None:
        """Wait until the homes hold this iteration's values."""

    def stored(self) -> list[list[Tensor]]:
        """List the tensors to transfer of each own expert."""

    def weights_in(self, chunk: Tensor) -> list[Tensor]:
        """View a fetched ``chunk`` as the parameters of an expert."""

    def drop_delayed(self) -> None:
        """Empty ``delayed``."""


@dataclasses.dataclass(frozen=True, eq=False)
class ReplicaSlots:
    """Replica slots of one layer on this rank.

    Args:
        index: index of the layer on this rank.
        experts: the layer's own experts.
        pool: the rank's buffers.
        label: name of the layer in errors.
    """

    index: int
    experts: ExpertWeights
    pool: BufferPool
    label: str

    @cached_property
    def sizes(self) -> LayerBuffer:
        return self.pool.layers[self.index]

    @property
    def trained(self) -> bool:
        """True if the experts are trained, not frozen."""
        return self.experts.home(0)[0].requires_grad

    def check(self) -> None:
        """Check that all parameters have one dtype, and that all or none are frozen.

        Raises:
            ValueError: if some parameters are frozen and some are trained, or their dtypes differ.
        """
        parameters = list(chain.from_iterable(self.experts.homes()))
        if len(set(map(attrgetter("requires_grad"), parameters))) > 1:
            raise ValueError(
                f"{self.label}: some expert parameters are frozen and others are not; freeze all "
                "or none"
            )
        dtypes = set(map(attrgetter("dtype"), parameters))
        if dtypes != {self.sizes.dtype}:
            raise ValueError(
                f"{self.label}: expert parameters have dtypes {sorted(map(str, dtypes))}; FSSDP "
                f"needs one, and keeps to {self.sizes.dtype}, which they had in the first step"
            )
