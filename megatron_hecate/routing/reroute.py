"""Rerouting from experts to physical experts, in front of Megatron's own dispatcher.

The router chooses among E experts. A second instance of Megatron's dispatcher is built over R x P
*physical* experts. Each token's choice of an expert becomes a choice of one of its holders: the
tokens of a source for one expert are split in their order, the first holder's quota first, then the
second's. The kernels are in ``kernels/reroute.cuh``.
"""

from __future__ import annotations

import functools
from ctypes import c_uint, c_ulonglong, c_void_p
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_hecate.device.autograd import direct_apply, lasting_tensors
from megatron_hecate.device.launch import Kernels
from megatron_hecate.plan import Placement, World
from megatron_hecate.routing.quotas import Exchange, QuotaTables
from megatron_hecate.routing.tables import GroupShape

# threads of a thread block
THREADS: int = 256
# about the number of a GPU's multiprocessors; each tile is a thread block
MOST_TILES: int = 128
# tokens
LEAST_TILE: int = 32
BITS = {torch.bfloat16: 16, torch.float16: 16, torch.float32: 32, torch.float64: 64}


class CountedTokens:
    """Token counts of one source, by one kernel launch.

    Args:
        routing_map: experts of each token, [T, E] bool.
        kernels: kernels of its device.
        total: [E] int64 sum to which the launch adds the loads.

    Attributes:
        routing_map: contiguous.
        tile: tokens per tile.
        before: [tiles, E] int32, tokens for an expert before each tile of tokens.
        loads: [E] int32, tokens for an expert in all tiles.
    """

    def __init__(self, routing_map: Tensor, kernels: Kernels, total: Tensor | None = None) -> None:
        self.routing_map = routing_map = routing_map.contiguous()
        num_tokens, num_experts = routing_map.shape
        self.tile = max(LEAST_TILE, -(-num_tokens // MOST_TILES))
        tiles = max(1, -(-num_tokens // self.tile))
        self.before = routing_map.new_empty((tiles, num_experts), dtype=torch.int32)
        self.loads = routing_map.new_empty(num_experts, dtype=torch.int32)
        kernels.launch(
            "fssdp_count",
            c_uint(num_tokens),
            c_uint(self.tile),
            c_uint(num_experts),
            c_void_p(routing_map.data_ptr()),
            c_void_p(self.before.data_ptr()),
            c_void_p(self.loads.data_ptr()),
            c_void_p(None if total is None else total.data_ptr()),
            c_void_p(_arrivals(routing_map.device).data_ptr()),
            blocks=tiles,
            threads=THREADS,
        )


def reroute(
    counted: CountedTokens,
    probs: Tensor,
    tables: QuotaTables,
    parts: Tensor,
    *,
    never_zero: bool = False,
) -> tuple[Tensor, Tensor]:
    """Assign a holder of each of its experts to every token of this source.

    One kernel launch, and one in the backward.

    Args:
        counted: token counts of this source.
        probs: [T, E] routing probabilities, differentiable.
        tables: tables of the placement.
        parts: result of `QuotaTables.parts`.
        never_zero: whether to raise the probability of a chosen expert to at least the dtype's
            smallest normal number.

    Returns:
        [T, R * P] bool routing map and [T, R * P] probabilities over physical experts.
    """
    if probs.dtype not in BITS:
        raise ValueError(
            f"routing probabilities are {probs.dtype}; FSSDP takes {', '.join(map(str, BITS))}"
        )
    # Bit pattern of the smallest normal number: 1 above the bits of the mantissa. Positive
    # floating-point numbers compare like their bits, so the kernel compares integers.
    smallest = round(1 / torch.finfo(probs.dtype).eps) if never_zero else 0
    return _reroute(probs, counted, tables, parts, smallest)


class _Reroute(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        probs: Tensor,
        counted: CountedTokens,
        tables: QuotaTables,
        parts: Tensor,
        smallest: int,
    ) -> tuple[Tensor, Tensor]:
        shape = (probs.shape[0], tables.shape.num_physical)
        routing_map = counted.routing_map
        physical_map = routing_map.new_empty(shape)
        physical_probs = probs.new_empty(shape)
        # kept until the launch
        probs = probs.contiguous()
        tables.kernels.launch(
            f"fssdp_reroute_{BITS[probs.dtype]}",
            c_uint(shape[0]),
            c_uint(counted.tile),
            *tables.at,
            c_void_p(counted.before.data_ptr()),
            c_void_p(parts.data_ptr()),
            c_void_p(routing_map.data_ptr()),
            c_void_p(probs.data_ptr()),
            c_ulonglong(smallest),
            c_void_p(physical_map.data_ptr()),
            c_void_p(physical_probs.data_ptr()),
            blocks=counted.before.shape[0] * -(-shape[1] // THREADS),
            threads=THREADS,
        )
        ctx.mark_non_differentiable(physical_map)
        ctx.save_for_backward(routing_map, counted.before, parts)
        ctx.kernels, ctx.tile = tables.kernels, counted.tile
        return physical_map, physical_probs

    @staticmethod
    def backward(ctx: Any, _: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        routing_map, offsets, parts = ctx.saved_tensors
        num_tokens, num_experts = routing_map.shape
        grad_map = torch.empty(routing_map.shape, dtype=grad.dtype, device=grad.device)
        ctx.kernels.launch(
            f"fssdp_reroute_gradient_{BITS[grad.dtype]}",
            c_uint(num_tokens),
            c_uint(ctx.tile),
            c_uint(num_experts),
            c_uint(grad.shape[1]),
            c_void_p(offsets.data_ptr()),
            c_void_p(parts.data_ptr()),
            c_void_p(routing_map.data_ptr()),
            c_void_p(grad.data_ptr()),
            # strides, because Megatron's gradient is column-major
            *map(c_ulonglong, grad.stride()),
            c_void_p(grad_map.data_ptr()),
            blocks=offsets.shape[0] * -(-num_experts // THREADS),
            threads=THREADS,
        )
        return grad_map, None, None, None, None


_reroute = direct_apply(_Reroute)


def _arrivals(device: torch.device) -> Tensor:
    """Return the counter of finished thread blocks of a launch; zero before and after it.

    Launches on one stream are ordered and share a counter. Launches captured by a CUDA graph get a
    counter of their own, zeroed by each replay, because graphs captured on one stream may be
    replayed on several.
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


class Rerouter:
    """Rerouting of this rank's tokens to holders of their experts, in one layer.

    Args:
        dispatcher: the layer's own dispatcher, over homes.
        world: nodes of the FSSDP group.
        homes: any placement of the layer; all have equal sizes.
        device: device of the tokens.
        exchanges: whether to count the all-to-all of `reroute`, for a dispatcher over physical
            experts that takes the counts.
    """

    def __init__(
        self,
        dispatcher: Any,
        world: World,
        homes: Placement,
        device: torch.device,
        *,
        exchanges: bool = False,
    ) -> None:
        # all ranks whose tokens reach the experts; with expert tensor parallelism, several per
        # rank of the FSSDP group
        self.sources: dist.ProcessGroup = dispatcher.tp_ep_group
        # index of this rank among them
        self._source = self.sources.rank()
        source_rank = [n // dispatcher.tp_size for n in range(self.sources.size())]
        self._kernels = Kernels(device)
        # of the group, and of the placement that tokens are routed by
        self.tables = QuotaTables(GroupShape(world, homes, source_rank), device, self._kernels)
        # of forwards without replicas; of its own where a CUDA graph reads the others in replays
        self.tables_of_homes = self.tables
        config = dispatcher.config
        backend = None
        if config.moe_token_dispatcher_type == "flex":
            backend = config.moe_flex_dispatcher_backend
        # The first dispatch of both backends allocates one buffer for all layers, sized by the
        # number of experts, so dispatches must use physical experts from the start.
        self.always_physical = backend in ("hybridep", "ncclep")
        # both backends choose a token's experts by its largest probabilities
        self._by_probability = backend in ("deepep", "ncclep")
        self._padded = config.moe_pad_expert_input_to_capacity
        self._exchanges = exchanges

    def count(
        self, routing_map: Tensor, probs: Tensor, total: Tensor | None = None
    ) -> CountedTokens:
        """Count this source's tokens in ``routing_map``, without the padding to capacity.

        Padding entries have probability zero, so they change neither outputs nor gradients.

        Args:
            routing_map: [T, E] bool.
            probs: [T, E] routing probabilities.
            total: see `CountedTokens`.
        """
        if self._padded:
            routing_map = routing_map & (probs.detach() != 0)
        return CountedTokens(routing_map, self._kernels, total)

    def reroute(
        self, probs: Tensor, counted: CountedTokens, loads: Tensor | None
    ) -> tuple[Tensor, Tensor, Exchange | None]:
        """Reroute from experts to the current placement's physical experts.

        Every rank computes equal quotas.

        Args:
            probs: [T, E] routing probabilities, differentiable.
            counted: counts of the same tokens.
            loads: [N, E] int32, the counted loads of all sources; ``None`` if the current placement
                has no replicas.

        Returns:
            The results of `reroute`, and the counts of the all-to-all if ``exchanges`` and there
            are loads.
        """
        exchange = None
        tables = self.tables
        if loads is None:
            tables = self.tables_of_homes
            parts = tables.parts_of_homes
        elif self._exchanges:
            parts, exchange = tables.parts_and_exchange(loads, self._source)
        else:
            parts = tables.parts(loads, self._source)
        # A backend that chooses by probability would replace a chosen expert of probability zero by
        # any physical expert, even an empty slot.
        rerouted = reroute(counted, probs, tables, parts, never_zero=self._by_probability)
        return *rerouted, exchange

    def separate_homes(self, homes: Placement) -> None:
        """Route forwards without replicas by tables of their own, which never change."""
        self.tables_of_homes = QuotaTables(self.tables.shape, self.tables.device, self._kernels)
        self.tables_of_homes.place(homes)
