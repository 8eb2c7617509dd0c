"""Megatron's ``TEGroupedMLP``, and its twin over homes and replicas.

TransformerEngine's ``GroupedLinear`` keeps state for each of its GEMMs: quantizers, copies of
quantized weights, delayed weight gradients. The twin has more GEMMs than the module with the homes,
so it has such state of its own.

With ``use_transformer_engine_op_fuser`` Megatron computes with TransformerEngine's operators, over
the same parameters.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from megatron.core.transformer.moe.experts import TEGroupedMLP
from torch import Tensor
from torch.nn import Module, Parameter

from megatron_hecate.megatron import assumptions
from megatron_hecate.megatron.twin import Twin, copy_module

_LINEARS = ("linear_fc1", "linear_fc2")
# fields of Megatron's recipe for a linear that make quantizers that replicas were not tested with
_UNKNOWN_QUANTIZERS = ("custom_recipe_factory", "recipe_attrs", "mxfp8_2d_quantization")


class GroupedTwin(Twin):
    """Twin of Megatron's grouped experts.

    Args:
        experts: the module that holds the homes.
        num_physical: P, the twin's number of GEMMs.

    Raises:
        ValueError: for linears without an attribute in `assumptions.TE_ASSUMPTIONS`, for experts
            without one in `assumptions.FUSED_ASSUMPTIONS`, and for custom quantizers.
    """

    def __init__(self, experts: TEGroupedMLP, num_physical: int) -> None:
        names: list[str] = []
        fused: list[bool] = []
        self._homes = [getattr(experts, name) for name in _LINEARS]
        for name, linear in zip(_LINEARS, self._homes, strict=True):
            _check_linear(name, linear)
            for kind in ("weight", "bias"):
                if isinstance(getattr(linear, f"{kind}0", None), Parameter):
                    names.append(f"{name}.{kind}{{}}")
                    fused.append(kind == "weight" and linear.fuse_wgrad_accumulation)
        self.fused = tuple(fused)
        twin = copy_module(experts, with_parameters=True)
        twin.num_local_experts = num_physical
        for name, linear in zip(_LINEARS, self._homes, strict=True):
            setattr(twin, name, _wide(linear, num_physical))
        self._linears = [getattr(twin, name) for name in _LINEARS]
        # modules of the twin with the number of GEMMs
        self._counted = list(self._linears)
        for name in ("quantization_padding", "quantization_unpadding"):
            if (padding := getattr(experts, name, None)) is not None:
                wide = copy_module(padding, with_parameters=True)
                wide.num_gemms = num_physical
                setattr(twin, name, wide)
                self._counted.append(wide)
        super().__init__(twin, names, num_physical)
        self.delays_wgrad = self._homes[0].wgrad_store.delay_wgrad_compute()
        self.has_operators = bool(getattr(twin, "_with_fused_impl", False))
        # A fused grouped GEMM needs a gradient for every weight, and so do operators.
        self.is_uniform = self.has_operators or any(fused)
        self._operators = None
        if self.has_operators:
            self._operators = _Operators(twin)
        # TransformerEngine keeps scales for each quantized GEMM and reduces their maxima over
        # ranks, which hold different replicas
        kinds = ("fp8", "fp4", "quant_recipe")
        quantizes = any(getattr(experts.config, kind, None) for kind in kinds)
        self._needs_all = quantizes or self.has_operators
        self._names_of_all = [name.format(i) for i in range(num_physical) for name in names]

    def compute(self, weights: Sequence[Tensor], *inputs: Any, **kwargs: Any) -> Any:
        if self._operators is None:
            return super().compute(weights, *inputs, **kwargs)
        # operators are made before the weights are set, from linears without weights
        with self._operators.over(dict(zip(self._names_of_all, weights, strict=True))):
            return super().compute(weights, *inputs, **kwargs)

    def compute_first(self, count: int) -> None:
        if self._needs_all or count == self.num_computed:
            return
        self.num_computed = count
        for module in self._counted:
            # ``Module.__setattr__`` takes long
            module.__dict__["num_gemms"] = count

    def pass_over(self) -> None:
        for linear in self._homes:
            # TE must add to ``main_grad``; ``Module.__setattr__`` takes long
            linear.__dict__["is_first_microbatch"] = False
            # from an earlier iteration
            linear._fp8_workspaces.clear()

    def drop_quantized(self, first: int) -> None:
        for linear in self._linears:
            copies = linear._fp8_workspaces
            dropped = [name for name in copies if int(name.removeprefix("weight")) >= first]
            for name in dropped:
                del copies[name]

    def compute_delayed(self, gradients: list[Tensor | None]) -> None:
        for name, linear in reversed(list(zip(_LINEARS, self._linears, strict=True))):
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
        # an aborted backward may have queued the gradients of one linear only; the queues stay in
        # use, because forwards in flight hold references
        for linear in self._linears:
            queue = linear.wgrad_store.context
            while not queue.empty():
                queue.get()

    def run_gradient_hooks(self) -> None:
        # as TE's ``backward_dw`` does
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
        """Give the twin operators that have ``weights``, by parameter name."""
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
            operator.pre_first_fuser_forward = lambda: None

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
        wgrad_store=type(linear.wgrad_store)(linear.wgrad_store.delay_wgrad_compute()),
        # never True: TE would then overwrite main_grad, to which the homes' own module may have
        # added
        is_first_microbatch=False,
    )
    wide.__dict__.update(attributes)
    return wide
