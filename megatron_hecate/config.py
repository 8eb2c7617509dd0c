"""The settings of FSSDP: one frozen dataclass, from which the command line flags are generated."""

from __future__ import annotations

import argparse
import dataclasses
import os
import re
import types
import typing
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

FLAG = "--moe-fssdp"
AUTO = "auto"  # of a setting that chooses by itself
OBSERVED = "fssdp-run"  # where an observed run is recorded, unless a folder is named
SHORTEST, LONGEST = 1e-3, 1e8  # seconds of a timeout; process groups take no more
# of whole numbers, the most that any job has a use for; what fits a model is known when it is built
MOST = {
    "slots": 4096,
    "overlap_degree": 4096,
    "late_replicas": 1 << 20,
    "rehome": 10**9,
    "nccl_ctas": 64,
}


def _flag(default: Any, text: str) -> Any:
    """A field with what its flag says in ``--help``."""
    return dataclasses.field(default=default, metadata={"help": text})


@dataclasses.dataclass(frozen=True, kw_only=True)
class HecateConfig:
    """How FSSDP runs. Every field is a flag: ``slots`` is ``--moe-fssdp-slots``.

    Raises:
        ValueError: for a value outside its range.
    """

    slots: int = _flag(
        2, "Replicas a rank can hold per MoE layer; 0 trains exactly as without FSSDP."
    )
    lifetime: Literal["auto", "iteration", "microbatch", "layer"] = _flag(
        "iteration",
        "How long replicas live: fetched once per iteration (least traffic), per microbatch, or before each layer's "
        "forward and again before its backward (least memory). auto takes the first of these that fits beside the "
        "experts' gradients and optimizer state; it leaves no room for activations.",
    )
    transport: Literal["auto", "p2p", "nvlink"] = _flag(
        "auto",
        "How expert weights and gradients travel: p2p, by torch.distributed; nvlink, by our kernels, which read peers' "
        "memory inside an NVLink domain (CPU ranks: inside a machine) and use p2p between domains. auto is nvlink "
        "where peers share an NVLink domain and its self-test succeeds, else p2p, and says why.",
    )
    overlap_degree: int | None = _flag(
        None,
        "Experts per rank whose fetch hides behind compute: they are free, and no more are fetched. None measures it.",
    )
    late_replicas: int = _flag(
        0,
        "Replicas a layer may fetch after the gate, on all ranks together, where the true loads make it pay: inside "
        "nodes, and across nodes where speeds are measured.",
    )
    speeds: str | None = _flag(
        None,
        "File with measured speeds (python -m megatron_hecate --measure FILE) by which copies are judged to pay; None "
        "takes those of an H100 node, or of CPU cores without GPUs.",
    )
    trace: str | None = _flag(
        None,
        "Iterations A-B, counted as in Megatron's log, of which every rank records what it does and when, into the "
        "folder of record (or fssdp-run); python -m megatron_hecate --report FOLDER puts all ranks on one timeline.",
    )
    rehome: int = _flag(
        0,
        "Iterations between two looks for better homes of experts, which then move with their optimizer state, where "
        "that pays before the next look; 0 leaves them where Megatron built them.",
    )
    nccl_ctas: int = _flag(
        8,
        "Thread blocks that NCCL uses at most for a transfer of replicas; each takes a multiprocessor of the GPU from "
        "what runs beside it. 0 leaves the number to NCCL, which may take 32.",
    )
    timeout: float = _flag(
        600.0, "Seconds before a wait for another rank becomes an error, or a line, that names it."
    )
    observe: bool = _flag(
        False,
        "Train as without FSSDP, bit for bit, with any settings, and record how many tokens each expert gets. Needs no "
        "--moe-fssdp, and goes before it.",
    )
    record: str | None = _flag(
        None,
        f"Folder for a record of what each MoE layer did in each iteration; None records nothing, and {OBSERVED} with "
        "--moe-fssdp-observe.",
    )

    def __post_init__(self) -> None:
        for name in ("speeds", "record"):
            if isinstance(path := getattr(self, name), os.PathLike):
                object.__setattr__(self, name, os.fspath(path))
        if problems := [*self._wrong_numbers(), *self._wrong_texts(), *self._wrong_together()]:
            raise ValueError("; ".join(problems))

    @classmethod
    def check(cls, config: Any) -> HecateConfig:
        """Return ``config``, the defaults for ``None``.

        Raises:
            TypeError: for anything else, such as the model itself.
        """
        if config is not None and not isinstance(config, cls):
            shown = (
                repr(config)
                if isinstance(config, int | float | str)
                else f"a {type(config).__name__}"
            )
            raise TypeError(
                f"fssdp takes a HecateConfig, or nothing, got {shown}; write fssdp(HecateConfig(slots=2))(model_chunks)"
            )
        return cls() if config is None else config

    def _wrong_numbers(self) -> Iterator[str]:
        for name, most in MOST.items():
            value, optional = getattr(self, name), name == "overlap_degree"
            or_none = " or None" if optional else ""
            if type(value) is not int and not (optional and value is None):
                yield f"{name}={value!r} must be a whole number{or_none}"
            elif value is not None and value < 0:
                yield f"{name}={value} must be 0 or more{', or None to measure it' if optional else ''}"
            elif value is not None and value > most:
                yield f"{name}={value} must be {most} or less"
        if type(self.timeout) not in (int, float) or not SHORTEST <= self.timeout <= LONGEST:
            yield f"timeout={self.timeout!r} must be a number of seconds from {SHORTEST:g} to {LONGEST:g}"

    def _wrong_texts(self) -> Iterator[str]:
        if not isinstance(self.observe, bool):
            yield f"observe={self.observe!r} must be True or False"
        for name in ("lifetime", "transport"):
            value = getattr(self, name)
            known = typing.get_args(typing.get_type_hints(type(self))[name])
            if value not in known:
                yield f"{name}={value!r} is none of {', '.join(known)}"
        for name, what in (("speeds", "file"), ("record", "folder")):
            value = getattr(self, name)
            if value is not None and not (isinstance(value, str) and value):
                yield f"{name}={value!r} must be the name of a {what}, or None"
            elif name == "speeds" and value is not None and not Path(value).is_file():
                way = "write it with torchrun ... -m megatron_hecate --measure FILE"
                yield f"{value} does not hold measured speeds: speeds={value!r} is no file; {way}"
            elif name == "record" and value is not None and Path(value).is_file():
                yield f"record={value!r} is a file; name a folder"

    def _wrong_together(self) -> Iterator[str]:
        try:
            traced = self.traced
        except ValueError as error:
            yield str(error)
            return
        if traced and self.observe is True:
            yield f"trace={self.trace!r} shows what FSSDP does, which observe=True leaves off"
        if self.slots == 0 and self.late_replicas and not self.observe:
            yield f"late_replicas={self.late_replicas} needs slots for them, got slots=0"
        if self.rehome and self.observe is True:
            yield f"rehome={self.rehome} moves experts, which observe=True leaves where they are"

    @property
    def traced(self) -> tuple[int, int] | None:
        """First and last iteration of ``trace``.

        Raises:
            ValueError: where it does not name them.
        """
        if self.trace is None:
            return None
        shown = self.trace if isinstance(self.trace, str) else repr(self.trace)
        found = re.fullmatch(r"([0-9]{1,9})(?:-([0-9]{1,9}))?", shown)
        first, last = (int(found[1]), int(found[2] or found[1])) if found else (1, 0)
        if not 1 <= first <= last:
            raise ValueError(
                f"trace={self.trace!r} must name iterations, from 1 on, such as 10-12 or 10"
            )
        return first, last

    @classmethod
    def add_arguments(cls, parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        """Add ``--moe-fssdp`` and one flag per field to Megatron's parser."""
        group = parser.add_argument_group(
            "fssdp", "fully sharded sparse data parallelism for MoE layers (megatron-hecate)"
        )
        group.add_argument(FLAG, action="store_true", help="Train every MoE layer with FSSDP.")
        hints = typing.get_type_hints(cls)
        for field in dataclasses.fields(cls):
            hint, options = hints[field.name], {}
            if typing.get_origin(hint) is Literal:
                options["choices"] = typing.get_args(hint)
            elif hint is bool:
                options["action"] = "store_true"
            else:
                optional = typing.get_origin(hint) in (typing.Union, types.UnionType)
                options["type"] = typing.get_args(hint)[0] if optional else hint
                named = {"record": "DIR", "trace": "A-B"}.get(field.name, "FILE")
                options["metavar"] = {str: named, float: "SECONDS"}.get(options["type"], "N")
            text = field.metadata["help"] + " (default: %(default)s)"
            group.add_argument(_flag_of(field.name), default=field.default, help=text, **options)
        return parser

    def as_arguments(self) -> dict[str, Any]:
        """The flags that ask for these settings, by the names argparse keeps them under."""
        fields = dataclasses.fields(self)
        return {
            _argument(FLAG): True,
            **{_argument(_flag_of(f.name)): getattr(self, f.name) for f in fields},
        }

    @classmethod
    def from_arguments(cls, args: Any) -> HecateConfig | None:
        """What the flags ask for, or ``None`` without ``--moe-fssdp`` and ``--moe-fssdp-observe``; other flags of ours
        then get a warning.

        ``args`` are Megatron's arguments, or any object with their names.
        """
        fields = dataclasses.fields(cls)
        asked = {f.name: getattr(args, _argument(_flag_of(f.name)), f.default) for f in fields}
        on = getattr(args, _argument(FLAG), False)
        for name, value in ((FLAG, on), (_flag_of("observe"), asked["observe"])):
            if value not in (True, False, None):  # an override may be any text
                raise ValueError(f"{_argument(name)}={value!r} must be true or false")
        asked["observe"] = bool(asked["observe"])
        if on or asked["observe"]:
            return cls(**asked)
        idle = [f.name for f in fields if asked[f.name] != f.default]
        if idle:
            warnings.warn(
                f"{', '.join(map(_flag_of, idle))} without {FLAG}: FSSDP is off", stacklevel=2
            )
        return None


def _flag_of(field: str) -> str:
    return f"{FLAG}-{field.replace('_', '-')}"


def _argument(flag: str) -> str:
    """Where argparse keeps the value of ``flag``."""
    return flag.removeprefix("--").replace("-", "_")
