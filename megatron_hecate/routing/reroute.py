"""Rerouting from experts to physical experts, in front of Megatron's own dispatcher.

The router chooses among E experts. A second instance of Megatron's dispatcher is built over R x P
*physical* experts. Each token's choice of an expert becomes a choice of one of its holders: the
tokens of a source for one expert are split in their order, the first holder's quota first, then the
second's. The kernels are in ``kernels/reroute.cuh``.

Routes have one of two forms: a routing map, [T, E] bool, or the index of the expert of each choice,
[T, k], negative for none, which newer routers write for the dispatcher ``flex``. Rerouted routes
have the same form. Probabilities have a column per expert in either form, as Megatron's have.
"""

from __future__ import annotations

import functools
from ctypes import c_uint, c_ulonglong, c_void_p
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_hecate.comm.transport import LoadExchange
from megatron_hecate.device.autograd import direct_apply, lasting_tensors
from megatron_hecate.device.launch import Argument, Kernels
from megatron_hecate.plan import Placement, World
from megatron_hecate.routing.quotas import Exchange, Loads, QuotaTables
from megatron_hecate.routing.tables import GroupShape

# threads of a thread block
THREADS: int = 256
# about the number of a GPU's multiprocessors; each tile is a thread block
MOST_TILES: int = 128
# tokens
LEAST_TILE: int = 32
BITS = {torch.bfloat16: 16, torch.float16: 16, torch.float32: 32, torch.float64: 64}
INDEX_BITS = {torch.int16: 16, torch.int32: 32, torch.int64: 64}


class CountedTokens:
    """Token counts of one source, by one kernel launch.

    Args:
        routes: routing map or indices.
        kernels: kernels of its device.
        total: [E] int64 sum to which the launch adds the loads.
        exchange: exchange in which the launch sends the loads to all ranks.
        num_experts: E, for indices.

    Attributes:
        routes: contiguous.
        tile: tokens per tile.
        before: [tiles, E] int32, tokens for an expert before each tile of tokens.
        within: for indices, [T, k] int32, tokens for the expert of each choice before it in its
            tile.
        loads: [E] int32, tokens for an expert in all tiles.
    """

    def __init__(
        self,
        routes: Tensor,
        kernels: Kernels,
        total: Tensor | None = None,
        exchange: LoadExchange | None = None,
        *,
        num_experts: int | None = None,
    ) -> None:
        self.routes = routes = routes.contiguous()
        num_tokens = len(routes)
        if routes.dtype is torch.bool:
            kernel, num_experts, shared_bytes = "fssdp_count", routes.shape[1], 0
            self.within, form = None, _addresses(routes)
        else:
            assert num_experts is not None, "indices do not tell the number of experts"
            kernel, shared_bytes = "fssdp_count_choices", 4 * num_experts
            self.within = routes.new_empty(routes.shape, dtype=torch.int32)
            form = [*_choices(routes), *_addresses(self.within)]
        self.tile = max(LEAST_TILE, -(-num_tokens // MOST_TILES))
        tiles = max(1, -(-num_tokens // self.tile))
        self.before = routes.new_empty((tiles, num_experts), dtype=torch.int32)
        self.loads = routes.new_empty(num_experts, dtype=torch.int32)
        kernels.launch(
            kernel,
            *map(c_uint, (num_tokens, self.tile, num_experts)),
            *form,
            *_addresses(self.before, self.loads, total),
            c_void_p(None if exchange is None else exchange.description.data_ptr()),
            *_addresses(_arrivals(routes.device)),
            blocks=tiles,
            threads=THREADS,
            shared_bytes=shared_bytes,
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
        never_zero: whether to raise the probability of an expert chosen by a map to at least the
            dtype's smallest normal number.

    Returns:
        Routes over physical experts, [T, R * P] bool or [T, k] indices of the given dtype, and
        [T, R * P] probabilities.
    """
    if probs.dtype not in BITS:
        raise ValueError(
            f"routing probabilities are {probs.dtype}; FSSDP takes {', '.join(map(str, BITS))}"
        )
    if counted.within is not None:
        return _reroute_choices(probs, counted, tables, parts)
    # Bit pattern of the smallest normal number: 1 above the bits of the mantissa. Positive
    # floating-point numbers compare like their bits, so the kernel compares integers.
    smallest = round(1 / torch.finfo(probs.dtype).eps) if never_zero else 0
    return _reroute(probs, counted, tables, parts, smallest)


def _addresses(*tensors: Tensor | None) -> list[Argument]:
    return [c_void_p(None if tensor is None else tensor.data_ptr()) for tensor in tensors]


def _choices(indices: Tensor) -> list[Argument]:
    """Return the kernels' arguments for ``indices``, [T, k]."""
    top, bits = c_uint(indices.shape[1]), c_uint(INDEX_BITS[indices.dtype])
    return [*_addresses(indices), top, bits]


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
        routing_map = counted.routes
        physical_map = routing_map.new_empty(shape)
        physical_probs = probs.new_empty(shape)
        # kept until the launch
        probs = probs.contiguous()
        tables.kernels.launch(
            f"fssdp_reroute_{BITS[probs.dtype]}",
            c_uint(shape[0]),
            c_uint(counted.tile),
            *tables.at,
            *_addresses(counted.before, parts, routing_map, probs),
            c_ulonglong(smallest),
            *_addresses(physical_map, physical_probs),
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
        grad_probs = torch.empty(routing_map.shape, dtype=grad.dtype, device=grad.device)
        ctx.kernels.launch(
            f"fssdp_reroute_gradient_{BITS[grad.dtype]}",
            *map(c_uint, (num_tokens, ctx.tile, num_experts, grad.shape[1])),
            *_addresses(offsets, parts, routing_map, grad),
            # strides, because Megatron's gradient is column-major
            *map(c_ulonglong, grad.stride()),
            *_addresses(grad_probs),
            blocks=offsets.shape[0] * -(-num_experts // THREADS),
            threads=THREADS,
        )
        return grad_probs, None, None, None, None


class _RerouteChoices(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, probs: Tensor, counted: CountedTokens, tables: QuotaTables, parts: Tensor
    ) -> tuple[Tensor, Tensor]:
        indices, num_physical = counted.routes, tables.shape.num_physical
        physical = torch.empty_like(indices)
        physical_probs = probs.new_empty((len(probs), num_physical))
        # kept until the launch
        probs = probs.contiguous()
        tables.kernels.launch(
            f"fssdp_reroute_choices_{BITS[probs.dtype]}",
            *map(c_uint, (len(probs), counted.tile, probs.shape[1], num_physical)),
            *_addresses(counted.before, counted.within, parts),
            *_choices(indices),
            *_addresses(probs, physical, physical_probs),
            blocks=len(counted.before),
            threads=THREADS,
        )
        ctx.mark_non_differentiable(physical)
        ctx.save_for_backward(indices, physical)
        ctx.kernels, ctx.tile, ctx.tiles = tables.kernels, counted.tile, len(counted.before)
        ctx.shape = probs.shape
        return physical, physical_probs

    @staticmethod
    def backward(ctx: Any, _: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        indices, physical = ctx.saved_tensors
        grad_probs = grad.new_empty(ctx.shape)
        ctx.kernels.launch(
            f"fssdp_reroute_choices_gradient_{BITS[grad.dtype]}",
            *map(c_uint, (len(indices), ctx.tile, ctx.shape[1])),
            *_choices(indices),
            *_addresses(physical, grad),
            *map(c_ulonglong, grad.stride()),
            *_addresses(grad_probs),
            blocks=ctx.tiles,
            threads=THREADS,
        )
        return grad_probs, None, None, None


_reroute = direct_apply(_Reroute)
_reroute_choices = direct_apply(_RerouteChoices)


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
        # of forwards without replicas; others where replays of a CUDA graph read `tables`
        self.tables_of_homes = self.tables
        config = dispatcher.config
        backend = None
        if config.moe_token_dispatcher_type == "flex":
            backend = config.moe_flex_dispatcher_backend
        # The first dispatch of both backends allocates one buffer for all layers, sized by the
        # number of experts, so dispatches must use physical experts from the start.
        self.always_physical = backend in ("hybridep", "ncclep")
        # from a map, both backends choose a token's experts by its largest probabilities
        self._by_probability = backend in ("deepep", "ncclep")
        self._padded = config.moe_pad_expert_input_to_capacity
        self._exchanges = exchanges

    def count(
        self,
        routes: Tensor,
        probs: Tensor,
        total: Tensor | None = None,
        exchange: LoadExchange | None = None,
    ) -> CountedTokens:
        """Count this source's tokens in ``routes``, without the padding to capacity.

        Padding entries have probability zero, so they change neither outputs nor gradients.

        Args:
            routes: routing map or indices; with padding to capacity a map.
            probs: [T, E] routing probabilities.
            total: see `CountedTokens`.
            exchange: see `CountedTokens`.
        """
        if self._padded:
            routes = routes & (probs.detach() != 0)
        return CountedTokens(
            routes, self._kernels, total, exchange, num_experts=self.tables.shape.num_experts
        )

    def reroute(
        self, probs: Tensor, counted: CountedTokens, loads: Loads | None
    ) -> tuple[Tensor, Tensor, Exchange | None]:
        """Reroute from experts to the current placement's physical experts.

        Every rank computes equal quotas.

        Args:
            probs: [T, E] routing probabilities, differentiable.
            counted: counts of the same tokens.
            loads: loads of all sources; ``None`` if the current placement has no replicas.

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
        # A backend that chooses by probability would replace an expert of probability zero, chosen
        # by a map, by any physical expert, even an empty slot.
        rerouted = reroute(counted, probs, tables, parts, never_zero=self._by_probability)
        return *rerouted, exchange

    def separate_homes(self, homes: Placement) -> None:
        """Route forwards without replicas by tables of their own, which never change."""
        self.tables_of_homes = QuotaTables(self.tables.shape, self.tables.device, self._kernels)
        self.tables_of_homes.place(homes)
