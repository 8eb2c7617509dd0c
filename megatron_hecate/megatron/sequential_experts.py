"""Megatron's ``SequentialMLP``, one module per expert, and its twin over homes and replicas."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from types import BuiltinFunctionType, FunctionType
from typing import Any

from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.nn import Module, ModuleList

from megatron_hecate.megatron.grouped_linear import copy_module
from megatron_hecate.megatron.rules import GROUPED_ONLY


def check_settings(experts: SequentialMLP) -> None:
    """Raise ValueError for a setting that needs grouped GEMMs."""
    for setting in GROUPED_ONLY:
        if value := getattr(experts.config, setting, None):
            raise ValueError(
                f"SequentialMLP with {setting}={value!r} has no replicas: its experts are modules "
                "of their own; set model.moe_grouped_gemm=true or --moe-grouped-gemm"
            )


def list_parameters(experts: SequentialMLP) -> tuple[list[str], list[Module]]:
    """List the parameters of one expert, with {} for its number, and the module that owns each.

    Raises:
        ValueError: if the experts differ, or have no parameters.
    """
    first, *further_experts = experts.local_experts
    names = [name for name, _ in first.named_parameters()]
    if not names:
        raise ValueError(
            f"expert 0 of this rank, a {type(first).__name__}, has no parameters; FSSDP has "
            "replicas for equal experts: leave --moe-fssdp off"
        )
    first_properties = _properties(first)
    for index, expert in enumerate(further_experts, 1):
        properties = _properties(expert)
        for name in {**first_properties, **properties}:
            expert_value, first_value = properties.get(name), first_properties.get(name)
            if expert_value != first_value:
                texts = (f"{name}={_shown(expert_value)}", f"{name}={_shown(first_value)}")
                raise ValueError(explain_difference(index, *texts))
    linears = [first.get_submodule(name.rpartition(".")[0]) for name in names]
    return [f"local_experts.{{}}.{name}" for name in names], linears


# Types of the attributes in which experts of one kind are equal.
_PLAIN = (bool, int, float, str, FunctionType, BuiltinFunctionType, partial, TransformerConfig)


def _properties(expert: Module) -> dict[str, Any]:
    """Return what replicas copy from one expert for all: classes, shapes, plain attributes."""
    properties: dict[str, Any] = {}
    for path, module in expert.named_modules():
        prefix = f"{path}." if path else ""
        properties[f"{prefix}class"] = type(module).__qualname__
        for name, parameter in module._parameters.items():
            properties[prefix + name] = None if parameter is None else format_shapes([parameter])
        for name, value in vars(module).items():
            if isinstance(value, _PLAIN):
                properties[prefix + name] = value
    return properties


def _shown(value: Any) -> str:
    if isinstance(value, TransformerConfig):
        return f"another {type(value).__name__}"
    return str(getattr(value, "__qualname__", value))


def explain_difference(index: int, expert_text: str, first_text: str) -> str:
    """Explain why the expert ``index`` of this rank has no replicas."""
    return (
        f"expert {index} of this rank has {expert_text}, expert 0 has {first_text}; replicas need "
        "experts of one kind and size: make them equal, or leave --moe-fssdp off"
    )


def describe_activation(experts: Module) -> str:
    """Name the activation functions of ``experts`` and of their configuration."""
    owners = (experts, experts.config, *experts.modules())
    functions = [getattr(owner, "activation_func", None) for owner in owners]
    names = [getattr(function, "__qualname__", None) for function in functions]
    return ", ".join(sorted(set(filter(None, names))))


def format_shapes(parameters: Sequence[Tensor]) -> str:
    """Format the shapes of parameters as "128x32, 32x64"."""
    return ", ".join("x".join(map(str, parameter.shape)) for parameter in parameters)


def make_twin(experts: SequentialMLP, num_physical: int) -> SequentialMLP:
    """Copy ``experts`` with ``num_physical`` experts that have no weights, all like the first."""
    twin = copy_module(experts, with_parameters=True)
    first = experts.local_experts[0]
    copies = [copy_module(first, with_parameters=False) for _ in range(num_physical)]
    twin.num_local_experts = num_physical
    twin.local_experts = ModuleList(copies)
    # all experts also where `local_experts` leaves out empty slots
    twin.every_expert = twin.local_experts
    return twin
