"""One setting of a file, and its meaning for Megatron: field names, negations."""

from __future__ import annotations

import dataclasses
from typing import Any

# other names of fields, as arguments of megatron.training or in older versions
ALIASES = {"fp8_format": "fp8", "fp4_format": "fp4", "use_custom_fsdp": "use_megatron_fsdp"}
NEGATED = {
    "no_gradient_accumulation_fusion": "gradient_accumulation_fusion",
    "disable_bias_linear": "add_bias_linear",
}
# ends of paths by which NeMo-RL and verl ask for ModelOpt
MODELOPT = (("quant_cfg",), ("qat", "enable"))
# values of other frameworks' settings that switch something off
OFF = (None, False, 0, "", "full", "none", "None", "null", "freeze", "false", "False")
# fields whose value is a map, written as a section
MAPS = {"fp8_recipe_attrs", "fp4_recipe_attrs"}


@dataclasses.dataclass(frozen=True)
class Setting:
    """Name and value of a setting.

    Args:
        path: sections around the setting, outermost first.
        name: name in the file, with underscores.
        value: an `Unresolved` if variables in the value are not set.
    """

    path: tuple[str, ...]
    name: str
    value: Any

    def __str__(self) -> str:
        section = ""
        if self.path:
            section = f" ({'.'.join(self.path)})"
        return f"{self.name}={self.value}{section}"

    @property
    def field(self) -> str:
        """Megatron's field or argument of this name."""
        if self._asks_for_modelopt:
            return "modelopt_enabled"
        return field_of(self.name)

    @property
    def _asks_for_modelopt(self) -> bool:
        place = (*self.path, self.name)
        return any(place[-len(end) :] == end for end in MODELOPT)

    def as_fields(self) -> dict[str, Any]:
        """Return values of Megatron's fields, by name."""
        # the name of a mixed precision of Bridge implies two fields
        if self.name == "mixed_precision" and "delayed_scaling" in str(self.value):
            return {"fp8": self.value, "fp8_recipe": "delayed"}
        if self._asks_for_modelopt:
            return {self.field: self.value not in OFF}
        if self.name in NEGATED and self.value is True:
            return {NEGATED[self.name]: False}
        if self.path and self.path[-1] in MAPS:
            return {self.path[-1]: {self.name: self.value}}
        return {self.field: self.value}


def field_of(name: str) -> str:
    """Return Megatron's field for the ``name`` of a setting."""
    return ALIASES.get(name, name)
