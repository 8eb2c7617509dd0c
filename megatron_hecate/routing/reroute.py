"""From experts to physical experts: of this source's tokens for an expert, in order, the first so many go to the first
holder, the next to the second. The kernels are in ``kernels/reroute.cuh``."""

from __future__ import annotations

import ctypes
import dataclasses
import functools
from typing import Any

import torch
from torch import Tensor

from megatron_hecate.device.direct_apply import apply_directly
from megatron_hecate.device.lasting import lasting_tensors
from megatron_hecate.device.launch import Kernels
from megatron_hecate.routing.quotas import QuotaTables

THREADS: int = 256  # of a block
MOST_TILES: int = 128  # about as many blocks as a GPU has multiprocessors
LEAST_TILE: int = 32  # tokens
BITS = {torch.bfloat16: 16, torch.float16: 16, torch.float32: 32, torch.float64: 64}
# Positive floating-point numbers compare as their bits do; these are those of the smallest that is not denormal.
TINY = {
    torch.bfloat16: 1 << 7,
    torch.float16: 1 << 10,
    torch.float32: 1 << 23,
    torch.float64: 1 << 52,
}


@dataclasses.dataclass(frozen=True, eq=False)
class CountedTokens:
    """One source's tokens, counted.

    Args:
        routing_map: [T, E] bool.
        before: [tiles, E] int32, tokens for an expert before each tile of tokens.
        loads: [E] int32, all of them.
        tile: tokens of a tile.
    """

    routing_map: Tensor
    before: Tensor
    loads: Tensor
    tile: int

    @classmethod
    def of(cls, routing_map: Tensor, kernels: Kernels) -> CountedTokens:
        """Count ``routing_map`` [T, E] bool, by one launch."""
        routing_map = routing_map.contiguous()
        num_tokens, num_experts = routing_map.shape
        tile = max(LEAST_TILE, -(-num_tokens // MOST_TILES))
        tiles = max(1, -(-num_tokens // tile))
        before = routing_map.new_empty((tiles, num_experts), dtype=torch.int32)
        loads = routing_map.new_empty(num_experts, dtype=torch.int32)
        numbers = [ctypes.c_uint(number) for number in (num_tokens, tile, num_experts)]
        memory = _at(routing_map, before, loads, _arrivals(routing_map.device))
        kernels.launch("fssdp_count", *numbers, *memory, blocks=tiles, threads=THREADS)
        return cls(routing_map, before, loads, tile)


def reroute(
    counted: CountedTokens,
    probs: Tensor,
    tables: QuotaTables,
    parts: Tensor,
    *,
    never_zero: bool = False,
) -> tuple[Tensor, Tensor]:
    """Give every token of this source a holder of each of its experts. One launch, and one in the backward.

    Args:
        counted: the tokens.
        probs: [T, E] routing probabilities, differentiable.
        tables: who holds what.
        parts: what `QuotaTables.parts` gave.
        never_zero: the probability of a chosen expert becomes at least the dtype's smallest normal number.

    Returns:
        [T, R * P] bool routing map and [T, R * P] probabilities over physical experts.
    """
    if probs.dtype not in BITS:
        raise ValueError(
            f"routing probabilities are {probs.dtype}; FSSDP takes {', '.join(map(str, BITS))}"
        )
    return apply_directly(
        _Reroute, probs, counted, tables, parts, TINY[probs.dtype] if never_zero else 0
    )


class _Reroute(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        probs: Tensor,
        counted: CountedTokens,
        tables: QuotaTables,
        parts: Tensor,
        least: int,
    ) -> tuple[Tensor, Tensor]:
        shape = (probs.shape[0], tables.shape.num_physical)
        routing_map, physical = (
            counted.routing_map,
            (counted.routing_map.new_empty(shape), probs.new_empty(shape)),
        )
        arguments = [ctypes.c_uint(shape[0]), ctypes.c_uint(counted.tile)]
        arguments += [*tables.at, *_at(counted.before, parts, routing_map, probs.contiguous())]
        arguments += [ctypes.c_ulonglong(least), *_at(*physical)]
        blocks = counted.before.shape[0] * -(-shape[1] // THREADS)
        tables.kernels.launch(
            f"fssdp_reroute_{BITS[probs.dtype]}", *arguments, blocks=blocks, threads=THREADS
        )
        ctx.mark_non_differentiable(physical[0])
        ctx.save_for_backward(routing_map, counted.before, parts)
        ctx.kernels, ctx.tile = tables.kernels, counted.tile
        return physical

    @staticmethod
    def backward(ctx: Any, _: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        routing_map, before, parts = ctx.saved_tensors
        num_tokens, num_experts = routing_map.shape
        into = torch.empty(routing_map.shape, dtype=grad.dtype, device=grad.device)
        arguments = [
            ctypes.c_uint(number) for number in (num_tokens, ctx.tile, num_experts, grad.shape[1])
        ]
        arguments += _at(before, parts, routing_map, grad)
        arguments += [
            ctypes.c_ulonglong(stride) for stride in grad.stride()
        ]  # Megatron's lies column by column
        blocks = before.shape[0] * -(-num_experts // THREADS)
        name = f"fssdp_reroute_gradient_{BITS[grad.dtype]}"
        ctx.kernels.launch(name, *arguments, *_at(into), blocks=blocks, threads=THREADS)
        return into, None, None, None, None


def _arrivals(device: torch.device) -> Tensor:
    """The counter of a launch's blocks that have finished: zero before and after.

    Launches on one stream follow each other and share one. Those that a CUDA graph captures have their own, which each
    replay sets to zero: graphs of one capturing stream may be replayed on several.
    """
    if device.type != "cuda":
        return _arrivals_on(device, 0)
    if torch.cuda.is_current_stream_capturing():
        return torch.zeros(1, dtype=torch.int32, device=device)
    return _arrivals_on(device, torch.cuda.current_stream(device).cuda_stream)


@functools.cache
def _arrivals_on(device: torch.device, stream: int) -> Tensor:
    with lasting_tensors():
        return torch.zeros(1, dtype=torch.int32, device=device)


def _at(*tensors: Tensor) -> list[ctypes.c_void_p]:
    return [ctypes.c_void_p(tensor.data_ptr()) for tensor in tensors]
