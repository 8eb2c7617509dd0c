"""Find the jobs that a mapping of settings describes.

A framework's file holds settings of several models. Each model that trains is a job of its own.
Models that only generate, or serve as a reference, are left out.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping
from typing import Any

from megatron_hecate.tools.files.spellings import Unknown, find_adapter, read_object, translate

# sections of Bridge's configuration, and of Megatron's functional tests
SECTIONS = {"model", "transformer", "mixed_precision", "ddp", "dist", "MODEL_ARGS"}
ROLES = {role: role for role in ("actor", "actor_train", "critic", "policy", "value", "student")}
# verl keeps the model of actor, rollout and reference here
ROLES["actor_rollout_ref"] = "actor"
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
# a key that names a backend, and the section that is read only if this backend is Megatron
BACKENDS = {"strategy_name": "strategy_config", "strategy": "megatron"}
OTHER_FILES = {"defaults", "extends", "includes", "bases", "base_config", "inherit_from"}
# a variable of a shell or of OmegaConf
VARIABLE = re.compile(r"\$[{(A-Za-z_]")


@dataclasses.dataclass(frozen=True)
class Job:
    """Settings of one job.

    Args:
        name: name of the job in a file with several; else empty.
        settings: all settings of the file, by dotted keys as in the file.
        omissions: sections that were not read, with the reason.
        other_files: files that the file includes.
        is_listed: whether the job is an entry of a list.
    """

    name: str
    settings: dict[str, Any]
    omissions: tuple[str, ...] = ()
    other_files: tuple[str, ...] = ()
    is_listed: bool = False

    @property
    def is_plain(self) -> bool:
        """Whether all settings stand where ``check`` documents them, without a search."""
        sections = {section for key in self.settings for section in key.split(".")[:-1]}
        return sections <= SECTIONS and not self.omissions and not self.other_files

    @property
    def names(self) -> dict[str, set[str]]:
        """Names of the fields of Megatron that each key stands for."""
        return {key: set(translate(key, value)) for key, value in self.settings.items()}

    @property
    def sources(self) -> list[dict[str, Any]]:
        """Fields of Megatron for `unsupported.find`, in order of precedence."""
        # Bridge overwrites fields of the model by mixed precision, so it takes precedence
        keys = sorted(self.settings, key=lambda key: "mixed_precision" not in key)
        return [
            *(translate(key, self.settings[key]) for key in keys),
            {"peft": find_adapter(self.settings)},
        ]


def find_jobs(mapping: Mapping[str, Any]) -> list[Job]:
    """Return the jobs of a mapping from YAML or JSON, one for each role that trains."""
    settings = dict(_flatten(mapping, ()))
    omissions: dict[str, str] = {}
    for key, value in settings.items():
        omissions.update(_skip(key, value))
    other_files: list[str] = []
    roles: dict[str, dict[str, Any]] = {}
    skipped_keys = set()
    for key, value in settings.items():
        sections = key.split(".")
        prefixes = {".".join(sections[:depth]) for depth in range(1, len(sections) + 1)}
        if prefixes & omissions.keys():
            skipped_keys |= prefixes
        elif OTHER_FILES & set(sections):
            other_files += map(str, value if isinstance(value, list) else [value])
        else:
            role = next((ROLES[section] for section in sections[:-1] if section in ROLES), "")
            roles.setdefault(role, {})[key] = value
    shared = roles.pop("", {})
    notes = [f"{key}{why}" for key, why in omissions.items() if key in skipped_keys]
    notes = [note for note in notes if note.rpartition(".")[2].lower() not in ENVIRONMENTS]
    return [
        Job(role, {**shared, **role_settings}, tuple(notes), tuple(other_files))
        for role, role_settings in (roles or {"": {}}).items()
    ]


def _flatten(value: Any, path: tuple[str, ...]) -> Iterator[tuple[str, Any]]:
    """Yield the dotted key and the value of each setting in nested maps, and in lists of maps."""
    value = read_object(value)
    if isinstance(value, list):
        value = [read_object(item) for item in value]
        if any(isinstance(item, Mapping) for item in value):
            value = dict(enumerate(value))
    if isinstance(value, Mapping):
        for key, item in value.items():
            # overrides of Hydra begin with + or ~, flags with --
            yield from _flatten(item, (*path, str(key).lstrip("+-~").replace("-", "_")))
        return
    texts = value if isinstance(value, list) else [value]
    if any(isinstance(text, str) and VARIABLE.search(text) for text in texts):
        value = Unknown(str(value))
    yield ".".join(path), value


def _skip(key: str, value: Any) -> Iterator[tuple[str, str]]:
    """Yield the sections and keys that ``key`` with its ``value`` excludes, each with a reason."""
    *sections, name = key.split(".")
    section = ".".join(sections)
    for depth, part in enumerate(sections, start=1):
        if part.lower() in IDLE:
            yield ".".join(sections[:depth]), ""
            break
    if section and name in ("enabled", "enable") and value in (False, "false", "False"):
        yield section, f" ({name}: false)"
    elif name in BACKENDS and isinstance(value, str) and not value.startswith("megatron"):
        yield ".".join([*sections, BACKENDS[name]]), f" ({name}: {value})"
    first = value[0] if isinstance(value, list) and value else value
    if isinstance(first, str) and first.lstrip().startswith("--"):
        yield key, " (a command line: megatron-hecate check -- SCRIPT.py reads one)"
