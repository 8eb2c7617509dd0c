"""FSSDP for ms-swift: megatron sft --external_plugins swift_plugin.py, and so pt and rlhf.

ms-swift builds the model chunks, loads their weights and calls `wrap_model`, which wraps them by
Megatron's DDP. Reference models of preference training are not wrapped, and stay stock.
"""

from __future__ import annotations

from typing import Any

from swift.megatron.trainers import base

from megatron_hecate import HecateConfig, fssdp

CONFIG = HecateConfig(slots=2)
wrap_model = base.wrap_model


def convert_and_wrap(args: Any, models: list, *rest: Any, **settings: Any) -> list:
    """Convert the model chunks, then call ms-swift's ``wrap_model``."""
    return wrap_model(args, fssdp(CONFIG)(models), *rest, **settings)


base.wrap_model = convert_and_wrap
