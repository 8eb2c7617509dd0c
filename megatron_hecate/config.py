"""Settings of FSSDP: one frozen dataclass that also defines the command line flags."""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import os
import textwrap
import typing
import warnings
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

FLAG = "--moe-fssdp"
# beginning of the names under which argparse stores our flags
PREFIX = "moe_fssdp"
# value of a setting that is resolved when FSSDP is switched on
AUTO = "auto"
# folder of an observed run's record, unless another one is named
OBSERVED = "fssdp-run"
# upper bound of `slots`, beyond any job's use; the limits of a model are checked when it is built
MOST_SLOTS = 4096

Lifetime = Literal["auto", "iteration", "layer"]
Transport = Literal["auto", "p2p", "nvlink"]


def _setting(
    default: Any, text: str, *, allowed: str, accepts: Callable[[Any], object], **options: Any
) -> Any:
    """Define a field.

    Args:
        default: value without the flag; ``None`` is then allowed, too.
        text: meaning and unit, for help.
        allowed: accepted values, for errors and help.
        accepts: function that returns whether a value other than ``None`` is accepted.
        options: argparse's options for the flag.
    """
    if default is None:
        allowed += ", or None"
    metadata = {"help": text, "allowed": allowed, "accepts": accepts, "options": options}
    return dataclasses.field(default=default, metadata=metadata)


def _whole_number(default: int | None, text: str, *, largest: int) -> Any:
    return _setting(
        default,
        text,
        allowed=f"a whole number from 0 to {largest}",
        # not isinstance: True is no number here
        accepts=lambda value: type(value) is int and 0 <= value <= largest,
        type=int,
        metavar="N",
    )


def _choice(default: str, text: str, *, hint: Any) -> Any:
    """Define a field with the values of a `Literal`."""
    choices = typing.get_args(hint)
    return _setting(
        default,
        text,
        allowed=f"{', '.join(choices[:-1])} or {choices[-1]}",
        accepts=lambda value: value in choices,
        choices=choices,
    )


def asks_for_fssdp(values: Mapping[str, Any]) -> bool:
    """Return whether ``values``, our flags by argparse's names, switch FSSDP or observing on."""
    return bool(values.get("moe_fssdp") or values.get("moe_fssdp_observe"))


def fssdp_arguments(source: Any) -> dict[str, Any]:
    """Return the attributes of ``source`` that are named like our flags, misspelt ones included."""
    attributes = getattr(source, "__dict__", {})
    return {name: value for name, value in attributes.items() if name.startswith(PREFIX)}


def check_names(names: Iterable[str]) -> None:
    """Raise a ValueError for a name that begins like our flags' names and is none of them."""
    flags = HecateConfig().as_arguments()
    for name in names:
        if name.startswith(PREFIX) and name not in flags:
            raise ValueError(
                f"--{name.replace('_', '-')} ({name}) does not exist; "
                "megatron-hecate run --help lists the flags"
            )


def check_slots(slots: int, *, num_experts: int, num_ranks: int) -> None:
    """Raise a ValueError if experts do not divide among ranks, or ``slots`` exceed other experts.

    A rank hosts replicas of experts with their home on another rank.
    """
    if num_experts % num_ranks:
        below = num_experts // num_ranks * num_ranks
        nearest = f"{below} or {below + num_ranks}" if below else f"{num_ranks}"
        raise ValueError(
            f"num_experts={num_experts} is not divisible by {num_ranks} ranks; use {nearest}"
        )
    per_rank = num_experts // num_ranks
    most = num_experts - per_rank
    if not 0 <= slots <= most:
        raise ValueError(
            f"slots={slots} is out of range: a rank that is home to {per_rank} of "
            f"{num_experts} experts can host 0 to {most} replicas"
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class HecateConfig:
    """Settings of FSSDP. Every field is a flag: ``slots`` is ``--moe-fssdp-slots``.

    Raises:
        ValueError: for a value outside its range; the message has all problems.
    """

    slots: int = _whole_number(
        2,
        "Replicas that a rank can hold per MoE layer; 0 trains exactly as without FSSDP.",
        largest=MOST_SLOTS,
    )
    lifetime: Lifetime = _choice(
        "iteration",
        "How long a replica lives. iteration: fetched once per iteration (least traffic). layer: "
        "fetched before each forward of its layer and again before the backward (least memory). "
        "auto: the first of the two that fits into memory with the experts' gradients and "
        "optimizer state; activations are not counted.",
        hint=Lifetime,
    )
    transport: Transport = _choice(
        "auto",
        "Transport of expert weights and gradients. p2p: torch.distributed. nvlink: our own "
        "kernels, which read peer memory inside an NVLink domain (with CPU ranks: inside a "
        "machine), and p2p between domains. auto: nvlink if peers share an NVLink domain and its "
        "self-test succeeds, else p2p with the reason.",
        hint=Transport,
    )
    overlap_degree: int | None = _whole_number(
        None,
        "Expert fetches per rank and layer that overlap with compute. They cost nothing, and no "
        "more are fetched. None measures the number.",
        largest=4096,
    )
    late_replicas: int = _whole_number(
        0,
        "Replicas that a layer may fetch after the gate, over all ranks, if the true loads justify "
        "the cost: inside a node, and across nodes if speeds are measured. Above 0 only with "
        "slots.",
        largest=1 << 20,
    )
    speeds: str | None = _setting(
        None,
        "File with measured speeds for the cost model of copies. None uses the speeds of an H100 "
        "node, or of CPU cores without GPUs.",
        allowed="the name of a file that torchrun ... -m megatron_hecate measure FILE has written",
        accepts=lambda value: isinstance(value, str) and Path(value).is_file(),
        metavar="FILE",
    )
    rehome: int = _whole_number(
        0,
        "Iterations between two searches for better homes. Experts then move with their optimizer "
        "state if the move pays before the next search. 0 keeps all experts where Megatron built "
        "them. Above 0 not with observe.",
        largest=10**9,
    )
    nccl_ctas: int = _whole_number(
        8,
        "Upper bound on the thread blocks of NCCL per transfer of replicas. Each occupies one "
        "multiprocessor of the GPU that concurrent kernels then lack. 0 leaves the number to NCCL, "
        "which may use 32.",
        largest=64,
    )
    timeout: float = _setting(
        600.0,
        "Seconds until a wait for another rank raises an error, or prints a line, with the name of "
        "that rank.",
        # the upper bound is the longest timeout of process groups
        allowed="a number of seconds from 0.001 to 1e+08",
        accepts=lambda value: type(value) in (int, float) and 1e-3 <= value <= 1e8,
        type=float,
        metavar="SECONDS",
    )
    observe: bool = _setting(
        False,
        "Train bitwise as without FSSDP, with any settings, and record the number of tokens per "
        "expert. Works without --moe-fssdp, and takes precedence over it.",
        allowed="True or False",
        accepts=lambda value: isinstance(value, bool),
        action="store_true",
    )
    record: str | None = _setting(
        None,
        "Folder for a record of every MoE layer and iteration. None records nothing; with "
        f"--moe-fssdp-observe it means {OBSERVED}.",
        allowed="the name of a folder, which need not exist",
        accepts=lambda value: isinstance(value, str) and value and not Path(value).is_file(),
        metavar="DIR",
    )

    def __post_init__(self) -> None:
        for name in ("speeds", "record"):
            if isinstance(path := getattr(self, name), os.PathLike):
                object.__setattr__(self, name, os.fspath(path))
        problems = []
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            is_default = value is None and field.default is None
            if not is_default and not field.metadata["accepts"](value):
                problems.append(f"{field.name}={value!r} must be {field.metadata['allowed']}")
        # values that are wrong by themselves cannot be compared
        if not problems and self.slots == 0 and self.late_replicas and not self.observe:
            problems.append(f"late_replicas={self.late_replicas} needs slots for them, got slots=0")
        if not problems and self.rehome and self.observe:
            problems.append(
                f"rehome={self.rehome} moves experts, which observe=True leaves where they are"
            )
        if problems:
            raise ValueError("; ".join(problems))

    @property
    def folder(self) -> str | None:
        """Folder of the record; ``None`` if there is none."""
        if self.record is None and self.observe:
            return OBSERVED
        return self.record

    @classmethod
    def add_arguments(cls, parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        """Add ``--moe-fssdp`` and one flag per field to Megatron's parser."""
        group = parser.add_argument_group(
            "fssdp", "fully sharded sparse data parallelism for MoE layers (megatron-hecate)"
        )
        group.add_argument(FLAG, action="store_true", help="Train every MoE layer with FSSDP.")
        for field in dataclasses.fields(cls):
            text = field.metadata["help"] + " (default: %(default)s)"
            options = field.metadata["options"]
            group.add_argument(_flag(field.name), default=field.default, help=text, **options)
        return parser

    def as_arguments(self) -> dict[str, Any]:
        """Return the flags of the settings, by the names that argparse uses."""
        values = {f"{PREFIX}_{name}": value for name, value in vars(self).items()}
        return {PREFIX: True, **values}

    @classmethod
    def from_arguments(cls, args: Any) -> HecateConfig | None:
        """Return the settings that flags ask for.

        ``None`` without ``--moe-fssdp`` and ``--moe-fssdp-observe``. Our other flags, if any are
        set, then cause a warning.

        Args:
            args: Megatron's arguments, or any object with attributes of the same names.

        Raises:
            ValueError: for a value outside its range, or a name that begins like ours.
        """
        check_names(fssdp_arguments(args))
        fields = dataclasses.fields(cls)
        values = {f.name: getattr(args, f"{PREFIX}_{f.name}", f.default) for f in fields}
        is_on = getattr(args, PREFIX, False)
        for name, value in ((PREFIX, is_on), (f"{PREFIX}_observe", values["observe"])):
            # an override of Bridge may be any text
            if value not in (True, False, None):
                raise ValueError(f"{name}={value!r} must be true or false")
        values["observe"] = bool(values["observe"])
        if is_on or values["observe"]:
            return cls(**values)
        idle = [f.name for f in fields if values[f.name] != f.default]
        if idle:
            flags = ", ".join(map(_flag, idle))
            warnings.warn(f"{flags} without {FLAG}: FSSDP is off", stacklevel=2)
        return None


def _document(settings: type[HecateConfig]) -> None:
    """Append all fields to the docstring, so that ``help`` and the flags have the same texts."""
    lines = [inspect.cleandoc(settings.__doc__ or ""), "", "Args:"]
    for field in dataclasses.fields(settings):
        facts = f"Default {field.default!r}; {field.metadata['allowed']}; {_flag(field.name)}."
        text = f"{field.name}: {field.metadata['help']} {facts}"
        lines.append(textwrap.indent(textwrap.fill(text, 88, break_on_hyphens=False), "    "))
    settings.__doc__ = "\n".join(lines)


def _flag(field: str) -> str:
    return f"{FLAG}-{field.replace('_', '-')}"


_document(HecateConfig)
