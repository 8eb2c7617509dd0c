"""Validate our own flags before Megatron starts, which takes minutes: `launcher`, ``check``."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from megatron_hecate.config import HecateConfig


def validate(values: Mapping[str, Any]) -> HecateConfig | None:
    """Return the settings that our flags ask for, and read their files.

    Args:
        values: values of our flags by argparse's names.

    Raises:
        ValueError: for an unknown name, a value outside its range, or a file without speeds.
    """
    settings = HecateConfig.from_arguments(argparse.Namespace(**values))
    if settings is not None and settings.speeds is not None:
        # the import loads numpy
        from megatron_hecate.plan import Speeds

        Speeds.load(settings.speeds)
    return settings
