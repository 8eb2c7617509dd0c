"""Replica slots of one layer, and the protocol of the experts whose weights fill them."""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable
from functools import cached_property
from itertools import chain
from operator import attrgetter
from typing import Protocol

import numpy as np
from torch import Tensor
from torch.nn import Parameter

from megatron_hecate.comm.transport import LayerBuffer, TransferPlan
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
        is_trained: function that returns whether any expert of the layer is trained, on any rank.
    """

    index: int
    experts: ExpertWeights
    pool: BufferPool
    label: str
    is_trained: Callable[[], bool] = lambda: True

    @cached_property
    def sizes(self) -> LayerBuffer:
        return self.pool.layers[self.index]

    def computes_gradients(self, transfers: TransferPlan) -> list[bool]:
        """Return for each weight whether it gets gradients: homes, then slots, flat.

        Homes follow their parameters, and drop gradients that they get from replicas while frozen.
        """
        layout = self.experts.layout
        parts = len(layout.shapes)
        homes = [p.requires_grad for home in self.experts.homes() for p in home]
        if not all(homes):
            homes = layout.computed(np.reshape(homes, (-1, parts))).ravel().tolist()
        for slot in range(self.sizes.slots):
            homes += [slot in transfers.slots] * parts
        return homes

    def check(self) -> None:
        """Check that all parameters have one dtype.

        Raises:
            ValueError: if their dtypes differ.
        """
        parameters = chain.from_iterable(self.experts.homes())
        dtypes = set(map(attrgetter("dtype"), parameters))
        if dtypes != {self.sizes.dtype}:
            raise ValueError(
                f"{self.label}: expert parameters have dtypes {sorted(map(str, dtypes))}; FSSDP "
                f"needs one, and keeps to {self.sizes.dtype}, which they had in the first step"
            )
