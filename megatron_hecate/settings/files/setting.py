"""One setting of a file, and its meaning for Megatron: field names, negations, adapters."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

# other names of fields, as arguments of megatron.training or in older versions
ALIASES = {"fp8_format": "fp8", "fp4_format": "fp4", "use_custom_fsdp": "use_megatron_fsdp"}
NEGATED = {
    "no_gradient_accumulation_fusion": "gradient_accumulation_fusion",
    "disable_bias_linear": "add_bias_linear",
}
ADAPTER_NAMES = {"tuner_type", "train_type", "finetuning_type", "peft_scheme", "peft_type"}
ADAPTER_SWITCHES = {"use_lora", "use_peft", "use_dora"}
ADAPTER_RANKS = {"lora_rank", "lora_r"}
ADAPTER_MAPS = {"peft", "lora", "lora_cfg", "lora_config", "peft_config", "lora_args"}
ADAPTERS = ADAPTER_NAMES | ADAPTER_SWITCHES | ADAPTER_RANKS | ADAPTER_MAPS
# fields whose value is a map, written as a section
MAPS = {"fp8_recipe_attrs", "fp4_recipe_attrs"}
NO_ADAPTER = (None, False, "", "full", "none", "None", "null", "freeze", "false", "False")


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
        return field_of(self.name)

    def as_fields(self) -> dict[str, Any]:
        """Return values of Megatron's fields, by name."""
        # the name of a mixed precision of Bridge implies two fields
        if self.name == "mixed_precision" and "delayed_scaling" in str(self.value):
            return {"fp8": self.value, "fp8_recipe": "delayed"}
        if self.name in NEGATED and self.value is True:
            return {NEGATED[self.name]: False}
        if self.path and self.path[-1] in MAPS:
            return {self.path[-1]: {self.name: self.value}}
        return {self.field: self.value}

    def adapters(self) -> Iterator[Any]:
        """Yield the adapters that this setting switches on; none for ``peft``, which has a rule."""
        value = self.value
        if self.name in ADAPTER_NAMES and value not in NO_ADAPTER:
            yield str(value)
        elif self.name in ADAPTER_SWITCHES and value is True:
            yield self.name
        elif self.name in ADAPTER_RANKS and isinstance(value, int) and value > 0:
            yield f"{self.name}={value}"
        elif self.name in ADAPTER_MAPS - {"peft"} and isinstance(value, Mapping):
            rank = value.get("rank", value.get("r", value.get("lora_rank", 1)))
            if not isinstance(rank, int) or rank > 0:
                yield self.name


def field_of(name: str) -> str:
    """Return Megatron's field for the ``name`` of a setting."""
    return ALIASES.get(name, name)
