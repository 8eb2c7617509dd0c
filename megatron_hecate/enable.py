"""``import megatron_hecate.enable``: the one line that gives a Megatron pretraining script the ``--moe-fssdp`` flags.

It must stand before Megatron parses its arguments, best among the imports. Two functions of
``megatron.training`` are wrapped, because no object exists yet that could be converted; without
``--moe-fssdp`` both do what they did. Scripts with a setup of their own call only the first: for
these `entry` watches where models are wrapped.
"""

from __future__ import annotations

import functools
import inspect
from argparse import ArgumentParser
from collections.abc import Callable
from typing import Any

from megatron.training import arguments, training

from megatron_hecate import HecateConfig, entry, fssdp
from megatron_hecate.entry import launched
from megatron_hecate.job.agreement import refuse
from megatron_hecate.settings import assumptions, unsupported


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
        parse = parser.parse_known_args  # `parse_args` calls it, too

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
        slots = (
            settings.slots if megatron_args.num_experts else 0
        )  # the hook says that there is no MoE layer
        if not settings.observe:
            refuse(unsupported.find(megatron_args, model_config, slots=slots))
        if model_config is not None:  # megatron.training builds the model from a config (0.19 on)
            hooks, hook = model_config.pre_wrap_hooks, fssdp(settings)
            if hook not in hooks:  # an attempt before may have had the same configuration
                hooks.append(hook)
        else:
            chunks = 1
            if megatron_args.pipeline_model_parallel_size > 1:
                chunks = megatron_args.virtual_pipeline_model_parallel_size or 1
            provider = call.arguments["model_provider_func"]
            call.arguments["model_provider_func"] = _convert_when_built(
                provider, fssdp(settings), num_chunks=chunks
            )
        return setup_model_and_optimizer(*call.args, **call.kwargs)

    return setup


def _convert_when_built(
    provider: Callable, hook: Callable[[list], list], *, num_chunks: int
) -> Callable:
    """``provider`` that runs ``hook`` on the first ``num_chunks`` models it made; later ones (upcycling) stay stock."""
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


_problems = assumptions.broken_assumptions(assumptions.TRAINING_ASSUMPTIONS)
if _problems:
    raise ImportError(
        "megatron_hecate.enable does not fit this Megatron:\n"
        + "\n".join(f"  - {p}" for p in _problems)
    )
entry.install()
wrap(arguments, "add_megatron_arguments", _with_flags)
wrap(training, "setup_model_and_optimizer", _with_hook)
