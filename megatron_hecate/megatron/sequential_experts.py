"""Megatron's ``SequentialMLP``, one module per expert, and its twin over homes and replicas."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megatron.core.transformer.moe.experts import SequentialMLP
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
    first = experts.local_experts[0]
    names = [name for name, _ in first.named_parameters()]
    if not names:
        raise ValueError(
            f"expert 0 of this rank, a {type(first).__name__}, has no parameters; FSSDP has "
            "replicas for equal experts: leave --moe-fssdp off"
        )
    first_parts = _describe_parts(first)
    for index, expert in enumerate(experts.local_experts):
        parts = _describe_parts(expert)
        for name in {**first_parts, **parts}:
            part, first_part = parts.get(name), first_parts.get(name)
            if part != first_part:
                raise ValueError(
                    f"expert {index} of this rank has {name}={_show(part)}, expert 0 has "
                    f"{name}={_show(first_part)}; replicas need experts of one kind and size: "
                    "make them equal, or leave --moe-fssdp off"
                )
    linears = [first.get_submodule(name.rpartition(".")[0]) for name in names]
    return [f"local_experts.{{}}.{name}" for name in names], linears


def _describe_parts(expert: Module) -> dict[str, Any]:
    """Describe an expert by classes, shapes and activation functions, which its replicas share."""
    parts: dict[str, Any] = {}
    for name, module in expert.named_modules():
        prefix = f"{name}." if name else ""
        parts[f"{prefix}class"] = type(module).__qualname__
        parts[f"{prefix}activation_func"] = getattr(module, "activation_func", None)
    for name, parameter in expert.named_parameters():
        parts[name] = format_shapes([parameter])
    return parts


def _show(part: Any) -> str:
    return str(getattr(part, "__qualname__", part))


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
