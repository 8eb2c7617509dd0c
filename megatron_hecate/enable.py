"""``import megatron_hecate.enable`` adds the ``--moe-fssdp`` flags to a Megatron script.

Import it before Megatron parses its arguments, best among the script's imports. It wraps the
function of ``megatron.training`` that defines the flags, and `entry` converts the model where
Megatron wraps it. Without ``--moe-fssdp`` both behave as before.
"""

from __future__ import annotations

import functools
from argparse import ArgumentParser
from collections.abc import Callable
from typing import Any

from megatron.training import arguments

from megatron_hecate.config import HecateConfig
from megatron_hecate.megatron import assumptions
from megatron_hecate.switch_on import entry
from megatron_hecate.switch_on.request import REQUEST


def wrap(module: Any, name: str, wrapper: Callable[[Callable], Callable]) -> None:
    """Replace the function ``module.name`` by ``wrapper`` of it."""
    original = getattr(module, name)
    setattr(module, name, functools.wraps(original)(wrapper(original)))


def _with_flags(add_megatron_arguments: Callable) -> Callable:
    def add(parser: ArgumentParser) -> ArgumentParser:
        HecateConfig.add_arguments(add_megatron_arguments(parser)).set_defaults(**REQUEST.launched)
        # `parse_args` calls it, too
        parse = parser.parse_known_args

        def parse_and_note(*args: Any, **kwargs: Any) -> Any:
            REQUEST.parsed, rest = parse(*args, **kwargs)
            return REQUEST.parsed, rest

        parser.parse_known_args = parse_and_note  # type: ignore[method-assign]
        return parser

    return add


assumptions.require(assumptions.TRAINING_ASSUMPTIONS, module=__name__, by="Megatron")
entry.install()
wrap(arguments, "add_megatron_arguments", _with_flags)
