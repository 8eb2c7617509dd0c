"""Memory of replicas: allocated once per rank and shared by layers where their lifetime allows it.

| lifetime | buffers for weights | buffers for gradients |
|---|---|---|
| ``iteration`` | one per layer | one per layer: accumulates the gradients of all microbatches |
| ``layer`` | two, used by layers in turn | two, used by layers in turn |

A *buffer* has room for all replicas of one layer on this rank. Layers of different size share
buffers: each layer makes its own views.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import cached_property
from itertools import chain
from operator import attrgetter
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor
from torch.nn import Parameter

from megatron_hecate.comm.transfer import Transfer
from megatron_hecate.comm.transport import LayerBuffer, TransferPlan, Transport, chunks_in
from megatron_hecate.device.autograd import lasting_tensors
from megatron_hecate.faults.attempt import Attempt

if TYPE_CHECKING:
    from megatron_hecate.replicas.autograd import Delayed
    from megatron_hecate.replicas.bound_weights import BoundWeights


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Lifetime:
    """Transfers of a lifetime and their prefetch distance.

    Args:
        fetches: fetches per microbatch; 0: one per iteration.
        returns: returns of gradients per microbatch; 0: one per iteration.
        buffers: buffers that all layers share; 0: one per layer.
        ahead: prefetch distance in layers. Replicas that are dropped share two buffers, so that
            only the next layer's is free.
    """

    fetches: int
    returns: int
    buffers: int
    ahead: int


# Upper bound of the further layers whose fetches begin before one layer: until the first attention
# is launched, a GPU waits for the host. The prefetch distance grows over the first layers.
FETCHED_TOGETHER: int = 2

LIFETIMES: dict[str, _Lifetime] = {
    "iteration": _Lifetime(fetches=0, returns=0, buffers=0, ahead=4),
    "layer": _Lifetime(fetches=2, returns=1, buffers=2, ahead=1),
}


def buffer_sizes(layers: Sequence[LayerBuffer], lifetime: str) -> tuple[list[int], list[int]]:
    """Compute the bytes of each buffer for weights, and of each buffer for gradients.

    Args:
        layers: sizes of every layer on this rank, by index.
        lifetime: lifetime of the replicas.
    """
    number = min(LIFETIMES[lifetime].buffers or len(layers), len(layers))
    turns = [layers[turn::number] for turn in range(number)]
    weights = [max(map(attrgetter("weight_bytes"), turn)) for turn in turns]
    return weights, [max(map(attrgetter("grad_bytes"), turn)) for turn in turns]


class Buffer:
    """Memory for the replicas of one layer at a time: their weights, or their gradients.

    Args:
        memory: the buffer's bytes, uint8.
    """

    def __init__(self, memory: Tensor) -> None:
        self.memory = memory
        # Results of `chunks` by slots, elements and data type.
        self._chunks: dict[tuple[int, int, torch.dtype], list[Tensor]] = {}
        # Transfers that fetched the content, compared by identity.
        self.holds: TransferPlan | None = None
        # The transfer in flight that fills or empties the buffer.
        self.transfer: Transfer | None = None
        # Called if the transfer's result was never consumed.
        self.abandon: Callable[[], None] | None = None
        # Weights over this memory, by index of the layer.
        self.bound: dict[int, BoundWeights] = {}

    def chunks(self, slots: int, elements: int, dtype: torch.dtype) -> list[Tensor]:
        """Return tensors over the memory, [elements] for each of ``slots``, made once."""
        key = (slots, elements, dtype)
        if key not in self._chunks:
            with lasting_tensors():
                self._chunks[key] = chunks_in(self.memory, *key)
        return self._chunks[key]

    def wait(self) -> None:
        """Wait for the transfer that uses this memory; where it fails, forget the content."""
        transfer = self.transfer
        self.transfer = None
        if transfer is not None:
            held, self.holds = self.holds, None
            transfer.wait()
            self.holds = held

    def clear(self) -> None:
        """Wait for the transfer, and discard a result left by an aborted backward."""
        self.wait()
        abandon = self.abandon
        self.abandon = None
        if abandon is not None:
            abandon()

    def release(self) -> None:
        """Drop references to the memory; a transfer in flight keeps it until the transfer ends."""
        self.bound.clear()
        self._chunks.clear()
        self.memory = self.memory.new_empty(0)
        self.holds = self.transfer = self.abandon = None

    def reset(self) -> None:
        """Wait for the transfer, and forget the content."""
        self.clear()
        self.holds = None
        self.bound.clear()


class BufferPool:
    """All buffers of a rank, which `allocate` makes before their first use.

    Args:
        transport: allocator of the buffers, in memory that it can access.
        lifetime: lifetime of the replicas.
    """

    def __init__(self, transport: Transport, lifetime: str) -> None:
        self.transport = transport
        self.lifetime = lifetime
        # Sizes of every layer on this rank, by index; none without memory.
        self.layers: Sequence[LayerBuffer] = ()
        # Bytes that `release` frees.
        self.nbytes = 0
        self.reset_because = ""
        self._weights: list[Buffer] = []
        self._grads: list[Buffer] = []
        Attempt.current().at_end(self.release)

    def allocate(self, layers: Sequence[LayerBuffer], device: torch.device) -> None:
        """Allocate buffers for ``layers``, all MoE layers of this rank, on ``device``. Collective.

        Call it before the activations, which would use up free memory.
        """
        weights, grads = buffer_sizes(layers, self.lifetime)
        total = sum(weights) + sum(grads)
        with lasting_tensors():
            memory = self.transport.allocate(total, layers, device)
            buffers = [Buffer(part) for part in memory.split([*weights, *grads])]
        self.layers = layers
        self.nbytes = total + self.transport.extra_bytes(layers)
        self._weights = buffers[: len(weights)]
        self._grads = buffers[len(weights) :]

    def release(self) -> None:
        """Free the memory: at the end of the job's attempt, or until `allocate`."""
        for buffer in (*self._weights, *self._grads):
            buffer.release()
        self.transport.release()
        self.nbytes = 0
        self.layers = ()

    def weights(self, layer: int) -> Buffer:
        """Return the buffer for weights of ``layer``."""
        return self._weights[layer % len(self._weights)]

    def grads(self, layer: int) -> Buffer:
        """Return the buffer for gradients of the replicas of ``layer``; wait for it before use."""
        return self._grads[layer % len(self._grads)]

    def unbind(self) -> None:
        """Drop references to the memory of homes and gradients.

        Code that moves parameters between iterations needs the memory to be free.
        """
        for buffer in self._weights:
            buffer.bound.clear()

    def reset(self, cause: str) -> None:
        """Wait for all transfers and drop all content.

        Args:
            cause: end of a sentence, for errors of later uses of dropped replicas.
        """
        self.reset_because = cause
        # Memory savers may have dropped the content between two iterations (`torch_memory_saver`
        # without a copy in host memory).
        for buffer in (*self._weights, *self._grads):
            buffer.reset()


@dataclasses.dataclass(frozen=True)
class ChunkLayout:
    """Layout of one expert's parameters, end to end in a chunk.

    Args:
        shapes: shape of every parameter, in the order of the expert's module.
        fused: True for each parameter whose gradient a GEMM adds straight into ``main_grad``
            (Megatron's ``gradient_accumulation_fusion``); autograd then carries a placeholder.
        uniform: True if weights of empty slots must require gradients where other weights do.
    """

    shapes: tuple[torch.Size, ...]
    fused: tuple[bool, ...]
    uniform: bool = False

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

    def views(self, chunk: Tensor) -> list[Tensor]:
        """Return the parameters in one ``chunk`` [elements], as views."""
        # `Tensor.split` runs Python around this method
        parts = chunk.split_with_sizes(self.sizes)
        return [part.view(shape) for part, shape in zip(parts, self.shapes, strict=True)]


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

    def are_trained(self) -> bool:
        """Return whether the experts are trained, and not frozen."""

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
