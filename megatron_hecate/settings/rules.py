"""A rule says of a setting that FSSDP does not combine with it, and the way out; the tables are in `unsupported`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any


@dataclasses.dataclass(frozen=True)
class Rule:
    """A setting FSSDP does not combine with.

    Args:
        setting: field of ``TransformerConfig``, or argument of ``megatron.training``.
        why: what FSSDP cannot do with it.
        instead: a value that can be combined.
        unsupported: whether the settings are; by default, whether `setting` is switched on.
        part: of Bridge's configuration that decides on the setting.
        flag: of ``megatron.training`` where its name is another; empty where there is none.
        hint: what follows the override on Bridge's command line.
        way: the whole way out, where Bridge takes no override of the setting itself.
    """

    setting: str
    why: str
    instead: Any = False
    unsupported: Callable[[Settings], bool] | None = None
    part: str = "model."
    flag: str | None = None
    hint: str = ""
    way: str = ""

    def applies(self, settings: Settings) -> bool:
        return (
            is_set(settings[self.setting])
            if self.unsupported is None
            else self.unsupported(settings)
        )

    @property
    def way_out(self) -> str:
        """The overrides, for Bridge's command line and for Megatron's."""
        if self.way:
            return self.way
        text = {False: "false", None: "null"}.get(self.instead, self.instead)
        way = f"set {self.part}{self.setting}={text}"
        flag = f"--{self.setting.replace('_', '-')}" if self.flag is None else self.flag
        way += self.hint
        if flag:
            way += (
                f" or leave out {flag}"
                if self.instead in (False, None)
                else f" or {flag} {self.instead}"
            )
        return way

    def explain(self, value: Any) -> str:
        """One line on this setting's ``value``."""
        written = isinstance(value, str | int | float | None) or type(value).__name__ == "dtype"
        shown = repr(value) if written else type(value).__name__
        return f"--moe-fssdp with {self.setting}={shown}: {self.why}; {self.way_out}"


class Settings:
    """Settings of a job by name, wherever they stand.

    Args:
        sources: objects with attributes, or mappings. The first that switches a setting on tells its value.
    """

    def __init__(self, *sources: Any) -> None:
        self._sources = [source for source in sources if source is not None]

    def __getitem__(self, name: str) -> Any:
        """The value, or ``None`` where no source knows the setting."""
        found = [
            s.get(name) if isinstance(s, Mapping) else getattr(s, name, None) for s in self._sources
        ]
        return next(
            (value for value in found if is_set(value)),
            next((v for v in found if v is not None), None),
        )


def is_set(value: Any) -> bool:
    return bool(value) and value != "none"
