"""Slot memory: one arena per rank, allocated once, shared by layers as far as their guests' lifetime allows.

| lifetime | frames for weights | frames for gradients |
|---|---|---|
| ``iteration`` | one per layer | one per layer: gradients of all microbatches add up in it |
| ``microbatch`` | one per layer and microbatch in flight | two, which layers take in turn |
| ``layer`` | two, which layers take in turn | two |

A *frame* has room for all guests of one layer. Beside them lies the staging memory, where guests' gradients arrive at
their home. Layers of different size share frames: each makes its own views.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_hecate import hierarchy
from megatron_hecate.sm import Sm
from megatron_hecate.transfer import Transfer

ALIGNMENT: int = 256  # bytes; what copies and GEMMs like best
STAGED: int = 4  # gradients that arrive at a home at once, at most; those of further guests come in rounds
STAGED_BYTES: int = 256 << 20  # and no more than this, but one


@dataclasses.dataclass(frozen=True, kw_only=True)
class Lifetime:
    """How often guests travel, and how early.

    Args:
        fetches: per microbatch; 0: once per iteration.
        returns: of gradients, per microbatch; 0: once per iteration.
        ahead: layers whose fetch starts with this one's. Dropped guests share two frames: the next layer's is free.
    """

    fetches: int
    returns: int
    ahead: int


LIFETIMES: dict[str, Lifetime] = {
    "iteration": Lifetime(fetches=0, returns=0, ahead=4),
    "microbatch": Lifetime(fetches=1, returns=1, ahead=1),
    "layer": Lifetime(fetches=2, returns=1, ahead=1),
}


@dataclasses.dataclass(frozen=True)
class Need:
    """What one layer asks of the arena.

    Args:
        slots: guests this rank can host.
        elements: of one chunk.
        dtype: of the weights.
        homes: experts that this rank owns, and may lend.
        domains: sizes of the NVLink domains of its FSSDP group.
    """

    slots: int
    elements: int
    dtype: torch.dtype
    homes: int = 0
    domains: tuple[int, ...] = (1,)

    @property
    def grad_dtype(self) -> torch.dtype:
        """In which gradients are summed, and travel: fp32 for bf16 weights."""
        return torch.promote_types(self.dtype, torch.float32)

    @property
    def weight_bytes(self) -> int:
        return self.slots * _aligned(self.elements * self.dtype.itemsize)

    @property
    def grad_bytes(self) -> int:
        return self.slots * _aligned(self.elements * self.grad_dtype.itemsize)

    @property
    def outbox_bytes(self) -> int:
        """Every home may be lent."""
        return self.homes * _aligned(self.elements * self.dtype.itemsize)

    @property
    def stripe(self) -> int:
        """Elements of what a rank holds of a chunk for others, between domains."""
        return hierarchy.width(self.elements, self.domains)

    @property
    def relay_bytes(self) -> int:
        """What a rank holds for others, in the larger of spAG and spRS."""
        counts = hierarchy.relays(self.domains, homes=self.homes, slots=self.slots)
        sizes = (_aligned(self.stripe * dtype.itemsize) for dtype in (self.dtype, self.grad_dtype))
        return max(count * size for count, size in zip(counts, sizes, strict=True))

    @property
    def staged(self) -> int:
        """Gradients that arrive at a home at once."""
        return max(1, min(STAGED, STAGED_BYTES // _aligned(self.elements * self.grad_dtype.itemsize)))

    @property
    def staging_bytes(self) -> int:
        """Those, and their sum."""
        return (self.staged + 1) * _aligned(self.elements * self.grad_dtype.itemsize)


@dataclasses.dataclass(frozen=True)
class Frames:
    """How large the arena is, in bytes, frame by frame.

    Args:
        weights, grads: of guests.
        staging: where gradients arrive (transport ``p2p``).
        outbox: where peers read lent experts (transports ``sm`` and ``ce``).
        relay: where stripes wait that go from one NVLink domain to another (the same).
    """

    weights: tuple[int, ...]
    grads: tuple[int, ...]
    staging: int
    outbox: int = 0
    relay: int = 0

    @classmethod
    def of(cls, needs: Sequence[Need], lifetime: str, *, in_flight: int, transport: str = "p2p") -> Frames:
        """What ``needs``, one per layer, come to.

        Args:
            in_flight: forwards of a layer whose backward has not run, of all layers together, at most.
            transport: "p2p", "sm" or "ce".
        """
        if not any(need.slots for need in needs):
            return cls((), (), 0)
        if transport == "p2p":
            moved = (max(need.staging_bytes for need in needs), 0, 0)
        else:
            moved = (0, max(need.outbox_bytes for need in needs), max(need.relay_bytes for need in needs))
        largest = max(need.weight_bytes for need in needs)
        turns = [needs[turn::2] for turn in range(min(2, len(needs)))]
        in_turn = tuple(max(need.grad_bytes for need in turn) for turn in turns)
        if lifetime == "iteration":
            return cls(tuple(n.weight_bytes for n in needs), tuple(n.grad_bytes for n in needs), *moved)
        if lifetime == "microbatch":
            return cls((largest,) * in_flight, in_turn, *moved)
        assert lifetime == "layer", lifetime
        return cls(tuple(max(need.weight_bytes for need in turn) for turn in turns), in_turn, *moved)

    @property
    def total(self) -> int:
        return sum(self.weights) + sum(self.grads) + self.moved

    @property
    def moved(self) -> int:
        """What transfers need beside their ends."""
        return self.staging + self.outbox + self.relay


class Frame:
    """Memory for the guests of one layer at a time: their weights, or their gradients.

    Args:
        memory: uint8.
    """

    def __init__(self, memory: Tensor) -> None:
        self._memory = memory
        self.holds: Any = None  # whose weights or gradients; compared by identity
        self.transfer: Transfer | None = None  # the one that fills or empties it
        self.given_up: Callable[[], None] | None = None  # called when nobody has used what that one brought

    def chunks(self, slots: int, elements: int, dtype: torch.dtype) -> list[Tensor]:
        """[elements] for each slot: new tensors over the same memory, which count their own versions.

        A guest's weights are written while autograd holds on to them for the backward (lifetime ``layer`` fetches the
        same weights to the same place again), so its version check must not see it.
        """
        apart = _aligned(elements * dtype.itemsize) // dtype.itemsize
        storage, begin = self._memory.untyped_storage(), self._memory.storage_offset() // dtype.itemsize
        return [
            torch.empty(0, dtype=dtype, device=self._memory.device).set_(storage, begin + i * apart, (elements,))
            for i in range(slots)
        ]

    def settle(self) -> None:
        """Wait for the transfer that uses this memory, if one does."""
        transfer, self.transfer = self.transfer, None
        if transfer is not None:
            transfer.wait()

    def clear(self) -> None:
        """`settle`, for use by others: what came and was not used was of a backward that broke off."""
        self.settle()
        given_up, self.given_up = self.given_up, None
        if given_up is not None:
            given_up()

    def hold(self, owner: Any) -> None:
        """Drop what it holds, and hold ``owner``'s. In Python's development mode (``PYTHONDEVMODE=1``) what was
        dropped becomes NaN."""
        self.settle()
        self.holds = owner
        if sys.flags.dev_mode:
            self._memory.fill_(0xFF)  # NaN in fp32, bf16 and fp16


class SlotMemory:
    """The arena and its frames.

    Args:
        needs: of every layer on this rank, by index.
        lifetime: of guests.
        in_flight: as in `Frames.of`.
        device: where.
        fused: makes the transport with an arena of so many bytes; ``None`` for ``p2p``.
    """

    def __init__(
        self,
        needs: Sequence[Need],
        lifetime: str,
        *,
        in_flight: int,
        device: torch.device,
        fused: Callable[[int], Sm] | None = None,
    ) -> None:
        self.needs, self.lifetime = needs, lifetime
        self.frames = Frames.of(needs, lifetime, in_flight=in_flight, transport="sm" if fused else "p2p")
        self.sm = fused(self.frames.total) if fused else None
        self._arena = (
            self.sm.peers.arena if self.sm else torch.empty(self.frames.total, dtype=torch.uint8, device=device)
        )
        frames, count = self.frames, len(self.frames.weights)
        sizes = [*frames.weights, *frames.grads, frames.staging, frames.outbox, frames.relay]
        *parts, self.staging, self.outbox, self.relay = (Frame(part) for part in self._arena.split(sizes))
        self._weights, self._grads = parts[:count], parts[count:]
        self._free = list(self._weights)  # for lifetime microbatch

    def weights(self, layer: int, *, label: str) -> Frame:
        """The frame for guests of ``layer`` in one microbatch (lifetime ``iteration``: in all of them).

        Raises:
            RuntimeError: with lifetime ``microbatch``, when more microbatches are in flight than the schedule has.
        """
        if self.lifetime != "microbatch":
            return self._weights[layer % len(self._weights)]
        if not self._free:
            raise RuntimeError(
                f"{label}: all {len(self._weights)} frames hold guests of microbatches whose backward has not run; the "
                "pipeline schedule runs more forwards ahead than Megatron's schedules do, or backwards were left out; "
                "use --moe-fssdp-lifetime layer or iteration"
            )
        return self._free.pop()

    def relays(self, need: Need, dtype: torch.dtype) -> list[Tensor]:
        """[stripe] for each that a rank may hold for others."""
        count = self.frames.relay // _aligned(need.stripe * dtype.itemsize)
        return self.relay.chunks(count, need.stripe, dtype)

    def free(self, frame: Frame) -> None:
        """Take back a frame that `weights` gave."""
        if self.lifetime == "microbatch":
            assert frame not in self._free
            frame.hold(None)
            self._free.append(frame)

    def grads(self, layer: int) -> Frame:
        """The frame for gradients of the guests of ``layer``; settle it before use."""
        return self._grads[layer % len(self._grads)]

    def reset(self) -> None:
        """Drop everything: wait for transfers that nobody waited for, and free all frames."""
        for frame in (*self._weights, *self._grads, self.staging):
            frame.clear()
            frame.holds = None
        self._free = list(self._weights)


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
