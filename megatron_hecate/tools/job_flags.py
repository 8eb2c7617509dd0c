"""Validate our own flags in the files of a job, for ``check``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megatron_hecate.config import PREFIX, check_names, check_slots
from megatron_hecate.megatron.rules import SettingSources
from megatron_hecate.switch_on.fssdp_flags import validate
from megatron_hecate.tools.files.jobs import JobSettings
from megatron_hecate.tools.files.variables import Unresolved


def validate_job(job: JobSettings) -> None:
    """Raise a ValueError for what `validate` refuses among the flags of ``job``."""
    values: dict[str, Any] = {}
    for setting in job.settings:
        ours = [name for name in (setting.name, *setting.path) if name.startswith(PREFIX)]
        if ours:
            check_names(ours[:1])
            # a section such as ``moe_fssdp: {slots: 2}`` is the value of its name
            value = setting.value if ours[0] == setting.name else {setting.name: setting.value}
            if isinstance(value, Unresolved):
                continue
            if ours[0] in values:
                # The job may use this one.
                validate({ours[0]: value, PREFIX: True})
            values.setdefault(ours[0], value)
    speeds = values.get("moe_fssdp_speeds")
    if isinstance(speeds, str) and speeds and not Path(speeds).is_file():
        values["moe_fssdp_speeds"] = _beside(speeds, job.folder)
    # the question is whether FSSDP can be switched on, also of a job that leaves it off
    validate({**values, PREFIX: values.get(PREFIX) or True})


def _beside(speeds: str, folder: Path) -> str:
    """Return the path of ``speeds``, which is no file here, beside the file of the settings."""
    beside = folder / speeds
    if not beside.is_file() and not Path(speeds).is_absolute():
        raise ValueError(
            f"speeds={speeds!r} is no file in {Path.cwd()} nor in {folder.absolute()}; start check "
            "in the folder in which the job starts, or write the file with "
            "torchrun ... -m megatron_hecate measure FILE"
        )
    return str(beside)


def find_too_many(slots: Any, settings: SettingSources) -> list[str]:
    """Return a line if experts or ``slots`` do not fit the ranks, as far as both are known."""
    experts = settings["num_moe_experts"] or settings["num_experts"]
    ranks = settings["expert_model_parallel_size"]
    if type(experts) is not int or type(ranks) is not int or ranks < 2:
        return []
    try:
        check_slots(slots, num_experts=experts, num_ranks=ranks)
    except ValueError as error:
        return [str(error)]
    return []
