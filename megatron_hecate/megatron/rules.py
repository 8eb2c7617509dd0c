"""Rules for unsupported settings and the way out of each; `unsupported` has the tables."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from typing import Any

# settings that SequentialMLP, with one module per expert, does not combine with
GROUPED_ONLY = (
    "fp8",
    "fp4",
    "quant_recipe",
    "delay_wgrad_compute",
    "overlap_dispatch_backward_with_experts_wgrad",
)


Condition = Callable[["SettingSources"], bool]


@dataclasses.dataclass(frozen=True)
class Rule:
    """Rule for a setting that FSSDP does not combine with.

    Args:
        setting: field of ``TransformerConfig``, or argument of ``megatron.training``.
        why: reason, as it stands in the error.
        instead: supported value; of a number, the largest one.
        known: names of all supported values of a setting that has names.
        when: condition over all settings under which the rule holds; ``None`` for always.
        unsupported: predicate over all settings in place of `instead`, `known` and `when`.
        prefix: prefix of the setting in Bridge's configuration.
        flag: flag of ``megatron.training`` if named otherwise; empty if there is none.
        hint: text after the override for Bridge's command line.
        way: complete way out, where an override of this setting alone does not help.
    """

    setting: str
    why: str
    instead: Any = False
    known: tuple[str, ...] = ()
    when: Condition | None = None
    unsupported: Condition | None = None
    prefix: str = "model."
    flag: str | None = None
    hint: str = ""
    way: str = ""

    def applies(self, settings: SettingSources) -> bool:
        """Return whether the rule refuses ``settings``."""
        if self.unsupported is not None:
            return self.unsupported(settings)
        value = settings[self.setting]
        is_refused = is_set(value)
        if self.known:
            # in some versions an enumerator, or a data type
            name = str(getattr(value, "value", value)).removeprefix("torch.")
            is_refused = is_refused and name not in self.known
        # No isinstance: False, the usual value, is an int.
        elif type(self.instead) is int:
            is_refused = (value or 0) > self.instead
        return is_refused and (self.when is None or self.when(settings))

    @property
    def way_out(self) -> str:
        """Overrides that help, for Bridge's command line and for Megatron's."""
        if self.way:
            return self.way
        # By identity, because 0, a number, equals False.
        is_off = self.instead is False or self.instead is None
        text = json.dumps(self.instead) if is_off else self.instead
        way = f"set {self.prefix}{self.setting}={text}{self.hint}"
        flag = self.flag
        if flag is None:
            flag = f"--{self.setting.replace('_', '-')}"
        if not flag:
            return way
        if is_off:
            return f"{way} or leave out {flag}"
        return f"{way} or {flag} {self.instead}"

    def explain(self, value: Any) -> str:
        """Return the line of an error about this setting's ``value``."""
        # an object such as a LoRA recipe is shown by its type only
        if isinstance(value, str | int | float | None) or type(value).__name__ == "dtype":
            shown = repr(value)
        else:
            shown = type(value).__name__
        return f"--moe-fssdp with {self.setting}={shown}: {self.why}; {self.way_out}"


class SettingSources:
    """Settings of a job by name, from several sources.

    Args:
        sources: objects with attributes, or mappings; ``None`` is skipped. The first source that
            switches a setting on determines its value.
    """

    def __init__(self, *sources: Any) -> None:
        self._sources = [source for source in sources if source is not None]

    def __getitem__(self, name: str) -> Any:
        """Return the value, or ``None`` if no source has the setting."""
        # a value that is off, such as False, counts only if no source switches the setting on
        off = None
        for source in self._sources:
            if isinstance(source, Mapping):
                value = source.get(name)
            else:
                value = getattr(source, name, None)
            if is_set(value):
                return value
            if off is None:
                off = value
        return off


def is_set(value: Any) -> bool:
    """Return whether ``value`` switches a setting on."""
    return bool(value) and value != "none"
