"""Flags and overrides on a command line."""

from __future__ import annotations

import dataclasses
import re
import shlex
from collections.abc import Iterator, Sequence
from typing import Any

from megatron_hecate.tools.files.variables import REFERENCE, Unresolved

# our flags that take no value
SWITCHES = ("moe-fssdp", "moe-fssdp-observe")
OVERRIDE = re.compile(r"\+{0,2}~?(?P<path>[A-Za-z_][\w.]*)=(?P<value>.*)", re.DOTALL)


@dataclasses.dataclass(frozen=True)
class Flag:
    """Setting on a command line.

    Args:
        name: name without dashes in front; an override of Hydra keeps its dots.
        value: text, list of texts, `Unresolved`, or True for a flag without a value.
    """

    name: str
    value: Any


class Perhaps(Unresolved):
    """Value of a flag that may be absent from the command line."""


def flags_of(words: Sequence[str | Unresolved]) -> Iterator[Flag]:
    """Yield the flags in ``words`` with their values, and the overrides of Hydra."""
    at = 0
    while at < len(words):
        word = words[at]
        at += 1
        text = str(word)
        if text.startswith("--") and len(text) > 2:
            name, equals, value = text[2:].partition("=")
            if equals:
                yield Flag(name, _text_of(value, word))
                continue
            if name in SWITCHES:
                yield Flag(name, True)
                continue
            values: list[str | Unresolved] = []
            while at < len(words) and not _starts_another(str(words[at])):
                values.append(words[at])
                at += 1
            yield Flag(name, _value_of(values))
        elif (found := OVERRIDE.fullmatch(text)) and "." in found["path"]:
            yield Flag(found["path"], _text_of(found["value"], word))


def split_words(text: str) -> list[str]:
    """Split a command line into words; split at white space if a quote stays open."""
    try:
        return shlex.split(text, comments=False)
    except ValueError:
        return text.split()


def _value_of(words: list[str | Unresolved]) -> Any:
    """Return the value of a flag from the words behind it."""
    if not words:
        return True
    # a variable after the first value may hold other flags
    values = words[:1] + [word for word in words[1:] if not _is_variable(word)]
    if len(values) == 1:
        return values[0]
    return values


def _is_variable(word: str | Unresolved) -> bool:
    return isinstance(word, Unresolved) and REFERENCE.fullmatch(word.text) is not None


def _starts_another(word: str) -> bool:
    """Return whether ``word`` is a flag or an override, not a value."""
    found = OVERRIDE.fullmatch(word)
    return word.startswith("--") or (found is not None and "." in found["path"])


def _text_of(value: str, word: str | Unresolved) -> str | Unresolved:
    """Return ``value``, a part of ``word``, as unresolved if the word is."""
    if isinstance(word, Unresolved):
        return Unresolved(value, word.names)
    return value
