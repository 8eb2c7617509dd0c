"""``python -m megatron_hecate --check``: what FSSDP finds here; ``--settings FILE``: whether a job could use it.

A file of settings is JSON or YAML (a mapping of fields of ``TransformerConfig`` and arguments of
``megatron.training``, in sections or nested maps of any framework, or a list of such) or a launch
script, whose command lines are read without running it (`job_files`). Settings that no rule reads are
skipped. What only the built modules show, such as experts that are no `TEGroupedMLP`, the hook
refuses. No Megatron is needed.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import json
import os
import sys
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from megatron_hecate import HecateConfig, __version__
from megatron_hecate.device import compile as kernels
from megatron_hecate.settings import unsupported
from megatron_hecate.settings.files import jobs
from megatron_hecate.settings.files.launch_script import looks_like_script
from megatron_hecate.settings.files.shell_text import COMMAND

EXPECTED = {
    bool: "true or false, without quotes",
    int: "a whole number, without quotes",
    str: "a name",
}
# settings that rules read beside their own
HELPERS = {
    *(
        "fp8",
        "fp4",
        "quant_recipe",
        "delay_wgrad_compute",
        "moe_token_dispatcher_type",
        "cuda_graph_scope",
    ),
    *(
        "moe_flex_dispatcher_backend",
        "cuda_graph_modules",
        "add_bias_linear",
        "overlap_grad_reduce",
    ),
    *(
        "moe_fssdp_rehome",
        "gradient_accumulation_fusion",
        "use_transformer_engine_op_fuser",
        "mixed_precision",
    ),
}
READ = {rule.setting for rule in unsupported.RULES} | HELPERS
# names that other programs have as well, and those of Megatron that no rule reads
COMMON = {"fp8", "fp4", "peft", "quant_recipe", "mixed_precision"}
PARALLEL = {
    f"{kind}_parallel_size"
    for kind in ("tensor_model", "pipeline_model", "context", "expert_tensor")
}
MEGATRON = (
    (READ - COMMON)
    | PARALLEL
    | {"num_experts", "num_moe_experts", "moe_router_topk", "moe_fssdp_slots"}
)
MEGATRON |= {"kitchen_config_file", "kitchen_recipe_number", "tensor_parallel_num_weight_shards"}
MEGATRON |= {"expert_tensor_parallel_num_weight_shards", "cpu_offloading_num_layers"}
EXPERT_PARALLEL = "expert_model_parallel_size"
# values that are refused, of settings that are neither true nor false
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
    "quant_recipe": ("custom",),
    **dict.fromkeys(("main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype"), ("fp16",)),
    **dict.fromkeys(
        ("mlp_chunks_for_training", "gtp_weight_remat_size", "expert_gtp_weight_remat_size"), (2,)
    ),
    **dict.fromkeys(("moe_fssdp_late_replicas", "moe_fssdp_rehome"), (1,)),
}
SWITCHES = {rule.setting for rule in unsupported.RULES if isinstance(rule.instead, bool)} - set(
    WORST
)
# those that most often decide
ASKED_OFTEN = (
    EXPERT_PARALLEL,
    "moe_token_dispatcher_type",
    "cuda_graph_impl",
    "fp8",
    "fp8_recipe",
    "fp4",
    "peft",
)
ASKED_OFTEN += ("use_megatron_fsdp", "use_torch_fsdp2", "transformer_impl")


def main(argv: list[str]) -> int:
    """Run ``--check`` with the arguments after it: 0 when all is well, 1 where FSSDP would not switch on, else 2."""
    parser = argparse.ArgumentParser(prog="python -m megatron_hecate --check", allow_abbrev=False)
    parser.add_argument(
        "--settings", metavar="FILE", help="settings of a job, or a list of such, as JSON or YAML"
    )
    path = parser.parse_args(argv).settings
    if path is None:
        return _check_here()
    try:
        return _check_file(Path(path))
    except RecursionError:
        print(f"{path}: is nested too deeply, or within itself", file=sys.stderr)
    except ValueError as error:
        print(f"{path}: {' '.join(str(error).split())}", file=sys.stderr)
    return 2


def problems(settings: Mapping[str, Any]) -> list[str]:
    """Every setting of one job that FSSDP does not combine with, a line each.

    Raises:
        ValueError: for a value of the wrong type, as quotes in YAML make it, or out of range.
    """
    (job,) = jobs.of_mapping(settings, {})
    return _judge(job)


def _judge(job: jobs.Job) -> list[str]:
    for setting in job.settings:
        name, value = jobs.ALIASES.get(setting.name, setting.name), setting.value
        if name in READ or set(setting.path) & set(jobs.PARTS):
            _check_quotes(name, value)
    sources = job.sources
    sources.insert(0, _derived(unsupported.Settings(*sources)))
    for source in sources:
        for rule in unsupported.RULES:
            _check_type(rule, source.get(rule.setting))
    slots = unsupported.Settings(*sources)["moe_fssdp_slots"]
    asked = HecateConfig() if slots is None else HecateConfig(slots=slots)
    return unsupported.find(*sources, slots=asked.slots)


@dataclasses.dataclass(frozen=True)
class Verdict:
    """What can be said of a job.

    Args:
        job: its settings.
        refused: settings that FSSDP does not combine with, a line each.
        asks: what the file does not say and a verdict needs, a line each.
    """

    job: jobs.Job
    refused: list[str]
    asks: list[str]

    @classmethod
    def of(cls, job: jobs.Job) -> Verdict:
        """Judge what is known of ``job``.

        Raises:
            ValueError: where it holds no setting of Megatron's, or one of a wrong type.
        """
        found = _judge(job)
        names = {jobs.ALIASES.get(setting.name, setting.name) for setting in job.settings}
        if not names & MEGATRON:
            others = ", ".join(sorted(names)[:10]) or "none"
            left = f"; left out: {', '.join(job.left_out)}" if job.left_out else ""
            left += f"; files not read: {', '.join(job.other_files)}" if job.other_files else ""
            raise ValueError(
                f"holds no setting of Megatron that is known here, such as {EXPERT_PARALLEL}; found {others}{left}"
            )
        unresolved = {setting.name: setting for setting in job.unresolved}
        open_ones = [
            name for name in sorted(unresolved.keys() & READ) if _may_decide(job, name, found)
        ]
        asks = _asks({name: unresolved[name].value.names for name in open_ones})
        says_size = unsupported.Settings(*job.sources)[EXPERT_PARALLEL] is not None
        if not says_size and EXPERT_PARALLEL not in unresolved:
            asks.append(
                f"{EXPERT_PARALLEL} was not found; FSSDP needs 2 or more, Megatron's default is 1"
            )
        if not says_size:
            found = [
                line
                for line in found
                if not line.startswith(f"--moe-fssdp with {EXPERT_PARALLEL}=")
            ]
        return cls(job, found, asks)

    @property
    def notes(self) -> list[str]:
        """What was read and what was not, a line each; nothing of a file that holds settings and no more."""
        job = self.job
        names = {jobs.ALIASES.get(setting.name, setting.name) for setting in job.settings}
        read = [
            s
            for s in job.settings
            if jobs.ALIASES.get(s.name, s.name) in READ | MEGATRON | jobs.ADAPTERS
        ]
        missing = [name for name in ASKED_OFTEN if name not in names]
        others = len(READ - names - set(missing))
        lines = [f"left out: {', '.join(job.left_out)}"] if job.left_out else []
        if job.is_plain:
            return lines
        lines.append(f"read: {', '.join(map(str, read)) or 'none of what FSSDP looks at'}")
        lines.append(
            f"not found, so Megatron's defaults count: {', '.join([*missing, f'{others} others that FSSDP looks at'])}"
        )
        if job.unknown:
            lines.append(f"not known, and may hold further flags: {', '.join(job.unknown)}")
        if job.other_files:
            lines.append(
                f"further settings may stand in files that were not read: {', '.join(job.other_files)}"
            )
        return lines


def _may_decide(job: jobs.Job, name: str, found: list[str]) -> bool:
    """Return whether some value of the setting ``name``, which is not known, would be refused."""
    values = WORST.get(name, (True, False))
    tried = (
        dataclasses.replace(job, settings=[*job.settings, jobs.Setting((), name, v)])
        for v in values
    )
    return any(set(_judge(other)) - set(found) for other in tried)


def _asks(variables: Mapping[str, tuple[str, ...]]) -> list[str]:
    """Return a line for each variable that settings, given by name, depend on."""
    decides: dict[str, list[str]] = {}
    for setting, names in variables.items():
        for name in names:
            decides.setdefault(name, []).append(setting)
    lines = []
    for name, settings in decides.items():
        what = f"{', '.join(settings)}"
        if name == COMMAND:
            lines.append(f"the output of a command decides {what}")
        elif name.isidentifier():
            lines.append(
                f"{name} decides {what}: give it, as in {name}=... python -m megatron_hecate --check"
            )
        else:
            lines.append(
                f"the script's argument ${name} decides {what}: write its value into the script"
            )
    return lines


def _check_file(path: Path) -> int:
    """Print the verdict on each job in the file."""
    found = _read(path)
    verdicts = []
    for job in found:
        try:
            verdicts.append(Verdict.of(job))
        except ValueError as error:
            # a role without Megatron beside one with it: a critic on another backend
            if (
                len(found) > 1
                and job.name in jobs.ROLES
                and "holds no setting of Megatron" in str(error)
            ):
                continue
            raise ValueError(f"{job.name}: {error}" if job.name else str(error)) from None
    if not verdicts:
        raise ValueError(
            f"holds no setting of Megatron that is known here, such as {EXPERT_PARALLEL}"
        )
    print("\n".join(_lines(verdicts)))
    asks = [
        f"{verdict.job.name}: {ask}".removeprefix(": ")
        for verdict in verdicts
        for ask in verdict.asks
    ]
    if any(verdict.refused for verdict in verdicts):
        return 1
    if asks:
        raise ValueError(f"cannot be judged yet: {'; '.join(asks)}. Nothing else in it is refused")
    return 0


def _lines(verdicts: list[Verdict]) -> Iterator[str]:
    for verdict in verdicts:
        name = verdict.job.name
        if len(verdicts) == 1 and not name.startswith("entry ") and not verdict.job.is_listed:
            if verdict.refused or not verdict.asks:
                yield "\n".join(verdict.refused) or "would switch on"
        elif verdict.refused:
            yield f"refused {name}: {' | '.join(verdict.refused)}"
        else:
            yield f"unknown {name}: {' | '.join(verdict.asks)}" if verdict.asks else f"on {name}"
        if verdict.refused:
            yield from (f"note: {ask}" for ask in verdict.asks)
        yield from (f"note: {line}" for line in verdict.notes)


def _read(path: Path) -> list[jobs.Job]:
    """The jobs in the file, whatever it is."""
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"cannot be read: {error}") from None
    if looks_like_script(text, path.suffix.lower()):
        if found := jobs.of_script(text, os.environ, MEGATRON, switches=SWITCHES):
            return found
        raise ValueError(
            f"holds no command with flags of Megatron, such as --{EXPERT_PARALLEL.replace('_', '-')}"
        )
    data = _parse(text, path.suffix.lower())
    if not data or not isinstance(data, Mapping | list):
        raise ValueError(f"holds {data!r}, not a mapping of settings or a list of such")
    if isinstance(data, Mapping):
        return jobs.of_mapping(data, os.environ)
    found = []
    for number, entry in enumerate(data, start=1):
        if not isinstance(entry, Mapping):
            raise ValueError(f"entry {number} is {entry!r}, not a mapping of settings")
        name = entry.get("name") or entry.get("case") or f"entry {number}"
        for job in jobs.of_mapping(entry, os.environ):
            own = f"{name}, {job.name}" if job.name else str(name)
            found.append(dataclasses.replace(job, name=own, is_listed=True))
    return found


def _parse(text: str, suffix: str) -> Any:
    if suffix not in (".yaml", ".yml"):
        try:
            return json.loads(text)
        except json.JSONDecodeError as error:
            raise ValueError(f"is not JSON: {error}") from None
    try:
        import yaml
    except ImportError:
        raise ValueError("needs PyYAML (pip install pyyaml), which JSON does not") from None
    loader = type(
        "Loader", (yaml.SafeLoader,), {}
    )  # tags of frameworks, such as !override, change no setting's value
    loader.add_multi_constructor("", _construct)
    try:
        return yaml.load(text, Loader=loader)
    except yaml.YAMLError as error:
        raise ValueError(f"is not YAML: {error}") from None


def _construct(loader: Any, _: str, node: Any) -> Any:
    kind = type(node).__name__.removesuffix("Node").lower()
    deep = {} if kind == "scalar" else {"deep": True}
    return getattr(loader, f"construct_{kind}")(node, **deep)


def _derived(settings: unsupported.Settings) -> dict[str, Any]:
    """Fields that ``megatron.training`` sets by arguments of other names."""
    found = {
        "use_kitchen": any(
            settings[f"kitchen_{name}"] is not None for name in ("config_file", "recipe_number")
        )
    }
    if settings["cpu_offloading"] is None:
        found["cpu_offloading"] = bool(settings["cpu_offloading_num_layers"])
    ranks = settings["tensor_model_parallel_size"] or 1
    for kind, size in (("", ranks), ("expert_", settings["expert_tensor_parallel_size"] or ranks)):
        shards = settings[f"{kind}tensor_parallel_num_weight_shards"]
        if shards is not None:
            if not isinstance(shards, int) or not isinstance(size, int):
                raise ValueError(
                    f"{kind}tensor_parallel_num_weight_shards={shards!r} of {size!r} ranks: numbers only"
                )
            found[f"{kind}gtp_weight_remat_size"] = shards // size
    return found


def _check_quotes(name: str, value: Any) -> None:
    """No setting has the text ``"false"`` for a value, but shells and quoted YAML make it; some have ``"none"``."""
    if value in ("true", "false", "True", "False", "null", "None") or (
        name in ("fp8", "fp4") and value == "none"
    ):
        raise ValueError(f"{name}={value!r} is a text; write true, false or null without quotes")


def _check_type(rule: unsupported.Rule, value: Any) -> None:
    kind = type(rule.instead)
    wrong = (
        type(value) is not kind
        if kind in EXPECTED
        else isinstance(value, bool) or value in ("none", "")
    )
    if wrong and value is not None:
        raise ValueError(
            f"{rule.setting}={value!r} must be {EXPECTED.get(kind, 'null or a value')}, or left out"
        )


def _check_here() -> int:
    """Print versions and what would be used; 1 when FSSDP cannot be switched on."""
    import torch

    print(
        f"megatron-hecate {__version__}, torch {torch.__version__}, {torch.cuda.device_count()} GPUs"
    )
    fits = _check_megatron()
    plans = _check_planner()
    print("transport p2p: torch.distributed point-to-point, on gloo or NCCL")
    lines, usable = kernels.describe()
    for line in lines:
        print(f"kernels, of quotas and of transport nvlink: {line}")
    print(
        "transport auto: nvlink where peers share an NVLink domain and its self-test succeeds, else p2p"
    )
    return 0 if fits and plans and usable else 1


def _check_megatron() -> bool:
    """Print which Megatron is here; returns whether it fits."""
    if (
        importlib.util.find_spec("megatron") is None
        or importlib.util.find_spec("megatron.core") is None
    ):
        print(
            "megatron-core is not installed: pip install -e '.[megatron]', or put your checkout on the path"
        )
        return False
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of Megatron, about what it can do without
        import megatron.core

        from megatron_hecate.settings import assumptions

        problems = assumptions.broken_assumptions()
    version = megatron.core.__version__.partition("+")[
        0
    ]  # Megatron adds the commit of any repository it runs in
    print(f"megatron-core {version}: {'fits' if not problems else 'does not fit'}")
    for problem in problems:
        print(f"  - {problem}")
    training = importlib.util.find_spec("megatron.training") is not None
    print(
        f"megatron.training: {'found, --moe-fssdp flags work' if training else 'not found; use the hook'}"
    )
    return not problems


def _check_planner() -> bool:
    """Print which numba is here; returns whether replicas can be planned."""
    try:
        import numba
    except ImportError as error:
        print(
            f"planner: numba cannot be imported ({error}); without it no replicas are planned, only slots=0 works"
        )
        return False
    print(f"planner: numba {numba.__version__}")
    return True
