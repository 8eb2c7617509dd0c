"""``import megatron_hecate.enable`` adds the ``--moe-fssdp`` flags to a Megatron script.

Import it before Megatron parses its arguments, best among the script's imports. It wraps two
functions of ``megatron.training``, because no object exists yet that could be converted. Without
``--moe-fssdp`` both behave as before. Scripts with a setup of their own call only
``add_megatron_arguments``; for such scripts `entry` watches where a model is wrapped.
"""

from __future__ import annotations

import functools
import inspect
from argparse import ArgumentParser
from collections.abc import Callable
from typing import Any

from megatron.training import arguments, training

from megatron_hecate import HecateConfig, fssdp
from megatron_hecate.comm.agreement import refuse
from megatron_hecate.config import launched
from megatron_hecate.megatron import assumptions
from megatron_hecate.switch_on import entry, unsupported


def wrap(module: Any, name: str, wrapper: Callable[[Callable], Callable]) -> None:
    """Replace ``module.name`` once, however often this module is imported or reloaded."""
    original = getattr(module, name)
    if not hasattr(original, "_megatron_hecate"):
        wrapped = functools.wraps(original)(wrapper(original))
        wrapped._megatron_hecate = True
        setattr(module, name, wrapped)


def _with_flags(add_megatron_arguments: Callable) -> Callable:
    def add(parser: ArgumentParser) -> ArgumentParser:
        HecateConfig.add_arguments(add_megatron_arguments(parser)).set_defaults(**launched)
        # `parse_args` calls it, too
        parse = parser.parse_known_args

        def parse_and_note(*args: Any, **kwargs: Any) -> Any:
            namespace, rest = parse(*args, **kwargs)
            entry.note_parsed(namespace)
            return namespace, rest

        parser.parse_known_args = parse_and_note  # type: ignore[method-assign]
        return parser

    return add


def _with_hook(setup_model_and_optimizer: Callable) -> Callable:
    def setup(*args: Any, **kwargs: Any) -> Any:
        megatron_args = training.get_args()
        settings = entry.asked()
        if settings is None:
            return setup_model_and_optimizer(*args, **kwargs)
        call = inspect.signature(setup_model_and_optimizer).bind(*args, **kwargs)
        model_config = getattr(call.arguments.get("cfg_container"), "model", None)
        # without experts the hook raises its own error, and rules about slots must not precede it
        slots = settings.slots if megatron_args.num_experts else 0
        if not settings.observe:
            refuse(unsupported.find(megatron_args, model_config, slots=slots))
        hook = fssdp(settings)
        if model_config is not None:
            # from 0.19 on megatron.training builds the model from a config with a list of hooks
            hooks = model_config.pre_wrap_hooks
            # a job that restarts in its process reuses the config of its earlier attempt
            if hook not in hooks:
                hooks.append(hook)
        else:
            chunks = 1
            if megatron_args.pipeline_model_parallel_size > 1:
                chunks = megatron_args.virtual_pipeline_model_parallel_size or 1
            provider = call.arguments["model_provider_func"]
            call.arguments["model_provider_func"] = _convert_when_built(
                provider, hook, num_chunks=chunks
            )
        return setup_model_and_optimizer(*call.args, **call.kwargs)

    return setup


def _convert_when_built(
    provider: Callable, hook: Callable[[list], list], *, num_chunks: int
) -> Callable:
    """Wrap ``provider`` so that ``hook`` runs on the first ``num_chunks`` models it builds.

    Models built later stay stock: upcycling builds another one.
    """
    built: list = []

    @functools.wraps(provider)
    def provide(*args: Any, **kwargs: Any) -> Any:
        chunk = provider(*args, **kwargs)
        if len(built) < num_chunks:
            built.append(chunk)
            if len(built) == num_chunks:
                hook(built)
        return chunk

    return provide


assumptions.require(assumptions.TRAINING_ASSUMPTIONS, module=__name__, by="Megatron")
entry.install()
wrap(arguments, "add_megatron_arguments", _with_flags)
wrap(training, "setup_model_and_optimizer", _with_hook)
