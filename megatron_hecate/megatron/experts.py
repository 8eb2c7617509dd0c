"""Replicas in Megatron's own expert modules.

The module with the homes keeps its class (for ``isinstance``), its parameters and its checkpoint
format. Next to it, a *physical* twin is an instance of the same Megatron class with room for P
experts and no parameters of its own: each forward sets the weights of homes and replicas as its
attributes. Forwards without replicas do not use the twin.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from megatron.core.transformer.moe.experts import SequentialMLP, TEGroupedMLP
from torch import Tensor
from torch.nn import Module, Parameter

from megatron_hecate.comm.transport import TransferPlan
from megatron_hecate.megatron.foreign_code import ExpertParts
from megatron_hecate.megatron.forward_pass import ForwardPass
from megatron_hecate.megatron.gradient_buckets import ReductionPoint
from megatron_hecate.megatron.grouped_linear import GroupedTwin
from megatron_hecate.megatron.parameter_gathers import wait_for_params
from megatron_hecate.megatron.sequential_experts import SequentialTwin, format_shapes
from megatron_hecate.megatron.stored_weights import StoredWeights, is_quantized
from megatron_hecate.megatron.twin import Twin, find_owners
from megatron_hecate.replicas.autograd import Delayed, PendingGradients
from megatron_hecate.replicas.buffers import ChunkLayout


class PhysicalExperts:
    """One rank's experts of a layer, homes and replicas, as computed by the twin.

    Args:
        experts: Megatron's expert module, with the homes.
        num_physical: P, homes and replica slots together.

    Raises:
        TypeError: for an expert module of an unknown class.
        ValueError: for an expert module whose class or settings do not support replicas.
    """

    def __init__(self, experts: Module, num_physical: int) -> None:
        self.num_homes = experts.num_local_experts
        # data type of the homes' main gradients, where GEMMs are fused, once DDP has made any
        self._main_dtype: torch.dtype | None = None
        self.inside = ExpertParts(experts)
        # before modules are copied
        self.inside.check()
        self._module = experts
        self.twin = _make_twin(experts, num_physical)
        # set by `step.layer_state`
        self.running: ForwardPass | None = None
        self.reduction_point = ReductionPoint(
            by_hand=bool(getattr(experts.config, "delay_wgrad_compute", False))
        )
        # transfers of the weights that the twin's quantized copies were made from
        self.computes_with: TransferPlan | None = None
        # submodule and attribute of each parameter of this rank's own experts, flat
        self.owners = find_owners(experts, self.twin.names, self.num_homes)
        # microbatches with delayed weight gradients, oldest first; None if none are delayed
        self.delayed: Delayed | None = deque() if self.twin.delays_wgrad else None
        # gradients of the last `backward_dw` that are not complete
        self.unsettled: PendingGradients | None = None
        self.description = f"parameters of {format_shapes(self.first)}"
        self.layout = ChunkLayout(
            shapes=tuple(p.shape for p in self.first),
            fused=self.twin.fused,
            uniform=self.twin.is_uniform,
        )

    def homes(self) -> list[list[Parameter]]:
        """Look up the parameters of this rank's own experts, expert by expert.

        Each call looks them up, because loading or moving a model replaces parameters.
        """
        parameters = [module._parameters[name] for module, name in self.owners]
        width = len(self.twin.names)
        return [parameters[i : i + width] for i in range(0, len(parameters), width)]

    @property
    def first(self) -> list[Parameter]:
        """Parameters of the first of this rank's own experts."""
        owners = self.owners[: len(self.twin.names)]
        return [module._parameters[name] for module, name in owners]

    @property
    def dtype(self) -> torch.dtype:
        """Data type of the parameters."""
        return self.first[0].dtype

    @property
    def grad_dtype(self) -> torch.dtype:
        """Data type of the replicas' gradients: fp32 for bf16 weights without fused GEMMs."""
        grad = getattr(self.first[0], "main_grad", None)
        # Loops that offload gradients may take them away between iterations.
        if self.layout.fuses_any and grad is not None:
            self._main_dtype = grad.dtype
        return self._main_dtype or torch.promote_types(self.dtype, torch.float32)

    def are_trained(self) -> bool:
        """Return whether the experts are trained, and not frozen.

        Raises:
            ValueError: if some of their parameters are frozen: replicas return gradients of whole
                layers, and grouped GEMMs compute gradients of all experts or none.
        """
        flags = [module._parameters[name].requires_grad for module, name in self.owners]
        num_frozen = flags.count(False)
        if 0 < num_frozen < len(flags):
            raise ValueError(
                f"{num_frozen} of the {len(flags)} parameters of its experts are frozen; freeze "
                "all experts of a layer, on all ranks, or none, or leave --moe-fssdp off"
            )
        return not num_frozen

    def wait_for_values(self) -> None:
        """Wait until the homes hold this iteration's values."""
        wait_for_params(self._module)

    @property
    def quantized(self) -> bool:
        """True if parameters are quantized. One module holds them all, so all are or none is."""
        return is_quantized(self.first[0])

    @property
    def chunk_bytes(self) -> int:
        """Bytes of one replica's weights."""
        return sum(part.nbytes for part in StoredWeights(self.first).tensors())

    def stored(self) -> list[list[Tensor]]:
        """List the tensors to transfer of each of this rank's own experts."""
        if not self.quantized:
            return self.homes()
        return [StoredWeights(expert).tensors() for expert in self.homes()]

    def weights_in(self, chunk: Tensor) -> list[Tensor]:
        """View the received ``chunk`` of one replica as the expert's parameters."""
        if self.quantized:
            return StoredWeights(self.first).weights_in(chunk)
        return self.layout.views(chunk)

    def drop_delayed(self) -> None:
        """Forget the delayed weight gradients of aborted backwards."""
        if self.delayed is not None:
            self.delayed.clear()
            self.twin.drop_delayed()

    def compute_with(self, transfers: TransferPlan | None) -> None:
        """Prepare the next forward for the replicas that ``transfers`` fetch, or for none.

        Every iteration has an object of its own, so that the quantized copies of the last
        iteration are dropped.
        """
        self.computes_with = transfers
        self.twin.drop_quantized(0)
        if transfers is not None:
            self.twin.compute_first(self.num_homes + max(transfers.slots, default=-1) + 1)


def _make_twin(experts: Module, num_physical: int) -> Twin:
    if isinstance(experts, TEGroupedMLP):
        return GroupedTwin(experts, num_physical)
    if isinstance(experts, SequentialMLP):
        return SequentialTwin(experts, num_physical)
    raise TypeError(
        f"experts are a {type(experts).__name__}; FSSDP knows SequentialMLP and TEGroupedMLP "
        "(--moe-grouped-gemm with TransformerEngine)"
    )


class FSSDPExperts:
    """Mixin in front of Megatron's expert module that uses the twin when the layer has replicas.

    Attributes:
        physical: homes and replicas of the layer.
        restore_homes: callback that moves experts back to their original ranks; ``None`` without
            rehoming.
    """

    physical: PhysicalExperts
    restore_homes: Callable[[], None] | None

    def forward(
        self,
        hidden_states: Tensor,
        tokens_per_expert: Tensor,
        probs: Tensor,
        *more_inputs: Any,
        **kwargs: Any,
    ) -> Any:
        physical = self.physical
        running = physical.running
        if running is not None:
            running.num_tokens = hidden_states.shape[0]
        if running is None or running.replicas is None:
            if physical.computes_with is not None:
                physical.compute_with(None)
            # the counts of empty slots follow the counts of homes
            if tokens_per_expert.shape[0] > physical.num_homes:
                tokens_per_expert = tokens_per_expert[: physical.num_homes]
            return super().forward(hidden_states, tokens_per_expert, probs, *more_inputs, **kwargs)
        twin = physical.twin
        if twin.module.training != self.training:
            twin.module.train(self.training)
        replicas = running.replicas
        hidden_states, weights = replicas.join(hidden_states, running.joined_homes)
        running.joined_homes = None
        if physical.computes_with is not replicas.transfers:
            physical.compute_with(replicas.transfers)
        if self.config.fine_grained_activation_offloading:
            # Offloading skips parameters only, and weights of replicas are no parameters. The
            # second attribute has the name of megatron-core 0.16.
            for weight in weights:
                weight._do_not_offload = True
                weight.offloading_activation = False
        inputs = (hidden_states, tokens_per_expert[: twin.num_computed], probs, *more_inputs)
        output, *more_outputs = twin.compute(weights, *inputs, **kwargs)
        twin.pass_over()
        if not replicas.are_kept:
            # quantized copies must not outlive replicas that are dropped after their backward
            twin.drop_quantized(physical.num_homes)
        return replicas.computed_by(output), *more_outputs

    def sharded_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Move experts back to their original ranks, then call Megatron's method. Collective."""
        if self.restore_homes is not None:
            self.restore_homes()
        return super().sharded_state_dict(*args, **kwargs)

    def backward_dw(self) -> None:
        """Compute delayed weight gradients, then start the return of replicas' gradients."""
        if not self.physical.delayed:
            super().backward_dw()
            return
        self.settle()
        gradients, take = self.physical.delayed.popleft()
        self.physical.twin.compute_delayed(gradients)
        self.physical.unsettled = take(gradients)
        if not self.config.delay_wgrad_compute:
            # without the setting, the layer does not call `settle` after the attention's backward
            self.settle()

    def settle(self) -> None:
        """Complete the homes' gradients of the last `backward_dw`, unless autograd will."""
        pending = self.physical.unsettled
        self.physical.unsettled = None
        if pending is not None and pending.settle():
            self.physical.twin.run_gradient_hooks()
