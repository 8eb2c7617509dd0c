"""Find the settings of Megatron in a file, whatever keeps it: a mapping of settings, sections, nested maps, a script.

A framework's file holds settings of several models. Those that train are jobs of their own; what only
generates, or serves as a reference, is left out.
"""

from __future__ import annotations

import ast
import dataclasses
import re
from collections.abc import Iterable, Iterator, Mapping, Set
from typing import Any

from megatron_hecate.settings.files.launch_script import LaunchScript, flags_of, split_words
from megatron_hecate.settings.files.variables import REFERENCE, Resolver, Unresolved

PARTS = (
    "model",
    "transformer",
    "mixed_precision",
    "ddp",
    "dist",
    "MODEL_ARGS",
)  # of Bridge, and of Megatron's tests
# arguments of megatron.training, older names, and the fields they set
ALIASES = {"fp8_format": "fp8", "fp4_format": "fp4", "use_custom_fsdp": "use_megatron_fsdp"}
NEGATED = {
    "no_gradient_accumulation_fusion": "gradient_accumulation_fusion",
    "disable_bias_linear": "add_bias_linear",
}
# parts of frameworks' files that train no model of Megatron's
IDLE = {
    "ref",
    "reference",
    "actor_infer",
    "rollout",
    "generation",
    "generating_args",
    "inference",
    "infer",
}
IDLE |= {
    "vllm",
    "vllm_cfg",
    "vllm_kwargs",
    "sglang",
    "sglang_cfg",
    "teacher",
    "reward",
    "rewards",
    "judge",
}
IDLE |= {"dtensor_cfg", "automodel_cfg", "env_vars", "envs", "system_envs", "runtime_env"}
ROLES = ("actor", "actor_train", "critic", "policy", "value", "student")
ADAPTER_NAMES = {"tuner_type", "train_type", "finetuning_type", "peft_scheme", "peft_type"}
ADAPTER_SWITCHES = {"use_lora", "use_peft", "use_dora"}
ADAPTER_RANKS = {"lora_rank", "lora_r"}
ADAPTER_MAPS = {"peft", "lora", "lora_cfg", "lora_config", "peft_config", "lora_args"}
ADAPTERS = ADAPTER_NAMES | ADAPTER_SWITCHES | ADAPTER_RANKS | ADAPTER_MAPS
NO_ADAPTER = (None, False, "", "full", "none", "None", "null", "freeze", "false", "False")
OTHER_FILES = ("defaults", "extends", "includes", "bases", "base_config", "inherit_from")


@dataclasses.dataclass(frozen=True)
class Setting:
    """One setting.

    Args:
        path: the sections it stands in.
        name: that Megatron's field or argument has.
        value: an `Unresolved` where variables in it have no value.
    """

    path: tuple[str, ...]
    name: str
    value: Any

    def __str__(self) -> str:
        section = f" ({'.'.join(self.path)})" if self.path else ""
        return f"{self.name}={self.value}{section}"


@dataclasses.dataclass
class Job:
    """The settings of one job.

    Args:
        name: where a file holds several; else empty.
        settings: all that were found, of any name.
        left_out: sections that were not read, and why.
        other_files: that the file takes further settings from.
        unknown: variables that may hold flags.
        is_listed: whether it is an entry of a list.
        is_plain: whether settings stand where `--check` documents them, so that nothing was searched for.
    """

    name: str
    settings: list[Setting]
    left_out: list[str] = dataclasses.field(default_factory=list)
    other_files: list[str] = dataclasses.field(default_factory=list)
    unknown: list[str] = dataclasses.field(default_factory=list)
    is_listed: bool = False
    is_plain: bool = True

    @property
    def sources(self) -> list[dict[str, Any]]:
        """The settings whose values are known, as `unsupported.find` takes them, in order of precedence."""
        known = [setting for setting in self.settings if not isinstance(setting.value, Unresolved)]
        # Bridge has mixed precision overwrite the model's fields
        known.sort(
            key=lambda setting: (
                not any("mixed_precision" in part for part in (*setting.path, setting.name))
            )
        )
        found = [_as_fields(setting) for setting in known]
        adapters = [a for setting in known for a in _adapters(setting)]
        if any(
            setting.name in ADAPTER_NAMES for setting in known
        ):  # they say which of the ranks count
            adapters = [
                a
                for setting in known
                if setting.name not in ADAPTER_RANKS
                for a in _adapters(setting)
            ]
        return found + [{"peft": adapter} for adapter in adapters]

    @property
    def unresolved(self) -> list[Setting]:
        found = (dataclasses.replace(s, name=ALIASES.get(s.name, s.name)) for s in self.settings)
        return [setting for setting in found if isinstance(setting.value, Unresolved)]


def of_mapping(settings: Mapping[str, Any], environment: Mapping[str, str]) -> list[Job]:
    """Return the jobs that a mapping, as YAML and JSON hold it, describes: one for each role that trains."""
    walk = _Walk(settings, environment)
    found = list(walk.settings(settings, ()))
    return _by_role(found, Job("", [], walk.left_out, walk.other_files))


def of_script(
    text: str,
    environment: Mapping[str, str],
    names: Iterable[str],
    *,
    switches: Set[str] = frozenset(),
) -> list[Job]:
    """Return the jobs that a launch script starts: one for each command with at least one of the settings ``names``.

    Args:
        switches: settings that are true or false, whose flags take no value in Megatron.
    """
    script, wanted, jobs = LaunchScript(text, environment), set(names), []
    for command in script.commands:
        last: dict[
            tuple[str, ...], Setting
        ] = {}  # of a flag that stands there twice, the last one counts
        for flag in command.flags:
            *path, name = flag.name.replace("-", "_").split(".")
            place = (*path, _plain_name(name))
            last.pop(place, None)
            value = _value_of_flag(_plain_name(name), flag.value)
            # with dashes it is Megatron's own, and a variable behind it holds further flags
            if (
                name in switches
                and "-" in flag.name
                and type(value) is Unresolved
                and REFERENCE.fullmatch(value.text)
            ):
                value = True
            last[place] = Setting(tuple(path), name, value)
        settings = list(last.values())
        if any(_plain_name(setting.name) in wanted for setting in settings):
            walk = _Walk({}, environment)
            kept = [s for s in settings if not walk.is_idle(s.path)]
            job = Job(
                "", [], walk.left_out, list(script.sourced), list(command.unknown), is_plain=False
            )
            jobs += _by_role(kept, job)
    if len(jobs) > 1:
        for number, job in enumerate(jobs, start=1):
            job.name = f"command {number}" + (f", {job.name}" if job.name else "")
    return jobs


class _Walk:
    """Collect settings from nested maps."""

    def __init__(self, document: Mapping[str, Any], environment: Mapping[str, str]) -> None:
        self.left_out: list[str] = []
        self.other_files: list[str] = []
        self._document = document
        self._resolver = Resolver(self._lookup, environment)

    def settings(self, mapping: Mapping[str, Any], path: tuple[str, ...]) -> Iterator[Setting]:
        skipped = self._skipped(mapping, path)
        for key, value in mapping.items():
            *sections, name = str(key).lstrip("+-~").replace("-", "_").split(".")
            where = (*path, *sections)
            if name in skipped or self.is_idle(
                (*where, name) if isinstance(value, Mapping) else where
            ):
                continue
            if name in OTHER_FILES and value:
                self.other_files += [
                    str(item) for item in (value if isinstance(value, list) else [value])
                ]
            elif isinstance(value, Mapping):
                yield from self._of_section(name, value, where)
            elif isinstance(value, list) and any(isinstance(item, Mapping) for item in value):
                for item in value:
                    yield from (
                        self.settings(item, (*where, name)) if isinstance(item, Mapping) else ()
                    )
            elif (words := _command_line(value)) is not None:
                yield from self._of_command_line(words, (*where, name))
            else:
                yield from _expanded(Setting(where, name, self._resolved(value)))

    def _of_command_line(self, words: list[str], path: tuple[str, ...]) -> Iterator[Setting]:
        resolved = [self._resolver.resolve(word) for word in words]
        for flag in flags_of(resolved):
            *sections, name = flag.name.replace("-", "_").split(".")
            yield Setting((*path, *sections), name, _value_of_flag(_plain_name(name), flag.value))

    def is_idle(self, path: tuple[str, ...]) -> bool:
        """Return whether a part of ``path`` holds no settings of a model that trains; note it."""
        idle = next((part for part in path if part.lower() in IDLE), None)
        if idle is not None:
            note = ".".join(path[: path.index(idle) + 1])
            if (
                idle.lower() not in ("env_vars", "envs", "system_envs", "runtime_env")
                and note not in self.left_out
            ):
                self.left_out.append(note)
        return idle is not None

    def _of_section(
        self, name: str, value: Mapping[str, Any], path: tuple[str, ...]
    ) -> Iterator[Setting]:
        switch = next((key for key in ("enabled", "enable") if key in value), None)
        if switch is not None and self._resolved(value[switch]) in (False, "false", "False"):
            self.left_out.append(f"{'.'.join((*path, name))} ({switch}: false)")
        elif name == "refused":  # a record of a recipe holds Python literals there
            for field, text in value.items():
                yield Setting(path, field, _literal(text))
        elif name in ADAPTER_MAPS:
            yield Setting(path, name, dict(value))
        else:
            yield from self.settings(value, (*path, name))

    def _skipped(self, mapping: Mapping[str, Any], path: tuple[str, ...]) -> set[str]:
        """Return the keys whose section another backend's name beside it makes void."""
        found = set()
        for key, section in (("strategy_name", "strategy_config"), ("strategy", "megatron")):
            backend = mapping.get(key)
            if (
                isinstance(backend, str)
                and not backend.startswith("megatron")
                and section in mapping
            ):
                self.left_out.append(f"{'.'.join((*path, section))} ({key}: {backend})")
                found.add(section)
        return found

    def _resolved(self, value: Any) -> Any:
        if isinstance(value, list):
            return [self._resolved(item) for item in value]
        if not isinstance(value, str) or not REFERENCE.search(value):
            return value
        resolved = self._resolver.resolve(value)
        return scalar(resolved) if isinstance(resolved, str) else resolved

    def _lookup(self, name: str) -> Any:
        """Return what ``${a.b}`` refers to in the same file."""
        found: Any = self._document
        for part in name.split("."):
            if not isinstance(found, Mapping) or part not in found:
                return None
            found = found[part]
        return None if isinstance(found, Mapping | list) else found


def scalar(text: str) -> Any:
    """Return the value that a flag's text stands for."""
    known = {"true": True, "false": False, "null": None}
    if text.lower() in known:
        return known[text.lower()]
    if re.fullmatch(r"[+-]?[0-9]+", text):
        return int(text)
    if re.fullmatch(r"[+-]?([0-9]+\.[0-9]*|\.[0-9]+|[0-9]+)([eE][+-]?[0-9]+)?", text):
        return float(text)
    return text


def _command_line(value: Any) -> list[str] | None:
    """Return the words of a command line that stands in a text or a list of texts; ``None`` for any other value."""
    texts = value if isinstance(value, list) else [value]
    if not any(isinstance(text, str) and text.lstrip().startswith("--") for text in texts):
        return None
    return [word for text in texts for word in split_words(str(text))]


def _value_of_flag(name: str, value: Any) -> Any:
    """Return the value of a flag: of several words the first, where they are no list of names."""
    if isinstance(value, list):
        if name not in ("cuda_graph_scope", "cuda_graph_modules"):
            return _value_of_flag(name, value[0])
        values = [_value_of_flag(name, item) for item in value]
        return next((item for item in values if isinstance(item, Unresolved)), values)
    if value == "none" and name in ("fp8", "fp4"):
        return None
    return scalar(value) if isinstance(value, str) else value


def _expanded(setting: Setting) -> Iterator[Setting]:
    """Yield a setting, and what it implies: AReaL names the sizes of parallel groups in one text."""
    yield setting
    value = setting.value
    if setting.name not in ("allocation_mode", "backend") or not isinstance(value, str):
        return
    for backend in re.findall(r"megatron:(\([^)]*\)|[^+|]*)", value):
        size = re.search(r"e([0-9]+)", backend)
        yield Setting(
            (*setting.path, setting.name), "expert_model_parallel_size", int(size[1]) if size else 1
        )


def _by_role(settings: list[Setting], job: Job) -> list[Job]:
    """Split ``settings`` into jobs by the roles in their paths; those of no role belong to each."""
    role_of = {id(s): next((part for part in s.path if part in ROLES), "") for s in settings}
    roles = list(dict.fromkeys(role for role in role_of.values() if role))
    shared = [s for s in settings if not role_of[id(s)]]
    plain = job.is_plain and not roles and all(set(s.path) <= set(PARTS) for s in settings)
    plain = (
        plain and not job.left_out and not any(isinstance(s.value, Unresolved) for s in settings)
    )
    job = dataclasses.replace(job, is_plain=plain)
    if not roles:
        return [dataclasses.replace(job, settings=settings)]
    own = {role: [s for s in settings if role_of[id(s)] == role] for role in roles}
    return [dataclasses.replace(job, name=role, settings=shared + own[role]) for role in roles]


def _plain_name(name: str) -> str:
    return ALIASES.get(name, name)


def _as_fields(setting: Setting) -> dict[str, Any]:
    name, value = setting.name, setting.value
    if name == "mixed_precision" and "delayed_scaling" in str(value):  # one of Bridge's names
        return {"fp8": value, "fp8_recipe": "delayed"}
    if name in NEGATED and value is True:
        return {NEGATED[name]: False}
    return {_plain_name(name): value}


def _adapters(setting: Setting) -> Iterator[Any]:
    """Yield what a setting of another name than ``peft`` says of adapters."""
    name, value = setting.name, setting.value
    if name in ADAPTER_NAMES and value not in NO_ADAPTER:
        yield str(value)
    elif name in ADAPTER_SWITCHES and value is True:
        yield name
    elif name in ADAPTER_RANKS and isinstance(value, int) and value > 0:
        yield f"{name}={value}"
    elif name in ADAPTER_MAPS - {"peft"} and isinstance(value, Mapping):
        rank = value.get("rank", value.get("r", value.get("lora_rank", 1)))
        if not isinstance(rank, int) or rank > 0:
            yield name


def _literal(text: Any) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        raise ValueError(f"{text!r} is not a Python literal") from None
