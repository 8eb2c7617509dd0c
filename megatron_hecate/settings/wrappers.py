"""Who else may own the experts' weights: seen on the model, or told by what builds it.

Both come as settings, so that `unsupported.find` says what to do.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterable
from typing import Any

from megatron.core.distributed.data_parallel_base import _BaseDataParallel
from megatron.core.transformer.moe.moe_layer import MoELayer
from torch.nn import Module

from megatron_hecate.settings import unsupported


def of_model(chunks: Iterable[Module]) -> dict[str, Any]:
    """Settings that modules and parameters of the model show to be on."""
    found: dict[str, Any] = {}
    for chunk in chunks:
        modules = list(chunk.modules())
        inside = {
            id(m)
            for layer in modules
            if isinstance(layer, MoELayer)
            for m in layer.experts.modules()
        }
        for module in modules:
            for setting in _asked_for_by(type(module)):
                if id(module) in inside or setting.startswith("use_"):
                    found[setting] = type(module).__name__ if setting == "peft" else True
        if any(hasattr(p, "__fsdp_param__") for p in chunk.parameters()):
            found["use_megatron_fsdp"] = True
    return found


def find_wrapped(chunks: Iterable[Module]) -> list[str]:
    """Return a line where a data-parallel class has wrapped the chunks already, or the modules that they wrap."""
    for chunk in chunks:
        wrappers = [
            type(module).__name__
            for module in chunk.modules()
            if isinstance(module, _BaseDataParallel)
        ]
        grads = (getattr(parameter, "main_grad", None) for parameter in chunk.parameters())
        # DDP's are parts of a buffer
        if wrappers or any(
            g is not None and g.untyped_storage().nbytes() > g.nbytes for g in grads
        ):
            by = wrappers[0] if wrappers else "DistributedDataParallel"
            return [f"{by} has wrapped the model already; call the hook on the model chunks before"]
    return []


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
        for name in {"use_megatron_fsdp", "use_torch_fsdp2"}.intersection(frame.f_code.co_varnames):
            if frame.f_locals.get(name) is True:
                found[name] = True
        frame = frame.f_back
    return found


@functools.cache
def _asked_for_by(kind: type) -> set[str]:
    """The settings that put modules of this type into a model, told by the packages of its classes."""
    found = set()
    for base in kind.__mro__:
        package = base.__module__.split(".")
        if "peft" in package:  # Bridge's, NeMo's, and the library of that name
            found.add("peft")
        elif package[0] == "modelopt":
            found.add("modelopt_enabled")
        elif package[:3] == ["torch", "distributed", "fsdp"]:
            found.add("use_torch_fsdp2")
        elif "megatron_fsdp" in package:
            found.add("use_megatron_fsdp")
    return found
