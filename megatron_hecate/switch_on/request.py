"""What this process asks of FSSDP, and whether a model has it; needs no Megatron.

All ways in but the hook write to it, and `entry` reads it where a model is wrapped. A model's own
configuration may hold flags as well, and converted chunks keep the settings of their hook.
"""

from __future__ import annotations

import argparse
import dataclasses
import weakref
from typing import Any

from megatron_hecate.config import HecateConfig, asks_for_fssdp, fssdp_arguments
from megatron_hecate.megatron.training_globals import training_arguments


@dataclasses.dataclass
class Request:
    """Request of a process for FSSDP.

    Args:
        flags: our flags on the command line, by argparse's names.
        models: model configurations with our flags as attributes (`add`).
        is_answered: whether a model has been converted, or has declined by its own settings.
    """

    flags: dict[str, Any] = dataclasses.field(default_factory=dict)
    models: list[weakref.ref] = dataclasses.field(default_factory=list)
    is_answered: bool = False

    def add(self, config: Any, values: dict[str, Any]) -> None:
        """Store ``values`` of our flags as attributes of a model's ``config``."""
        vars(config).update(values)
        self.models.append(weakref.ref(config))

    def settings(self, config: Any = None) -> HecateConfig | None:
        """Return the settings asked for, or ``None`` if FSSDP was not asked for.

        In order of precedence: the model's ``config``, Megatron's arguments, the command line.

        Args:
            config: configuration of a model; overrides of Bridge are its attributes.

        Raises:
            SwitchOnError: for settings out of range.
        """
        try:
            return HecateConfig.from_arguments(argparse.Namespace(**self._values(config)))
        except ValueError as error:
            # the import loads torch
            from megatron_hecate.comm.agreement import SwitchOnError

            raise SwitchOnError([str(error)]) from None

    @property
    def is_made(self) -> bool:
        """Whether flags, or the configuration of a model that is still there, ask for FSSDP."""
        configs = [config for reference in self.models if (config := reference()) is not None]
        return any(map(asks_for_fssdp, [self._values(), *map(vars, configs)]))

    @property
    def is_unmet(self) -> bool:
        """Whether FSSDP was asked for and is not on for any model, in a job that trains one."""
        if self.is_answered or not self.is_made:
            return False
        # a job that only evaluates wraps no model
        return not getattr(training_arguments(), "skip_train", False)

    def _values(self, config: Any = None) -> dict[str, Any]:
        """Return the values of our flags by name, merged from all sources."""
        arguments = fssdp_arguments(training_arguments())
        return {**self.flags, **arguments, **fssdp_arguments(config)}


REQUEST = Request()
