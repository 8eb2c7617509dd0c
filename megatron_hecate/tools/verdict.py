"""Judge the settings of a job by the rules of the switch-on (`unsupported`). Needs no Megatron.

Only what a rule reads is looked at. A value that only the job knows, such as ``${EP}``, leaves the
rules open that read it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from megatron_hecate.config import PREFIX, HecateConfig, check_names, check_slots
from megatron_hecate.megatron.cuda_graphs import OLD_NAMES, names_iteration
from megatron_hecate.megatron.rules import Rule, SettingSources, is_set
from megatron_hecate.switch_on import unsupported
from megatron_hecate.switch_on.launcher import validate
from megatron_hecate.tools.files.jobs import ROLES, Job
from megatron_hecate.tools.files.spellings import Unknown

Source = Mapping[str, Any]
EXPERT_PARALLEL = "expert_model_parallel_size"
# value of a size that a file leaves out, and may set elsewhere
MISSING = Unknown("")
NO_SETTING = f"holds no setting of Megatron that is known here, such as {EXPERT_PARALLEL}"
# names that other programs use as well
COMMON = {"fp8", "fp4", "peft", "quant_recipe", "mixed_precision", "modelopt_enabled"}
# settings by which a file of Megatron is recognized
MEGATRON = ({rule.setting for rule in unsupported.RULES} - COMMON) | {
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
EXPECTED = {
    bool: "true or false, without quotes",
    int: "a whole number, without quotes",
    str: "a name",
}
# Texts that shells and quotes in YAML produce. No setting of Megatron accepts them.
QUOTED = ("true", "false", "True", "False", "null", "None")


class _Settings(SettingSources):
    """Settings that record what a rule reads of them.

    Args:
        sources: as for `SettingSources`; a value may be `Unknown`, which reads as ``None``.
    """

    def __init__(self, *sources: Source) -> None:
        super().__init__(*sources)
        self.values: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        """Return the value, or ``None`` if it is unknown or no source has the setting."""
        value = self.values[name] = super().__getitem__(name)
        return None if isinstance(value, Unknown) else value

    @property
    def unknowns(self) -> dict[str, Unknown]:
        """Values that were read and are unknown, by name."""
        return {name: v for name, v in self.values.items() if isinstance(v, Unknown)}


@dataclasses.dataclass(frozen=True)
class Verdict:
    """Result of the rules for one job.

    Args:
        refusals: a line for each setting that FSSDP does not combine with, by its name.
        unknowns: values that the result depends on, by name.
        names: names of all settings that rules have looked at.
        acceptance: line for a job without refusals and unknown values.
    """

    refusals: dict[str, str]
    unknowns: dict[str, Unknown]
    names: frozenset[str] = frozenset()
    acceptance: str = "would switch on"

    @property
    def questions(self) -> list[str]:
        """A line for each unknown value."""
        absence = "was not found; FSSDP needs 2 or more, Megatron's default is 1"
        return [
            f"{name} {absence}" if value is MISSING else f"{name}={value} is decided elsewhere"
            for name, value in self.unknowns.items()
        ]


def judge(sources: Sequence[Source]) -> Verdict:
    """Apply the rules of the switch-on to fields of Megatron and to our flags.

    Args:
        sources: fields by name, in order of precedence.

    Raises:
        ValueError: for a value of the wrong type, such as quotes in YAML cause, or out of range,
            and for what `launcher.validate` refuses.
    """
    config, unknowns = _find_flags(sources)
    if config.observe:
        text = "would observe, with all settings; --optimizer-cuda-graph ends the record"
        return Verdict({}, {}, acceptance=text)
    sources = [_derive(SettingSources(*sources)), *sources]
    values = SettingSources(*sources)
    refusals: dict[str, str] = {}
    names: set[str] = set()
    for rule in unsupported.rules_for(config.slots):
        condition = _Settings(*sources)
        is_idle = rule.when is not None and not rule.when(condition) and not condition.unknowns
        settings = _Settings(*sources)
        is_refused = _is_refused(rule, settings, values[rule.setting])
        names |= {rule.setting, *condition.values, *settings.values}
        if settings.unknowns and not is_idle:
            unknowns |= settings.unknowns
        elif is_refused:
            refusals[rule.setting] = rule.explain(values[rule.setting])
    _check_values({name: values[name] for name in {*names, *MEGATRON}})
    if "moe_fssdp_slots" not in unknowns:
        refusals |= _find_too_many(config.slots, values)
    return Verdict(refusals, unknowns, frozenset(names))


def judge_file(listed_jobs: Sequence[Job]) -> list[tuple[Job, Verdict]]:
    """Judge the jobs of a file, and leave out roles that train without Megatron.

    Raises:
        ValueError: for what `judge` raises, or a file without settings of Megatron.
    """
    verdicts = []
    for job in listed_jobs:
        prefix = f"{job.name}: " if job.name else ""
        names = set().union(*job.names.values())
        sources = job.sources
        if EXPERT_PARALLEL not in names:
            sources.append({EXPERT_PARALLEL: MISSING})
        try:
            verdict = judge(sources)
        except ValueError as error:
            raise ValueError(f"{prefix}{error}") from None
        if names & MEGATRON:
            verdicts.append((job, verdict))
        # one role may train without Megatron, such as a critic on another backend
        elif len(listed_jobs) == 1 or job.name not in ROLES:
            notes = [NO_SETTING, f"found {', '.join(sorted(names)[:10]) or 'none'}"]
            notes += [f"left out: {', '.join(job.omissions)}"] if job.omissions else []
            notes += [f"files not read: {', '.join(job.other_files)}"] if job.other_files else []
            raise ValueError(f"{prefix}{'; '.join(notes)}")
    if not verdicts:
        raise ValueError(NO_SETTING)
    return verdicts


def _find_flags(sources: Sequence[Source]) -> tuple[HecateConfig, dict[str, Unknown]]:
    """Return the settings that our flags ask for, and our flags of unknown value."""
    values: dict[str, Any] = {}
    for source in reversed(sources):
        values |= {name: value for name, value in source.items() if name.startswith(PREFIX)}
    check_names(values)
    unknowns = {name: value for name, value in values.items() if isinstance(value, Unknown)}
    flags = {name: value for name, value in values.items() if name not in unknowns}
    # the question is whether FSSDP can be switched on, also of a job that leaves it off
    config = validate({**flags, PREFIX: flags.get(PREFIX) or True})
    assert config is not None
    return config, unknowns


def _derive(settings: SettingSources) -> dict[str, Any]:
    """Return fields that ``megatron.training`` derives from arguments of other names."""
    kitchen = (settings["kitchen_config_file"], settings["kitchen_recipe_number"])
    fields: dict[str, Any] = {"use_kitchen": any(value is not None for value in kitchen)}
    if settings["cpu_offloading"] is None:
        layers = settings["cpu_offloading_num_layers"]
        fields["cpu_offloading"] = layers if isinstance(layers, Unknown) else bool(layers)
    # From 0.18 on Megatron captures the iteration wherever a scope or modules name it. Before,
    # there are no modules, and a scope is idle with the implementation "none".
    impl, parts = settings["cuda_graph_impl"], settings["cuda_graph_modules"]
    is_idle = parts is None and impl == "none" and not any(settings[name] for name in OLD_NAMES)
    unknown = parts if isinstance(parts, Unknown) else settings["cuda_graph_scope"]
    if names_iteration(settings) and not is_idle:
        fields["cuda_graph_impl"] = "full_iteration"
    elif isinstance(unknown, Unknown) and not is_idle and not is_set(impl):
        fields["cuda_graph_impl"] = unknown
    ranks = settings["tensor_model_parallel_size"] or 1
    expert_ranks = settings["expert_tensor_parallel_size"] or ranks
    for kind, size in (("", ranks), ("expert_", expert_ranks)):
        name = f"{kind}tensor_parallel_num_weight_shards"
        shards = settings[name]
        if shards is None:
            continue
        unknowns = [value for value in (shards, size) if isinstance(value, Unknown)]
        if not unknowns and not (isinstance(shards, int) and isinstance(size, int)):
            raise ValueError(f"{name}={shards!r} of {size!r} ranks: numbers only")
        fields[f"{kind}gtp_weight_remat_size"] = unknowns[0] if unknowns else shards // size
    return fields


def _is_refused(rule: Rule, settings: _Settings, value: Any) -> bool:
    """Return whether ``rule`` refuses ``settings``, among them its own setting's ``value``."""
    kind = type(rule.instead)
    if value is not None and not isinstance(value, Unknown) and value not in QUOTED:
        is_wrong = type(value) is not kind
        if kind not in EXPECTED:
            is_wrong = isinstance(value, bool) or value in ("none", "")
        if is_wrong:
            expected = EXPECTED.get(kind, "null or a value")
            raise ValueError(f"{rule.setting}={value!r} must be {expected}, or left out")
    try:
        return rule.applies(settings)
    except (TypeError, ValueError):
        _check_values(settings.values)
        raise ValueError(f"{rule.setting}={value!r} must be a number, or left out") from None


def _check_values(values: Source) -> None:
    """Raise a ValueError for a value that no setting of Megatron has, whether or not it matters."""
    for name, value in values.items():
        if value in QUOTED or (value == "none" and name in ("fp8", "fp4")):
            remedy = "write true, false or null without quotes"
            raise ValueError(f"{name}={value!r} is a text; {remedy}")
    factor = values.get("moe_expert_capacity_factor")
    if isinstance(factor, Unknown):
        return
    try:
        float(factor or 0)
    except (TypeError, ValueError):
        text = f"moe_expert_capacity_factor={factor!r} must be a number, or left out"
        raise ValueError(text) from None


def _find_too_many(slots: int, settings: SettingSources) -> dict[str, str]:
    """Return a line if experts or ``slots`` do not fit the ranks, as far as both are known."""
    experts = settings["num_moe_experts"] or settings["num_experts"]
    ranks = settings[EXPERT_PARALLEL]
    if type(experts) is not int or type(ranks) is not int or ranks < 2:
        return {}
    try:
        check_slots(slots, num_experts=experts, num_ranks=ranks)
    except ValueError as error:
        return {"moe_fssdp_slots": str(error)}
    return {}
