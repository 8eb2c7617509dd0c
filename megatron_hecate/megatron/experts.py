"""Replicas in Megatron's own expert modules.

The module that holds the homes stays what it is: same class for ``isinstance``, same parameters, same checkpoint.
Beside it stands a *physical* twin, the same Megatron class with room for P experts and no parameters of its own: for
each forward it gets the weights of homes and replicas as attributes. Without replicas it is not used.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from megatron.core.transformer.moe.experts import SequentialMLP, TEGroupedMLP
from torch import Tensor
from torch.nn import Module, ModuleList, Parameter

from megatron_hecate.comm.transport import TransferPlan
from megatron_hecate.megatron.forward_pass import ForwardPass
from megatron_hecate.megatron.gradient_buckets import ReductionPoint
from megatron_hecate.megatron.grouped_linear import NOTHING, GroupedExperts, copy_module
from megatron_hecate.megatron.stored_weights import StoredWeights
from megatron_hecate.plan import LayerShape
from megatron_hecate.replicas.autograd import ChunkLayout, PendingGradients
from megatron_hecate.replicas.layer_replicas import Delayed, Replicas
from megatron_hecate.settings.unsupported import GROUPED_ONLY


class PhysicalExperts:
    """One rank's experts of a layer, as the twin with ``num_physical`` experts sees them.

    Args:
        experts: Megatron's expert module, with the homes.
        num_physical: P, homes and replica slots together.

    Raises:
        TypeError: for an expert module we do not know.
        ValueError: for one that lacks what replicas need.
    """

    def __init__(self, experts: Module, num_physical: int) -> None:
        self.num_homes = experts.num_local_experts
        self.grouped: GroupedExperts | None = None
        if isinstance(experts, TEGroupedMLP):
            self.grouped = GroupedExperts(experts, num_physical)
            self._names, linears, self.twin = (
                self.grouped.names,
                self.grouped.linears,
                self.grouped.twin,
            )
        elif isinstance(experts, SequentialMLP):
            for setting in GROUPED_ONLY:
                if value := getattr(experts.config, setting, None):
                    raise ValueError(
                        f"SequentialMLP with {setting}={value!r} has no replicas: its experts are modules of their "
                        "own; set model.moe_grouped_gemm=true or --moe-grouped-gemm"
                    )
            self._names, linears = _sequential_names(experts)
            self.twin = _sequential_twin(experts, num_physical)
        else:
            raise TypeError(
                f"experts are a {type(experts).__name__}; FSSDP knows SequentialMLP and TEGroupedMLP "
                "(--moe-grouped-gemm with TransformerEngine)"
            )
        self.running: ForwardPass | None = None  # set by the layer
        self.reduction_point = ReductionPoint(
            by_hand=bool(getattr(experts.config, "delay_wgrad_compute", False))
        )
        # the plan of the weights that the twin's quantized copies were made of
        self.computes_with: TransferPlan | None = None
        # the modules that own the homes' parameters: looking names up from the top takes long for many experts
        paths = [
            [name.format(i).rpartition(".") for name in self._names] for i in range(self.num_homes)
        ]
        self._owners = [
            [(experts.get_submodule(path), leaf) for path, _, leaf in expert] for expert in paths
        ]
        # where the twin looks its weights up, and under which name, in the order of experts and of their parameters:
        # as attributes, which takes the least time, and for TransformerEngines that ask for any parameter, as these
        owners = [
            [name.format(i).rpartition(".") for name in self._names] for i in range(num_physical)
        ]
        self._places: list[tuple[dict[str, Any], str]] = []
        for path, _, leaf in (owner for expert in owners for owner in expert):
            owner = self.twin.get_submodule(path)
            self._places.append(
                (
                    owner.__dict__ if len(self._places) >= len(self._names) else owner._parameters,
                    leaf,
                )
            )
        # microbatches whose weight gradients `compute_delayed` will give, oldest first; None: none are delayed
        self.delayed: Delayed | None = (
            deque() if self.grouped is not None and self.grouped.delays_wgrad else None
        )
        # a fused GEMM writes weights' gradients only; biases go through autograd
        self.layout = ChunkLayout(
            shapes=tuple(p.shape for p in self.homes()[0]),
            fused=tuple(
                "weight" in name and _fuses_wgrad(linear)
                for name, linear in zip(self._names, linears, strict=True)
            ),
            uniform=self.grouped is not None and self.grouped.has_operators,
        )

    def homes(self) -> list[list[Parameter]]:
        """The parameters of this rank's own experts. Looked up each time: loading or moving a model replaces them."""
        return [[owner._parameters[leaf] for owner, leaf in expert] for expert in self._owners]

    @property
    def chunk_bytes(self) -> int:
        """Bytes of one replica's weights."""
        return StoredWeights(self.homes()[0]).nbytes

    def stored(self) -> list[list[Tensor]]:
        """What travels of this rank's own experts."""
        return [StoredWeights(expert).parts() for expert in self.homes()]

    def weights_in(self, chunk: Tensor) -> list[Tensor]:
        """The parameters of a replica, in one ``chunk`` of what has come."""
        like = StoredWeights(self.homes()[0])
        return like.weights_in(chunk) if like.quantized else self.layout.views(chunk)

    def shape(self, token_bytes: int, *, microbatches: int) -> LayerShape:
        """Sizes of the layer for the cost model. Gradients travel in fp32; a matrix costs 2 FLOPs per element."""
        expert = self.homes()[0]
        return LayerShape(
            expert_bytes=self.chunk_bytes,
            grad_bytes=sum(p.numel() * max(4, p.element_size()) for p in expert),
            token_bytes=token_bytes,
            token_flops=sum(2.0 * p.numel() for p in expert if p.dim() > 1),
            microbatches=microbatches,
        )

    def compute_delayed(self, carried: Sequence[Tensor | None]) -> list[Tensor | None]:
        """The gradients of all physical experts' weights, flat, of the oldest backward that delays them.

        Args:
            carried: what autograd had in their place: placeholders for weights, and in fp8 gradients of biases.
        """
        assert self.grouped is not None
        computed, grads = self.grouped.compute_delayed(), list(carried)
        for part, (name, fused) in enumerate(zip(self._names, self.layout.fused, strict=True)):
            for i, grad in enumerate(computed[name]):
                if not fused and grad is not None and grad.numel():
                    grads[i * len(self._names) + part] = grad
        return grads

    def drop_delayed(self) -> None:
        """Forget backwards whose weight gradients were to be computed: they broke off."""
        if (
            self.delayed is not None
        ):  # a backward that broke off may have left those of one linear only
            self.delayed.clear()
            self.grouped.drop_delayed()

    def compute_with(self, plan: TransferPlan | None) -> None:
        """The coming forward has the replicas of ``plan``, which each iteration makes anew, or none."""
        if self.computes_with is not plan:
            self.computes_with = plan
            self.drop_quantized(0)

    def drop_quantized(self, first: int) -> None:
        """Drop the quantized copies that TransformerEngine keeps over microbatches, of experts from ``first`` on."""
        for copies in () if self.grouped is None else self.grouped.quantized_copies:
            for name in [name for name in copies if int(name.removeprefix("weight")) >= first]:
                del copies[name]

    def compute(self, weights: Sequence[Tensor], *inputs: Any, **kwargs: Any) -> Any:
        """The outputs of the twin for ``inputs``, with ``weights`` of all physical experts, flat."""
        with NOTHING if self.grouped is None else self.grouped.over(weights):
            for (owner, name), weight in zip(self._places, weights, strict=True):
                owner[name] = weight
            try:
                return self.twin(*inputs, **kwargs)
            finally:
                for owner, name in self._places:
                    owner[name] = None


class FSSDPExperts:
    """Mixin in front of Megatron's expert module: computes homes and replicas when the layer has replicas."""

    physical: PhysicalExperts
    unsettled: PendingGradients | None  # of the last `backward_dw`
    reduction_point: ReductionPoint  # where reductions of their gradients start
    restore_homes: Callable[[], None] | None  # where homes may move

    @property
    def replicas(self) -> Replicas | None:
        """Those of the running forward."""
        running = self.physical.running
        return None if running is None else running.replicas

    def forward(
        self,
        hidden_states: Tensor,
        tokens_per_expert: Tensor,
        probs: Tensor,
        *rest: Any,
        **kwargs: Any,
    ) -> Any:
        physical, running = self.physical, self.physical.running
        if running is not None:
            running.num_tokens = hidden_states.shape[0]
        if running is None or running.replicas is None:
            if physical.computes_with is not None:
                physical.compute_with(None)
            if tokens_per_expert.numel() > physical.num_homes:  # slots follow, without tokens
                tokens_per_expert = tokens_per_expert[: physical.num_homes]
            return super().forward(hidden_states, tokens_per_expert, probs, *rest, **kwargs)
        if physical.twin.training != self.training:
            physical.twin.train(self.training)
        replicas = running.replicas
        hidden_states, weights = replicas.join(hidden_states, running.joined_homes)
        running.joined_homes = None
        physical.compute_with(replicas.plan)
        if self.config.fine_grained_activation_offloading:  # spares parameters, and these are none
            for weight in weights:
                weight._do_not_offload, weight.offloading_activation = (
                    True,
                    False,
                )  # its name now, and in 0.16
        inputs = (hidden_states, tokens_per_expert, probs, *rest)
        output, *others = physical.compute(weights, *inputs, **kwargs)
        if physical.grouped is not None:
            physical.grouped.pass_over()
        if replicas.after_backward is not None:  # these replicas do not stay
            physical.drop_quantized(physical.num_homes)
        return replicas.computed_by(output), *others

    def sharded_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Megatron's own, where Megatron built the experts. All ranks ask for it at once."""
        if self.restore_homes is not None:
            self.restore_homes()
        return super().sharded_state_dict(*args, **kwargs)

    def backward_dw(self) -> None:
        """Compute weight gradients that the backward left for later; those of replicas then return."""
        if not self.physical.delayed:
            super().backward_dw()
            return
        self.settle()
        carried, take = self.physical.delayed.popleft()
        self.unsettled = take(self.physical.compute_delayed(carried))
        if (
            not self.config.delay_wgrad_compute
        ):  # no `settle` will come after the attention's backward
            self.settle()

    def settle(self) -> None:
        """Complete the homes' gradients of the last `backward_dw`, unless autograd will."""
        pending, self.unsettled = self.unsettled, None
        if pending is not None and pending.settle():
            self.physical.grouped.run_gradient_hooks()


def _sequential_names(experts: SequentialMLP) -> tuple[list[str], list[Module]]:
    names, linears = [], []
    for name, _ in experts.local_experts[0].named_parameters():
        names.append("local_experts.{}." + name)
        linears.append(experts.local_experts[0].get_submodule(name.rpartition(".")[0]))
    return names, linears


def _sequential_twin(experts: SequentialMLP, num_physical: int) -> SequentialMLP:
    twin = copy_module(experts, with_parameters=True)
    of_homes = [
        copy_module(expert, with_parameters=False, with_hooks=True)
        for expert in experts.local_experts
    ]
    of_replicas = [
        copy_module(experts.local_experts[0], with_parameters=False)
        for _ in range(num_physical - experts.num_local_experts)
    ]
    twin.num_local_experts = num_physical
    twin.local_experts = ModuleList([*of_homes, *of_replicas])
    return twin


def _fuses_wgrad(linear: Module) -> bool:
    """Whether this linear's GEMM adds its gradient straight into ``main_grad``: Megatron's name, then TE's."""
    return bool(getattr(linear, "gradient_accumulation_fusion", False)) or bool(
        getattr(linear, "fuse_wgrad_accumulation", False)
    )
