"""Decide from the settings of a job whether FSSDP would switch on. Needs no Megatron.

Rules are those of `unsupported`. Settings that no rule reads are skipped. A setting of unknown
value, such as a shell variable, counts if one of its possible values would be refused.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from megatron_hecate.config import MOST_SLOTS, HecateConfig
from megatron_hecate.switch_on import unsupported
from megatron_hecate.tools import job_flags
from megatron_hecate.tools.files import adapters, jobs
from megatron_hecate.tools.files.flags import Perhaps
from megatron_hecate.tools.files.setting import Setting
from megatron_hecate.tools.files.shell_text import COMMAND

EXPECTED = {
    bool: "true or false, without quotes",
    int: "a whole number, without quotes",
    str: "a name",
}
# settings that rules read in addition to their own
HELPERS = {
    "fp8",
    "fp4",
    "quant_recipe",
    "delay_wgrad_compute",
    "moe_token_dispatcher_type",
    "cuda_graph_scope",
    "moe_flex_dispatcher_backend",
    "cuda_graph_modules",
    "add_bias_linear",
    "overlap_grad_reduce",
    "moe_fssdp_rehome",
    "moe_fssdp_slots",
    "gradient_accumulation_fusion",
    "use_transformer_engine_op_fuser",
    "mixed_precision",
    "enable_primus_turbo",
}
READ = {rule.setting for rule in unsupported.RULES} | HELPERS
# names that other programs use as well
COMMON = {"fp8", "fp4", "peft", "quant_recipe", "mixed_precision", "modelopt_enabled"}
# settings by which a file of Megatron is recognized: the rest of READ, and settings without a rule
MEGATRON = (READ - COMMON) | {
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "context_parallel_size",
    "expert_tensor_parallel_size",
    "num_experts",
    "num_moe_experts",
    "moe_router_topk",
    "kitchen_config_file",
    "kitchen_recipe_number",
    "tensor_parallel_num_weight_shards",
    "expert_tensor_parallel_num_weight_shards",
    "cpu_offloading_num_layers",
}
EXPERT_PARALLEL = "expert_model_parallel_size"
NO_SETTING = f"holds no setting of Megatron that is known here, such as {EXPERT_PARALLEL}"
# supported value of each setting with a rule
SUPPORTED = {rule.setting: rule.instead for rule in unsupported.RULES}
# refused values of settings that are neither true nor false
WORST: dict[str, tuple[Any, ...]] = {
    EXPERT_PARALLEL: (1,),
    "fp8": ("e4m3",),
    "fp8_recipe": ("delayed",),
    "fp4": ("e2m1",),
    "fp4_recipe": ("custom",),
    "cuda_graph_impl": ("local",),
    "cuda_graph_scope": ("full",),
    "cuda_graph_modules": ("full",),
    "moe_token_dispatcher_type": ("flex",),
    "moe_flex_dispatcher_backend": ("ncclep",),
    "transformer_impl": ("inference_optimized",),
    "ckpt_format": ("torch",),
    "peft": ("lora",),
    "mixed_precision": ("bf16_with_fp8_delayed_scaling_mixed",),
    "moe_expert_capacity_factor": (1.0,),
    "moe_dispatch_fwd_dtype": ("fp8",),
    "moe_combine_bwd_dtype": ("fp8",),
    "moe_megakernel_backend": ("mok",),
    "moe_router_topk_mode": ("seq_topk",),
    "fp8_recipe_attrs": ("custom",),
    "fp4_recipe_attrs": ("custom",),
    "quant_recipe": ("custom",),
    "main_params_dtype": ("fp16",),
    "exp_avg_dtype": ("fp16",),
    "exp_avg_sq_dtype": ("fp16",),
    "mlp_chunks_for_training": (2,),
    "gtp_weight_remat_size": (2,),
    "expert_gtp_weight_remat_size": (2,),
    "moe_fssdp_late_replicas": (1,),
    "moe_fssdp_rehome": (1,),
    "moe_fssdp_slots": (MOST_SLOTS,),
    "turbo_sync_free_moe_stage": (2,),
}
SWITCHES = {
    rule.setting
    for rule in unsupported.RULES
    if isinstance(rule.instead, bool) and rule.setting not in WORST
}
# settings that decide most often, listed by name when a file does not have them
ASKED_OFTEN = (
    EXPERT_PARALLEL,
    "moe_token_dispatcher_type",
    "cuda_graph_impl",
    "fp8",
    "fp8_recipe",
    "fp4",
    "peft",
    "use_megatron_fsdp",
    "use_torch_fsdp2",
    "transformer_impl",
)


class NoSettingError(ValueError):
    """Error for a job without any setting of Megatron."""


def find_refused(job: jobs.JobSettings) -> list[str]:
    """Return one line for each setting of a job that FSSDP does not combine with.

    Raises:
        ValueError: for a value of the wrong type, such as quotes in YAML cause, or out of range,
            and for what `fssdp_flags.validate` refuses.
    """
    job_flags.validate_job(job)
    return _find_refused(job)


def _find_refused(job: jobs.JobSettings) -> list[str]:
    for setting in job.settings:
        is_adapters = adapters.section_of(setting) is not None
        if setting.field in READ or (set(setting.path) & set(jobs.SECTIONS) and not is_adapters):
            _check_quotes(setting.field, setting.value)
    sources = job.sources
    sources.insert(0, _derived(unsupported.SettingSources(*sources)))
    for source in sources:
        for rule in unsupported.RULES:
            _check_type(rule, source.get(rule.setting))
    settings = unsupported.SettingSources(*sources)
    _check_numbers(settings)
    slots = settings["moe_fssdp_slots"]
    if slots is None:
        slots = HecateConfig().slots
    return unsupported.find(*sources, slots=slots) + job_flags.find_too_many(slots, settings)


@dataclasses.dataclass(frozen=True)
class Verdict:
    """Result of the rules for one job.

    Args:
        job: settings of the job.
        refused: settings that FSSDP does not combine with, a line each.
        asks: unknown values that the result depends on, a line each.
    """

    job: jobs.JobSettings
    refused: list[str]
    asks: list[str]

    @classmethod
    def of(cls, job: jobs.JobSettings) -> Verdict:
        """Apply the rules to the known settings of ``job``.

        Raises:
            NoSettingError: for a job without any setting of Megatron.
            ValueError: for a setting of a wrong type.
        """
        refused, open_settings = _judge(job)
        names = {setting.field for setting in job.settings}
        if not names & MEGATRON:
            found = ", ".join(sorted(names)[:10]) or "none"
            raise NoSettingError("; ".join([NO_SETTING, f"found {found}", *_unread(job)]))
        asks = _asks(open_settings)
        is_named = any(setting.name == EXPERT_PARALLEL for setting in job.unresolved)
        if not is_named and unsupported.SettingSources(*job.sources)[EXPERT_PARALLEL] is None:
            asks.append(
                f"{EXPERT_PARALLEL} was not found; FSSDP needs 2 or more, Megatron's default is 1"
            )
            # an unknown size is asked for, not refused
            refused = [line for line in refused if _refused_setting(line) != EXPERT_PARALLEL]
        return cls(job, refused, asks)

    @property
    def notes(self) -> list[str]:
        """Lines about settings that were read, were not found, or were left out.

        For a plain file of settings the lines are only about sections that were left out.
        """
        job = self.job
        lines = []
        if job.left_out:
            lines.append(f"left out: {', '.join(job.left_out)}")
        if job.is_plain:
            return lines
        names = {setting.field for setting in job.settings}
        if adapters.find_adapter(job.settings) is not None:
            names.add("peft")
        known = READ | MEGATRON
        read = [
            str(setting)
            for setting in job.settings
            if setting.field in known or adapters.may_decide(setting)
        ]
        lines.append(f"read: {', '.join(read) or 'none of the settings that FSSDP looks at'}")
        missing = [name for name in ASKED_OFTEN if name not in names]
        others = len(READ - names - set(missing))
        defaults = ", ".join([*missing, f"{others} more that FSSDP looks at"])
        lines.append(f"not found, so Megatron's defaults count: {defaults}")
        if job.unknown:
            lines.append(f"not known, and may hold further flags: {', '.join(job.unknown)}")
        if job.other_files:
            files = ", ".join(job.other_files)
            lines.append(f"further settings may stand in files that were not read: {files}")
        return lines


def _unread(job: jobs.JobSettings) -> list[str]:
    """Return notes on sections and files of ``job`` that were not read."""
    notes = []
    if job.left_out:
        notes.append(f"left out: {', '.join(job.left_out)}")
    if job.other_files:
        notes.append(f"files not read: {', '.join(job.other_files)}")
    return notes


def _judge(job: jobs.JobSettings) -> tuple[list[str], list[Setting]]:
    """Return lines about settings that are refused for certain, and settings that may decide.

    A setting of unknown value may decide if one of its values adds or removes a refusal.
    """
    refused = find_refused(job)
    certain = {_refused_setting(line) for line in refused}
    known = frozenset(certain)
    may_decide: list[Setting] = []
    for unknown in sorted(job.unresolved, key=lambda setting: setting.name):
        if unknown.name not in READ:
            continue
        for value in _possible_values(unknown):
            settings = [*job.settings, Setting((), unknown.name, value)]
            tried = _find_refused(dataclasses.replace(job, settings=settings))
            names = {_refused_setting(line) for line in tried}
            certain &= names
            if names != known and unknown not in may_decide:
                may_decide.append(unknown)
    return [line for line in refused if _refused_setting(line) in certain], may_decide


def _possible_values(unknown: Setting) -> tuple[Any, ...]:
    """Return values that a setting of unknown value may have, refused and supported ones."""
    supported = SUPPORTED.get(unknown.name)
    if unknown.name not in WORST and not isinstance(supported, str):
        return (True, False)
    values = (supported, *WORST.get(unknown.name, ()))
    # a flag that may be absent has a value in the script, so its value is one of Megatron's
    if isinstance(supported, str) and not isinstance(unknown.value, Perhaps):
        values += ("another",)
    return values


def _refused_setting(line: str) -> str:
    """Return the setting that a line of `unsupported.find` is about."""
    return line.removeprefix("--moe-fssdp with ").partition("=")[0]


def _asks(settings: list[Setting]) -> list[str]:
    """Return one line for each variable that ``settings`` of unknown value depend on."""
    decides: dict[str, list[str]] = {}
    for setting in settings:
        for name in setting.value.names:
            decided = decides.setdefault(name, [])
            if setting.name not in decided:
                decided.append(setting.name)
    lines = []
    for name, fields in decides.items():
        decided = ", ".join(fields)
        if name == COMMAND:
            lines.append(f"the output of a command decides {decided}")
        elif name.isidentifier():
            way = f"give it, as in {name}=... megatron-hecate check"
            lines.append(f"{name} decides {decided}: {way}")
        else:
            way = "write its value into the script"
            lines.append(f"the script's argument ${name} decides {decided}: {way}")
    return lines


def _derived(settings: unsupported.SettingSources) -> dict[str, Any]:
    """Return fields that ``megatron.training`` derives from arguments of other names."""
    kitchen = (settings["kitchen_config_file"], settings["kitchen_recipe_number"])
    found: dict[str, Any] = {"use_kitchen": any(value is not None for value in kitchen)}
    if settings["cpu_offloading"] is None:
        found["cpu_offloading"] = bool(settings["cpu_offloading_num_layers"])
    ranks = settings["tensor_model_parallel_size"] or 1
    expert_ranks = settings["expert_tensor_parallel_size"] or ranks
    for kind, size in (("", ranks), ("expert_", expert_ranks)):
        name = f"{kind}tensor_parallel_num_weight_shards"
        shards = settings[name]
        if shards is None:
            continue
        if not isinstance(shards, int) or not isinstance(size, int):
            raise ValueError(f"{name}={shards!r} of {size!r} ranks: numbers only")
        found[f"{kind}gtp_weight_remat_size"] = shards // size
    return found


def _check_quotes(name: str, value: Any) -> None:
    """Raise a ValueError for a text such as ``"false"``, which shells and quoted YAML produce.

    No setting of Megatron accepts these texts. ``"none"`` is a value of some settings.
    """
    is_none = name in ("fp8", "fp4") and value == "none"
    if value in ("true", "false", "True", "False", "null", "None") or is_none:
        raise ValueError(f"{name}={value!r} is a text; write true, false or null without quotes")


def _check_numbers(settings: unsupported.SettingSources) -> None:
    """Raise a ValueError for a value that is no number, where rules compare it with numbers."""
    name = "moe_expert_capacity_factor"
    factor = settings[name]
    if factor is None:
        return
    try:
        float(factor)
    except (TypeError, ValueError):
        raise ValueError(f"{name}={factor!r} must be a number, or left out") from None


def _check_type(rule: unsupported.Rule, value: Any) -> None:
    if value is None:
        return
    kind = type(rule.instead)
    if kind in EXPECTED:
        is_wrong = type(value) is not kind
    else:
        is_wrong = isinstance(value, bool) or value in ("none", "")
    if is_wrong:
        expected = EXPECTED.get(kind, "null or a value")
        raise ValueError(f"{rule.setting}={value!r} must be {expected}, or left out")
