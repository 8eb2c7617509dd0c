"""The FSSDP layer: one iteration on one screen.

materialize  before the attention   first forward of an iteration: plan from the forecast; begin to fetch replicas
observe      `route`                count this microbatch's tokens per expert
late         `preprocess`           where asked for: true loads -> late replicas where they pay
reroute      `preprocess`           true loads -> quotas -> every token gets a holder of its expert
dispatch, experts, combine          Megatron's own, over physical experts
backward     `replicas`             dropped replicas are fetched again; gradients return during the attention's backward
step         Megatron's own, on homes
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from megatron_hecate.adapter.training_state import Forward
from megatron_hecate.runtime.layer_state import LayerState
from megatron_hecate.runtime.prefetch import Prefetcher
from megatron_hecate.tools import trace


class FSSDPLayer:
    """Mixin in front of ``MoELayer``."""

    fssdp: LayerState
    prefetcher: Prefetcher

    def before_attention(self, *_: Any) -> None:
        """A forward pre-hook of the attention in front of this layer."""
        self.prefetcher.before_attention(self.fssdp.index, self.prefetcher.purpose_of_forward(self))

    def route(self, hidden_states: Tensor, *args: Tensor | None, **kwargs: Tensor | None) -> tuple[Tensor, Tensor]:
        state, self.purpose = self.fssdp, self.prefetcher.purpose_of_forward(self)
        self.experts.replicas = self.prefetcher.materialize(state.index, self.purpose)
        self.experts.joined_homes, state.joined_homes = state.joined_homes, None
        probs, routing_map = super().route(hidden_states, *args, **kwargs)
        if self.purpose is Forward.MICROBATCH:
            self.prefetcher.observe(state.index, state.rerouter.without_padding(routing_map, probs))
        return probs, routing_map

    def preprocess(self, hidden_states: Tensor, probs: Tensor, routing_map: Tensor) -> tuple[Tensor, Tensor]:
        state, experts, in_training = self.fssdp, self.experts, self.purpose is Forward.MICROBATCH
        chosen = state.rerouter.without_padding(routing_map, probs)
        if experts.replicas is not None or state.expects_late:
            with trace.span("loads", state.name):
                loads = state.rerouter.gather_loads(chosen)
            if state.expects_late and in_training:
                with trace.span("late", state.name):
                    experts.replicas = self.prefetcher.add_late_replicas(state.index, loads.tokens)
        physical = experts.replicas is not None or state.always_physical
        self.token_dispatcher = state.physical_dispatcher if physical else state.stock_dispatcher
        if experts.replicas is not None:
            with trace.span("quotas", state.name):
                state.rerouter.place(experts.replicas.placement, probs.device)
                routing_map, probs = state.rerouter.reroute(probs, loads)
        elif physical:
            state.rerouter.place(state.parts.homes_only, probs.device)
            routing_map, probs = state.rerouter.to_homes(chosen, probs)
        if in_training:
            self.prefetcher.forwarded(state.index, experts.replicas)
        return super().preprocess(hidden_states, probs, routing_map)

    def dispatch(self, *args: Any, **kwargs: Any) -> Any:
        with trace.span("dispatch", self.fssdp.name):
            return super().dispatch(*args, **kwargs)

    def routed_experts_compute(self, *args: Any, **kwargs: Any) -> Any:
        with trace.span("experts", self.fssdp.name):
            return super().routed_experts_compute(*args, **kwargs)

    def combine(self, *args: Any, **kwargs: Any) -> Any:
        with trace.span("combine", self.fssdp.name):
            return super().combine(*args, **kwargs)

    def backward_dw(self, routed_experts: bool = True, shared_experts: bool = False) -> None:
        """Megatron's combined schedule calls it for the routed experts, and after the attention's backward for shared
        ones (with ``delay_wgrad_compute``): the return of gradients runs in between."""
        super().backward_dw(routed_experts, shared_experts)
        if shared_experts:
            self.experts.settle()
