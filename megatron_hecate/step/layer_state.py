"""Parts of one converted layer, and its state: placement, replicas, microbatches in flight.

The state makes no decisions about time: `layer` and `prefetch` call it, never the reverse.
"""

from __future__ import annotations

import copy
import dataclasses
import operator
from collections import deque
from itertools import chain
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from megatron.core.transformer.moe.moe_layer import MoELayer
from torch import Tensor

from megatron_hecate.comm.device import device_of_rank
from megatron_hecate.comm.overlap import OverlapMeter
from megatron_hecate.comm.transport import LayerBuffer, LoadExchange, TransferPlan, Transport
from megatron_hecate.config import HecateConfig
from megatron_hecate.megatron.cuda_graphs import captures_iteration, holds_preprocess
from megatron_hecate.megatron.dispatcher import CountedAlltoAll, physical_dispatcher
from megatron_hecate.megatron.experts import PhysicalExperts
from megatron_hecate.megatron.foreign_code import check_layer
from megatron_hecate.megatron.forward_pass import ForwardPass, LayerIteration
from megatron_hecate.megatron.rules import SettingSources
from megatron_hecate.megatron.training_state import Forward, name_of_layer
from megatron_hecate.plan import CopyCost, LayerShape, Placement, World
from megatron_hecate.replicas.autograd import PendingGradients
from megatron_hecate.replicas.buffers import LIFETIMES, ReplicaSlots
from megatron_hecate.replicas.layer_replicas import Replicas
from megatron_hecate.routing.reroute import INDEX_BITS, Rerouter


class Uncopied:
    """Mixin of objects on a model that cannot be copied or pickled with the model."""

    def __reduce_ex__(self, _: Any) -> NoReturn:
        raise TypeError(
            "a model with FSSDP cannot be copied or pickled, as its replicas belong to one model; "
            "build another model and load this one's state_dict(), or copy it before the hook"
        )


class LayerParts:
    """Parts that the conversion of one layer needs, built without a change to the layer.

    Args:
        layer: Megatron's layer.
        chunk: index of the layer's model chunk on this rank.
        slots: replica slots of each rank.
        passes: passes of one microbatch through the layer.

    Raises:
        TypeError, ValueError: if the layer cannot be converted.
    """

    def __init__(self, layer: MoELayer, *, chunk: int, slots: int, passes: int) -> None:
        check_layer(layer)
        self.layer = layer
        self.chunk = chunk
        self.passes = passes
        # As built by Megatron.
        self.homes_only = Placement.initial(
            layer.config.num_moe_experts, layer.ep_group.size(), num_slots=slots
        )
        num_physical = self.homes_only.slots_per_rank
        self.physical_dispatcher = physical_dispatcher(layer.token_dispatcher, num_physical)
        self.experts = PhysicalExperts(layer.experts, num_physical)

    @property
    def ranks(self) -> tuple[int, ...]:
        """Ranks of the FSSDP group, by their numbers in the job."""
        return tuple(dist.get_process_group_ranks(self.layer.ep_group))

    def buffer(self, slots: int, dtype: torch.dtype | None = None) -> LayerBuffer:
        """Return the sizes of a buffer for the layer's replicas.

        Args:
            slots: replica slots of this rank.
            dtype: dtype to which the parameters will be cast; ``None``: their current dtype.
        """
        stored_bytes = self.experts.chunk_bytes if self.experts.quantized else 0
        return LayerBuffer(
            slots,
            self.experts.layout.elements,
            dtype or self.experts.dtype,
            self.experts.num_homes,
            stored_bytes,
            self.experts.grad_dtype,
        )


class LayerState(Uncopied):
    """State of one converted layer on this rank.

    Args:
        parts: parts of the layer.
        index: index of the layer on this rank.
        config: settings on which all ranks have agreed.
        world: nodes and speeds of the FSSDP group.
        transport: transport of the layer's FSSDP group.
    """

    def __init__(
        self,
        parts: LayerParts,
        index: int,
        config: HecateConfig,
        *,
        world: World,
        transport: Transport,
    ) -> None:
        layer = parts.layer
        self.parts = parts
        self.index = index
        self.chunk = parts.chunk
        self.config = config
        self.world = world
        self.transport = transport
        # True if replicas live for a whole iteration.
        self.keeps_replicas = config.lifetime == "iteration"
        self.name = name_of_layer(layer)
        self.group = layer.ep_group
        self.stock_dispatcher = layer.token_dispatcher
        self.physical_dispatcher = parts.physical_dispatcher
        self.rerouter = Rerouter(
            self.stock_dispatcher,
            world,
            parts.homes_only,
            device_of_rank(),
            exchanges=isinstance(self.physical_dispatcher, CountedAlltoAll),
        )
        # Whether a CUDA graph holds `preprocess`.
        self.is_captured = holds_preprocess(SettingSources(layer.config))
        self.always_physical = bool(config.slots or config.rehome) and (
            self.rerouter.always_physical or self.is_captured
        )
        # Slots and own experts that transfers cover in any plan, where one CUDA graph holds whole
        # iterations; else ``None``.
        self.covered: tuple[int, int] | None = None
        if config.slots and captures_iteration(SettingSources(layer.config)):
            self.covered = config.slots, parts.experts.num_homes
        # Current homes.
        self.homes = parts.homes_only
        # The running iteration, or the last one.
        self.current = LayerIteration(placement=self.homes, planned=self.homes)
        # The running forward, until its combine.
        self.running: ForwardPass | None = None
        # Homes of the next forward, joined before the attention in front of the layer.
        self.joined_homes: tuple[PendingGradients, Tensor] | None = None
        # The layer's slots in the buffers of the model; ``None`` before they are allocated.
        self.slots: ReplicaSlots | None = None
        # The last placement whose transfers were prepared early, and the transfers.
        self._early: tuple[Placement, TransferPlan] | None = None
        # Version counters of the homes' weights at the last fetch.
        self.fetched_versions: list[int] = []
        # True if a schedule of Megatron ran the last forward. Stored, because a backward may run in
        # a thread without the schedule's stack.
        self.in_schedule = True
        self._shapes: dict[tuple[int, bool, torch.dtype, torch.dtype], LayerShape] = {}
        # Replicas of the microbatches whose backward has not run, one entry per pass, oldest first:
        # Megatron's schedules preserve the order.
        self._in_flight: deque[Replicas | None] = deque()

    def begin_forward(self, running: ForwardPass) -> None:
        """Begin a forward, for which the homes may have been joined before the attention."""
        running.joined_homes, self.joined_homes = self.joined_homes, None
        self.running = self.parts.experts.running = running

    def end_forward(self) -> None:
        """End the running forward, complete or aborted."""
        self.running = self.parts.experts.running = None

    def drop_prepared(self) -> None:
        """Drop prepared replicas of an aborted forward, because weights may have changed since."""
        current = self.current
        current.is_prepared = False
        if not self.keeps_replicas and current.replicas is not None:
            # No backward follows the passes of the aborted microbatch.
            self.finish_backward(current.replicas)
            current.replicas = None

    def check_routes(self, probs: Tensor, routes: Tensor) -> None:
        """Raise a ValueError if a router returns routes that cannot be rerouted."""
        layer, experts = self.parts.layer, self.homes.num_experts
        if routes.dtype is torch.bool:
            is_known = routes.shape[-1:] == (experts,)
        else:
            takes_indices = layer.config.moe_token_dispatcher_type == "flex"
            is_known = takes_indices and routes.dtype in INDEX_BITS and routes.dim() == 2
        if not is_known or probs.shape[-1:] != (experts,):
            raise ValueError(
                f"{self.name}: {type(layer.router).__name__} returned a routing map of "
                f"{routes.dtype} {list(routes.shape)}, and probabilities {list(probs.shape)}; "
                f"FSSDP reads probabilities of {experts} experts with a bool map over them or, for "
                "the dispatcher flex, indices [tokens, k] in int16, int32 or int64; use Megatron's "
                "TopKRouter, or leave --moe-fssdp off"
            )

    @property
    def placement(self) -> Placement:
        """Current homes and replicas."""
        return self.current.placement

    def shape(self, microbatches: int) -> LayerShape:
        """Return the layer's sizes for the cost model, for iterations of ``microbatches``."""
        # A cast and DDP's main gradients come after the conversion.
        experts = self.parts.experts
        inputs = (microbatches, self.in_schedule, experts.dtype, experts.grad_dtype)
        if inputs not in self._shapes:
            self._shapes[inputs] = self._compute_shape(microbatches)
        return self._shapes[inputs]

    def _compute_shape(self, microbatches: int) -> LayerShape:
        model = self.parts.layer.config
        # Width of a token as dispatched.
        token_width = getattr(model, "moe_latent_size", None) or model.hidden_size
        expert = self.parts.experts.first
        lifetime = LIFETIMES[self.config.lifetime]
        passes = self.parts.passes
        # Replicas serve all passes of a microbatch, and each pass returns gradients.
        # Without a schedule, replicas and their gradients are transferred in each microbatch.
        least = 0 if self.in_schedule else 1
        return LayerShape(
            expert_bytes=self.parts.experts.chunk_bytes,
            grad_bytes=self.parts.experts.layout.elements * self.parts.experts.grad_dtype.itemsize,
            token_bytes=token_width * expert[0].element_size(),
            # a matrix costs 2 FLOPs per element and token
            token_flops=sum(2.0 * p.numel() for p in expert if p.dim() > 1),
            microbatches=microbatches * passes,
            fetches=max(1, max(least, lifetime.fetches) * microbatches),
            returns=max(1, max(least, lifetime.returns * passes) * microbatches),
        )

    def copy_cost(self, microbatches: int, meter: OverlapMeter) -> CopyCost:
        """Return the cost of replicas that serve ``microbatches``."""
        shape = self.shape(microbatches)
        degree = self.config.overlap_degree
        hidden = 0.0
        # Measured times differ from run to run, so deterministic mode does without.
        if degree is None and not self.parts.layer.config.deterministic_mode:
            hidden = meter.degree(shape.fetch_seconds(self.world))
        cost = shape.copy_cost(self.world, hidden=hidden, scatters=self.transport.scatters)
        if degree is not None:
            # The given number of fetches is hidden, and is the upper bound.
            cost = dataclasses.replace(cost, near=0.0, far=0.0, most=degree)
        return cost

    def prepare_transfers(self, placement: Placement) -> None:
        """Prepare the transfers of ``placement``, a possible plan, in any thread."""
        if placement.num_replicas and self.slots is not None:
            transfers = self._plan_transfers(placement)
            self.transport.prepare(transfers)
            self.rerouter.tables.prepare(placement)
            self._early = (placement, transfers)

    def transfers_for(self, placement: Placement) -> TransferPlan | None:
        """Return this rank's transfers for the replicas of ``placement``, if it may have any."""
        if not placement.num_replicas and self.covered is None:
            return None
        early = self._early
        if early is not None and early[0] is placement:
            return early[1]
        return self._plan_transfers(placement)

    def _plan_transfers(self, placement: Placement) -> TransferPlan:
        return TransferPlan.from_placement(placement, self.group.rank(), self.covered)

    def versions(self) -> list[int]:
        """Return the version counters of the homes' weights, which grow with every write."""
        homes = chain.from_iterable(self.parts.experts.homes())
        return list(map(operator.attrgetter("_version"), homes))

    def renew_transfers(self) -> None:
        """Replace the transfers by equal ones, so that replicas are fetched again.

        Buffers compare transfers by identity: a buffer that the old ones filled is filled again.
        """
        self.fetched_versions = self.versions()
        if self.current.transfers is not None:
            # with the properties that they have computed
            self.current.transfers = copy.copy(self.current.transfers)

    def move_homes(self, homes: Placement) -> None:
        """Change the experts' homes, between two iterations.

        Megatron's own dispatcher knows only the original homes, so physical experts stay in use.
        """
        self.homes = homes
        self.always_physical = True
        self.current = LayerIteration(homes, homes)

    def replicas_of(self, purpose: Forward) -> Replicas | None:
        """Return the replicas of a forward.

        Evaluation has none: its weights may differ from training's (averages, for example).
        """
        if purpose is Forward.OTHER:
            return None
        if purpose is Forward.RECOMPUTED and not self.keeps_replicas:
            return self._in_flight[0]
        return self.current.replicas

    def exchange_loads(self) -> LoadExchange | None:
        """Return the exchange of a forward's loads by kernels; ``None`` where there is none."""
        if self.rerouter.sources.size() != self.group.size():
            return None
        return self.transport.exchange_loads(self.homes.num_experts, label=self.name)

    def place(self, replicas: Replicas | None) -> None:
        """Route the running forward to homes and ``replicas``."""
        placement = self.homes if replicas is None else replicas.placement
        tables = self.rerouter.tables if replicas is not None else self.rerouter.tables_of_homes
        if tables.placed is not placement:
            tables.place(placement)

    def join_homes_early(self, purpose: Forward) -> None:
        """Join homes before the attention, whose backward then hides the return of gradients."""
        self.joined_homes = None
        if self.replicas_of(purpose) is not None and torch.is_grad_enabled():
            self.joined_homes = PendingGradients.join_homes(self.parts.experts)

    def forwarded(self, replicas: Replicas | None) -> None:
        """Record a microbatch's forward with ``replicas``, which a backward follows."""
        if not self.keeps_replicas:
            self._in_flight.append(replicas)

    @property
    def awaits_backward(self) -> bool:
        """True if a microbatch is known that may be recomputed."""
        return self.keeps_replicas or bool(self._in_flight)

    def pop_stock_microbatch(self) -> bool:
        """Return whether the oldest microbatch ran stock code, and forget it then.

        A backward of stock code has no node of FSSDP. Without gradients the microbatch is kept:
        under a checkpoint inside another one, the same forward is computed once more.
        """
        if not self._in_flight or self._in_flight[0] is not None:
            return False
        if torch.is_grad_enabled():
            self._in_flight.popleft()
        return True

    def fetch_again(self) -> None:
        """Begin to fetch the oldest microbatch's dropped replicas, before its backward."""
        if self._in_flight and self._in_flight[0] is not None:
            self._in_flight[0].start()

    def finish_backward(self, replicas: Replicas) -> None:
        """Forget the microbatch of ``replicas`` after its last backward."""
        while replicas in self._in_flight:
            self._in_flight.popleft()

    def abandon(self) -> None:
        """Forget microbatches of an ended iteration whose backward has not run."""
        self._in_flight.clear()
        if self.parts.experts.delayed is not None:
            self.parts.experts.drop_delayed()
            self.parts.experts.unsettled = None
        last = self.current
        self.current = LayerIteration(last.placement, last.planned, last.iteration)
        self.joined_homes = None
        self.end_forward()
