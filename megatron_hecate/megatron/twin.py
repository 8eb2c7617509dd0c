"""Twins: copies of Megatron's expert modules that compute homes and replicas.

A twin has room for P experts and no weights of its own: each forward sets the weights of all
experts, so that nothing here keeps memory that a job releases between forwards.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.nn import Module


class Twin:
    """Copy of an expert module, and all that differs between Megatron's classes of such modules.

    Args:
        module: the copy, with room for ``num_physical`` experts.
        names: dotted name of each parameter of an expert, with {} for the expert's number.
        num_physical: P, homes and replica slots together.

    Attributes:
        fused: for each of the names, whether a GEMM adds the gradient into ``main_grad``.
        num_computed: physical experts that a forward computes, the first ones.
        is_uniform: whether weights of empty slots must require gradients where other weights do.
        has_operators: whether Megatron computes with TransformerEngine's operators.
        delays_wgrad: whether weight gradients are computed in ``backward_dw``, not in the backward.
    """

    fused: tuple[bool, ...]
    is_uniform = False
    has_operators = False
    delays_wgrad = False

    def __init__(self, module: Module, names: Sequence[str], num_physical: int) -> None:
        self.module = module
        self.names = names
        self.num_computed = num_physical
        # Dictionary and key of each weight. Weights are set as plain attributes, which takes the
        # least time. Weights of the first expert are set as parameters, because some versions of
        # TransformerEngine look for any parameter.
        self._places = [
            (owner.__dict__ if index >= len(names) else owner._parameters, name)
            for index, (owner, name) in enumerate(find_owners(module, names, num_physical))
        ]

    def compute(self, weights: Sequence[Tensor], *inputs: Any, **kwargs: Any) -> Any:
        """Run the module on ``inputs`` with ``weights`` of all physical experts, flat."""
        for (owner, name), weight in zip(self._places, weights, strict=True):
            owner[name] = weight
        try:
            # not by ``__call__``: hooks of all modules have run for Megatron's module
            return self.module.forward(*inputs, **kwargs)
        finally:
            for owner, name in self._places:
                owner[name] = None

    def compute_first(self, count: int) -> None:
        """Compute only the first ``count`` physical experts from here on, where that is possible.

        An empty slot costs the host as much as an expert with tokens.
        """
        raise NotImplementedError

    def pass_over(self) -> None:
        """Note that the twin computed a microbatch of this iteration instead of the homes' module.

        The next microbatch that the homes' module computes is then not the first.
        """

    def drop_quantized(self, first: int) -> None:
        """Drop quantized weights that are kept over microbatches, of experts from ``first`` on."""

    def compute_delayed(self, gradients: list[Tensor | None]) -> None:
        """Compute the delayed weight gradients of the oldest backward.

        Args:
            gradients: gradients that autograd passed on, flat over physical experts: placeholders
                for weights, and in fp8 the gradients of biases. Computed gradients replace them;
                fused GEMMs write to ``main_grad`` instead.
        """

    def drop_delayed(self) -> None:
        """Forget the delayed weight gradients of aborted backwards."""

    def run_gradient_hooks(self) -> None:
        """Run DDP's hooks for complete gradients of the homes."""


def find_owners(module: Module, names: Sequence[str], num_experts: int) -> list[tuple[Module, str]]:
    """Find submodule and attribute of each parameter of ``module``, expert by expert, flat.

    Args:
        module: expert module.
        names: dotted name of each parameter of an expert, with {} for the expert's number.
        num_experts: number of experts.
    """
    owners: list[tuple[Module, str]] = []
    for expert in range(num_experts):
        for name in names:
            path, _, leaf = name.format(expert).rpartition(".")
            owners.append((module.get_submodule(path), leaf))
    return owners


def copy_module(module: Module, *, with_parameters: bool) -> Module:
    """Make a shallow copy without hooks that can get submodules of its own.

    Args:
        module: module to copy.
        with_parameters: whether the copy shares parameters and submodules; else submodules are
            copied too, and every parameter is missing, to be set in each call.
    """
    twin = copy.copy(module)
    for name, value in vars(module).items():
        if "_hooks" in name and isinstance(value, dict | list):
            twin.__dict__[name] = type(value)()
    if with_parameters:
        twin._parameters = dict(module._parameters)
        twin._modules = dict(module._modules)
        return twin
    twin._parameters = dict.fromkeys(module._parameters)
    twin._modules = {}
    for name, child in module._modules.items():
        if child is not None:
            child = copy_module(child, with_parameters=False)
        twin._modules[name] = child
    return twin
