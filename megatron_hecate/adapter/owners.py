"""Who else may own the experts' weights: seen on the model, or told by what builds it.

Both come as settings, so that `unsupported.find` says what to do.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

from megatron.core.transformer.moe.moe_layer import MoELayer
from torch.nn import Module

from megatron_hecate.adapter import unsupported

_OWNERS = {  # package whose classes show it, and the setting that asks for it
    "torch.distributed.fsdp": "use_torch_fsdp2",
    "megatron.core.distributed.fsdp": "use_megatron_fsdp",
    "megatron_fsdp": "use_megatron_fsdp",
    "megatron.bridge.peft": "peft",
    "nemo": "peft",
    "peft": "peft",
    "modelopt": "modelopt_enabled",
}


def of_model(chunks: Iterable[Module]) -> dict[str, Any]:
    """Settings that modules and parameters of the model show to be on."""
    found: dict[str, Any] = {}
    for chunk in chunks:
        modules = list(chunk.modules())
        inside = {id(m) for layer in modules if isinstance(layer, MoELayer) for m in layer.experts.modules()}
        for module in modules:
            for owner in {_owner(base) for base in type(module).__mro__}:
                if owner is not None and (id(module) in inside or owner.startswith("use_")):
                    found[owner] = True if owner != "peft" else type(module).__name__
        if any(hasattr(p, "__fsdp_param__") for p in chunk.parameters()):
            found["use_megatron_fsdp"] = True
    return found


def of_job() -> dict[str, Any]:
    """Settings of the job that runs this hook: arguments of ``megatron.training``, and of the hook's callers.

    Megatron's and Bridge's builders take ``use_megatron_fsdp`` and ``use_torch_fsdp2``, run the hook and then wrap the
    model; no object that the hook can see tells of it before.
    """
    training = sys.modules.get("megatron.training.global_vars")
    args = getattr(training, "_GLOBAL_ARGS", None)
    found = {rule.setting: getattr(args, rule.setting, None) for rule in unsupported.JOB}
    frame = sys._getframe(1)
    while frame is not None:
        for name in ("use_megatron_fsdp", "use_torch_fsdp2"):
            if frame.f_locals.get(name) is True:
                found[name] = True
        frame = frame.f_back
    return found


def _owner(base: type) -> str | None:
    package = base.__module__
    return next((s for name, s in _OWNERS.items() if package == name or package.startswith(f"{name}.")), None)
