"""Refuse MoE layers whose subclasses compute in ways of their own: FSSDP would replace or skip their code.

Experts are computed once more by a twin over homes and replicas, dispatchers are built again over
physical experts, and a layer's parts are overridden. Routers may be subclasses: FSSDP reads what they
return. So may layers that put Megatron's parts together in their own way, as Gemma 4's does.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from megatron.core.transformer.moe.moe_layer import BaseMoELayer, MoELayer
from torch.nn import Module

KNOWN = ("megatron.core.", "transformer_engine.", "torch.", "megatron_hecate.")
# parts of Megatron's layer that FSSDP overrides, and the forward that calls them
LAYER = {
    "forward",
    "route",
    "preprocess",
    "dispatch",
    "routed_experts_compute",
    "combine",
    "backward_dw",
}
# methods that are looked at in Megatron's own classes, too: a package may have put its own there
PATCHED = {*LAYER, "token_dispatch", "token_combine"}
# methods that change neither what is computed nor how
HARMLESS = {
    "__init__",
    "__repr__",
    "extra_repr",
    "load_state_dict",
    "reset_parameters",
    "set_layer_number",
    "set_tensor_parallel_attributes",
    "sharded_state_dict",
    "state_dict_for_save_checkpoint",
    "_load_from_state_dict",
}


def check_layer(layer: MoELayer) -> None:
    """Raise a ValueError that names each module of ``layer`` with code of its own."""
    found = list(_describe(layer, "the layer", only=LAYER))
    found += _describe(layer.token_dispatcher, "its dispatcher")
    parts = {type(part): part for part in layer.experts.modules() if part._parameters}
    for part in {type(layer.experts): layer.experts, **parts}.values():
        found += _describe(
            part, "its experts" if part is layer.experts else "a part of its experts"
        )
    if found:
        raise ValueError(
            f"{'; '.join(found)}: FSSDP has replicas for Megatron's own code only; use Megatron's "
            "classes, or leave --moe-fssdp off"
        )


def find_foreign_layers(chunks: Iterable[Module]) -> list[str]:
    """Return a line for each kind of MoE layer that is not Megatron's `MoELayer`."""
    modules = (module for chunk in chunks for module in chunk.modules())
    kinds = {
        type(m) for m in modules if isinstance(m, BaseMoELayer) and not isinstance(m, MoELayer)
    }
    return [
        f"{_name(kind)} is a MoE layer of its own kind: FSSDP converts Megatron's MoELayer"
        for kind in sorted(kinds, key=_name)
    ]


def _describe(module: Any, role: str, *, only: set[str] | None = None) -> Iterable[str]:
    """Yield a line where ``module`` has methods of its own, of those in ``only``."""
    names = _methods(type(module)) if only is None else only
    if own := sorted(name for name in names if _is_foreign(module, name)):
        yield f"{role} ({_name(type(module))}) has {', '.join(own)} of its own"


def _methods(kind: type) -> set[str]:
    """Return names of the methods that Megatron's and TransformerEngine's classes of ``kind`` have."""
    known = [base for base in kind.__mro__ if _is_known(base.__module__) and base is not Module]
    found = {name for base in known for name, value in vars(base).items() if callable(value)}
    return (found | {"forward", "__call__"}) - HARMLESS


def _is_foreign(module: Any, name: str) -> bool:
    """Return whether ``name`` comes from another package, by a subclass or because somebody patched it."""
    if name in vars(module):
        return not _is_known(getattr(vars(module)[name], "__module__", ""))
    owner = next((base for base in type(module).__mro__ if name in vars(base)), object)
    if owner is object:
        return False
    function = getattr(vars(owner)[name], "__module__", None)
    is_patched = name in PATCHED and function is not None and not _is_known(function)
    return is_patched or not _is_known(owner.__module__)


def _is_known(module: str) -> bool:
    return f"{module}.".startswith(KNOWN)


def _name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"
