"""Switch FSSDP on where it was asked for, however a script builds its model, or refuse its first step.

Scripts with a setup of their own call neither ``setup_model_and_optimizer`` nor Bridge's
``pretrain``, and they import Megatron's functions by name. But each model that Megatron trains is
wrapped in one of its data-parallel classes: `install` watches their base class, and the steps of
torch's optimizers for models that are wrapped in another way.
"""

from __future__ import annotations

import argparse
import functools
import sys
from typing import Any

from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel
from megatron.core.distributed.data_parallel_base import _BaseDataParallel
from megatron.core.transformer.moe.moe_layer import MoELayer
from torch.nn import Module
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from megatron_hecate import HecateConfig, fssdp
from megatron_hecate.job.agreement import SwitchOnError, refuse
from megatron_hecate.observe import has_run, is_on
from megatron_hecate.settings import unsupported

NAMES = HecateConfig().as_arguments()  # of our flags, as argparse keeps them
WAY_OUT = (
    "call megatron_hecate.fssdp(HecateConfig(...))(model_chunks) before the model is wrapped, or leave "
    "--moe-fssdp out"
)

launched: dict[str, Any] = {}  # the flags given to our launcher
_parsed: dict[str, Any] = {}  # the newest namespace of Megatron's parser, under its only key
_declined: set[str] = set()  # why FSSDP stays off though flags ask for it


def asked(config: Any = None) -> HecateConfig | None:
    """Return the settings asked for in this process, or ``None`` where FSSDP was not asked for.

    A model's own ``config`` takes precedence (Bridge's overrides are attributes there), then
    Megatron's arguments, then arguments that were parsed and not kept, then the launcher's flags.

    Raises:
        SwitchOnError: for settings out of range.
    """
    try:
        return HecateConfig.from_arguments(argparse.Namespace(**_requested(config)))
    except ValueError as error:
        raise SwitchOnError([str(error)]) from None


def note_parsed(namespace: Any) -> None:
    """Remember what Megatron's parser returned: a script may keep it to itself."""
    _parsed["newest"] = namespace


def install() -> None:
    """Watch Megatron's data-parallel classes and torch's optimizers, once per process."""
    if hasattr(_BaseDataParallel.__init__, "_megatron_hecate"):
        return
    original = _BaseDataParallel.__init__

    @functools.wraps(original)
    def init(self: Module, config: Any, module: Module, *args: Any, **kwargs: Any) -> None:
        switch_on(type(self), config, module)
        original(self, config, module, *args, **kwargs)

    init._megatron_hecate = True  # type: ignore[attr-defined]
    _BaseDataParallel.__init__ = init  # type: ignore[method-assign]
    register_optimizer_step_pre_hook(_refuse_step_while_off)


def switch_on(wrapper: type, config: Any, module: Module) -> None:
    """Run the hook on a model that is about to be wrapped.

    Args:
        wrapper: which of Megatron's data-parallel classes wraps it.
        config: the model's ``TransformerConfig``.
        module: one chunk of the model; the others are found.

    Raises (on every rank):
        SwitchOnError: for settings that cannot be combined, or chunks that cannot be found.
    """
    has_experts = any(isinstance(part, MoELayer) for part in module.modules())
    if not has_experts and getattr(config, "num_moe_experts", None) is None:
        return  # a critic, or a dense model that is upcycled
    settings = asked(config)
    if settings is None:
        if _wanted({**launched, **_arguments()}):
            _declined.add("the model's own settings")
        return
    if not settings.observe and not issubclass(wrapper, DistributedDataParallel):
        fsdp = "use_torch_fsdp2" if "Torch" in wrapper.__name__ else "use_megatron_fsdp"
        refuse(unsupported.find({fsdp: True}, slots=0))
    if any(has_run([module], observing=observing) for observing in (True, False)):
        return
    fssdp(settings)(_chunks_beside(module, config))


def is_off_against_wish() -> bool:
    """Return whether FSSDP was asked for and has not been switched on for any model."""
    return not is_on() and not _declined and _wanted(_requested())


def _refuse_step_while_off(optimizer: Optimizer, *_: Any) -> None:
    if is_off_against_wish():
        name = type(optimizer).__name__
        refuse(
            [
                f"it was asked for, and {name} is about to step while no model with MoE layers has gone "
                f"through Megatron's data-parallel classes, where FSSDP is switched on; {WAY_OUT}"
            ]
        )


def _wanted(requested: dict[str, Any]) -> bool:
    return bool(requested.get("moe_fssdp") or requested.get("moe_fssdp_observe"))


def _requested(config: Any = None) -> dict[str, Any]:
    """Values of our flags by name, from all places that may hold them."""
    own = {name: value for name, value in getattr(config, "__dict__", {}).items() if name in NAMES}
    return {**launched, **_arguments(), **own}


def _arguments() -> dict[str, Any]:
    """Values of our flags in Megatron's arguments, or in those that were parsed and not kept."""
    kept = getattr(sys.modules.get("megatron.training.global_vars"), "_GLOBAL_ARGS", None)
    for source in (kept, _parsed.get("newest")):
        if found := {name: getattr(source, name) for name in NAMES if hasattr(source, name)}:
            return found
    return {}


def _chunks_beside(module: Module, config: Any) -> list[Module]:
    """Return all model chunks of this rank, given one: the code that wraps them has a list of them."""
    stages = getattr(config, "virtual_pipeline_model_parallel_size", None)
    stages = stages or parallel_state.get_virtual_pipeline_model_parallel_world_size() or 1
    if stages == 1 or parallel_state.get_pipeline_model_parallel_world_size() == 1:
        return [module]
    frame = sys._getframe(1)
    while frame is not None:
        for value in list(frame.f_locals.values()):
            if isinstance(value, list | tuple) and len(value) == stages:
                is_model = all(isinstance(part, Module) for part in value)
                if is_model and any(part is module for part in value):
                    return list(value)
        frame = frame.f_back
    count = (
        f"this rank's model has {stages} chunks, of which only one is in sight when it is wrapped"
    )
    raise SwitchOnError([f"{count}; {WAY_OUT}"])
