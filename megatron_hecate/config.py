"""The settings of FSSDP: one frozen dataclass, from which the command line flags are generated."""

from __future__ import annotations

import argparse
import dataclasses
import types
import typing
from typing import Literal

PREFIX = "moe_fssdp"


@dataclasses.dataclass(frozen=True, kw_only=True)
class HecateConfig:
    """How FSSDP runs. Every field is a flag: ``slots`` is ``--moe-fssdp-slots``.

    Raises:
        ValueError: for a value outside its range.
        NotImplementedError: for a lifetime or transport that does not exist yet.
    """

    # Guests a rank can host per MoE layer. 0 trains exactly as without FSSDP.
    slots: int = 2
    # How long guests live: fetched once per iteration, per microbatch, or before forward and again before backward.
    lifetime: Literal["iteration", "microbatch", "layer"] = "iteration"
    # How expert weights and gradients travel; auto picks the fastest that works here.
    transport: Literal["auto", "p2p", "sm", "ce"] = "auto"
    # Experts per rank whose fetch hides behind compute (t in the paper); default: as many as the slots hold.
    overlap_degree: int | None = None
    # Seconds before a wait for another rank becomes an error that names it.
    timeout: float = 600.0

    def __post_init__(self) -> None:
        if self.slots < 0:
            raise ValueError(f"slots={self.slots} must be 0 or more")
        if self.overlap_degree is not None and self.overlap_degree < 0:
            raise ValueError(f"overlap_degree={self.overlap_degree} must be 0 or more, or None for no limit")
        if not self.timeout > 0:
            raise ValueError(f"timeout={self.timeout} must be more than 0 seconds")
        for name, built in (("lifetime", ("iteration",)), ("transport", ("auto", "p2p"))):
            value = getattr(self, name)
            known = typing.get_args(typing.get_type_hints(type(self))[name])
            if value not in known:
                raise ValueError(f"{name}={value!r} is none of {', '.join(known)}")
            if value not in built:
                raise NotImplementedError(f"{name}={value!r} is not built yet; use {' or '.join(map(repr, built))}")


def add_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add ``--moe-fssdp`` and one flag per `HecateConfig` field to Megatron's parser."""
    group = parser.add_argument_group("fssdp", "fully sharded sparse data parallelism for MoE layers (megatron-hecate)")
    flag = "--" + PREFIX.replace("_", "-")
    group.add_argument(flag, action="store_true", help="Train every MoE layer with FSSDP.")
    hints = typing.get_type_hints(HecateConfig)
    for field in dataclasses.fields(HecateConfig):
        name = f"{flag}-{field.name.replace('_', '-')}"
        hint, options = hints[field.name], {}
        if typing.get_origin(hint) is Literal:
            options["choices"] = typing.get_args(hint)
        elif typing.get_origin(hint) in (typing.Union, types.UnionType):
            options["type"] = typing.get_args(hint)[0]
        else:
            options["type"] = hint
        group.add_argument(name, default=field.default, help=f"HecateConfig.{field.name}.", **options)
    return parser


def from_arguments(args: argparse.Namespace) -> HecateConfig | None:
    """The settings the flags ask for, or ``None`` without ``--moe-fssdp``."""
    if not getattr(args, PREFIX, False):
        return None
    return HecateConfig(**{f.name: getattr(args, f"{PREFIX}_{f.name}") for f in dataclasses.fields(HecateConfig)})
