"""Detect wrappers that conflict with FSSDP: FSDP, PEFT, ModelOpt.

Wrappers are found on the model, or in the settings of the code that builds it. Both functions
return settings, so that `unsupported.find` adds the way out.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from itertools import chain
from typing import Any

from megatron.core.transformer.moe.moe_layer import MoELayer
from torch.nn import Module, Parameter

from megatron_hecate.megatron.training_globals import training_arguments
from megatron_hecate.switch_on import unsupported


def model_settings(chunks: Iterable[Module]) -> dict[str, Any]:
    """Return settings that are on, judging by modules and parameters of the model."""
    settings: dict[str, Any] = {}
    for chunk in chunks:
        inside_experts: set[int] = set()
        for layer in chunk.modules():
            # a megakernel of a later Megatron leaves a layer without experts
            if isinstance(layer, MoELayer) and layer.experts is not None:
                inside_experts.update(id(module) for module in layer.experts.modules())
        for module in chunk.modules():
            for setting in _settings_of(type(module)):
                # FSDP conflicts anywhere; adapters and ModelOpt conflict only inside the experts
                if id(module) in inside_experts or setting.startswith("use_"):
                    settings[setting] = type(module).__name__ if setting == "peft" else True
        if any(hasattr(p, "__fsdp_param__") for p in chunk.parameters()):
            settings["use_megatron_fsdp"] = True
    return settings


def find_wrapped(chunks: Iterable[Module]) -> list[str]:
    """Return a line if DDP wraps the chunks, or is inside of them."""
    parameters = chain.from_iterable(chunk.parameters() for chunk in chunks)
    if not any(map(_has_main_grad, parameters)):
        return []
    return [
        "DistributedDataParallel has wrapped the model already; call the hook on the model chunks "
        "before they are wrapped"
    ]


def _has_main_grad(parameter: Parameter) -> bool:
    """Return whether DDP has given ``parameter`` a main gradient, which is part of a buffer."""
    grad = getattr(parameter, "main_grad", None)
    return grad is not None and grad.untyped_storage().nbytes() > grad.nbytes


def job_settings() -> dict[str, Any]:
    """Return settings of the job that runs the hook: arguments of ``megatron.training``."""
    args = training_arguments()
    names = [rule.setting for rule in unsupported.JOB] + ["enable_primus_turbo"]
    return {name: getattr(args, name, None) for name in names}


@functools.cache
def _settings_of(kind: type) -> set[str]:
    """Return the settings that add modules of type ``kind`` to a model, by its packages."""
    settings = set()
    for base in kind.__mro__:
        package = base.__module__.split(".")
        # packages of Bridge and of NeMo, and the library of that name
        if "peft" in package:
            settings.add("peft")
        elif package[0] == "modelopt":
            settings.add("modelopt_enabled")
        elif package[:3] == ["torch", "distributed", "fsdp"]:
            settings.add("use_torch_fsdp2")
        elif "megatron_fsdp" in package:
            settings.add("use_megatron_fsdp")
    return settings
