"""Read the flags of a job from a launch script, without running it.

Assignments are followed in their order, with defaults (``${EP:-8}``) and arrays. Conditions on
known variables are evaluated. Settings under any other condition are unknown, and the verdict names
the variables in the condition.
"""

from __future__ import annotations

import dataclasses
import operator
import re
from collections.abc import Callable, Iterator, Mapping

from megatron_hecate.tools.files.flags import Flag, Perhaps, flags_of, split_words
from megatron_hecate.tools.files.shell_text import COMMAND, split_commands
from megatron_hecate.tools.files.variables import DEEPEST, REFERENCE, Resolver, Unresolved

ASSIGNMENT = re.compile(r"(?P<name>[A-Za-z_]\w*)(?P<add>\+?)=(?P<value>.*)", re.DOTALL)
DECLARE = {"export", "declare", "local", "readonly", "typeset", "set"}
OPEN = {"if", "case", "for", "while", "until"}
CLOSE = {"fi", "esac", "done"}
WORDS = {"then", "else", "elif", "do", "{", "}", "!", "time", "exec", "sudo", "nohup", "in"}
TESTS = ("[", "[[", "test")
# commands whose success depends on the machine
ASKS = {"!", "command", "false", "grep", "pgrep", "type", "which"}
# commands whose words are no settings
PRINTS = {"echo", "printf", "cat", "mkdir", "cd", "pip", "source", "."}
ORDERS: dict[str, Callable[[int, int], bool]] = {
    "-gt": operator.gt,
    "-ge": operator.ge,
    "-lt": operator.lt,
    "-le": operator.le,
}


@dataclasses.dataclass(frozen=True)
class CommandLine:
    """One command of a script.

    Args:
        flags: flags in their order.
        unknown: unresolved variables of the command that may hold flags.
    """

    flags: tuple[Flag, ...]
    unknown: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class _Outcome:
    """Outcome of a command or a condition.

    Args:
        succeeds: ``None`` if unknown.
        names: variables that the outcome depends on.
    """

    succeeds: bool | None
    names: tuple[str, ...] = ()

    def connect(self, connector: str, right: _Outcome) -> _Outcome:
        """Return the outcome of two commands with ``&&``, ``||`` or nothing between the two."""
        names = self.names + right.names
        if connector == "":
            return _Outcome(right.succeeds, names)
        # a success decides ``||``, a failure decides ``&&``
        decisive = connector == "||"
        both = (self.succeeds, right.succeeds)
        if decisive in both:
            return _Outcome(decisive, names)
        if None in both:
            return _Outcome(None, names)
        return _Outcome(not decisive, names)


SUCCESS = _Outcome(True)


@dataclasses.dataclass
class _Block:
    """Open ``if``, ``case`` or loop.

    Args:
        runs: whether the current branch runs; ``None`` if unknown.
        names: variables that decide.
        is_over: whether an earlier branch, or the current one, is known to run.
        ran_before: ``runs`` of the branch before the current one.
        was_over: ``is_over`` of the branch before the current one.
        condition: outcome of the current branch's condition, as far as it has been read.
        is_open: whether the condition may continue behind ``&&`` or ``||``.
    """

    runs: bool | None
    names: tuple[str, ...] = ()
    is_over: bool = False
    ran_before: bool | None = False
    was_over: bool = False
    condition: _Outcome = SUCCESS
    is_open: bool = False

    def begin_branch(self, condition: _Outcome) -> None:
        """Begin a branch whose ``condition`` may continue."""
        self.is_open = True
        self.decide(condition)

    def end_branch(self) -> None:
        """Store the state of the current branch for the next one."""
        self.ran_before = self.runs
        self.was_over = self.is_over

    def decide(self, condition: _Outcome) -> None:
        """Set whether the current branch runs from the ``condition`` read so far."""
        self.condition = condition
        self.names += condition.names
        self.is_over = self.was_over
        if self.is_over:
            self.runs = False
            return
        self.runs = condition.succeeds
        # the branch before may have run, so even a true condition decides nothing
        if self.ran_before is None and condition.succeeds:
            self.runs = None
        self.is_over = self.runs is True


class LaunchScript:
    """Launch script, read without running it.

    Args:
        text: text of the script.
        environment: variables of the shell that would start the script.

    Attributes:
        commands: commands with flags, in their order.
        sourced: files that the script sources.
    """

    def __init__(self, text: str, environment: Mapping[str, str]) -> None:
        self.commands: list[CommandLine] = []
        self.sourced: list[str] = []
        self._values: dict[str, str] = {}
        # variables with an assignment under an unknown condition: variables in the condition
        self._deciders: dict[str, tuple[str, ...]] = {}
        # the same variables: values that they may have
        self._alternatives: dict[str, list[str]] = {}
        self._resolver = Resolver(self._lookup, environment)
        self._blocks: list[_Block] = []
        # outcome of the commands before, as far as a connector joins the next one
        self._outcome = SUCCESS
        # inside a ``[[ ... && ... ]]``, which the lexer splits at the connector
        self._is_in_brackets = False
        for connector, words in split_commands(text):
            self._read_connected(connector, words)

    def _lookup(self, name: str) -> str | None:
        if name in self._deciders:
            return None
        return self._values.get(name)

    def _read_connected(self, connector: str, words: list[str]) -> None:
        """Read a command behind ``&&``, ``||`` or nothing."""
        before = SUCCESS
        if connector:
            before = self._outcome
        continues_brackets = connector != "" and self._is_in_brackets
        opens_brackets = words[0] == "[[" or (words[0] in OPEN and "[[" in words)
        if opens_brackets or continues_brackets:
            self._is_in_brackets = "]]" not in words
        if continues_brackets:
            outcome = self._outcome_of(["[[", *words])
        else:
            outcome = self._outcome_of(words)
        self._outcome = before.connect(connector, outcome)
        if connector and self._blocks and self._blocks[-1].is_open:
            self._continue_condition(self._blocks[-1], connector, outcome)
        elif not continues_brackets:
            self._read_if(connector, before, words)

    @staticmethod
    def _continue_condition(block: _Block, connector: str, outcome: _Outcome) -> None:
        joined = block.condition.connect(connector, outcome)
        # the block already has the variables of the condition's first part
        block.decide(_Outcome(joined.succeeds, outcome.names))

    def _read_if(self, connector: str, before: _Outcome, words: list[str]) -> None:
        """Read a command that runs depending on the outcome of the commands before."""
        runs = before.succeeds
        if connector == "||" and runs is not None:
            runs = not runs
        if runs:
            self._read(words)
            return
        # such a command counts like the body of an ``if``
        block = _Block(runs, before.names)
        self._blocks.append(block)
        self._read(words)
        self._blocks = [known for known in self._blocks if known is not block]

    def _outcome_of(self, words: list[str]) -> _Outcome:
        if words[0] in TESTS:
            return self._evaluate(words)
        if words[0] in ASKS:
            return _Outcome(None)
        return SUCCESS

    def _read(self, words: list[str]) -> None:
        """Read the keywords, assignments and flags of one command."""
        while words and words[0] in WORDS | OPEN | CLOSE:
            keyword = words.pop(0)
            self._read_keyword(keyword, words)
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

    def _read_keyword(self, keyword: str, rest: list[str]) -> None:
        """Open, close or continue a block."""
        if keyword in OPEN:
            block = _Block(None)
            self._blocks.append(block)
            if keyword == "if":
                block.begin_branch(self._evaluate(rest))
            return
        if not self._blocks:
            return
        block = self._blocks[-1]
        if keyword in CLOSE:
            self._blocks.pop()
        elif keyword == "elif":
            block.end_branch()
            block.begin_branch(self._evaluate(rest))
        elif keyword == "else":
            block.end_branch()
            block.decide(SUCCESS)
        elif keyword == "then":
            block.is_open = False

    def _evaluate(self, words: list[str]) -> _Outcome:
        """Evaluate ``[ ... ]``."""
        names = tuple(self._names_in(words))
        test = [word for word in words if word not in ("[", "]", "[[", "]]", "test")]
        # with more than two brackets it is no single test
        if not words or words[0] not in TESTS or len(words) - len(test) > 2:
            return _Outcome(None, names)
        values = [self._resolver.resolve(word) for word in test]
        if len(test) == 2 and test[0] in ("-z", "-n"):
            is_empty = self._is_empty(values[1])
            if is_empty is not None and test[0] == "-n":
                return _Outcome(not is_empty, names)
            return _Outcome(is_empty, names)
        if len(test) == 3 and not any(isinstance(value, Unresolved) for value in values):
            left, comparison, right = map(str, values)
            return _Outcome(_compare(left, comparison, right), names)
        return _Outcome(None, names)

    def _names_in(self, words: list[str]) -> list[str]:
        names: list[str] = []
        for word in words:
            names += self._resolver.names(word)
        return names

    def _is_empty(self, value: str | Unresolved) -> bool | None:
        """Return whether a value is the empty text, or ``None`` if unknown."""
        if not isinstance(value, Unresolved):
            return value == ""
        is_set = any(name in self._values or not name.isidentifier() for name in value.names)
        if is_set or COMMAND in value.names:
            return None
        # neither the script nor the environment sets the variable, so it is empty
        return True

    def _assign(self, name: str, value: str, *, adds: bool) -> None:
        own = self._values.get(name, "")
        # the own value in ``X="$X --more"``
        value = re.sub(rf"\$(\{{{name}(\[@\])?\}}|{name}\b)", lambda _: own, value)
        # the current values of other variables; unknown variables stay
        known = self._resolver.replace_known(value)
        if adds:
            known = f"{own} {known}"
        known = known.strip()
        if any(block.runs is None for block in self._blocks):
            deciders: list[str] = []
            for block in self._blocks:
                deciders += block.names
            self._deciders[name] = tuple(deciders) or (name,)
            self._alternatives.setdefault(name, []).append(known)
            return
        self._values[name] = known
        self._deciders.pop(name, None)

    def _add_command(self, words: list[str]) -> None:
        unknown: list[str] = []
        expanded: list[str | Unresolved] = []
        for word in words:
            expanded += self._expand(word, unknown)
        flags = tuple(flags_of(expanded))
        if flags:
            self.commands.append(CommandLine(flags, tuple(dict.fromkeys(unknown))))

    def _expand(
        self, word: str, unknown: list[str], *, depth: int = 0
    ) -> Iterator[str | Unresolved]:
        """Yield the words that ``word`` expands to.

        There are several for a variable that holds flags, and for a command in quotes.

        Args:
            word: word of a command.
            unknown: unresolved variables; appended to.
            depth: number of expansions so far.
        """
        reference = REFERENCE.fullmatch(word)
        text: str | None = word
        if reference is not None:
            text = self._resolver.raw(reference)
        if text is None or depth > DEEPEST:
            yield from self._expand_unknown(word, unknown)
            return
        holds_words = reference is not None or re.search(r"(^|\s)--", text) or REFERENCE.match(text)
        if " " in text.strip() and holds_words:
            for part in split_words(text):
                yield from self._expand(part, unknown, depth=depth + 1)
        elif reference is not None and REFERENCE.fullmatch(text):
            yield from self._expand(text, unknown, depth=depth + 1)
        else:
            yield self._resolver.resolve(text)

    def _expand_unknown(self, word: str, unknown: list[str]) -> Iterator[str | Unresolved]:
        """Yield the flags that a variable of unknown value may hold, without their values."""
        names = self._resolver.names(word)
        if not names:
            yield word
            return
        deciders: dict[str, None] = {}
        flags: dict[str, None] = {}
        for name in names:
            deciders.update(dict.fromkeys(self._deciders.get(name, (name,))))
            for text in self._alternatives.get(name, ()):
                flags.update((flag.name, None) for flag in flags_of(split_words(text)))
        unknown += deciders
        for flag in flags:
            yield f"--{flag}"
            yield Perhaps(word, tuple(deciders))
        if not flags:
            yield Unresolved(word, tuple(deciders))


def _compare(left: str, comparison: str, right: str) -> bool | None:
    """Compare two values as ``[`` does, or return ``None`` for an unknown comparison."""
    if comparison in ("=", "==", "-eq"):
        return left == right
    if comparison in ("!=", "-ne"):
        return left != right
    if comparison in ORDERS and left.isdigit() and right.isdigit():
        return ORDERS[comparison](int(left), int(right))
    return None
