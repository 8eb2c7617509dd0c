"""What FSSDP knows of one converted layer: its placement, its replicas, and the microbatches in flight.

A layer's state decides nothing about time: `prefetch` calls it, never the other way round.
"""

from __future__ import annotations

import copy
import dataclasses
import operator
import sys
from collections import deque

import torch
import torch.distributed as dist
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.token_dispatcher import MoETokenDispatcher
from torch import Tensor

from megatron_hecate.comm.overlap import OverlapMeter
from megatron_hecate.comm.transport import LayerBuffer, TransferPlan, Transport
from megatron_hecate.config import HecateConfig
from megatron_hecate.job.agreement import assert_same
from megatron_hecate.megatron.dispatcher import physical_dispatcher
from megatron_hecate.megatron.experts import PhysicalExperts
from megatron_hecate.megatron.forward_pass import NO_ITERATION, ForwardPass, LayerIteration
from megatron_hecate.megatron.parameter_gathers import wait_for_params
from megatron_hecate.megatron.stored_weights import StoredWeights
from megatron_hecate.megatron.training_state import Forward, name_of_layer
from megatron_hecate.plan import CopyCost, LayerShape, Placement, World
from megatron_hecate.replicas.autograd import PendingGradients
from megatron_hecate.replicas.buffers import LIFETIMES, BufferPool
from megatron_hecate.replicas.layer_replicas import Replicas, ReplicaSlots
from megatron_hecate.routing.rerouter import Rerouter
from megatron_hecate.settings.cuda_graphs import holds_preprocess
from megatron_hecate.settings.foreign_code import check_layer
from megatron_hecate.settings.rules import Settings


@dataclasses.dataclass(frozen=True, eq=False)
class LayerParts:
    """What conversion needs of one layer, built beside it: the layer itself is not touched.

    Args:
        layer: Megatron's layer.
        homes_only: its placement without replicas, as Megatron built it.
        physical_dispatcher: over homes and replica slots.
        experts: as the physical experts see them.
        passes: how often a microbatch runs it.
    """

    layer: MoELayer
    homes_only: Placement
    physical_dispatcher: MoETokenDispatcher
    experts: PhysicalExperts
    passes: int

    @classmethod
    def build(cls, layer: MoELayer, *, slots: int, passes: int) -> LayerParts:
        """Raises TypeError or ValueError for a layer that cannot be converted."""
        check_layer(layer)
        homes_only = Placement.initial(
            layer.config.num_moe_experts, layer.ep_group.size(), num_slots=slots
        )
        return cls(
            layer=layer,
            homes_only=homes_only,
            physical_dispatcher=physical_dispatcher(
                layer.token_dispatcher, homes_only.slots_per_rank
            ),
            experts=PhysicalExperts(layer.experts, homes_only.slots_per_rank),
            passes=passes,
        )

    @property
    def ranks(self) -> tuple[int, ...]:
        """Of the FSSDP group, as the job numbers them."""
        return tuple(dist.get_process_group_ranks(self.layer.ep_group))

    def buffer(self, slots: int, dtype: torch.dtype | None = None) -> LayerBuffer:
        """What its replicas need, for the parameters as they are now, or once they are cast to ``dtype``."""
        home = self.experts.homes()[0]
        elements, stored = sum(p.numel() for p in home), StoredWeights(home)
        stored_bytes = stored.nbytes if stored.quantized else 0
        return LayerBuffer(
            slots, elements, dtype or home[0].dtype, self.experts.num_homes, stored_bytes
        )


class LayerState:
    """What FSSDP knows of one converted layer on this rank, between one forward and the next.

    Args:
        parts: of the layer.
        index: of the layer among this rank's.
        config: the settings all ranks agreed on.
        world: nodes and speeds of the FSSDP group.
        transport: its own.
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
        self.parts, self.index, self.config, self.world, self.transport = (
            parts,
            index,
            config,
            world,
            transport,
        )
        # whether replicas live for a whole iteration
        self.keeps_replicas = config.lifetime == "iteration"
        self.name, self.group = name_of_layer(layer), layer.ep_group
        self.stock_dispatcher, self.physical_dispatcher = (
            layer.token_dispatcher,
            parts.physical_dispatcher,
        )
        self.rerouter = Rerouter(
            layer.token_dispatcher, world, label=self.name, timeout=config.timeout
        )
        captured = holds_preprocess(Settings(layer.config))
        self.always_physical = config.slots + config.rehome > 0 and (
            self.rerouter.always_physical or captured
        )
        if captured:  # a graph's outputs are told by names
            for dispatcher in (self.stock_dispatcher, self.physical_dispatcher):
                dispatcher.cudagraph_attrs.append("expert_loads")
        self.homes = parts.homes_only  # where homes are now
        # the running iteration, or the last one
        self.current = LayerIteration(placement=self.homes, planned=self.homes)
        self.running: ForwardPass | None = None
        # of the coming forward, from the attention in front of the layer on
        self.joined_homes: tuple[PendingGradients, Tensor] | None = None
        self._slots: ReplicaSlots | None = None
        # the last placement whose transfers were prepared early, and these
        self._early: tuple[Placement, TransferPlan] | None = None
        self._fetched_versions: list[
            int
        ] = []  # version counters of the homes' weights at the last fetch
        # by microbatches, and whether a schedule runs them
        self._shapes: dict[tuple[int, bool], LayerShape] = {}
        # whether one of Megatron's schedules ran the last forward; backwards may run in a thread without its stack
        self.in_schedule = True
        # plans of the running iteration, in order, and those of the one before that are still to be repeated
        self.plans: list[Placement] = []
        self._kept: deque[Placement] = deque()
        # replicas of the microbatches whose backward has not run, once per pass, oldest first: Megatron's schedules
        # keep that order
        self._in_flight: deque[Replicas | None] = deque()

    @property
    def is_begun(self) -> bool:
        """Whether the running forward knows its replicas, and has not dispatched its tokens."""
        return self.running is not None and not self.running.is_dispatched

    def break_off(self) -> None:
        """Forget a forward that has not dispatched its tokens, and never will."""
        if self.is_begun:
            self.running = None

    def drop_prepared(self) -> None:
        """Forget what a forward that broke off had prepared: weights may be others now."""
        current = self.current
        if not current.is_prepared:
            return
        current.is_prepared = False
        if not self.keeps_replicas and current.replicas is not None:
            self.finish_backward(current.replicas)  # no microbatch computes with them
            current.replicas = None

    def check_routes(self, routing_map: Tensor) -> None:
        """Raise a ValueError where a router of its own kind returns no [T, E] bool map of tokens to experts."""
        if routing_map.dtype is not torch.bool or routing_map.shape[-1:] != (
            self.homes.num_experts,
        ):
            raise ValueError(
                f"{self.name}: {type(self.parts.layer.router).__name__} returned a routing map of {routing_map.dtype} "
                f"{list(routing_map.shape)}, FSSDP reads a bool map over {self.homes.num_experts} experts; use "
                "Megatron's TopKRouter, or leave --moe-fssdp off"
            )

    @property
    def placement(self) -> Placement:
        """Homes and replicas now."""
        return self.current.placement

    @property
    def planned(self) -> Placement:
        """Homes and replicas now, without late replicas."""
        return self.current.planned

    @property
    def plan(self) -> TransferPlan | None:
        """Transfers that fetch this iteration's replicas; ``None`` without any."""
        return self.current.plan

    @property
    def replicas(self) -> Replicas | None:
        """Those of the coming or running forward."""
        return self.current.replicas

    def shape(self, microbatches: int) -> LayerShape:
        """Sizes for the cost model, with so many ``microbatches`` in an iteration. Without a schedule, replicas and
        their gradients travel with each of them."""
        key = microbatches, self.in_schedule
        if key not in self._shapes:
            self._shapes[key] = self._shape(*key)
        return self._shapes[key]

    def _shape(self, microbatches: int, in_schedule: bool) -> LayerShape:
        lifetime = LIFETIMES[self.config.lifetime]
        fetches, returns = lifetime.fetches, lifetime.returns * self.parts.passes
        if not in_schedule:
            fetches, returns = max(1, fetches), max(1, returns)
        model = self.parts.layer.config
        token_width = getattr(model, "moe_latent_size", None) or model.hidden_size  # as dispatched
        token_bytes = token_width * self.parts.experts.homes()[0][0].element_size()
        return dataclasses.replace(
            self.parts.experts.shape(token_bytes, microbatches=microbatches * self.parts.passes),
            fetches=max(1, fetches * microbatches),
            returns=max(1, returns * microbatches),
        )

    def copy_cost(self, microbatches: int, meter: OverlapMeter) -> CopyCost:
        """What replicas cost that serve so many ``microbatches``."""
        shape, degree = self.shape(microbatches), self.config.overlap_degree
        hidden = 0.0
        if (
            degree is None and not self.parts.layer.config.deterministic_mode
        ):  # times differ from run to run
            hidden = meter.degree(shape.fetch_seconds(self.world))
        cost = dataclasses.replace(
            shape.copy_cost(self.world, hidden=hidden), scatters=self.transport.scatters
        )
        if degree is not None:  # so many are hidden, and there are never more
            cost = dataclasses.replace(cost, near=0.0, far=0.0, most=degree)
        return cost

    def slots_in(self, pool: BufferPool) -> ReplicaSlots:
        """The layer's replica slots, in the buffers of ``pool``."""
        if self._slots is None or self._slots.pool is not pool:
            experts, module = self.parts.experts, self.parts.layer.experts
            self._slots = ReplicaSlots(
                index=self.index,
                homes=experts.homes,
                stored=experts.stored,
                weights=experts.weights_in,
                layout=experts.layout,
                pool=pool,
                ready=lambda: wait_for_params(module),
                label=self.name,
                delayed=experts.delayed,
                drop_delayed=experts.drop_delayed,
            )
        return self._slots

    def check_agreement(self, placement: Placement) -> None:
        """In Python's development mode (``PYTHONDEVMODE=1``): a placement that ranks have just planned must be valid,
        and the same on all of them."""
        if sys.flags.dev_mode:
            placement.check(num_slots=self.config.slots)
            assert_same(
                placement.fingerprint, self.group, label=self.name, timeout=self.config.timeout
            )

    def set_plan(self, placement: Placement, iteration: int) -> None:
        """Replicas are those of ``placement`` in an iteration that begins."""
        self.current = LayerIteration(placement, placement, iteration, self._transfers(placement))

    def add_late(self, placement: Placement) -> None:
        """Replicas are those of ``placement`` from now on, some of them chosen after the gate."""
        self.current.placement, self.current.plan = placement, self._transfers(placement)

    def prepare_transfers(self, placement: Placement) -> None:
        """Work out the transfers of ``placement``, which may become the plan; in any thread."""
        if placement.num_replicas and self._slots is not None:
            plan = TransferPlan.from_placement(placement, self.group.rank())
            self.transport.prepare(plan, self._slots.sizes)
            self._early = placement, plan

    def _transfers(self, placement: Placement) -> TransferPlan | None:
        if not placement.num_replicas:
            return None
        early = self._early
        if early is not None and early[0] is placement:
            return early[1]
        return TransferPlan.from_placement(placement, self.group.rank())

    def weights_were_written(self) -> bool:
        """Whether the homes' weights were written in place since the last fetch, as far as version counters show it.

        Raises:
            RuntimeError: where only some were, so that other ranks may have written none and would not fetch.
        """
        if self.plan is None or self.config.lifetime == "microbatch":
            return False  # nothing was fetched, or every forward fetches
        versions = self._versions()
        if versions == self._fetched_versions:
            return False
        unwritten = sum(map(operator.eq, versions, self._fetched_versions))
        if unwritten:
            raise RuntimeError(
                f"{self.name}: {len(versions) - unwritten} of {len(versions)} weights of experts were written within a "
                "call of Megatron's schedule, after replicas had been fetched; write them between calls, write all of "
                "them on all ranks, or use --moe-fssdp-lifetime microbatch, which fetches in every forward"
            )
        return True

    def _versions(self) -> list[int]:
        return [p._version for expert in self.parts.experts.homes() for p in expert]

    def renew_plan(self) -> None:
        """Replace the transfer plan by an equal one. Buffers compare plans by identity: one that was filled by the old
        plan is filled again."""
        self._fetched_versions = self._versions()
        if self.current.plan is not None:
            self.current.plan = copy.copy(self.current.plan)

    def move_homes(self, homes: Placement) -> None:
        """Experts have other homes from now on, between two iterations. Megatron's own dispatcher knows those of its
        own only, so that physical experts stay in use."""
        self.homes, self.always_physical = homes, True
        self._kept.clear()
        self.set_plan(homes, NO_ITERATION)

    def replicas_of(self, purpose: Forward) -> Replicas | None:
        """Those that a forward computes with. Evaluation runs without: its weights may be others (averages, for
        example) than those of training."""
        if purpose is Forward.OTHER:
            return None
        if purpose is Forward.RECOMPUTED and not self.keeps_replicas:
            return self._in_flight[0]
        return self.current.replicas

    def place(self, replicas: Replicas | None) -> None:
        """The running forward computes with ``replicas``."""
        placement = self.homes if replicas is None else replicas.placement
        if self.rerouter.placed is not placement:
            self.rerouter.place(placement, self.parts.experts.homes()[0][0].device)

    def join_homes_early(self, purpose: Forward) -> None:
        """The attention is about to run: from here on, its backward hides the return of gradients."""
        self.joined_homes = None
        if self.replicas_of(purpose) is not None and torch.is_grad_enabled():
            self.joined_homes = PendingGradients.join_homes(
                self.parts.experts.homes(), self.parts.experts.layout
            )

    def forwarded(self, replicas: Replicas | None) -> None:
        """A microbatch's forward goes on with ``replicas``; its backward will come."""
        if not self.keeps_replicas:
            self._in_flight.append(replicas)

    @property
    def awaits_backward(self) -> bool:
        """Whether a microbatch is known that may be recomputed."""
        return self.keeps_replicas or bool(self._in_flight)

    @property
    def awaits_microbatch(self) -> bool:
        """Whether the backward of a microbatch with replicas of its own has not run."""
        return any(replicas is not None for replicas in self._in_flight)

    def next_kept_plan(self) -> Placement | None:
        """The plan that the last iteration made at this point, if it made one."""
        return self._kept.popleft() if self._kept else None

    def skip_stock_backward(self) -> bool:
        """Whether the oldest microbatch ran stock code; it is then forgotten, since its backward does not tell. Without
        gradients, which is so under a checkpoint inside another one, the same forward is computed once more."""
        if not self._in_flight or self._in_flight[0] is not None:
            return False
        if torch.is_grad_enabled():
            self._in_flight.popleft()
        return True

    def fetch_again(self) -> None:
        """The backward comes near: begin to fetch the oldest microbatch's replicas, unless they are here."""
        if self._in_flight and self._in_flight[0] is not None:
            self._in_flight[0].start()

    def finish_backward(self, replicas: Replicas) -> None:
        """The microbatch of ``replicas`` needs them no more."""
        while replicas in self._in_flight:
            self._in_flight.popleft()
        replicas.slots.pool.free(replicas.buffer)

    def abandon(self) -> None:
        """Forget microbatches of an iteration that ended without their backward."""
        self._in_flight.clear()
        self._kept = deque(self.plans)
        self.plans = []
        self.parts.experts.drop_delayed()
        self.parts.layer.experts.unsettled = None
        self.current = LayerIteration(self.current.placement, self.current.planned)
        self.joined_homes = self.running = None
