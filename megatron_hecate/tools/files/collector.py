"""Collect settings from the nested maps of a YAML or JSON file."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from typing import Any

from megatron_hecate.tools.files.flags import flags_of, split_words
from megatron_hecate.tools.files.setting import Setting, field_of
from megatron_hecate.tools.files.variables import REFERENCE, Resolver, Unresolved

ENVIRONMENTS = {"env_vars", "envs", "system_envs", "runtime_env"}
# sections of frameworks' files whose models Megatron does not train
IDLE = ENVIRONMENTS | {
    "ref",
    "reference",
    "actor_infer",
    "rollout",
    "generation",
    "generating_args",
    "inference",
    "infer",
    "vllm",
    "vllm_cfg",
    "vllm_kwargs",
    "sglang",
    "sglang_cfg",
    "teacher",
    "reward",
    "rewards",
    "judge",
    "dtensor_cfg",
    "automodel_cfg",
}
# our flags whose values stay texts, such as a folder named 2026
TEXTS = ("moe_fssdp_record", "moe_fssdp_speeds", "moe_fssdp_trace")
OTHER_FILES = ("defaults", "extends", "includes", "bases", "base_config", "inherit_from")
# a key that names a backend, and the section that is read only if this backend is Megatron
BACKEND_SECTIONS = (("strategy_name", "strategy_config"), ("strategy", "megatron"))


class Collector:
    """Collector of the settings in nested maps.

    Args:
        document: the whole file, in which ``${a.b}`` is looked up.
        environment: variables of the shell that starts the job.
    """

    def __init__(self, document: Mapping[str, Any], environment: Mapping[str, str]) -> None:
        # sections that were skipped
        self.left_out: list[str] = []
        # files that the document includes
        self.other_files: list[str] = []
        self._document = document
        self._resolver = Resolver(self._lookup, environment)

    def settings(self, mapping: Mapping[str, Any], path: tuple[str, ...]) -> Iterator[Setting]:
        """Yield the settings below ``mapping``, a part of the document at ``path``."""
        skipped = self._skipped(mapping, path)
        for key, value in mapping.items():
            # overrides of Hydra begin with + or ~, flags with --
            *sections, name = str(key).lstrip("+-~").replace("-", "_").split(".")
            where = (*path, *sections)
            if name in skipped:
                continue
            sections_of_value = (*where, name) if isinstance(value, Mapping) else where
            if self.is_idle(sections_of_value):
                continue
            if name in OTHER_FILES and value:
                files = value if isinstance(value, list) else [value]
                self.other_files += [str(file) for file in files]
            else:
                yield from self._of_value(name, value, where)

    def is_idle(self, path: tuple[str, ...]) -> bool:
        """Return whether a section in ``path`` belongs to no model that trains; record it."""
        for depth, section in enumerate(path, start=1):
            if section.lower() in IDLE:
                note = ".".join(path[:depth])
                if section.lower() not in ENVIRONMENTS and note not in self.left_out:
                    self.left_out.append(note)
                return True
        return False

    def _of_value(self, name: str, value: Any, path: tuple[str, ...]) -> Iterator[Setting]:
        if isinstance(value, Mapping):
            yield from self._of_section(name, value, path)
            return
        if isinstance(value, list) and any(isinstance(item, Mapping) for item in value):
            for item in value:
                if isinstance(item, Mapping):
                    yield from self.settings(item, (*path, name))
            return
        words = _command_line(value)
        if words is not None:
            yield from self._of_command_line(words, (*path, name))
        else:
            yield from _expanded(Setting(path, name, self._resolved(value)))

    def _of_command_line(self, words: list[str], path: tuple[str, ...]) -> Iterator[Setting]:
        resolved = [self._resolver.resolve(word) for word in words]
        for flag in flags_of(resolved):
            *sections, name = flag.name.replace("-", "_").split(".")
            yield Setting((*path, *sections), name, value_of_flag(field_of(name), flag.value))

    def _of_section(
        self, name: str, value: Mapping[str, Any], path: tuple[str, ...]
    ) -> Iterator[Setting]:
        switch = next((key for key in ("enabled", "enable") if key in value), None)
        if switch is not None and self._resolved(value[switch]) in (False, "false", "False"):
            self.left_out.append(f"{'.'.join((*path, name))} ({switch}: false)")
        elif name == "refused":
            # the record of a recipe in this project's tests: its values are Python literals
            for field, text in value.items():
                yield Setting(path, field, _literal(text))
        else:
            yield from self.settings(value, (*path, name))

    def _skipped(self, mapping: Mapping[str, Any], path: tuple[str, ...]) -> set[str]:
        """Return sections that ``mapping`` disables by naming another backend; record each."""
        found = set()
        for key, section in BACKEND_SECTIONS:
            backend = mapping.get(key)
            is_other = isinstance(backend, str) and not backend.startswith("megatron")
            if is_other and section in mapping:
                self.left_out.append(f"{'.'.join((*path, section))} ({key}: {backend})")
                found.add(section)
        return found

    def _resolved(self, value: Any) -> Any:
        if isinstance(value, list):
            return [self._resolved(item) for item in value]
        if not isinstance(value, str) or not REFERENCE.search(value):
            return value
        resolved = self._resolver.resolve(value)
        if isinstance(resolved, str):
            return scalar(resolved)
        return resolved

    def _lookup(self, name: str) -> Any:
        """Return the value in this document that ``${a.b}`` refers to, or ``None``."""
        found: Any = self._document
        for part in name.split("."):
            if not isinstance(found, Mapping) or part not in found:
                return None
            found = found[part]
        if isinstance(found, Mapping | list):
            return None
        return found


def scalar(text: str) -> Any:
    """Parse the text of a flag's value."""
    known = {"true": True, "false": False, "null": None}
    if text.lower() in known:
        return known[text.lower()]
    if re.fullmatch(r"[+-]?[0-9]+", text):
        return int(text)
    if re.fullmatch(r"[+-]?([0-9]+\.[0-9]*|\.[0-9]+|[0-9]+)([eE][+-]?[0-9]+)?", text):
        return float(text)
    return text


def value_of_flag(name: str, value: Any) -> Any:
    """Return the value of a flag for Megatron's field ``name``.

    Only lists of names take several words; of any other flag the first word counts.

    Args:
        name: Megatron's field.
        value: text, list of texts, `Unresolved`, or True for a flag without a value.
    """
    if isinstance(value, list):
        if name not in ("cuda_graph_scope", "cuda_graph_modules"):
            return value_of_flag(name, value[0])
        values = [value_of_flag(name, item) for item in value]
        # with one name unknown, the list is unknown
        return next((item for item in values if isinstance(item, Unresolved)), values)
    if value == "none" and name in ("fp8", "fp4", "peft"):
        return None
    if isinstance(value, str) and name not in TEXTS:
        return scalar(value)
    return value


def _command_line(value: Any) -> list[str] | None:
    """Return the words of a command line in a text or a list of texts, or ``None`` without one."""
    texts = value if isinstance(value, list) else [value]
    if not any(isinstance(text, str) and text.lstrip().startswith("--") for text in texts):
        return None
    words: list[str] = []
    for text in texts:
        words += split_words(str(text))
    return words


def _expanded(setting: Setting) -> Iterator[Setting]:
    """Yield a setting, and the settings it implies: AReaL writes all group sizes into one text."""
    yield setting
    value = setting.value
    if setting.name not in ("allocation_mode", "backend") or not isinstance(value, str):
        return
    for backend in re.findall(r"megatron:(\([^)]*\)|[^+|]*)", value):
        size = 1
        if found := re.search(r"e([0-9]+)", backend):
            size = int(found[1])
        yield Setting((*setting.path, setting.name), "expert_model_parallel_size", size)


def _literal(text: Any) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        raise ValueError(f"{text!r} is not a Python literal") from None
