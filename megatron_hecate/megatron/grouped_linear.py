"""Megatron's ``TEGroupedMLP``, and its twin over homes and replicas.

TransformerEngine's ``GroupedLinear`` keeps state for each of its GEMMs: quantizers, copies of quantized weights, weight
gradients to be computed later. A twin has more GEMMs than the module beside it, so it owns all of these.

With ``use_transformer_engine_op_fuser`` Megatron computes by TransformerEngine's operators, over the same parameters.
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

from megatron_hecate.settings import assumptions

_LINEARS = ("linear_fc1", "linear_fc2")
NOTHING: contextlib.AbstractContextManager[None] = contextlib.nullcontext()


class GroupedExperts:
    """Megatron's grouped experts and their twin.

    Args:
        experts: the module that holds the homes.
        num_physical: P, the twin's number of GEMMs.

    Raises:
        ValueError: for linears that lack what `compat.TE_ASSUMPTIONS` lists, or experts what `FUSED_ASSUMPTIONS` does.
    """

    def __init__(self, experts: TEGroupedMLP, num_physical: int) -> None:
        self.names: list[str] = []  # of one expert's parameters, with {} for its number
        self.linears: list[Module] = []  # the one that owns each
        self._homes = [getattr(experts, name) for name in _LINEARS]
        for name, linear in zip(_LINEARS, self._homes, strict=True):
            for kind in ("weight", "bias"):
                if isinstance(getattr(linear, f"{kind}0", None), Parameter):
                    self.names.append(f"{name}.{kind}{{}}")
                    self.linears.append(linear)
            if missing := [
                attribute
                for attribute in assumptions.TE_ASSUMPTIONS
                if not hasattr(linear, attribute)
            ]:
                raise ValueError(
                    f"TEGroupedMLP.{name} is a {type(linear).__name__} without {', '.join(missing)}; FSSDP needs "
                    "TransformerEngine's GroupedLinear with one weight per expert, and is tested from version 2.9 on"
                )
            recipes = getattr(linear, "te_quant_params", None)  # what quant_recipe has for it
            if getattr(getattr(recipes, "training_recipe", None), "custom_recipe_factory", None):
                raise ValueError(
                    f"TEGroupedMLP.{name}: custom quantizers are unknown; change model.quant_recipe"
                )
        self.twin = copy_module(experts, with_parameters=True)
        self.twin.num_local_experts = num_physical
        for name, linear in zip(_LINEARS, self._homes, strict=True):
            setattr(self.twin, name, _wide(linear, num_physical))
        for name in ("quantization_padding", "quantization_unpadding"):  # they count GEMMs
            if (padding := getattr(experts, name, None)) is not None:
                wide = copy_module(padding, with_parameters=True)
                wide.num_gemms = num_physical
                setattr(self.twin, name, wide)
        self._operators = _Operators(self.twin) if self.has_operators else None

    @property
    def has_operators(self) -> bool:
        """Whether Megatron computes with operators of TransformerEngine, instead of its modules."""
        return bool(getattr(self.twin, "_with_fused_impl", False))

    def over(self, weights: Sequence[Tensor]) -> contextlib.AbstractContextManager[None]:
        """In this block the twin's operators, if it has such, have ``weights``, as many for each expert as `names`."""
        if self._operators is None:
            return NOTHING
        names = (name.format(i) for i in range(self.twin.num_local_experts) for name in self.names)
        return self._operators.over(dict(zip(names, weights, strict=True)))

    @property
    def delays_wgrad(self) -> bool:
        """Whether TE computes weight gradients when ``backward_dw`` is called, not in the backward."""
        return self._homes[0].wgrad_store.delay_wgrad_compute()

    def pass_over(self) -> None:
        """The twin computed one of this iteration's microbatches in place of the homes' own module.

        The next one that this module computes is not the first then: TE must add to ``main_grad``. The quantized
        weights it kept are those of an earlier iteration.
        """
        for linear in self._homes:
            linear.__dict__["is_first_microbatch"] = False  # Module's own way to set it takes long
            linear._fp8_workspaces.clear()

    @property
    def quantized_copies(self) -> list[dict[str, Tensor]]:
        """Copies of the twin's weights that TransformerEngine keeps over microbatches, by name, for each linear."""
        return [getattr(self.twin, name)._fp8_workspaces for name in _LINEARS]

    def compute_delayed(self) -> dict[str, list[Tensor]]:
        """Compute the weight gradients of the oldest backward whose are not: P tensors by parameter name. Those of
        fused GEMMs are in ``main_grad`` then, and biases' can be empty: autograd had them."""
        computed: dict[str, list[Tensor]] = {}
        for name in reversed(_LINEARS):
            gemm, (_, _, weights) = getattr(self.twin, name).wgrad_store.pop()
            biases = [] if self.has_operators else gemm[1]
            computed[f"{name}.weight{{}}"], computed[f"{name}.bias{{}}"] = weights, biases
        return computed

    def drop_delayed(self) -> None:
        """Forget those. Forwards whose backward comes hold the same stores."""
        for name in _LINEARS:
            left = getattr(self.twin, name).wgrad_store.context
            while not left.empty():
                left.get()

    def run_gradient_hooks(self) -> None:
        """Tell DDP that the gradients of the homes are complete, as TE's ``backward_dw`` does."""
        for linear in reversed(self._homes):
            for hook in linear.wgrad_accumulation_and_reduce_hooks:
                hook()


class _Operators:
    """The twin's operators.

    Megatron registers parameters on them. TransformerEngine lists these for autograd when it fuses operators, and its
    backward asks an operator for them once more, to find their ``main_grad``. The twin's weights are other tensors in
    each forward, and several forwards can wait for their backward. So each has operators of its own; they share their
    quantizers, and with the twin's linears the queues of delayed weight gradients.
    """

    def __init__(self, twin: TEGroupedMLP) -> None:
        if missing := [name for name in assumptions.FUSED_ASSUMPTIONS if not hasattr(twin, name)]:
            raise ValueError(
                f"{type(twin).__name__} with use_transformer_engine_op_fuser lacks {', '.join(missing)}; set "
                "model.use_transformer_engine_op_fuser=false or leave out --use-transformer-engine-op-fuser"
            )
        self._twin, self._linears = twin, [getattr(twin, name) for name in _LINEARS]
        twin._fused_ops = None  # a copy's: Megatron's, over the homes
        self._last: list[Module] = []  # without weights: what the next forward's are copied from
        self._sequence: type[Module] = Module

    @contextlib.contextmanager
    def over(self, weights: Mapping[str, Tensor]) -> Iterator[None]:
        """As `GroupedExperts.over`."""
        if not self._last:
            self._make(weights[f"{_LINEARS[0]}.weight0"].dtype)
        if (
            not torch.is_grad_enabled()
        ):  # of these some say that they require gradients, others that they do not
            weights = {name: weight.detach() for name, weight in weights.items()}
        operators = [copy_module(operator, with_parameters=False) for operator in self._last]
        for name, operator in zip(_LINEARS, operators[::2], strict=True):
            operator._parameters = {
                leaf: weights.get(f"{name}.{leaf}") for leaf in operator._parameters
            }
            # TransformerEngine insists on one whenever its GEMMs could add to it; without gradients there is none
            operator._accumulate_into_main_grad = hasattr(operator.weight0, "main_grad")
        self._twin._fused_ops = (self._sequence(*operators),)
        try:
            yield
        finally:
            self._twin._fused_ops = None
            # with the quantizers that this forward may have made, and without its weights
            self._last = [copy_module(operator, with_parameters=False) for operator in operators]
        for operator in (
            self._last
        ):  # checks that all weights are alike were made, and take longer than all else here
            operator.pre_first_fuser_forward = _nothing

    def _make(self, dtype: torch.dtype) -> None:
        """Have Megatron make operators, over stand-ins for weights of ``dtype``."""
        stand_in = Parameter(torch.empty(0, dtype=dtype, device="meta"))
        missing = [linear._parameters for linear in self._linears]
        for linear, names in zip(self._linears, missing, strict=True):
            linear._parameters = dict.fromkeys(names, stand_in)
        try:
            made = self._twin._make_fused_ops()
        finally:
            for linear, names in zip(self._linears, missing, strict=True):
                linear._parameters = names
        self._sequence, self._last = type(made), list(made)
        assert len(self._last) == 3, f"{self._last}: not a linear, an activation and a linear"
        for linear, operator in zip(self._linears, self._last[::2], strict=True):
            operator.wgrad_store = linear.wgrad_store


def _nothing() -> None:
    pass


def _wide(linear: Module, num_gemms: int) -> Module:
    wide = copy_module(linear, with_parameters=False)
    kinds = [kind for kind in ("weight", "bias") if f"{kind}0" in linear._parameters]
    wide._parameters = {f"{kind}{i}": None for kind in kinds for i in range(num_gemms)}
    if "bias" not in kinds:  # TE keeps an empty tensor for each GEMM
        for i in range(num_gemms):
            setattr(wide, f"bias{i}", linear.bias0)
    own: dict[str, Any] = dict(  # what TE keeps for each GEMM, as in a new module
        num_gemms=num_gemms,
        fp8_meta={"fp8_checkpoint": False, "fp8_group": None},
        fp8_meta_tensors_initialized=False,
        fp8_initialized=False,
        quantizers={way: type(of_way)() for way, of_way in linear.quantizers.items()},
        _fp8_workspaces={},
        _custom_quantizer_cache={},
        wgrad_store=_new_store(linear),
        # never: TE would take it as leave to overwrite main_grad, to which the homes' own module may have added
        is_first_microbatch=False,
    )
    wide.__dict__.update(own)
    return wide


def _new_store(linear: Module) -> Any:
    return type(linear.wgrad_store)(linear.wgrad_store.delay_wgrad_compute())


def copy_module(module: Module, *, with_parameters: bool, with_hooks: bool = False) -> Module:
    """A shallow copy that can get submodules of its own.

    Args:
        with_parameters: whether it shares parameters and submodules; else submodules are copied too, and every
            parameter is missing, to be given in each call.
        with_hooks: whether it shares the hooks of ``module``, now and later; else it has none, and a user's hook fires
            once per forward.
    """
    twin = copy.copy(module)
    for name, value in () if with_hooks else vars(module).items():
        if "_hooks" in name and isinstance(value, dict | list):
            twin.__dict__[name] = type(value)()
    if with_parameters:
        twin._parameters, twin._modules = dict(module._parameters), dict(module._modules)
        return twin
    twin._parameters = dict.fromkeys(module._parameters)
    twin._modules = {
        name: None
        if child is None
        else copy_module(child, with_parameters=False, with_hooks=with_hooks)
        for name, child in module._modules.items()
    }
    return twin
