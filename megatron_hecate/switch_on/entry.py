"""The one watch that switches FSSDP on, whatever script or framework builds the model.

Scripts and frameworks import Megatron's functions by name, so no wrapper of a function reaches
their calls. But each model that trains is wrapped in one of Megatron's data-parallel classes:
importing this module watches their construction. For models that are wrapped in another way it
watches the steps of torch's optimizers.
"""

from __future__ import annotations

import sys
from itertools import chain
from typing import Any

from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel
from megatron.core.distributed.data_parallel_base import _BaseDataParallel
from megatron.core.transformer.moe.moe_layer import MoELayer
from torch.nn import Module
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from megatron_hecate.comm.agreement import SwitchOnError, refuse
from megatron_hecate.config import HecateConfig
from megatron_hecate.switch_on import unsupported
from megatron_hecate.switch_on.request import REQUEST

WAY_OUT = (
    "call megatron_hecate.fssdp(HecateConfig(...))(model_chunks) before the model is wrapped, "
    "or leave --moe-fssdp out"
)


def _construct(kind: type, *args: Any, **kwargs: Any) -> Any:
    """Create an object of a data-parallel class, and switch FSSDP on for the model in it.

    This precedes ``__init__``, in which Megatron-FSDP takes the parameters.
    """
    for argument in (*args, *kwargs.values()):
        # a copy is made without arguments
        if isinstance(argument, Module):
            switch_on(kind, argument)
            for part in argument.modules():
                if hasattr(part, "fssdp_data_parallel"):
                    data_parallel, chunk = part.fssdp_data_parallel
                    return data_parallel.construct(kind, chunk)
    return super(_BaseDataParallel, kind).__new__(kind)


def switch_on(wrapper: type, module: Module) -> None:
    """Run the hook on a model that is about to be wrapped, if FSSDP was asked for.

    Args:
        wrapper: Megatron's data-parallel class around the model.
        module: one chunk of the model; the other chunks are searched for.

    Raises (on every rank):
        SwitchOnError: for settings that cannot be combined, or chunks that cannot be found.
    """
    config = getattr(module, "config", None)
    if converted := converted_parts([module]):
        for part in converted:
            _refuse_fsdp(wrapper, config, part._fssdp_settings)
        return
    has_experts = any(isinstance(part, MoELayer) for part in module.modules())
    # a model without experts is a critic, or a dense model that is upcycled
    if not has_experts and getattr(config, "num_moe_experts", None) is None:
        return
    settings = REQUEST.settings(config)
    if settings is None:
        # Another model of the process may be the one that FSSDP was asked for.
        REQUEST.is_answered |= REQUEST.is_made
        return
    _refuse_fsdp(wrapper, config, settings)
    # the import loads what only FSSDP needs, such as numba
    from megatron_hecate.switch_on.convert import Hook

    Hook(settings)(_chunks_beside(module, config))


def _refuse_fsdp(wrapper: type, config: Any, settings: HecateConfig) -> None:
    """Refuse a ``wrapper`` that shards the experts' weights, with all problems of the model."""
    if not settings.observe and not issubclass(wrapper, DistributedDataParallel):
        fsdp = "use_torch_fsdp2" if "Torch" in wrapper.__name__ else "use_megatron_fsdp"
        sources = ({fsdp: True}, config, settings.as_arguments())
        refuse(unsupported.find(*sources, slots=settings.slots))


def _refuse_step_while_off(optimizer: Optimizer, *_: Any) -> None:
    if REQUEST.is_unmet:
        name = type(optimizer).__name__
        refuse(
            [
                f"it was asked for, and {name} is about to step while no model with MoE layers is "
                "wrapped by Megatron's data-parallel classes, where FSSDP is switched on; "
                f"{WAY_OUT}"
            ]
        )


def _chunks_beside(module: Module, config: Any) -> list[Module]:
    """Return all model chunks of this rank, from a list in a calling function.

    Megatron wraps the chunks one by one, and keeps the others in such a list only.
    """
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


def num_chunks(config: Any) -> int:
    """Return the number of model chunks per rank: stages of a virtual pipeline, else 1."""
    if not parallel_state.model_parallel_is_initialized():
        return 1
    if parallel_state.get_pipeline_model_parallel_world_size() == 1:
        return 1
    stages = getattr(config, "virtual_pipeline_model_parallel_size", None)
    return stages or parallel_state.get_virtual_pipeline_model_parallel_world_size() or 1


def converted_parts(chunks: list[Module]) -> list[Any]:
    """Return the modules in ``chunks`` on which the hook has run; they hold its settings."""
    modules = chain.from_iterable(chunk.modules() for chunk in chunks)
    return [part for part in modules if hasattr(part, "_fssdp_settings")]


_BaseDataParallel.__new__ = staticmethod(_construct)  # type: ignore[method-assign,assignment]
register_optimizer_step_pre_hook(_refuse_step_while_off)
