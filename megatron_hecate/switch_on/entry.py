"""Switch FSSDP on for a model that no other way in has converted, or refuse its first step.

Scripts with a setup of their own call neither ``setup_model_and_optimizer`` nor Bridge's
``pretrain``, and they import Megatron's functions by name, so no wrapper of a function reaches
their calls. But Megatron wraps each model that it trains in one of its data-parallel classes:
`install` watches their base class. For models that are wrapped in another way it watches the steps
of torch's optimizers.
"""

from __future__ import annotations

import argparse
import functools
import sys
import weakref
from typing import Any

from megatron.core.distributed import DistributedDataParallel
from megatron.core.distributed.data_parallel_base import _BaseDataParallel
from megatron.core.transformer.moe.moe_layer import MoELayer
from torch.nn import Module
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from megatron_hecate.comm.agreement import SwitchOnError, refuse
from megatron_hecate.config import HecateConfig, asks_for_fssdp, fssdp_arguments, launched
from megatron_hecate.record.observe import has_run, is_on
from megatron_hecate.switch_on import unsupported
from megatron_hecate.switch_on.pending_chunks import num_chunks

WAY_OUT = (
    "call megatron_hecate.fssdp(HecateConfig(...))(model_chunks) before the model is wrapped, "
    "or leave --moe-fssdp out"
)

# newest namespace of Megatron's parser, under the only key "newest"
_parsed: dict[str, Any] = {}
# model configurations that ask for FSSDP by attributes
_expected: list[weakref.ref] = []
# reasons why FSSDP stays off although flags ask for it
_declined: set[str] = set()


def asked(config: Any = None) -> HecateConfig | None:
    """Return the settings of FSSDP in this process, or ``None`` if FSSDP was not asked for.

    In order of precedence: the model's ``config``, Megatron's arguments, arguments that were parsed
    and not stored, the launcher's flags.

    Args:
        config: configuration of a model; overrides of Bridge are its attributes.

    Raises:
        SwitchOnError: for settings out of range.
    """
    try:
        return HecateConfig.from_arguments(argparse.Namespace(**_requested(config)))
    except ValueError as error:
        raise SwitchOnError([str(error)]) from None


def note_parsed(namespace: Any) -> None:
    """Store the result of Megatron's parser, which a script may not pass on to Megatron."""
    _parsed["newest"] = namespace


def expect(config: Any) -> None:
    """Refuse optimizer steps until a model is converted, while ``config`` asks for FSSDP."""
    _expected.append(weakref.ref(config))


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
        wrapper: Megatron's data-parallel class around the model.
        config: the model's ``TransformerConfig``.
        module: one chunk of the model; the other chunks are searched for.

    Raises (on every rank):
        SwitchOnError: for settings that cannot be combined, or chunks that cannot be found.
    """
    has_experts = any(isinstance(part, MoELayer) for part in module.modules())
    # a model without experts is a critic, or a dense model that is upcycled
    if not has_experts and getattr(config, "num_moe_experts", None) is None:
        return
    settings = asked(config)
    if settings is None:
        # Another model of the process may be the one that FSSDP was asked for.
        if _is_asked_for():
            _declined.add("the model's own settings")
        return
    if not settings.observe and not issubclass(wrapper, DistributedDataParallel):
        fsdp = "use_torch_fsdp2" if "Torch" in wrapper.__name__ else "use_megatron_fsdp"
        refuse(unsupported.find({fsdp: True}, slots=0))
    if any(has_run([module], observing=observing) for observing in (True, False)):
        return
    # the import loads what only FSSDP needs, such as numba
    from megatron_hecate.switch_on import convert

    convert.fssdp(settings)(_chunks_beside(module, config))


def is_off_against_wish() -> bool:
    """Return whether FSSDP was asked for and is not on for any model."""
    return not is_on() and not _declined and _is_asked_for()


def _is_asked_for() -> bool:
    """Return whether flags, or a configuration given to `expect`, ask for FSSDP."""
    expected = (vars(config) for reference in _expected if (config := reference()) is not None)
    return any(map(asks_for_fssdp, [_requested(), *expected]))


def _refuse_step_while_off(optimizer: Optimizer, *_: Any) -> None:
    if is_off_against_wish():
        name = type(optimizer).__name__
        refuse(
            [
                f"it was asked for, and {name} is about to step while no model with MoE layers is "
                "wrapped by Megatron's data-parallel classes, where FSSDP is switched on; "
                f"{WAY_OUT}"
            ]
        )


def _requested(config: Any = None) -> dict[str, Any]:
    """Return the values of our flags by name, merged from all sources."""
    return {**launched, **_arguments(), **fssdp_arguments(config)}


def _arguments() -> dict[str, Any]:
    """Return our flags in Megatron's arguments, else in arguments parsed and not stored."""
    kept = getattr(sys.modules.get("megatron.training.global_vars"), "_GLOBAL_ARGS", None)
    for source in (kept, _parsed.get("newest")):
        if found := fssdp_arguments(source):
            return found
    return {}


def _chunks_beside(module: Module, config: Any) -> list[Module]:
    """Return all model chunks of this rank, from a list in a calling function."""
    stages = num_chunks(config)
    if stages == 1:
        return [module]
    frame = sys._getframe(1)
    while frame is not None:
        for value in list(frame.f_locals.values()):
            if isinstance(value, list | tuple) and len(value) == stages:
                is_model = all(isinstance(part, Module) for part in value)
                if is_model and any(part is module for part in value):
                    return list(value)
        frame = frame.f_back
    raise SwitchOnError(
        [
            f"this rank's model has {stages} chunks, of which only one is in sight when it is "
            f"wrapped; {WAY_OUT}"
        ]
    )
