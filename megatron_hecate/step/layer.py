"""The FSSDP layer: one iteration on one screen.

materialize  before the attention  first forward of an iteration: plan from the forecast, begin
                                   to fetch replicas
begin        before the router     choose the replicas that this forward computes with
count        `preprocess`          this microbatch's tokens per expert; after a graph, in `dispatch`
late         `preprocess`          if enabled: measured loads -> late replicas where they pay
reroute      `preprocess`          measured loads -> quotas -> a holder of its expert for each token
dispatch, experts, combine         Megatron's methods, over physical experts
backward     `replicas`            fetch dropped replicas again; return gradients during the
                                   attention's backward
step         Megatron's optimizer, on homes

CUDA graphs may hold the router, and `preprocess` too. The host's decisions are then made before the
graph (`GraphedBlock`) and read after the graph, in `dispatch`: no Python runs inside a graph.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.nn import Module

from megatron_hecate import trace
from megatron_hecate.comm.collectives import gather_rows
from megatron_hecate.faults.watchdog import here
from megatron_hecate.megatron.forward_pass import ForwardPass, Stage
from megatron_hecate.megatron.training_state import Forward, captures_graph
from megatron_hecate.step.layer_state import LayerState
from megatron_hecate.step.prefetch import Prefetcher


class FSSDPLayer:
    """Mixin in front of ``MoELayer``.

    Attributes:
        fssdp: state of this layer.
        prefetcher: prefetcher of all layers of the model.
    """

    fssdp: LayerState
    prefetcher: Prefetcher

    def before_attention(self, hidden: Tensor) -> Tensor:
        """Prepare this layer before the attention in front of it runs.

        Args:
            hidden: input of the attention, any shape, or a tensor that the input is computed from.

        Returns:
            ``hidden``, with an autograd node where reductions wait for the attention's backward.
        """
        state = self.fssdp
        if captures_graph():
            return hidden
        running = state.running
        if running is not None and running.stage is not Stage.DISPATCHED:
            # a replay has prepared the layer already, before the graph
            if running.stage is Stage.REPLAYED:
                return hidden
            # an earlier forward was aborted before its dispatch
            state.end_forward()
        # before the homes are joined to replicas, because autograd runs later nodes first
        hidden = state.parts.experts.reduction_point.before_attention(hidden)
        purpose = Forward.classify(self, gradients=self.prefetcher.gradients)
        self.prefetcher.before_attention(state.index, purpose)
        return hidden

    def attention_hook(
        self, _: Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Apply `before_attention` to the input of an attention, or of its transformer layer."""
        if args:
            return (self.before_attention(args[0]), *args[1:]), kwargs
        hidden = self.before_attention(kwargs["hidden_states"])
        return args, {**kwargs, "hidden_states": hidden}

    def begin(self) -> None:
        """Begin a forward on the host, before the router or the graph that holds the router.

        Idempotent within a forward.
        """
        state = self.fssdp
        if state.running is not None and state.running.stage is not Stage.DISPATCHED:
            return
        here.reach(state.name)
        purpose = Forward.classify(self, gradients=self.prefetcher.gradients)
        replicas = self.prefetcher.materialize(state.index, purpose)
        state.begin_forward(ForwardPass(purpose, replicas))
        if replicas is not None or state.always_physical:
            state.place(replicas)

    def route(
        self, hidden_states: Tensor, *args: Tensor | None, **kwargs: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        if not captures_graph():
            self.begin()
        probs, routing_map = super().route(hidden_states, *args, **kwargs)
        if routing_map is not None:
            self.fssdp.check_routes(probs, routing_map)
        return probs, routing_map

    def preprocess(
        self, hidden_states: Tensor, probs: Tensor, routing_map: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        # without a map, a graph has rerouted the tokens
        if routing_map is not None:
            probs, routing_map = self._to_physical(probs, routing_map)
        return super().preprocess(hidden_states, probs, routing_map)

    def _to_physical(self, probs: Tensor, routing_map: Tensor) -> tuple[Tensor, Tensor]:
        """Convert routes to physical experts, and choose the dispatcher.

        Routes stay logical where this forward has no replicas, unless a graph's replay may have
        some.
        """
        state = self.fssdp
        rerouter = state.rerouter
        # a graph is captured outside of any forward
        running = state.running
        captured = captures_graph()
        if captured:
            may_split = state.always_physical
            late = False
        else:
            assert running is not None, f"{state.name}: a forward without begin"
            may_split = running.replicas is not None
            late = self.prefetcher.planner.awaits_late_replicas(state)
        if captured and state.always_physical and rerouter.tables.placed is None:
            # graphs are warmed up and captured before the first iteration places replicas
            state.place(None)
        sums = None
        if not captured and running.purpose is Forward.MICROBATCH:
            running.is_counted = True
            sums = self.prefetcher.monitor.next_counts(state.index, routing_map.device)
        # a graph of a part of the layer may outlive the memory of an exchange
        exchanged = may_split and not (captured or late)
        loads = state.exchange_loads() if exchanged else None
        counted = rerouter.count(routing_map, probs, sums, loads)
        if late or (may_split and loads is None):
            with trace.span("loads", state.name):
                loads = gather_rows(
                    counted.loads,
                    rerouter.sources,
                    what="gathering the loads",
                    label=state.name,
                    timeout=state.config.timeout,
                )
            if late:
                with trace.span("late", state.name):
                    running.replicas = self.prefetcher.add_late(state, loads)
                may_split = running.replicas is not None
                if may_split:
                    state.place(running.replicas)
        physical = may_split or state.always_physical
        dispatcher = state.physical_dispatcher if physical else state.stock_dispatcher
        if self.token_dispatcher is not dispatcher:
            self.token_dispatcher = dispatcher
        if physical:
            with trace.span("quotas", state.name):
                routing_map, probs, exchange = rerouter.reroute(
                    probs, counted, loads if may_split else None
                )
            if exchange is not None:
                dispatcher.expect(routing_map, exchange)
        dispatcher.expert_loads = counted.loads
        return probs, routing_map

    def dispatch(self, *args: Any, **kwargs: Any) -> Any:
        state = self.fssdp
        running = state.running
        if running is None or running.stage is Stage.DISPATCHED:
            # a recomputation begins here if Megatron's graphs hold the router
            self.begin()
            running = state.running
        # from here on, the next call of `begin` begins another forward
        running.stage = Stage.DISPATCHED
        if running.purpose is Forward.MICROBATCH:
            loads = None if running.is_counted else self.token_dispatcher.expert_loads
            self.prefetcher.dispatched(state.index, loads, running.replicas)
        return here.through(state.name, super().dispatch, *args, **kwargs)

    def routed_experts_compute(self, *args: Any, **kwargs: Any) -> Any:
        state = self.fssdp
        running = state.running
        computed = super().routed_experts_compute(*args, **kwargs)
        recorder = self.prefetcher.monitor.recorder
        is_recorded = recorder is not None and recorder.counts is not None
        if is_recorded and running.purpose is Forward.MICROBATCH:
            sent_tokens = getattr(self.token_dispatcher, "input_splits", None)
            recorder.computed(state.index, running, sent_tokens)
        return computed

    def combine(self, *args: Any, **kwargs: Any) -> Any:
        state = self.fssdp
        state.end_forward()
        return here.through(state.name, super().combine, *args, **kwargs)

    def backward_dw(self, routed_experts: bool = True, shared_experts: bool = False) -> None:
        """Compute delayed weight gradients.

        Megatron's combined schedule calls it for the routed experts, and with
        ``delay_wgrad_compute`` again for the shared experts after the attention's backward. The
        return of gradients runs between the two calls.
        """
        super().backward_dw(routed_experts, shared_experts)
        if shared_experts:
            self.experts.settle()
            self.fssdp.parts.experts.reduction_point.reach()


class GraphedBlock:
    """Mixin in front of a transformer layer with experts of which CUDA graphs hold parts.

    It replaces the hooks: no hook runs inside a graph, and Megatron's graphs refuse modules with
    hooks.
    """

    mlp: FSSDPLayer

    def _forward_attention(self, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = self.mlp.attention_hook(self, args, kwargs)
        return super()._forward_attention(*args, **kwargs)

    def _te_cuda_graph_replay(self, *args: Any, **kwargs: Any) -> Any:
        self.mlp.fssdp.end_forward()
        args, kwargs = self.mlp.attention_hook(self, args, kwargs)
        self.mlp.begin()
        self.mlp.fssdp.running.stage = Stage.REPLAYED
        return super()._te_cuda_graph_replay(*args, **kwargs)

    def _forward_mlp(self, *args: Any, **kwargs: Any) -> Any:
        if not captures_graph():
            self.mlp.begin()
        return super()._forward_mlp(*args, **kwargs)
