"""Validate our own flags before Megatron starts, for the launcher and for ``check``."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from megatron_hecate.config import HecateConfig


def validate(values: Mapping[str, Any]) -> HecateConfig | None:
    """Return the settings that our flags ask for, and read their files.

    The launcher and ``check`` call this before Megatron starts, which takes minutes.

    Args:
        values: values of our flags by argparse's names.

    Raises:
        ValueError: for a name that does not exist, a value outside its range, or a file without
            speeds.
    """
    settings = HecateConfig.from_arguments(argparse.Namespace(**values))
    if settings is not None and settings.speeds is not None:
        # the import loads numpy
        from megatron_hecate.plan import Speeds

        Speeds.load(settings.speeds)
    return settings
