"""Read the flags of a job from a launch script, without running it.

Assignments are followed in their order, with defaults (``${EP:-8}``) and arrays. Conditions on known
variables are evaluated. What other conditions decide is not guessed: settings that depend on them
count as unknown, with the variables that the conditions look at.
"""

from __future__ import annotations

import dataclasses
import re
import shlex
from collections.abc import Iterator, Mapping
from typing import Any

from megatron_hecate.settings.files.shell_text import COMMAND, simplified
from megatron_hecate.settings.files.variables import DEEPEST, REFERENCE, Resolver, Unresolved

ASSIGNMENT = re.compile(r"(?P<name>[A-Za-z_]\w*)(?P<add>\+?)=(?P<value>.*)", re.DOTALL)
OVERRIDE = re.compile(r"\+{0,2}~?(?P<path>[A-Za-z_][\w.]*)=(?P<value>.*)", re.DOTALL)
DECLARE = {"export", "declare", "local", "readonly", "typeset", "set"}
OPEN, CLOSE = {"if", "case", "for", "while", "until"}, {"fi", "esac", "done"}
WORDS = {"then", "else", "elif", "do", "{", "}", "!", "time", "exec", "sudo", "nohup", "in"}
TESTS = ("[", "[[", "test")
ASKS = {
    "!",
    "command",
    "false",
    "grep",
    "pgrep",
    "type",
    "which",
}  # whose success is not to be taken for granted
PRINTS = {"echo", "printf", "cat", "mkdir", "cd", "pip", "source", "."}


@dataclasses.dataclass(frozen=True)
class Flag:
    """A setting on a command line.

    Args:
        name: without dashes in front; overrides of Hydra keep their dots.
        value: a text, a list of such, True for a flag without one, or an `Unresolved`.
    """

    name: str
    value: Any


class Perhaps(Unresolved):
    """The value of a flag that may not stand there at all."""


@dataclasses.dataclass(frozen=True)
class CommandLine:
    """One command of a script.

    Args:
        flags: in their order.
        unknown: variables in it that may hold flags and could not be resolved.
    """

    flags: tuple[Flag, ...]
    unknown: tuple[str, ...]


@dataclasses.dataclass
class _Block:
    """An open ``if``, ``case`` or loop.

    Args:
        runs: whether its running branch does; ``None`` where that is not known.
        names: of the variables that decide.
        is_over: whether an earlier branch is known to run.
        before: ``runs`` and ``is_over`` of the branches before the running one.
        condition: whether the running branch's condition holds, as far as it has been read.
        is_open: whether more of the condition may come, behind ``&&`` or ``||``.
    """

    runs: bool | None
    names: tuple[str, ...]
    is_over: bool = False
    before: tuple[bool | None, bool] = (False, False)
    condition: bool | None = None
    is_open: bool = False

    def decide(self, condition: bool | None, names: tuple[str, ...]) -> None:
        """The running branch's ``condition``, which looks at ``names``, holds, does not, or is not known."""
        self.condition = condition
        self.names += names
        before, self.is_over = self.before
        if self.is_over:
            self.runs = False
            return
        # behind a branch that may have run, one that is known to hold may not run
        self.runs = None if before is None and condition else condition
        self.is_over = self.runs is True


class LaunchScript:
    """A launch script.

    Args:
        text: of the script.
        environment: of the shell that would start it.
    """

    def __init__(self, text: str, environment: Mapping[str, str]) -> None:
        self._values: dict[str, str] = {}
        self._decided: dict[
            str, tuple[str, ...]
        ] = {}  # by variable, those that a condition on it looks at
        self._alternatives: dict[str, list[str]] = {}  # what such a variable may become
        self.commands: list[CommandLine] = []
        self.sourced: list[str] = []
        self._resolver = Resolver(self._lookup, environment)
        self._blocks: list[_Block] = []
        # of the command before: whether it succeeded, and the variables that decide
        self._status: tuple[bool | None, tuple[str, ...]] = (True, ())
        self._is_in_brackets = False  # of a ``[[ ... && ... ]]``
        for connector, words in _commands(text):
            self._read_connected(connector, words)

    def _lookup(self, name: str) -> str | None:
        return None if name in self._decided else self._values.get(name)

    def _read_connected(self, connector: str, words: list[str]) -> None:
        """Read a command behind ``&&`` or ``||``, which the commands before decide on, or behind neither."""
        status, names = self._status if connector else (True, ())
        parts, is_rest = list(words), connector != "" and self._is_in_brackets
        if parts[0] == "[[" or (parts[0] in OPEN and "[[" in parts) or is_rest:
            self._is_in_brackets = "]]" not in parts
        result, more = self._result(["[[", *parts] if is_rest else parts)
        self._status = _connected(status, connector, result), names + more
        block = self._blocks[-1] if self._blocks else None
        if connector and block is not None and block.is_open:
            block.decide(_connected(block.condition, connector, result), more)
        elif not is_rest:
            runs = status if connector != "||" or status is None else not status
            own = None if runs else _Block(runs, names)
            self._blocks += [own] if own else []
            self._read(words)
            self._blocks = [known for known in self._blocks if known is not own]

    def _result(self, words: list[str]) -> tuple[bool | None, tuple[str, ...]]:
        """Return whether a command succeeds, and the variables that decide."""
        if words[0] in TESTS:
            return self._evaluate(words)
        return (None if words[0] in ASKS else True), ()

    def _read(self, words: list[str]) -> None:
        while words and words[0] in WORDS | OPEN | CLOSE:
            word = words.pop(0)
            if word in OPEN:
                self._blocks.append(_Block(None, ()))
                if word == "if":
                    self._begin_branch(self._blocks[-1], *self._evaluate(words))
            elif word in CLOSE and self._blocks:
                self._blocks.pop()
            elif word == "elif" and self._blocks:
                block = self._blocks[-1]
                block.before = block.runs, block.is_over
                self._begin_branch(block, *self._evaluate(words))
            elif word == "else" and self._blocks:
                block = self._blocks[-1]
                block.before = block.runs, block.is_over
                block.decide(True, ())
            elif word == "then" and self._blocks:
                self._blocks[-1].is_open = False
        if any(block.runs is False for block in self._blocks):
            return
        if words and words[0] in DECLARE:
            words = [word for word in words[1:] if not word.startswith("-")]
        while words and (found := ASSIGNMENT.fullmatch(words[0])):
            self._assign(found["name"], found["value"], adds=bool(found["add"]))
            words = words[1:]
        if words and words[0] in ("source", "."):
            self.sourced += words[1:2]
        if words and words[0] not in PRINTS:
            self._add_command(words)

    @staticmethod
    def _begin_branch(block: _Block, condition: bool | None, names: tuple[str, ...]) -> None:
        block.is_open = True
        block.decide(condition, names)

    def _evaluate(self, words: list[str]) -> tuple[bool | None, tuple[str, ...]]:
        """Return whether ``[ ... ]`` holds, if it is known, and the variables it looks at."""
        names = tuple(name for word in words for name in self._resolver.names(word))
        test = [word for word in words if word not in ("[", "]", "[[", "]]", "test")]
        if not words or words[0] not in TESTS or len(words) - len(test) > 2:
            return None, names
        values = [self._resolver.resolve(word) for word in test]
        if len(test) == 2 and test[0] in ("-z", "-n"):
            known = values[1]
            if isinstance(known, Unresolved):
                # nobody sets it: it is empty
                is_unset = all(
                    name not in self._values and name.isidentifier() for name in known.names
                )
                return (
                    (test[0] == "-z") if is_unset and COMMAND not in known.names else None
                ), names
            return (test[0] == "-z") == (known == ""), names
        if len(test) == 3 and not any(isinstance(value, Unresolved) for value in values):
            left, operator, right = map(str, values)
            if operator in ("=", "==", "!=", "-eq", "-ne"):
                return (left == right) == (operator in ("=", "==", "-eq")), names
            if left.isdigit() and right.isdigit() and operator in ("-gt", "-ge", "-lt", "-le"):
                order = {"-gt": int(left) > int(right), "-ge": int(left) >= int(right)}
                order |= {"-lt": int(left) < int(right), "-le": int(left) <= int(right)}
                return order[operator], names
        return None, names

    def _assign(self, name: str, value: str, *, adds: bool) -> None:
        own = self._values.get(name, "")
        before = own if adds else ""
        value = re.sub(
            rf"\$(\{{{name}(\[@\])?\}}|{name}\b)", lambda _: own, value
        )  # ``X="$X --more"``
        # the values of other variables as of now; those that are unknown stay
        known = f"{before} {self._resolver.replace_known(value)}".strip()
        if any(block.runs is None for block in self._blocks):
            self._decided[name] = tuple(n for block in self._blocks for n in block.names) or (name,)
            self._alternatives.setdefault(name, []).append(known)
            return
        self._values[name] = known
        self._decided.pop(name, None)

    def _add_command(self, words: list[str]) -> None:
        unknown: list[str] = []
        expanded = [part for word in words for part in self._expand(word, unknown)]
        flags = list(flags_of(expanded))
        if flags:
            self.commands.append(CommandLine(tuple(flags), tuple(dict.fromkeys(unknown))))

    def _expand(
        self, word: str, unknown: list[str], *, depth: int = 0
    ) -> Iterator[str | Unresolved]:
        """Yield the words that a word becomes: many for a variable that holds flags, or a command in quotes."""
        reference = REFERENCE.fullmatch(word)
        text = word if reference is None else self._resolver.raw(reference)
        if text is None or depth > DEEPEST:
            yield from self._unknown(word, unknown)
            return
        holds_words = reference is not None or re.search(r"(^|\s)--", text) or REFERENCE.match(text)
        if " " in text.strip() and holds_words:
            for part in split_words(text):
                yield from self._expand(part, unknown, depth=depth + 1)
        elif reference is not None and REFERENCE.fullmatch(text):
            yield from self._expand(text, unknown, depth=depth + 1)
        else:
            yield self._resolver.resolve(text)

    def _unknown(self, word: str, unknown: list[str]) -> Iterator[str | Unresolved]:
        """Yield the flags that a variable of unknown value may hold, without their values."""
        names = self._resolver.names(word)
        if not names:
            yield word
            return
        deciders = tuple(
            dict.fromkeys(d for name in names for d in self._decided.get(name, (name,)))
        )
        unknown += deciders
        flags = [
            f
            for name in names
            for text in self._alternatives.get(name, ())
            for f in flags_of(split_words(text))
        ]
        for flag in dict.fromkeys(flag.name for flag in flags):
            yield f"--{flag}"
            yield Perhaps(word, deciders)
        if not flags:
            yield Unresolved(word, deciders)


def _connected(left: bool | None, connector: str, right: bool | None) -> bool | None:
    """Return whether two commands with ``&&``, ``||`` or nothing between them succeed, if it is known."""
    if connector == "":
        return right
    decides = connector == "||"
    if decides in (left, right):
        return decides
    return None if None in (left, right) else not decides


def flags_of(words: list[str | Unresolved]) -> Iterator[Flag]:
    """Yield flags with the words after them, and overrides of Hydra."""
    at = 0
    while at < len(words):
        word = words[at]
        at += 1
        text = str(word)
        if text.startswith("--") and len(text) > 2:
            name, equals, value = text[2:].partition("=")
            values: list[Any] = [_text_of(value, word)] if equals else []
            while not equals and at < len(words) and not _starts_another(str(words[at])):
                values.append(words[at])
                at += 1
            # a variable after the first value may hold other flags
            lone = (
                isinstance(v, Unresolved) and REFERENCE.fullmatch(v.text) is not None
                for v in values[1:]
            )
            values = values[:1] + [
                v for v, is_lone in zip(values[1:], lone, strict=True) if not is_lone
            ]
            yield Flag(name, True if not values else values[0] if len(values) == 1 else values)
        elif (found := OVERRIDE.fullmatch(text)) and "." in found["path"]:
            yield Flag(found["path"], _text_of(found["value"], word))


def _starts_another(word: str) -> bool:
    found = OVERRIDE.fullmatch(word)
    return word.startswith("--") or (found is not None and "." in found["path"])


def _text_of(value: str, word: str | Unresolved) -> str | Unresolved:
    return Unresolved(value, word.names) if isinstance(word, Unresolved) else value


def split_words(text: str) -> list[str]:
    """Return the words of a command line; quotes that stay open are taken as they are."""
    try:
        return shlex.split(text, comments=False)
    except ValueError:
        return text.split()


def _commands(text: str) -> Iterator[tuple[str, list[str]]]:
    """Yield what connects each command to the one before (``&&``, ``||`` or nothing), and its words; an array is one
    assignment. Comments and redirections are left out."""
    lexer = shlex.shlex(simplified(text), posix=True, punctuation_chars="\n;|&()<>")
    lexer.whitespace, lexer.whitespace_split, lexer.commenters = " \t\r", True, ""
    words: list[str] = []
    array: list[str] | None = None  # the elements of one that is open
    is_target = False  # of a redirection
    connector = ""
    try:
        for token in lexer:
            if not token or not set(token) <= set("\n;|&()<>"):
                if not is_target:
                    (words if array is None else array).append(token)
                is_target = False
                continue
            if token[0] in "<>":
                is_target = "\n" not in token
                if is_target:
                    continue
            for mark in token:
                if mark == "(" and words and words[-1].endswith("=") and array is None:
                    array = []
                elif mark == ")" and array is not None:
                    words[-1] += (
                        shlex.join(array)
                        if not any("$" in part for part in array)
                        else " ".join(array)
                    )
                    array = None
                elif mark in "\n;|&()" and array is None and words:
                    yield connector, words
                    words, connector = [], ""
            if array is None and not words:
                connector = next((mark for mark in ("&&", "||") if mark in token), connector)
    except (
        ValueError
    ):  # an open quote: the rest is lost, which what was read before does not suffer from
        pass
    if words:
        yield connector, words


def looks_like_script(text: str, suffix: str) -> bool:
    """Return whether a file is a shell script, by its suffix, its first line or its flags."""
    if suffix in (".sh", ".bash", ".slurm", ".sbatch", ".zsh", ".job"):
        return True
    first = text.partition("\n")[0]
    if suffix in (".json", ".yaml", ".yml"):
        return False
    is_shell = re.fullmatch(r"#!.*\b(ba|z|da|k)?sh\b.*", first) is not None
    return is_shell or re.search(r"\s--[a-z][\w-]+", text) is not None
