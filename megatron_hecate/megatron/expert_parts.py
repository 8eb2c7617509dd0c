"""Detect code that is attached to single modules inside the experts of a layer.

Hooks, replaced forwards, wrapped linears and parametrized weights of one expert would miss the
tokens that replicas compute on other ranks: such a model is refused, also if the code is attached
after FSSDP was switched on. Code of the experts module itself runs for all tokens of its rank.
"""

from __future__ import annotations

from collections.abc import Iterable
from inspect import isroutine
from typing import Any

from torch.nn import Module
from torch.utils.hooks import RemovableHandle

# packages whose hooks work for replicas, too
KNOWN = ("megatron.core.", "transformer_engine.", "megatron_hecate.")
# Megatron's own loggers, which hook into all modules of all ranks for one iteration
LOGGERS = "megatron.training."
# attributes of a module with its hooks, and their names in errors
HOOKS = {
    "_forward_pre_hooks": "forward pre-hook",
    "_forward_hooks": "forward hook",
    "_backward_pre_hooks": "backward pre-hook",
    "_backward_hooks": "backward hook",
}
# attributes of an instance that replace its class's forward, bound to the instance's weights
REPLACED = ("forward", "_compiled_call_impl")


class ExpertParts:
    """Modules inside the experts of a layer, as they are when FSSDP is switched on.

    Args:
        experts: Megatron's expert module.
    """

    def __init__(self, experts: Module) -> None:
        parts = dict(experts.named_modules())
        self._children = [
            (f"{name}.{child}" if name else child, part._modules, child, module)
            for name, part in parts.items()
            for child, module in part._modules.items()
        ]
        # such as activations, of the experts module itself, too
        self._functions = [
            (name or "experts", vars(part), attribute, function)
            for name, part in parts.items()
            for attribute, function in vars(part).items()
            if isroutine(function) and attribute not in REPLACED
        ]
        del parts[""]
        self._parts = [(name, part, type(part), vars(part)) for name, part in parts.items()]
        # modules keep these dictionaries
        self._hooks = [vars(part)[attribute] for part in parts.values() for attribute in HOOKS]
        # number of hooks registered in this process when all hooks of the parts were known
        self._known_until = -1

    def check(self, label: str = "", *, is_first: bool = False) -> None:
        """Check that no foreign code is attached. Takes little time if nothing has changed.

        Args:
            label: name of the layer, for the error.
            is_first: whether an iteration begins for the first time: Megatron's loggers may be
                attached.

        Raises:
            ValueError: with each kind of code, and the first module that has it.
        """
        if not is_first and not self._may_be_foreign():
            return
        known = (*KNOWN, LOGGERS) if is_first else KNOWN
        kinds: dict[str, str] = {}
        for name, what in (*self._attached(known), *self._replaced()):
            kinds.setdefault(what, name)
        if kinds:
            listed = "; ".join(f"{name} has {what}" for what, name in kinds.items())
            prefix = f"{label}: " if label else ""
            raise ValueError(
                f"{prefix}inside its experts {listed}: tokens that replicas compute on other ranks "
                "would miss it; remove it, attach it to the experts as a whole or to the MoE "
                "layer, or leave --moe-fssdp off"
            )
        if not is_first:
            self._known_until = RemovableHandle.next_id

    def _may_be_foreign(self) -> bool:
        """Return whether there are new hooks, replaced forwards or other modules than before."""
        if any(self._hooks) and self._known_until != RemovableHandle.next_id:
            return True
        # without calls: this runs in every forward with replicas
        for _, children, child, module in self._children:
            if child not in children or children[child] is not module:
                return True
        for _, attributes, attribute, function in self._functions:
            if attribute not in attributes or attributes[attribute] is not function:
                return True
        forward, compiled = REPLACED
        for _, part, kind, attributes in self._parts:
            if part.__class__ is not kind or forward in attributes or compiled in attributes:
                return True
        return False

    def _attached(self, known: tuple[str, ...]) -> Iterable[tuple[str, str]]:
        """Yield name and description of each hook and replaced forward."""
        for name, _, kind, attributes in self._parts:
            shown = f"{name} ({kind.__name__})"
            for attribute, hook_kind in HOOKS.items():
                for hook in attributes[attribute].values():
                    if not _origin(hook).startswith(known):
                        yield shown, f"a {hook_kind} of {_origin(hook)}"
            for attribute in REPLACED:
                if (replaced := attributes.get(attribute)) is not None:
                    yield shown, f"a forward of {_origin(replaced)} on the instance"

    def _replaced(self) -> Iterable[tuple[str, str]]:
        """Yield name and description of each module that is not what it was."""
        for name, part, kind, _ in self._parts:
            if "parametrizations" in part._modules:
                yield name, "parametrized weights (torch.nn.utils.parametrize)"
            elif type(part) is not kind:
                yield name, f"become a {type(part).__qualname__}"
        for name, attributes, attribute, function in self._functions:
            if attributes.get(attribute) is not function:
                yield name, f"another {attribute}"
        for name, children, child, module in self._children:
            if (now := children.get(child)) is not module:
                yield name, f"become a {type(now).__qualname__}"

    def are_logged(self) -> bool:
        """Return whether Megatron's own loggers have hooks on any of the modules."""
        hooks = [hook for hooks in self._hooks for hook in hooks.values()]
        return any(_origin(hook).startswith(LOGGERS) for hook in hooks)


def _origin(function: Any) -> str:
    """Return the module whose code ``function`` runs; ``functools.wraps`` copies other names."""
    function = getattr(function, "func", function)
    function = getattr(function, "__func__", function)
    variables = getattr(function, "__globals__", None)
    if variables is None:
        return type(function).__module__
    return variables.get("__name__", "")
