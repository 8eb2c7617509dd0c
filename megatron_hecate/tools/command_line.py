"""Read the command line of a Megatron script by Megatron's own parser, without starting the script.

Megatron's ``validate_args`` is left to the job: it needs a GPU and the number of ranks.
"""

from __future__ import annotations

import dataclasses
import sys
import warnings
from argparse import ArgumentParser
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

from megatron_hecate.comm.rank_0 import VARIABLES, environment_number
from megatron_hecate.config import HecateConfig, asks_for_fssdp
from megatron_hecate.megatron.rules import SettingSources
from megatron_hecate.switch_on.launcher import STARTERS, flags_among
from megatron_hecate.tools.files.spellings import translate

EXAMPLE = "megatron-hecate check -- pretrain_gpt.py --num-experts 8 ..."
NO_EXPERTS = (
    "there is no --num-experts among Megatron's arguments, and FSSDP trains models with experts; "
    "settings of Megatron-Bridge and other frameworks are read from their file: "
    "megatron-hecate check --settings FILE"
)


@dataclasses.dataclass(frozen=True)
class CommandLine:
    """Command line of a job, as Megatron's parser reads it.

    Args:
        script: path of the script, or name of a module or console command.
        sources: fields by name, in order of precedence, our flags among them.
        unknown_words: words among the script's arguments that Megatron's parser does not know.
        asks_for_fssdp: whether the job switches FSSDP or observing on.
    """

    script: str
    sources: list[dict[str, Any]]
    unknown_words: tuple[str, ...]
    asks_for_fssdp: bool

    @classmethod
    def parse(cls, words: Sequence[str]) -> CommandLine:
        """Parse a command line with our flags added to Megatron's.

        Args:
            words: script and arguments; our launcher and torchrun may precede the script.

        Raises:
            ImportError: without ``megatron.training``.
            ValueError: for what Megatron's parser or our launcher refuses, without a script, and
                without experts.
        """
        for name in VARIABLES:
            environment_number(name)
        # a parser without positional arguments would know nothing behind --
        words = [word for word in words if word != "--"]
        index = _find_script(words)
        flags = flags_among(words)
        extra_words: list[str] = []

        def prepare(parser: ArgumentParser) -> ArgumentParser:
            HecateConfig.add_arguments(parser)
            parse = parser.parse_known_args

            def parse_words() -> Any:
                namespace, remainder = parse(words)
                extra_words.extend(word for word in remainder if word in words[index + 1 :])
                return namespace, remainder

            parser.parse_known_args = parse_words  # type: ignore[method-assign]
            parser.error = _refuse  # type: ignore[method-assign]
            return parser

        _put_on_path(words[index])
        with warnings.catch_warnings():
            # Megatron warns about optional packages that are not installed
            warnings.simplefilter("ignore")
            from megatron.training.arguments import parse_args

            try:
                namespace = parse_args(extra_args_provider=prepare, ignore_unknown_args=True)
            # such as a file of --yaml-cfg that does not exist
            except (OSError, RuntimeError) as error:
                raise ValueError(f"Megatron cannot read the arguments: {error}") from None
        # a file of --yaml-cfg has settings in sections
        parts = [part for part in vars(namespace).values() if isinstance(part, SimpleNamespace)]
        settings = [setting for part in (namespace, *parts) for setting in vars(part).items()]
        sources = [flags, *(translate(name, value) for name, value in settings)]
        unknown_words = [word for word in extra_words if word.startswith(("-", "@"))]
        values = SettingSources(*sources)
        if not (values["num_experts"] or values["num_moe_experts"]):
            extra = f"; it does not know {', '.join(unknown_words)}" if unknown_words else ""
            raise ValueError(f"{NO_EXPERTS}{extra}")
        is_on = asks_for_fssdp({**vars(namespace), **flags})
        return cls(words[index], sources, tuple(dict.fromkeys(unknown_words)), is_on)


def _find_script(words: Sequence[str]) -> int:
    """Return the index of the script: a Python file, a module behind ``-m``, or the first word.

    Raises:
        ValueError: without a script.
    """
    starters = (*STARTERS, "megatron_hecate")
    for index, word in enumerate(words):
        is_module = index > 0 and words[index - 1] == "-m" and word not in starters
        if is_module or word.endswith(".py"):
            return index
    if not words or words[0].startswith("-"):
        raise ValueError(f"a script must follow --, as in {EXAMPLE}")
    return 0


def _refuse(message: str) -> NoReturn:
    """Replace the error of a parser, which prints all of Megatron's flags and exits."""
    raise ValueError(message)


def _put_on_path(script: str) -> None:
    """Search for Megatron where Python would with ``script``: first in its folder."""
    path = Path(script)
    folder = path.resolve().parent if path.is_file() else Path.cwd()
    sys.path.insert(0, str(folder))
