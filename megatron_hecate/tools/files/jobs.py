"""Find the jobs that a mapping of settings or a launch script describes.

A framework's file holds settings of several models. Each model that trains is a job of its own.
Models that only generate, or serve as a reference, are left out.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Set
from pathlib import Path
from typing import Any

from megatron_hecate.tools.files.adapters import find_adapter
from megatron_hecate.tools.files.collector import Collector, value_of_flag
from megatron_hecate.tools.files.launch_script import CommandLine, LaunchScript
from megatron_hecate.tools.files.setting import Setting, field_of
from megatron_hecate.tools.files.variables import REFERENCE, Unresolved

# sections of Bridge's configuration, and of Megatron's functional tests
SECTIONS = ("model", "transformer", "mixed_precision", "ddp", "dist", "MODEL_ARGS")
ROLES = {role: role for role in ("actor", "actor_train", "critic", "policy", "value", "student")}
# verl keeps the model of actor, rollout and reference here
ROLES["actor_rollout_ref"] = "actor"
# flags that name a set of further settings
INCLUDES = {"recipe", "config", "config_file", "config_name", "yaml_cfg"}


@dataclasses.dataclass
class JobSettings:
    """Settings of one job.

    Args:
        name: name of the job in a file with several; else empty.
        settings: all settings of the file, under any name.
        left_out: sections that were not read, with the reason.
        other_files: files that the file includes.
        unknown: variables that may hold flags.
        is_listed: whether the job is an entry of a list.
        is_plain: whether all settings stand where ``check`` documents them, without a search.
        folder: folder of the file.
    """

    name: str
    settings: list[Setting]
    left_out: list[str] = dataclasses.field(default_factory=list)
    other_files: list[str] = dataclasses.field(default_factory=list)
    unknown: list[str] = dataclasses.field(default_factory=list)
    is_listed: bool = False
    is_plain: bool = True
    folder: Path = Path()

    @property
    def sources(self) -> list[dict[str, Any]]:
        """Settings of known value for `unsupported.find`, in order of precedence."""
        known = [setting for setting in self.settings if not isinstance(setting.value, Unresolved)]
        # Bridge overwrites fields of the model by mixed precision, so it takes precedence
        known.sort(key=lambda setting: not _is_of_mixed_precision(setting))
        found = [setting.as_fields() for setting in known]
        adapter = find_adapter(self.settings)
        if adapter is not None and not isinstance(adapter.value, Unresolved):
            found.append({"peft": str(adapter)})
        return found

    @property
    def unresolved(self) -> list[Setting]:
        """Settings of unknown value, under the names of Megatron's fields."""
        adapter = find_adapter(self.settings)
        named = [(setting.field, setting) for setting in self.settings]
        if adapter is not None:
            named.append(("peft", adapter))
        return [
            Setting((), name, setting.value)
            for name, setting in named
            if isinstance(setting.value, Unresolved)
        ]


def of_mapping(settings: Mapping[str, Any], environment: Mapping[str, str]) -> list[JobSettings]:
    """Return the jobs of a mapping from YAML or JSON, one for each role that trains.

    Args:
        settings: nested maps.
        environment: variables of the shell that starts the job.
    """
    collector = Collector(settings, environment)
    found = list(collector.settings(settings, ()))
    return _by_role(found, JobSettings("", [], collector.left_out, collector.other_files))


def of_script(
    text: str,
    environment: Mapping[str, str],
    names: Iterable[str],
    *,
    switches: Set[str] = frozenset(),
) -> list[JobSettings]:
    """Return the jobs of a launch script, one for each command with a setting of Megatron.

    Args:
        text: text of the script.
        environment: variables of the shell that starts the script.
        names: settings of which a command must have at least one.
        switches: settings that are true or false, whose flags take no value in Megatron.
    """
    script = LaunchScript(text, environment)
    wanted = set(names)
    jobs: list[JobSettings] = []
    for command in script.commands:
        settings = _settings_of(command, switches)
        if not any(setting.field in wanted for setting in settings):
            continue
        collector = Collector({}, environment)
        kept = [setting for setting in settings if not collector.is_idle(setting.path)]
        kept = _without_disabled(kept, collector.left_out)
        included = [str(s.value) for s in kept if s.name in INCLUDES and not s.path]
        job = JobSettings(
            "",
            [],
            left_out=collector.left_out,
            other_files=[*script.sourced, *included],
            unknown=list(command.unknown),
            is_plain=False,
        )
        jobs += _by_role(kept, job)
    if len(jobs) > 1:
        for number, job in enumerate(jobs, start=1):
            role = f", {job.name}" if job.name else ""
            job.name = f"command {number}{role}"
    return jobs


def _settings_of(command: CommandLine, switches: Set[str]) -> list[Setting]:
    """Return the settings of a command line; the last occurrence of a repeated flag counts."""
    last: dict[tuple[str, ...], Setting] = {}
    for flag in command.flags:
        *path, name = flag.name.replace("-", "_").split(".")
        value = value_of_flag(field_of(name), flag.value)
        # A flag with dashes is an argument of Megatron, whose switches take no value. A variable
        # after such a switch therefore holds further flags.
        is_switch = name in switches and "-" in flag.name
        if is_switch and type(value) is Unresolved and REFERENCE.fullmatch(value.text):
            value = True
        place = (*path, field_of(name))
        # remove the earlier one first, so that the order is that of the last ones
        last.pop(place, None)
        last[place] = Setting(tuple(path), name, value)
    return list(last.values())


def _without_disabled(settings: list[Setting], left_out: list[str]) -> list[Setting]:
    """Return ``settings`` without sections that an override disables; append to ``left_out``."""
    disabled = {}
    for setting in settings:
        if setting.path and setting.name in ("enabled", "enable") and setting.value is False:
            disabled[setting.path] = f"{'.'.join(setting.path)} ({setting.name}: false)"
    left_out += disabled.values()
    return [
        setting
        for setting in settings
        if not any(setting.path[: len(section)] == section for section in disabled)
    ]


def _by_role(settings: list[Setting], job: JobSettings) -> list[JobSettings]:
    """Split ``settings`` into jobs by the roles in their paths; all jobs share the rest."""
    shared: list[Setting] = []
    own: dict[str, list[Setting]] = {}
    for setting in settings:
        role = next((ROLES[part] for part in setting.path if part in ROLES), None)
        if role is None:
            shared.append(setting)
        else:
            own.setdefault(role, []).append(setting)
    if own:
        return [
            dataclasses.replace(job, name=role, settings=shared + settings_of_role, is_plain=False)
            for role, settings_of_role in own.items()
        ]
    is_plain = (
        job.is_plain
        and not job.left_out
        and all(set(setting.path) <= set(SECTIONS) for setting in settings)
        and not any(isinstance(setting.value, Unresolved) for setting in settings)
    )
    return [dataclasses.replace(job, settings=settings, is_plain=is_plain)]


def _is_of_mixed_precision(setting: Setting) -> bool:
    return any("mixed_precision" in part for part in (*setting.path, setting.name))
