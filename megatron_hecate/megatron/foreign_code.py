"""Refuse MoE layers with foreign code, which FSSDP would replace or skip.

* `check_layer`: code of classes. FSSDP computes experts by a twin module over homes and replicas,
  builds dispatchers again over physical experts, and overrides methods of a layer. Routers may be
  subclasses, because FSSDP only reads their results. Layers may be subclasses that combine
  Megatron's parts in another way, as Gemma 4's does.
* `ExpertParts`: code that is attached to single modules inside the experts, also after FSSDP was
  switched on. It would miss the tokens that replicas compute on other ranks. Code of the experts
  module itself runs for all tokens of its rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from megatron.core.transformer.moe.moe_layer import BaseMoELayer, MoELayer
from megatron.core.transformer.moe.token_dispatcher import MoETokenDispatcher
from torch.nn import Module

from megatron_hecate.megatron.frameworks import KNOWN_PATCHES

# packages whose classes and patches FSSDP was tested with
KNOWN = ("megatron.core.", "transformer_engine.", "torch.", "megatron_hecate.")
# methods of Megatron's layer that FSSDP overrides, and the forward that calls all of these
LAYER = {
    "forward",
    "route",
    "preprocess",
    "dispatch",
    "routed_experts_compute",
    "combine",
    "backward_dw",
}
# methods that are checked in Megatron's own classes, too, because a package may have patched a
# class
PATCHED = {*LAYER, "token_dispatch", "token_combine"}
# methods without influence on the computation
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
# Megatron's loggers, which hook into all modules of all ranks for one iteration
LOGGERS = "megatron.training."
# packages whose hooks work for replicas, too
KNOWN_HOOKS = ("megatron.core.", "transformer_engine.", "megatron_hecate.", LOGGERS)
# attributes of a module with its hooks, and their names in errors
HOOKS = (
    ("_forward_pre_hooks", "forward pre-hook"),
    ("_forward_hooks", "forward hook"),
    ("_backward_pre_hooks", "backward pre-hook"),
    ("_backward_hooks", "backward hook"),
)
# attributes of an instance that replace its class's forward, bound to the instance's weights
REPLACED = ("forward", "_compiled_call_impl")


def check_layer(layer: MoELayer) -> None:
    """Raise a ValueError that lists the modules of ``layer`` with foreign code."""
    problems = list(_describe(layer, "the layer", names=LAYER))
    problems += _describe(layer.token_dispatcher, "its dispatcher")
    # one module per class is enough
    modules = {type(layer.experts): layer.experts}
    modules.update((type(part), part) for part in layer.experts.modules() if part._parameters)
    for module in modules.values():
        role = "a part of its experts"
        if module is layer.experts:
            role = "its experts"
        problems += _describe(module, role)
    if problems:
        raise ValueError(
            f"{'; '.join(problems)}: FSSDP has replicas for Megatron's own code only; use "
            "Megatron's classes, or leave --moe-fssdp off"
        )
    if not vars(layer.experts).keys().isdisjoint(REPLACED):
        raise ValueError(
            f"its experts ({_name(type(layer.experts))}) have a forward on the instance, which "
            "would bypass FSSDP; replace it after FSSDP is switched on, or leave --moe-fssdp off"
        )


def find_foreign_layers(chunks: Iterable[Module]) -> list[str]:
    """Return a line for each kind of MoE layer that is not Megatron's `MoELayer`."""
    kinds = set()
    for chunk in chunks:
        for module in chunk.modules():
            if isinstance(module, BaseMoELayer) and not isinstance(module, MoELayer):
                kinds.add(type(module))
    return [
        f"{_name(kind)} is a MoE layer of its own kind: FSSDP converts Megatron's MoELayer"
        for kind in sorted(kinds, key=_name)
    ]


def _describe(module: Any, role: str, *, names: set[str] | None = None) -> Iterator[str]:
    """Yield a line if ``module`` has foreign methods.

    Args:
        module: module to check.
        role: name of the module in the message.
        names: methods to check; by default all methods of Megatron's classes.
    """
    if names is None:
        names = _methods(type(module))
    if foreign := sorted(name for name in names if _is_foreign(module, name)):
        yield f"{role} ({_name(type(module))}) has {', '.join(foreign)} of its own"


def _methods(kind: type) -> set[str]:
    """Return the methods of ``kind`` that Megatron's and TransformerEngine's classes define."""
    methods = {"forward", "__call__"}
    for base in kind.__mro__:
        if _is_known(base.__module__) and base is not Module:
            methods.update(name for name, value in vars(base).items() if callable(value))
    return methods - HARMLESS


def _is_foreign(module: Any, name: str) -> bool:
    """Return whether another package defines the method ``name``, by a subclass or a patch."""
    if name in vars(module):
        return not _is_known(getattr(vars(module)[name], "__module__", ""))
    owner = next((base for base in type(module).__mro__ if name in vars(base)), object)
    if owner is object:
        return False
    function = getattr(vars(owner)[name], "__module__", None)
    is_patched = name in PATCHED and function is not None and not _is_known(function)
    if isinstance(module, MoETokenDispatcher) and (function, name) in KNOWN_PATCHES:
        is_patched = False
    return is_patched or not _is_known(owner.__module__)


def _is_known(module: str) -> bool:
    return f"{module}.".startswith(KNOWN)


def _name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


class ExpertParts:
    """Modules inside the experts of a layer, as they are when FSSDP is switched on.

    Args:
        experts: Megatron's expert module.
    """

    def __init__(self, experts: Module) -> None:
        # Name of each module, the module, its class, and the dictionary and key that hold it. Kept,
        # because a walk over all modules takes long in each iteration.
        self._parts: list[tuple[str, Module, type, dict[str, Module | None], str]] = []
        for path, parent in experts.named_modules():
            for key, part in parent._modules.items():
                if part is not None:
                    name = f"{path}.{key}" if path else key
                    self._parts.append((name, part, type(part), parent._modules, key))

    def check(self) -> None:
        """Check that nothing is attached to a module or has replaced one.

        Hooks of Megatron's loggers are allowed: an iteration with them has no replicas.

        Raises:
            ValueError: with each kind of code, and the first module that has it.
        """
        names: dict[str, str] = {}
        for name, problem in self._attached() + self._replaced():
            names.setdefault(problem, name)
        if names:
            problems = "; ".join(f"{name} has {problem}" for problem, name in names.items())
            raise ValueError(
                f"inside its experts {problems}: tokens that replicas compute on other ranks would "
                "miss it; remove it, attach it to the experts as a whole or to the MoE layer, or "
                "leave --moe-fssdp off"
            )

    def are_logged(self) -> bool:
        """Return whether Megatron's own loggers have hooks on any of the modules."""
        return any(origin.startswith(LOGGERS) for _, _, origin in self._hooks())

    def _hooks(self) -> list[tuple[str, str, str]]:
        """List name and class of the module, kind and origin of each hook."""
        hooks: list[tuple[str, str, str]] = []
        for name, part, kind, _, _ in self._parts:
            for attribute, hook_kind in HOOKS:
                if attached := part.__dict__[attribute]:
                    shown = f"{name} ({kind.__name__})"
                    hooks += [(shown, hook_kind, _origin(hook)) for hook in attached.values()]
        return hooks

    def _attached(self) -> list[tuple[str, str]]:
        """List name and description of each foreign hook and each replaced forward."""
        attached = [
            (name, f"a {kind} of {origin}")
            for name, kind, origin in self._hooks()
            if not origin.startswith(KNOWN_HOOKS)
        ]
        for name, part, kind, _, _ in self._parts:
            for attribute in REPLACED:
                if attribute in part.__dict__ and part.__dict__[attribute] is not None:
                    origin = _origin(part.__dict__[attribute])
                    shown = f"{name} ({kind.__name__})"
                    attached.append((shown, f"a forward of {origin} on the instance"))
        return attached

    def _replaced(self) -> list[tuple[str, str]]:
        """List name and description of each module that is not what it was."""
        return [
            (name, f"become a {type(modules.get(key)).__qualname__}")
            for name, part, kind, modules, key in self._parts
            if key not in modules or modules[key] is not part or part.__class__ is not kind
        ]


def _origin(function: Any) -> str:
    """Return the module whose code ``function`` runs; ``functools.wraps`` copies other names."""
    function = getattr(function, "func", function)
    function = getattr(function, "__func__", function)
    variables = getattr(function, "__globals__", None)
    if variables is None:
        return type(function).__module__
    return variables.get("__name__", "")
