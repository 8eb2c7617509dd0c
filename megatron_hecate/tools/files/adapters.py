"""Names by which frameworks ask for adapters, such as LoRA."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence

from megatron_hecate.tools.files.setting import OFF, Setting
from megatron_hecate.tools.files.variables import REFERENCE, Unresolved

# Sections about adapters: of NeMo-RL (peft.enabled), verl (lora.rank), LoongForge (peft_config).
SECTIONS = {"peft", "lora", "lora_cfg", "lora_config", "peft_config", "lora_args"}
# settings of which each can switch its section off; no other setting can
SWITCHES = {"enabled", "enable", "rank", "r", "dim", "lora_rank", "lora_dim", "type", "peft_type"}
# Names outside of such sections. The first row of which a job has a name decides: with a
# ``tuner_type`` of full, as in ms-swift, the rank of an adapter means nothing.
ROWS = (
    {"tuner_type", "train_type", "finetuning_type", "peft_scheme", "peft_type"},
    {"use_lora", "use_peft"},
    # ranks: of verl, miles and ROLL, of others, of LoongForge; then ROLL, miles
    {"lora_rank", "lora_r", "lora_dim", "lora_target", "lora_adapter_path", "use_dora"},
)
# Megatron-Bridge's kinds of training: as a mode, and as a word in the name of a recipe
RECIPES = {"mode", "task", "recipe"}
ADAPTED = re.compile(r"(^|_)(lora|dora|peft)(_|$)", re.IGNORECASE)
NOT_ADAPTED = re.compile(r"(^|_)(pretrain|sft|finetune)(_|$)", re.IGNORECASE)
NAMES = RECIPES.union(*ROWS)


def find_adapter(settings: Sequence[Setting]) -> Setting | None:
    """Return a setting that switches an adapter on, or ``None``.

    The value is an `Unresolved` if it depends on this value whether an adapter is on.
    """
    sections: dict[tuple[str, ...], list[Setting]] = {}
    others: list[Setting] = []
    for setting in settings:
        section = section_of(setting)
        group = others if section is None else sections.setdefault(section, [])
        group.append(setting)
    chosen = [_of_section(group) for group in sections.values()]
    chosen += [_of_row(others), _of_recipe(others)]
    return _known_first([setting for setting in chosen if setting is not None])


def may_decide(setting: Setting) -> bool:
    """Return whether a job's adapter may depend on ``setting``."""
    return setting.name in (NAMES if section_of(setting) is None else SWITCHES)


def section_of(setting: Setting) -> tuple[str, ...] | None:
    """Return the path of the section about adapters that contains ``setting``, or ``None``."""
    for depth, name in enumerate(setting.path, start=1):
        if name in SECTIONS:
            return setting.path[:depth]
    return None


def _of_section(settings: list[Setting]) -> Setting | None:
    switches = [setting for setting in settings if setting.name in SWITCHES]
    if any(setting.value in OFF for setting in switches):
        return None
    unknown = [setting for setting in switches if isinstance(setting.value, Unresolved)]
    return (unknown or switches or settings)[0]


def _of_row(settings: list[Setting]) -> Setting | None:
    for row in ROWS:
        if present := [setting for setting in settings if setting.name in row]:
            return _known_first([setting for setting in present if setting.value not in OFF])
    return None


def _of_recipe(settings: list[Setting]) -> Setting | None:
    unknown: list[Setting] = []
    is_adapted = True
    for setting in settings:
        if setting.name not in RECIPES:
            continue
        # the text around variables may hold the word, as in ${MODEL}_sft_config
        text = REFERENCE.sub("", str(setting.value))
        if ADAPTED.search(text):
            return dataclasses.replace(setting, value=str(setting.value))
        is_adapted = is_adapted and not NOT_ADAPTED.search(text)
        # elsewhere these names mean something else
        if isinstance(setting.value, Unresolved) and not setting.path:
            unknown.append(setting)
    return _known_first(unknown) if is_adapted else None


def _known_first(settings: list[Setting]) -> Setting | None:
    return min(settings, key=lambda setting: isinstance(setting.value, Unresolved), default=None)
