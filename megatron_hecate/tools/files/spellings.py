"""One table of spellings: how frameworks write the settings that FSSDP looks at.

A setting of a file is a dotted key with a value, such as ``model.lora.rank``: 32. `translate` turns
it into fields of Megatron, by the names that `unsupported.RULES` use.

| spelling | field |
|---|---|
| `ALIASES` | the same value under another name |
| `NEGATED` | the opposite value |
| `ALLOCATIONS` | ``expert_model_parallel_size`` |
| `MODELOPT` | ``modelopt_enabled`` |
| `ADAPTER_SECTIONS`, `ADAPTER_NAMES`, `RECIPES` | ``peft``, by `find_adapter` over all keys |
| `MAPS` | a section that is the value of one field; our flags have no sections |
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping
from typing import Any

from megatron_hecate.config import PREFIX

ALIASES = {
    "fp8_format": "fp8",
    "fp4_format": "fp4",
    "use_custom_fsdp": "use_megatron_fsdp",
    # of Megatron's parser from 0.18 on
    "cuda_graph_scope_deprecated": "cuda_graph_scope",
}
NEGATED = {
    "no_gradient_accumulation_fusion": "gradient_accumulation_fusion",
    "disable_bias_linear": "add_bias_linear",
}
MAPS = {"fp8_recipe_attrs", "fp4_recipe_attrs"}
# ends of keys by which NeMo-RL and verl ask for ModelOpt
MODELOPT = ("quant_cfg", "qat.enable")
# Sections about adapters: of NeMo-RL (peft.enabled), verl (lora.rank), LoongForge (peft_config).
ADAPTER_SECTIONS = {"peft", "lora", "lora_cfg", "lora_config", "peft_config", "lora_args"}
# settings of which each can switch its section off; no other setting can
ADAPTER_SWITCHES = {"enabled", "enable", "rank", "r", "dim", "lora_rank", "lora_dim"}
ADAPTER_SWITCHES |= {"type", "peft_type"}
# Names outside of such sections. The first row of which a job has a name decides: with a
# ``tuner_type`` of full, as in ms-swift, the rank of an adapter means nothing.
ADAPTER_NAMES = (
    {"tuner_type", "train_type", "finetuning_type", "peft_scheme", "peft_type"},
    {"use_lora", "use_peft"},
    # ranks: of verl, miles and ROLL, of others, of LoongForge; then ROLL, miles
    {"lora_rank", "lora_r", "lora_dim", "lora_target", "lora_adapter_path", "use_dora"},
)
# Megatron-Bridge's kinds of training: as a mode, and as a word in the name of a recipe
RECIPES = {"mode", "task", "recipe"}
ADAPTED = re.compile(r"(^|_)(lora|dora|peft)(_|$)", re.IGNORECASE)
# AReaL's names of a text with all sizes of groups, such as megatron:(attn:d1p4t2|ffn:d1p4e2)
ALLOCATIONS = ("allocation_mode", "backend")
# values that switch an adapter or ModelOpt off
OFF = (None, False, 0, "", "full", "none", "None", "null", "freeze", "false", "False")


@dataclasses.dataclass(frozen=True)
class Unknown:
    """Value that a file leaves to a variable, such as ``${EP}``."""

    text: str

    def __str__(self) -> str:
        return self.text


def translate(key: str, value: Any) -> dict[str, Any]:
    """Return the fields of Megatron that the setting ``key`` stands for, with their values."""
    *sections, name = key.split(".")
    if any(f".{key}".endswith(f".{end}") for end in MODELOPT):
        return {"modelopt_enabled": value if isinstance(value, Unknown) else value not in OFF}
    # the name of a mixed precision of Bridge implies two fields
    if name == "mixed_precision" and "delayed_scaling" in str(value):
        return {"fp8": value, "fp8_recipe": "delayed"}
    if name in ALLOCATIONS and "megatron:" in str(value):
        groups = str(value).partition("megatron:")[2].partition("+")[0]
        sizes = re.findall(r"e([0-9]+)", groups)
        return {"expert_model_parallel_size": int(sizes[0]) if sizes else 1}
    if name in NEGATED and value is True:
        return {NEGATED[name]: False}
    if sections and (sections[-1] in MAPS or sections[-1].startswith(PREFIX)):
        return {sections[-1]: {name: value}}
    return {ALIASES.get(name, name): value}


def read_object(value: Any) -> Any:
    """Return the name of an enumerator, or of a data type, that Megatron-Bridge writes as a map."""
    if isinstance(value, Mapping) and "_name_" in value:
        return value["_name_"]
    if isinstance(value, Mapping) and value.get("_call_") is False:
        return value.get("_target_")
    return value


def find_adapter(settings: Mapping[str, Any]) -> str | Unknown | None:
    """Return the setting that asks for an adapter, `Unknown` if a variable decides, or ``None``."""
    candidates = [*_by_section(settings), *_by_name(settings), *_by_recipe(settings)]
    for key, value in candidates:
        if not isinstance(value, Unknown):
            return f"{key}={value}"
    return next((value for _, value in candidates), None)


def _by_section(settings: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield a setting of each section about adapters that no switch turns off."""
    sections: dict[str, dict[str, Any]] = {}
    for key, value in settings.items():
        if section := _adapter_section(key):
            sections.setdefault(section, {})[key] = value
    for section in sections.values():
        switches = {key: section[key] for key in section if _name(key) in ADAPTER_SWITCHES}
        if not any(value in OFF for value in switches.values()):
            unknowns = {key: v for key, v in switches.items() if isinstance(v, Unknown)}
            yield next(iter((unknowns or switches or section).items()))


def _by_name(settings: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for names in ADAPTER_NAMES:
        row = {key: settings[key] for key in settings if _name(key) in names}
        row = {key: row[key] for key in row if not _adapter_section(key)}
        if row:
            yield from ((key, value) for key, value in row.items() if value not in OFF)
            return


def _by_recipe(settings: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for key, value in settings.items():
        if key in RECIPES and isinstance(value, Unknown):
            yield key, value
        elif _name(key) in RECIPES and ADAPTED.search(str(value)):
            yield key, str(value)


def _adapter_section(key: str) -> str:
    """Return the beginning of ``key`` that names a section about adapters, or an empty text."""
    sections = key.split(".")[:-1]
    for depth, section in enumerate(sections, start=1):
        if section in ADAPTER_SECTIONS:
            return ".".join(sections[:depth])
    return ""


def _name(key: str) -> str:
    return key.rpartition(".")[2]
