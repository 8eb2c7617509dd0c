"""The FSSDP layer: one iteration on one screen.

materialize  before the attention   first forward of an iteration: plan from the forecast; begin to fetch replicas
begin        before the router      which replicas this forward computes with
late         `preprocess`           where asked for: true loads -> late replicas where they pay
reroute      `preprocess`           true loads -> quotas -> every token gets a holder of its expert
observe      `dispatch`             count this microbatch's tokens per expert
dispatch, experts, combine          Megatron's own, over physical experts
backward     `replicas`             dropped replicas are fetched again; gradients return during the attention's backward
step         Megatron's own, on homes

CUDA graphs may hold the router, and `preprocess` too. What the host decides is then decided before the graph
(`GraphedBlock`), and read after it, in `dispatch`: in between a graph has no Python.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.nn import Module

from megatron_hecate import trace
from megatron_hecate.job.watchdog import here
from megatron_hecate.megatron.forward_pass import ForwardPass
from megatron_hecate.megatron.training_state import Forward, captures_graph
from megatron_hecate.runtime.layer_state import LayerState
from megatron_hecate.runtime.prefetch import Prefetcher


class FSSDPLayer:
    """Mixin in front of ``MoELayer``."""

    fssdp: LayerState
    prefetcher: Prefetcher

    def before_attention(self, hidden: Tensor | None) -> Tensor | None:
        """Prepare this layer before the attention in front of it runs.

        Args:
            hidden: the attention's input, any shape, or what it is computed from.

        Returns ``hidden``, with a node of autograd where reductions wait for its backward.
        """
        state = self.fssdp
        if captures_graph():
            return hidden
        if state.is_begun:
            if state.running.is_replayed:
                return hidden
            state.break_off()
        if hidden is not None:
            hidden = state.parts.experts.reduction_point.before_attention(hidden)
        purpose = Forward.running(self, gradients=self.prefetcher.gradients)
        self.prefetcher.before_attention(state.index, purpose)
        return hidden

    def attention_hook(self, _: Module, inputs: tuple[Any, ...]) -> tuple[Any, ...] | None:
        """`before_attention`, as a forward pre-hook of the attention, unless a graph holds it."""
        hidden = self.before_attention(inputs[0] if inputs else None)
        return (hidden, *inputs[1:]) if inputs else None

    def begin(self) -> None:
        """What the host does before the router runs, or the graph that holds it; once per forward."""
        state = self.fssdp
        if state.is_begun:
            return
        here.reach(state.name)
        purpose = Forward.running(self, gradients=self.prefetcher.gradients)
        replicas = self.prefetcher.materialize(state.index, purpose)
        state.running = ForwardPass(purpose, replicas, state.joined_homes, trace.is_on())
        state.parts.experts.running = state.running
        state.joined_homes = None
        if replicas is not None or state.always_physical:
            state.place(replicas)

    def route(
        self, hidden_states: Tensor, *args: Tensor | None, **kwargs: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        if not captures_graph():
            self.begin()
        probs, routing_map = super().route(hidden_states, *args, **kwargs)
        if routing_map is not None:
            self.fssdp.check_routes(routing_map)
        return probs, routing_map

    def preprocess(
        self, hidden_states: Tensor, probs: Tensor, routing_map: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        if routing_map is not None:  # else a graph has done it
            probs, routing_map = self._to_physical(probs, routing_map)
        return super().preprocess(hidden_states, probs, routing_map)

    def _to_physical(self, probs: Tensor, routing_map: Tensor) -> tuple[Tensor, Tensor]:
        """Over physical experts, and by the dispatcher for these, where there are replicas or may be in a replay."""
        state, rerouter = self.fssdp, self.fssdp.rerouter
        # a graph is captured outside of any forward
        running, captured = state.running, captures_graph()
        by_quotas, late = state.always_physical, False
        if not captured:
            assert running is not None, f"{state.name}: a forward without begin"
            by_quotas, late = running.replicas is not None, state.current.expects_late
        if captured and state.always_physical and rerouter.placed is None:
            state.place(
                None
            )  # graphs are captured before the first iteration; this is still their warmup
        chosen = rerouter.without_padding(routing_map, probs)
        counted = rerouter.count(chosen)
        if by_quotas or late:
            with trace.span("loads", state.name):
                loads = rerouter.gather_loads(counted)
            if late and running is not None and running.purpose is Forward.MICROBATCH:
                with trace.span("late", state.name):
                    running.replicas = self.prefetcher.add_late_replicas(state.index, loads)
                if by_quotas := running.replicas is not None:
                    state.place(running.replicas)
        physical = by_quotas or state.always_physical
        dispatcher = state.physical_dispatcher if physical else state.stock_dispatcher
        if self.token_dispatcher is not dispatcher:
            self.token_dispatcher = dispatcher
        if by_quotas:
            with trace.span("quotas", state.name):
                routing_map, probs = rerouter.reroute(probs, counted, loads)
        elif physical:
            routing_map, probs = rerouter.to_homes(probs, counted)
        dispatcher.expert_loads = counted.loads
        return probs, routing_map

    def dispatch(self, *args: Any, **kwargs: Any) -> Any:
        state = self.fssdp
        self.begin()  # a recomputation of Megatron's own graphs begins here
        running = state.running
        running.is_dispatched = True
        if running.purpose is Forward.MICROBATCH:
            self.prefetcher.dispatched(
                state.index, self.token_dispatcher.expert_loads, running.replicas
            )
        if not running.is_traced:
            return here.through(state.name, super().dispatch, *args, **kwargs)
        with trace.span("dispatch", state.name):
            return here.through(state.name, super().dispatch, *args, **kwargs)

    def routed_experts_compute(self, *args: Any, **kwargs: Any) -> Any:
        state, monitor = self.fssdp, self.prefetcher.monitor
        running = state.running
        if running.is_traced:
            with trace.span("experts", state.name):
                computed = super().routed_experts_compute(*args, **kwargs)
        else:
            computed = super().routed_experts_compute(*args, **kwargs)
        if monitor.measures and running.purpose is Forward.MICROBATCH:
            sent = getattr(self.token_dispatcher, "input_splits", None)
            monitor.computed(state.index, running, sent)
        return computed

    def combine(self, *args: Any, **kwargs: Any) -> Any:
        state = self.fssdp
        if not state.running.is_traced:
            return here.through(state.name, super().combine, *args, **kwargs)
        with trace.span("combine", state.name):
            return here.through(state.name, super().combine, *args, **kwargs)

    def backward_dw(self, routed_experts: bool = True, shared_experts: bool = False) -> None:
        """Megatron's combined schedule calls it for the routed experts, and after the attention's backward for shared
        ones (with ``delay_wgrad_compute``): the return of gradients runs in between."""
        super().backward_dw(routed_experts, shared_experts)
        if shared_experts:
            self.experts.settle()
            self.experts.reduction_point.reach()


class GraphedBlock:
    """Mixin in front of a transformer layer with experts that CUDA graphs hold parts of: no hook runs inside them,
    and Megatron's own take no module with hooks."""

    mlp: FSSDPLayer

    def _forward_attention(self, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = self._before_attention(args, kwargs)
        return super()._forward_attention(*args, **kwargs)

    def _te_cuda_graph_replay(self, *args: Any, **kwargs: Any) -> Any:
        self.mlp.fssdp.break_off()
        args, kwargs = self._before_attention(args, kwargs)
        self.mlp.begin()
        self.mlp.fssdp.running.is_replayed = True
        return super()._te_cuda_graph_replay(*args, **kwargs)

    def _forward_mlp(self, *args: Any, **kwargs: Any) -> Any:
        if not captures_graph():
            self.mlp.begin()
        return super()._forward_mlp(*args, **kwargs)

    def _before_attention(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of the block, with `FSSDPLayer.before_attention` applied to its input."""
        if args:
            return (self.mlp.before_attention(args[0]), *args[1:]), kwargs
        hidden = self.mlp.before_attention(kwargs["hidden_states"])
        return args, {**kwargs, "hidden_states": hidden}
