"""``import megatron_hecate.enable`` adds the ``--moe-fssdp`` flags to a Megatron script.

Import it before Megatron parses its arguments, best among the script's imports. It wraps the
function of ``megatron.training`` that defines the flags, and `entry` converts the model where
Megatron wraps it. Without ``--moe-fssdp`` both behave as before.
"""

from __future__ import annotations

import functools
import sys
from argparse import ArgumentParser
from collections.abc import Callable
from typing import Any

from megatron.training import arguments

from megatron_hecate.comm.agreement import SwitchOnError
from megatron_hecate.config import HecateConfig
from megatron_hecate.megatron import assumptions
from megatron_hecate.switch_on import entry  # noqa: F401  (watches what wraps models)
from megatron_hecate.switch_on.launcher import flags_among
from megatron_hecate.switch_on.request import REQUEST


def wrap(module: Any, name: str, wrapper: Callable[[Callable], Callable]) -> None:
    """Replace the function ``module.name`` by ``wrapper`` of it."""
    original = getattr(module, name)
    setattr(module, name, functools.wraps(original)(wrapper(original)))


def _with_flags(add_megatron_arguments: Callable) -> Callable:
    def add(parser: ArgumentParser) -> ArgumentParser:
        HecateConfig.add_arguments(add_megatron_arguments(parser)).set_defaults(**REQUEST.flags)
        return parser

    return add


assumptions.require(assumptions.TRAINING_ASSUMPTIONS, module=__name__, by="Megatron")
# Read here, because a script may not store what it has parsed.
try:
    REQUEST.flags = {**flags_among(sys.argv[1:]), **REQUEST.flags}
except ValueError as error:
    raise SwitchOnError([str(error)]) from None
wrap(arguments, "add_megatron_arguments", _with_flags)
