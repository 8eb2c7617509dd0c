"""Megatron's ``SequentialMLP``, one module per expert, and its twin over homes and replicas."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megatron.core.transformer.moe.experts import SequentialMLP
from torch import Tensor
from torch.nn import Module, ModuleList

from megatron_hecate.megatron.rules import GROUPED_ONLY
from megatron_hecate.megatron.twin import Twin, copy_module


class SequentialTwin(Twin):
    """Twin of one module per expert: all of its experts are copies of the first one.

    Args:
        experts: the module that holds the homes.
        num_physical: P, the twin's number of experts.

    Raises:
        ValueError: for settings that need grouped GEMMs, and for experts that differ.
    """

    def __init__(self, experts: SequentialMLP, num_physical: int) -> None:
        for setting in GROUPED_ONLY:
            if value := getattr(experts.config, setting, None):
                raise ValueError(
                    f"SequentialMLP with {setting}={value!r} has no replicas: its experts are "
                    "modules of their own; set model.moe_grouped_gemm=true or --moe-grouped-gemm"
                )
        _check_equal(experts.local_experts)
        first = experts.local_experts[0]
        parameters = [name for name, _ in first.named_parameters()]
        self.fused = tuple(_is_fused(first, name) for name in parameters)
        twin = copy_module(experts, with_parameters=True)
        self._all = ModuleList(
            [copy_module(first, with_parameters=False) for _ in range(num_physical)]
        )
        twin.num_local_experts = num_physical
        twin.local_experts = self._all
        names = [f"local_experts.{{}}.{name}" for name in parameters]
        super().__init__(twin, names, num_physical)

    def compute_first(self, count: int) -> None:
        if count != self.num_computed:
            self.num_computed = count
            self.module.local_experts = self._all[:count]


def _is_fused(expert: Module, name: str) -> bool:
    """Return whether a GEMM adds the gradient of a parameter into ``main_grad``."""
    path, _, leaf = name.rpartition(".")
    linear = expert.get_submodule(path)
    # Megatron's name of the setting, then TransformerEngine's
    settings = ("gradient_accumulation_fusion", "fuse_wgrad_accumulation")
    # biases go through autograd
    return leaf == "weight" and any(getattr(linear, setting, False) for setting in settings)


def _check_equal(experts: Sequence[Module]) -> None:
    """Check that ``experts`` are of one kind and size.

    Raises:
        ValueError: if they differ, or have no parameters.
    """
    first = experts[0]
    if not list(first.parameters()):
        raise ValueError(
            f"expert 0 of this rank, a {type(first).__name__}, has no parameters; FSSDP has "
            "replicas for equal experts: leave --moe-fssdp off"
        )
    first_parts = _describe_parts(first)
    for index, expert in enumerate(experts):
        parts = _describe_parts(expert)
        for name in {**first_parts, **parts}:
            part, first_part = parts.get(name), first_parts.get(name)
            if part != first_part:
                raise ValueError(
                    f"expert {index} of this rank has {name}={_show(part)}, expert 0 has "
                    f"{name}={_show(first_part)}; replicas need experts of one kind and size: "
                    "make them equal, or leave --moe-fssdp off"
                )


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
