"""``python -m megatron_hecate --check``: what FSSDP finds here; ``--settings FILE``: whether a job could use it.

A file of settings is JSON or YAML: a mapping of fields of ``TransformerConfig`` and arguments of ``megatron.training``,
or a list of such. Parts of a Bridge configuration may stand in it as they are, as in a ``run_config.yaml``, or as
prefixes (``model.fp8``, ``+model.fp8``), and so may ``MODEL_ARGS`` of Megatron-LM's functional tests. Settings that no
rule reads are skipped. What only the built modules show, such as experts that are no `TEGroupedMLP`, the hook refuses.
No Megatron is needed.
"""

from __future__ import annotations

import argparse
import ast
import importlib.util
import json
import sys
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_hecate import HecateConfig, __version__
from megatron_hecate.adapter import unsupported
from megatron_hecate.device import compile as kernels

PARTS = ("model", "transformer", "mixed_precision", "ddp", "dist", "MODEL_ARGS")
ALIASES = {"fp8_format": "fp8", "fp4_format": "fp4"}  # arguments of megatron.training, and the fields they set
EXPECTED = {bool: "true or false, without quotes", int: "a whole number, without quotes", str: "a name"}


def main(argv: list[str]) -> int:
    """Run ``--check`` with the arguments after it: 0 when all is well, 1 where FSSDP would not switch on, else 2."""
    parser = argparse.ArgumentParser(prog="python -m megatron_hecate --check", allow_abbrev=False)
    parser.add_argument("--settings", metavar="FILE", help="settings of a job, or a list of such, as JSON or YAML")
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
    sources = _parts(settings)
    sources.insert(0, _derived(unsupported.Settings(*sources)))
    for source in sources:
        for name, value in source.items():
            _check_quotes(name, value)
        for rule in unsupported.RULES:
            _check_type(rule, source.get(rule.setting))
    slots = unsupported.Settings(*sources)["moe_fssdp_slots"]
    asked = HecateConfig() if slots is None else HecateConfig(slots=slots)
    return unsupported.find(*sources, slots=asked.slots)


def _check_file(path: Path) -> int:
    """Print the verdict on each job in the file."""
    jobs = _read(path)
    if not jobs or not isinstance(jobs, Mapping | list):
        raise ValueError(f"holds {jobs!r}, not a mapping of settings or a list of such")
    if isinstance(jobs, Mapping):
        found = problems(jobs)
        print("\n".join(found) if found else "would switch on")
        return 1 if found else 0
    lines = []
    for number, job in enumerate(jobs, start=1):
        if not isinstance(job, Mapping):
            raise ValueError(f"entry {number} is {job!r}, not a mapping of settings")
        name = job.get("name") or job.get("case") or f"entry {number}"
        try:
            found = problems(job)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
        lines.append(f"refused {name}: {' | '.join(found)}" if found else f"on {name}")
    print("\n".join(lines))
    return 1 if any(line.startswith("refused") for line in lines) else 0


def _read(path: Path) -> Any:
    """What the file holds, whatever it is."""
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"cannot be read: {error}") from None
    if path.suffix.lower() not in (".yaml", ".yml"):
        try:
            return json.loads(text)
        except json.JSONDecodeError as error:
            raise ValueError(f"is not JSON: {error}") from None
    try:
        import yaml
    except ImportError:
        raise ValueError("needs PyYAML (pip install pyyaml), which JSON does not") from None
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(f"is not YAML: {error}") from None


def _parts(settings: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Settings by the field's own name: what stands in the mapping itself, and in each of its parts."""
    parts = []
    # mixed precision comes first: Bridge has it overwrite the model's fields
    for key, value in sorted(settings.items(), key=lambda item: "mixed_precision" not in str(item[0])):
        prefix, _, name = str(key).lstrip("+-").replace("-", "_").rpartition(".")
        if isinstance(value, Mapping) and name in PARTS:
            parts += _parts(value)
        elif isinstance(value, Mapping) and name == "refused":  # a record of a recipe holds Python literals there
            parts.append({name: _literal(text) for name, text in value.items()})
        elif name == "mixed_precision" and "delayed_scaling" in str(value):  # one of Bridge's names
            parts.append({"fp8": value, "fp8_recipe": "delayed"})
        elif not prefix or prefix.rpartition(".")[2] in PARTS:
            parts.append({ALIASES.get(name, name): value})
    return parts


def _derived(settings: unsupported.Settings) -> dict[str, Any]:
    """Fields that ``megatron.training`` sets by arguments of other names."""
    found = {"use_kitchen": any(settings[f"kitchen_{name}"] is not None for name in ("config_file", "recipe_number"))}
    if settings["cpu_offloading"] is None:
        found["cpu_offloading"] = bool(settings["cpu_offloading_num_layers"])
    ranks = settings["tensor_model_parallel_size"] or 1
    for kind, size in (("", ranks), ("expert_", settings["expert_tensor_parallel_size"] or ranks)):
        shards = settings[f"{kind}tensor_parallel_num_weight_shards"]
        if shards is not None:
            if not isinstance(shards, int) or not isinstance(size, int):
                raise ValueError(f"{kind}tensor_parallel_num_weight_shards={shards!r} of {size!r} ranks: numbers only")
            found[f"{kind}gtp_weight_remat_size"] = shards // size
    return found


def _literal(text: Any) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        raise ValueError(f"{text!r} is not a Python literal") from None


def _check_quotes(name: str, value: Any) -> None:
    """No setting has the text ``"false"`` for a value, but shells and quoted YAML make it; some have ``"none"``."""
    if value in ("true", "false", "True", "False", "null", "None") or (name in ("fp8", "fp4") and value == "none"):
        raise ValueError(f"{name}={value!r} is a text; write true, false or null without quotes")


def _check_type(rule: unsupported.Rule, value: Any) -> None:
    kind = type(rule.instead)
    wrong = type(value) is not kind if kind in EXPECTED else isinstance(value, bool) or value in ("none", "")
    if wrong and value is not None:
        raise ValueError(f"{rule.setting}={value!r} must be {EXPECTED.get(kind, 'null or a value')}, or left out")


def _check_here() -> int:
    """Print versions and what would be used; 1 when FSSDP cannot be switched on."""
    import torch

    print(f"megatron-hecate {__version__}, torch {torch.__version__}, {torch.cuda.device_count()} GPUs")
    if importlib.util.find_spec("megatron") is None or importlib.util.find_spec("megatron.core") is None:
        print("megatron-core is not installed: pip install -e '.[megatron]', or put your checkout on the path")
        return 1
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of Megatron, about what it can do without
        import megatron.core

        from megatron_hecate.adapter import compat

        problems = compat.broken_assumptions()
    version = megatron.core.__version__.partition("+")[0]  # Megatron adds the commit of any repository it runs in
    print(f"megatron-core {version}: {'fits' if not problems else 'does not fit'}")
    for problem in problems:
        print(f"  - {problem}")
    training = importlib.util.find_spec("megatron.training") is not None
    print(f"megatron.training: {'found, --moe-fssdp flags work' if training else 'not found; use the hook'}")
    print("transport p2p: torch.distributed point-to-point, on gloo or NCCL")
    lines, usable = kernels.describe()
    for line in lines:
        print(f"kernels, of quotas and of transport nvlink: {line}")
    print("transport auto: nvlink where peers share an NVLink domain and its self-test succeeds, else p2p")
    return 0 if usable and not problems else 1
