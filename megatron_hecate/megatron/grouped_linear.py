"""Megatron's ``TEGroupedMLP``, and its twin over homes and replicas.

TransformerEngine's ``GroupedLinear`` keeps state for each of its GEMMs: quantizers, copies of
quantized weights, delayed weight gradients. The twin has more GEMMs than the module with the homes,
so it has such state of its own.

With ``use_transformer_engine_op_fuser`` Megatron computes with TransformerEngine's operators, over
the same parameters.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from megatron.core.transformer.moe.experts import TEGroupedMLP
from torch import Tensor
from torch.nn import Module, Parameter

from megatron_hecate.megatron import assumptions

_LINEARS = ("linear_fc1", "linear_fc2")
# fields of Megatron's recipe for a linear that make quantizers that replicas were not tested with
_UNKNOWN_QUANTIZERS = ("custom_recipe_factory", "recipe_attrs", "mxfp8_2d_quantization")


class GroupedExperts:
    """Megatron's grouped experts and their twin.

    Args:
        experts: the module that holds the homes.
        num_physical: P, the twin's number of GEMMs.

    Raises:
        ValueError: for linears without an attribute in `assumptions.TE_ASSUMPTIONS`, for experts
            without one in `assumptions.FUSED_ASSUMPTIONS`, and for custom quantizers.
    """

    def __init__(self, experts: TEGroupedMLP, num_physical: int) -> None:
        # names of one expert's parameters, with {} for its number
        self.names: list[str] = []
        # linear that owns each of the parameters
        self.linears: list[Module] = []
        self._homes = [getattr(experts, name) for name in _LINEARS]
        for name, linear in zip(_LINEARS, self._homes, strict=True):
            for kind in ("weight", "bias"):
                if isinstance(getattr(linear, f"{kind}0", None), Parameter):
                    self.names.append(f"{name}.{kind}{{}}")
                    self.linears.append(linear)
            _check_linear(name, linear)
        self.twin = copy_module(experts, with_parameters=True)
        self.twin.num_local_experts = num_physical
        for name, linear in zip(_LINEARS, self._homes, strict=True):
            setattr(self.twin, name, _wide(linear, num_physical))
        # modules of the twin with the number of GEMMs
        self._counted = [getattr(self.twin, name) for name in _LINEARS]
        for name in ("quantization_padding", "quantization_unpadding"):
            if (padding := getattr(experts, name, None)) is not None:
                wide = copy_module(padding, with_parameters=True)
                wide.num_gemms = num_physical
                setattr(self.twin, name, wide)
                self._counted.append(wide)
        self._operators = _Operators(self.twin) if self.has_operators else None
        self._names_of_all: list[str] = []
        for expert in range(num_physical):
            self._names_of_all += [name.format(expert) for name in self.names]

    @property
    def has_operators(self) -> bool:
        """Whether Megatron computes with TransformerEngine's operators instead of its modules."""
        return bool(getattr(self.twin, "_with_fused_impl", False))

    def over(self, weights: Sequence[Tensor]) -> contextlib.AbstractContextManager[None]:
        """Return a context in which the twin's operators have ``weights``.

        Args:
            weights: weights of all physical experts, flat; each expert has one per name in `names`.
        """
        assert self._operators is not None, "Megatron computes with modules"
        return self._operators.over(dict(zip(self._names_of_all, weights, strict=True)))

    @property
    def delays_wgrad(self) -> bool:
        """Whether TE computes weight gradients in ``backward_dw`` instead of the backward."""
        return self._homes[0].wgrad_store.delay_wgrad_compute()

    def compute_first(self, count: int) -> None:
        """Compute only the first ``count`` physical experts from here on.

        Not with quantized GEMMs, whose state has the size of all of them.
        """
        for module in self._counted:
            # ``Module.__setattr__`` takes long
            module.__dict__["num_gemms"] = count

    def pass_over(self) -> None:
        """Note that the twin computed a microbatch of this iteration instead of the homes' module.

        The next microbatch that the homes' module computes is then not the first: TE must add to
        ``main_grad``. The module's quantized weights are from an earlier iteration.
        """
        for linear in self._homes:
            # ``Module.__setattr__`` takes long
            linear.__dict__["is_first_microbatch"] = False
            linear._fp8_workspaces.clear()

    @property
    def quantized_copies(self) -> list[dict[str, Tensor]]:
        """Quantized weights that TransformerEngine keeps over microbatches, by name, per linear."""
        return [getattr(self.twin, name)._fp8_workspaces for name in _LINEARS]

    def compute_delayed(self, gradients: list[Tensor | None]) -> None:
        """Compute the delayed weight gradients of the oldest backward.

        Args:
            gradients: gradients that autograd passed on, flat over physical experts: placeholders
                for weights, and in fp8 the gradients of biases. Computed gradients replace them;
                fused GEMMs write to ``main_grad`` instead.
        """
        for name in reversed(_LINEARS):
            linear = getattr(self.twin, name)
            gemm, (_, _, weights) = linear.wgrad_store.pop()
            computed = {
                f"{name}.weight{{}}": [] if linear.fuse_wgrad_accumulation else weights,
                # empty where autograd computed them
                f"{name}.bias{{}}": [] if self.has_operators else gemm[1],
            }
            for part, parameter in enumerate(self.names):
                for expert, gradient in enumerate(computed.get(parameter, ())):
                    if gradient is not None and gradient.numel():
                        gradients[expert * len(self.names) + part] = gradient

    def drop_delayed(self) -> None:
        """Empty the stores of delayed weight gradients.

        The stores stay in use, because forwards in flight hold references.
        """
        for name in _LINEARS:
            queue = getattr(self.twin, name).wgrad_store.context
            while not queue.empty():
                queue.get()

    def run_gradient_hooks(self) -> None:
        """Run DDP's hooks for complete gradients of the homes, as TE's ``backward_dw`` does."""
        for linear in reversed(self._homes):
            for hook in linear.wgrad_accumulation_and_reduce_hooks:
                hook()


class _Operators:
    """TransformerEngine's operators of the twin.

    Megatron registers parameters on the operators. TransformerEngine lists an operator's parameters
    for autograd when it fuses operators, and its backward reads the parameters again to find their
    ``main_grad``. The twin's weights are other tensors in each forward, and several forwards can
    wait for their backward. So each forward has operators of its own. All of them share their
    quantizers, and share the queues of delayed weight gradients with the twin's linears.
    """

    def __init__(self, twin: TEGroupedMLP) -> None:
        if missing_names := [
            name for name in assumptions.FUSED_ASSUMPTIONS if not hasattr(twin, name)
        ]:
            raise ValueError(
                f"{type(twin).__name__} with use_transformer_engine_op_fuser lacks "
                f"{', '.join(missing_names)}; set model.use_transformer_engine_op_fuser=false or "
                "leave out --use-transformer-engine-op-fuser"
            )
        self._twin = twin
        self._linears = [getattr(twin, name) for name in _LINEARS]
        # the copied module may have Megatron's operators over the homes
        twin._fused_ops = None
        # operators of the last forward, without weights: templates for the next forward's
        self._last: list[Module] = []
        self._sequence: type[Module] = Module

    @contextlib.contextmanager
    def over(self, weights: Mapping[str, Tensor]) -> Iterator[None]:
        """Implement `GroupedExperts.over`, with ``weights`` by parameter name."""
        if not self._last:
            self._make(weights[f"{_LINEARS[0]}.weight0"].dtype)
        if not torch.is_grad_enabled():
            # only some of the weights require gradients, and operators need all weights to agree
            weights = {name: weight.detach() for name, weight in weights.items()}
        operators = [copy_module(operator, with_parameters=False) for operator in self._last]
        for name, operator in zip(_LINEARS, operators[::2], strict=True):
            operator._parameters = {
                leaf: weights.get(f"{name}.{leaf}") for leaf in operator._parameters
            }
            # TransformerEngine requires a ``main_grad`` wherever its GEMMs could add to one, but
            # without gradients there is none
            operator._accumulate_into_main_grad = hasattr(operator.weight0, "main_grad")
        self._twin._fused_ops = (self._sequence(*operators),)
        try:
            yield
        finally:
            self._twin._fused_ops = None
            # copied to keep the quantizers that this forward may have created, without its weights
            self._last = [copy_module(operator, with_parameters=False) for operator in operators]
        # The first forward has checked that all weights agree; the check takes longer than all
        # other work here.
        for operator in self._last:
            operator.pre_first_fuser_forward = _nothing

    def _make(self, dtype: torch.dtype) -> None:
        """Create operators by Megatron's method, over placeholders for weights of ``dtype``."""
        stand_in = Parameter(torch.empty(0, dtype=dtype, device="meta"))
        parameter_dicts = [linear._parameters for linear in self._linears]
        for linear, names in zip(self._linears, parameter_dicts, strict=True):
            linear._parameters = dict.fromkeys(names, stand_in)
        try:
            operators = self._twin._make_fused_ops()
        finally:
            for linear, names in zip(self._linears, parameter_dicts, strict=True):
                linear._parameters = names
        self._sequence = type(operators)
        self._last = list(operators)
        assert len(self._last) == 3, f"{self._last}: not a linear, an activation and a linear"
        for linear, operator in zip(self._linears, self._last[::2], strict=True):
            operator.wgrad_store = linear.wgrad_store


def _nothing() -> None:
    pass


def _check_linear(name: str, linear: Module) -> None:
    """Raise ValueError for a linear that replicas cannot be computed with."""
    missing_names = [
        attribute for attribute in assumptions.TE_ASSUMPTIONS if not hasattr(linear, attribute)
    ]
    if missing_names:
        raise ValueError(
            f"TEGroupedMLP.{name} is a {type(linear).__name__} without {', '.join(missing_names)}; "
            "FSSDP needs TransformerEngine's GroupedLinear with one weight per expert, and is "
            "tested from version 2.9 on"
        )
    # set by Megatron from quant_recipe
    recipe = getattr(getattr(linear, "te_quant_params", None), "training_recipe", None)
    for field in _UNKNOWN_QUANTIZERS:
        if getattr(recipe, field, None):
            raise ValueError(
                f"TEGroupedMLP.{name} with {field}: custom quantizers are unknown; "
                "change model.quant_recipe"
            )


def _wide(linear: Module, num_gemms: int) -> Module:
    """Copy ``linear`` with ``num_gemms`` GEMMs and without weights."""
    wide = copy_module(linear, with_parameters=False)
    kinds = [kind for kind in ("weight", "bias") if f"{kind}0" in linear._parameters]
    wide._parameters = {}
    for kind in kinds:
        wide._parameters |= {f"{kind}{i}": None for i in range(num_gemms)}
    if "bias" not in kinds:
        # TE keeps an empty tensor for each GEMM
        for i in range(num_gemms):
            setattr(wide, f"bias{i}", linear.bias0)
    # TE's state per GEMM, as in a new module
    attributes: dict[str, Any] = dict(
        num_gemms=num_gemms,
        fp8_meta={"fp8_checkpoint": False, "fp8_group": None},
        fp8_meta_tensors_initialized=False,
        fp8_initialized=False,
        quantizers={
            direction: type(quantizer)() for direction, quantizer in linear.quantizers.items()
        },
        _fp8_workspaces={},
        _custom_quantizer_cache={},
        wgrad_store=_new_store(linear),
        # never True: TE would then overwrite main_grad, to which the homes' own module may have
        # added
        is_first_microbatch=False,
    )
    wide.__dict__.update(attributes)
    return wide


def _new_store(linear: Module) -> Any:
    return type(linear.wgrad_store)(linear.wgrad_store.delay_wgrad_compute())


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
