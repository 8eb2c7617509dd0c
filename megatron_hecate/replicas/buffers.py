"""Memory of replicas: allocated once per rank, shared by layers as far as the lifetime of their replicas allows.

| lifetime | buffers for weights | buffers for gradients |
|---|---|---|
| ``iteration`` | one per layer | one per layer: gradients of all microbatches add up in it |
| ``microbatch`` | one per layer and microbatch in flight | two, which layers take in turn |
| ``layer`` | two, which layers take in turn | two |

A *buffer* has room for all replicas of one layer on this rank. Layers of different size share buffers: each makes its
own views.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_hecate.comm.transfer import Transfer, has_one_queue, transfer_stream
from megatron_hecate.comm.transport import LayerBuffer, Transport, chunks_in
from megatron_hecate.device.lasting import lasting_tensors
from megatron_hecate.job.attempt import Attempt


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Lifetime:
    """How often replicas travel, and how early.

    Args:
        fetches: per microbatch; 0: once per iteration.
        returns: of gradients, per microbatch; 0: once per iteration.
        ahead: layers whose fetch starts with this one's. Dropped replicas share two buffers: the next layer's is free.
    """

    fetches: int
    returns: int
    ahead: int


LIFETIMES: dict[str, _Lifetime] = {
    "iteration": _Lifetime(fetches=0, returns=0, ahead=4),
    "microbatch": _Lifetime(fetches=1, returns=1, ahead=1),
    "layer": _Lifetime(fetches=2, returns=1, ahead=1),
}


@dataclasses.dataclass(frozen=True)
class BufferSizes:
    """Bytes of every buffer.

    Args:
        weights: of the buffers for weights.
        grads: of those for gradients.
    """

    weights: tuple[int, ...]
    grads: tuple[int, ...]

    @classmethod
    def plan(cls, layers: Sequence[LayerBuffer], lifetime: str, *, in_flight: int) -> BufferSizes:
        """What ``layers`` come to.

        Args:
            in_flight: forwards of a layer whose backward has not run, of all layers together, at most.
        """
        if not any(layer.slots for layer in layers):
            return cls((), ())
        turns = [layers[turn::2] for turn in range(min(2, len(layers)))]
        grads_in_turn = tuple(max(layer.grad_bytes for layer in turn) for turn in turns)
        if lifetime == "iteration":
            return cls(
                tuple(layer.weight_bytes for layer in layers),
                tuple(layer.grad_bytes for layer in layers),
            )
        if lifetime == "microbatch":
            return cls((max(layer.weight_bytes for layer in layers),) * in_flight, grads_in_turn)
        assert lifetime == "layer", lifetime
        return cls(
            tuple(max(layer.weight_bytes for layer in turn) for turn in turns), grads_in_turn
        )

    @property
    def total(self) -> int:
        return sum(self.weights) + sum(self.grads)


class Buffer:
    """Memory for the replicas of one layer at a time: their weights, or their gradients.

    Args:
        memory: uint8.
    """

    def __init__(self, memory: Tensor) -> None:
        self._memory = memory
        self.holds: Any = None  # whose weights or gradients; compared by identity
        self.transfer: Transfer | None = None  # the one that fills or empties it
        self.abandon: Callable[[], None] | None = (
            None  # called when nobody has used what that one brought
        )
        self.bound: dict[
            int, Any
        ] = {}  # weights that experts compute with, by layer: see `autograd.BoundWeights`
        self._is_zero = False  # once the two below are done
        self._to_zero: Sequence[Tensor] = ()
        self._zeroed: torch.cuda.Event | None = None

    def chunks(self, layer: LayerBuffer, dtype: torch.dtype) -> list[Tensor]:
        """[elements] for each slot of ``layer``: new tensors over the same memory."""
        return chunks_in(self._memory, layer.slots, layer.elements, dtype)

    def weights(self, layer: LayerBuffer) -> list[Tensor]:
        """The same for its weights, as they travel."""
        return chunks_in(self._memory, layer.slots, *layer.weights)

    def wait(self) -> None:
        """Wait for the transfer that uses this memory, if one does."""
        transfer, self.transfer = self.transfer, None
        if transfer is not None:
            transfer.wait()

    def clear(self) -> None:
        """`wait`, for use by others: what came and was not used was of a backward that broke off."""
        self.wait()
        abandon, self.abandon = self.abandon, None
        if abandon is not None:
            abandon()

    def release(self) -> None:
        """Let go of the memory: a transfer that uses it keeps it until then."""
        self.bound.clear()
        self._memory, self._to_zero = self._memory.new_empty(0), ()
        self.holds = self.transfer = self.abandon = None

    def begin_sums(self, *, from_zero: bool) -> None:
        """`clear` it for new gradients, which add to what is there where they start ``from_zero``."""
        self.clear()
        if self._zeroed is not None:
            torch.cuda.current_stream().wait_event(self._zeroed)
        for part in self._to_zero if self._is_zero else ():
            part.zero_()
        if from_zero and not self._is_zero:
            self._memory.zero_()
        if from_zero and sys.flags.dev_mode:
            assert not self._memory.any(), "gradients of an earlier backward are still there"
        self._is_zero, self._to_zero, self._zeroed = False, (), None

    def zero_after_transfer(self, parts: Sequence[Tensor]) -> None:
        """Have ``parts`` zero once the transfer that uses this memory is over, beside computing where that is possible:
        all that `begin_sums` found zero and that is no longer."""
        self._is_zero = True
        if not self._memory.is_cuda or has_one_queue():
            self._to_zero = parts
            return
        stream = transfer_stream(self._memory.device)
        with torch.cuda.stream(stream):
            for part in parts:
                part.zero_()
            self._zeroed = stream.record_event()

    def hold(self, owner: Any) -> None:
        """Drop what it holds, and hold ``owner``'s. In Python's development mode (``PYTHONDEVMODE=1``) what was
        dropped becomes NaN."""
        self.wait()
        self.holds = owner
        if sys.flags.dev_mode:
            self._memory.fill_(0xFF)  # NaN in fp32, bf16 and fp16


class BufferPool:
    """All buffers of a rank.

    Args:
        transport: allocates them where it can reach them.
        layers: sizes of every layer on this rank, by index.
        lifetime: of replicas.
        in_flight: as in `BufferSizes.plan`.
        device: where the layers are.
    """

    def __init__(
        self,
        transport: Transport,
        layers: Sequence[LayerBuffer],
        lifetime: str,
        *,
        in_flight: int,
        device: torch.device,
    ) -> None:
        self.transport, self.layers, self.lifetime = transport, layers, lifetime
        sizes = BufferSizes.plan(layers, lifetime, in_flight=in_flight)
        with lasting_tensors():
            memory = transport.allocate(sizes.total, layers, device)
            buffers = [Buffer(part) for part in memory.split([*sizes.weights, *sizes.grads])]
        self._weights, self._grads = buffers[: len(sizes.weights)], buffers[len(sizes.weights) :]
        self._free = list(self._weights)  # for lifetime microbatch
        self.reset_because = ""
        Attempt.current().at_end(self.release)

    def release(self) -> None:
        """The attempt of the job is over: give memory back, also where something keeps the model."""
        for buffer in (*self._weights, *self._grads):
            buffer.release()
        self.transport.release()

    def weights(self, layer: int, *, label: str) -> Buffer:
        """The buffer for weights of ``layer`` in one microbatch (lifetime ``iteration``: in all of them).

        Raises:
            RuntimeError: with lifetime ``microbatch``, when more microbatches are in flight than the schedule has.
        """
        if self.lifetime != "microbatch":
            return self._weights[layer % len(self._weights)]
        if not self._free:
            raise RuntimeError(
                f"{label}: all {len(self._weights)} buffers hold replicas of microbatches whose backward has not run; "
                "the schedule runs more forwards ahead than Megatron's schedules do, or backwards were left out; "
                "use --moe-fssdp-lifetime layer, and run forwards without a backward under torch.no_grad()"
            )
        return self._free.pop()

    def free(self, buffer: Buffer) -> None:
        """Take back a buffer that `weights` gave."""
        if self.lifetime == "microbatch":
            assert buffer not in self._free
            buffer.hold(None)
            self._free.append(buffer)

    def grads(self, layer: int) -> Buffer:
        """The buffer for gradients of the replicas of ``layer``; wait for it before use."""
        return self._grads[layer % len(self._grads)]

    def unbind(self) -> None:
        """Let go of homes' memory, and of gradients': who moves parameters between iterations wants it free."""
        for buffer in self._weights:
            buffer.bound.clear()

    def reset(self, cause: str) -> None:
        """Drop everything: wait for transfers that nobody waited for, and free all buffers.

        Args:
            cause: end of a sentence, for errors of those that need what is dropped.
        """
        self.reset_because = cause
        self.unbind()
        for buffer in (*self._weights, *self._grads):
            buffer.clear()
            buffer.holds = None
        self._free = list(self._weights)
