"""Replicas in Megatron's own expert modules.

The module that holds the homes stays what it is: same class for ``isinstance``, same parameters, same checkpoint.
Beside it stands a *physical* twin, the same Megatron class with room for P experts and no parameters, which is called
with the weights of homes and replicas for one microbatch (``torch.func.functional_call``). Without replicas it is not
used.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from megatron.core.transformer.moe.experts import SequentialMLP, TEGroupedMLP
from torch import Tensor
from torch.nn import Module, ModuleList, Parameter

from megatron_hecate.adapter.stored_weights import StoredWeights
from megatron_hecate.adapter.training_state import wait_for_params
from megatron_hecate.comm.transport import TransferPlan
from megatron_hecate.plan import LayerShape
from megatron_hecate.replicas.autograd import ChunkLayout, PendingGradients
from megatron_hecate.replicas.layer_replicas import Replicas


QUANTIZED = ("fp8", "fp4", "quant_recipe")  # settings under which experts may be


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
        if isinstance(experts, TEGroupedMLP):
            self._names, linears = _grouped_names(experts)
            self.twin = _grouped_twin(experts, num_physical)
        elif isinstance(experts, SequentialMLP) and any(getattr(experts.config, name, None) for name in QUANTIZED):
            raise ValueError(
                "experts in fp8 or fp4 are modules of their own; set model.moe_grouped_gemm=true or --moe-grouped-gemm"
            )
        elif isinstance(experts, SequentialMLP):
            self._names, linears = _sequential_names(experts)
            self.twin = _sequential_twin(experts, num_physical)
        else:
            raise TypeError(
                f"experts are a {type(experts).__name__}; FSSDP knows SequentialMLP and TEGroupedMLP "
                "(--moe-grouped-gemm with TransformerEngine)"
            )
        self._plan: TransferPlan | None = None  # of the weights that the twin's quantized copies were made of
        # the modules that own the homes' parameters: looking names up from the top takes long for many experts
        paths = [[name.format(i).rpartition(".") for name in self._names] for i in range(self.num_homes)]
        self._owners = [[(experts.get_submodule(path), leaf) for path, _, leaf in expert] for expert in paths]
        # a fused GEMM writes weights' gradients only; biases go through autograd
        self.layout = ChunkLayout(
            shapes=tuple(p.shape for p in self.homes()[0]),
            fused=tuple(
                "weight" in name and _fuses_wgrad(linear) for name, linear in zip(self._names, linears, strict=True)
            ),
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

    def compute_with(self, plan: TransferPlan) -> None:
        """The coming forward has the replicas of ``plan``: each iteration makes its own."""
        if self._plan is not plan:
            self._plan = plan
            self.drop_quantized(0)

    def drop_quantized(self, first: int) -> None:
        """Drop the quantized copies that TransformerEngine keeps over microbatches, of experts from ``first`` on."""
        for linear in self.twin.children():
            copies = getattr(linear, "_fp8_workspaces", {})
            for name in [name for name in copies if int(name.removeprefix("weight")) >= first]:
                del copies[name]

    def named(self, weights: list[list[Tensor]]) -> dict[str, Tensor]:
        """The weights of all physical experts under the twin's parameter names."""
        return {
            name.format(i): tensor
            for i, expert in enumerate(weights)
            for name, tensor in zip(self._names, expert, strict=True)
        }


class FSSDPExperts:
    """Mixin in front of Megatron's expert module: computes homes and replicas when the layer has replicas."""

    physical: PhysicalExperts
    replicas: Replicas | None  # of the running forward; set by the layer, and so are
    joined_homes: tuple[PendingGradients, list[Tensor]] | None  # its homes, joined before the attention

    def forward(
        self, hidden_states: Tensor, tokens_per_expert: Tensor, probs: Tensor, *rest: Any, **kwargs: Any
    ) -> Any:
        if self.replicas is None:
            tokens_per_expert = tokens_per_expert[: self.physical.num_homes]  # slots may follow, without tokens
            return super().forward(hidden_states, tokens_per_expert, probs, *rest, **kwargs)
        wait_for_params(self)
        if self.physical.twin.training != self.training:
            self.physical.twin.train(self.training)
        joined_homes, self.joined_homes = self.joined_homes, None
        weights = self.physical.named(self.replicas.materialize(joined_homes))
        self.physical.compute_with(self.replicas.plan)
        if self.config.fine_grained_activation_offloading:  # spares parameters, and these are none
            for weight in weights.values():
                weight._do_not_offload, weight.offloading_activation = True, False  # its name now, and in 0.16
        inputs = (hidden_states, tokens_per_expert, probs, *rest)
        output, *others = torch.func.functional_call(self.physical.twin, weights, inputs, kwargs)
        if self.replicas.after_backward is not None:  # these replicas do not stay
            self.physical.drop_quantized(self.physical.num_homes)
        return self.replicas.computed_by(output), *others


def _sequential_names(experts: SequentialMLP) -> tuple[list[str], list[Module]]:
    names, linears = [], []
    for name, _ in experts.local_experts[0].named_parameters():
        names.append("local_experts.{}." + name)
        linears.append(experts.local_experts[0].get_submodule(name.rpartition(".")[0]))
    return names, linears


def _sequential_twin(experts: SequentialMLP, num_physical: int) -> SequentialMLP:
    twin = _bare_copy(experts)
    of_replicas = [
        _copy_without_parameters(experts.local_experts[0]) for _ in range(num_physical - experts.num_local_experts)
    ]
    twin.num_local_experts = num_physical
    twin.local_experts = ModuleList([*experts.local_experts, *of_replicas])
    return twin


def _grouped_names(experts: TEGroupedMLP) -> tuple[list[str], list[Module]]:
    names, linears = [], []
    for linear in ("linear_fc1", "linear_fc2"):
        module = getattr(experts, linear)
        for kind in ("weight", "bias"):
            if isinstance(getattr(module, f"{kind}0", None), Parameter):
                names.append(f"{linear}.{kind}{{}}")
                linears.append(module)
        if f"{linear}.weight{{}}" not in names or not hasattr(module, "num_gemms"):
            raise ValueError(
                f"TEGroupedMLP.{linear} is a {type(module).__name__} without num_gemms and one weight0, weight1, ... "
                "per expert; FSSDP needs TransformerEngine's GroupedLinear (TransformerEngine 1.9 or newer)"
            )
    return names, linears


def _grouped_twin(experts: TEGroupedMLP, num_physical: int) -> TEGroupedMLP:
    twin = _bare_copy(experts)
    twin.num_local_experts = num_physical
    for linear in ("linear_fc1", "linear_fc2"):
        wide = _copy_without_parameters(getattr(experts, linear))
        wide.num_gemms = num_physical
        wide.fp8_meta = {"fp8_checkpoint": False, "fp8_group": None}
        wide.quantizers = {"scaling_fwd": [], "scaling_bwd": []}
        wide.is_first_microbatch = False
        wide.fp8_initialized = wide.fp8_meta_tensors_initialized = False
        wide._fp8_workspaces = {}
        wide._custom_quantizer_cache = {}
        bias = next((v for k, v in vars(wide).items() if k == "bias0"), None)
        if isinstance(bias, torch.Tensor):  # without biases TE keeps an empty tensor for each GEMM
            for i in range(num_physical):
                setattr(wide, f"bias{i}", bias)
        setattr(twin, linear, wide)
    for name in ("quantization_padding", "quantization_unpadding"):
        if hasattr(experts, name):
            module = _bare_copy(getattr(experts, name))
            module.num_gemms = num_physical
            setattr(twin, name, module)
    return twin


def _bare_copy(module: Module) -> Module:
    """A shallow copy that shares submodules and settings, can get submodules of its own, and has no hooks: a user's
    hook on ``module`` fires there, once per forward."""
    twin = copy.copy(module)
    twin._parameters, twin._modules = dict(module._parameters), dict(module._modules)
    for name, value in vars(module).items():
        if "_hooks" in name and isinstance(value, dict):
            setattr(twin, name, type(value)())
    return twin


def _copy_without_parameters(module: Module) -> Module:
    """A shallow copy of a module tree in which every parameter is missing, to be given in each call."""
    twin = _bare_copy(module)
    twin._parameters = dict.fromkeys(module._parameters)
    twin._modules = {
        name: None if child is None else _copy_without_parameters(child) for name, child in module._modules.items()
    }
    return twin


def _fuses_wgrad(linear: Module) -> bool:
    """Whether this linear's GEMM adds its gradient straight into ``main_grad``: Megatron's name, then TE's."""
    return bool(getattr(linear, "gradient_accumulation_fusion", False)) or bool(
        getattr(linear, "fuse_wgrad_accumulation", False)
    )
