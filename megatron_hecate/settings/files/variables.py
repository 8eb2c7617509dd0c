"""Variables in settings: ``$EP``, ``${EP}``, ``${EP:-8}`` of shells, ``${EP:8}`` and ``${a.b}`` of YAML files; and
arithmetic with them, ``$((GPUS / 2))``."""

from __future__ import annotations

import ast
import dataclasses
import operator
import re
from collections.abc import Callable, Mapping
from typing import Any

REFERENCE = re.compile(r"\$(?:(?P<plain>[A-Za-z_]\w*|[0-9@*#?$!-])|\{(?P<braced>[^{}]*)\})")
BRACED = re.compile(
    r"(?P<name>[\w.@*]+)(?:\[[@*\w]*\])?(?:(?P<operator>:?[-=+?]|:|,)(?P<default>.*))?", re.DOTALL
)
NAMED = ("oc.env:", "env:", "oc.select:")  # OmegaConf's resolvers of a name and a default
VALUE = "oc.decode:"  # and of a value
DEEPEST: int = 20  # variables within variables
# Before an expression that stands in the place of a variable's name, with brackets for parentheses and without spaces:
# the name must stay one word.
ARITHMETIC = "[["
OPERATORS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    # shells round towards zero
    ast.Div: lambda left, right: int(left / right),
    ast.Mod: lambda left, right: left - right * int(left / right),
    ast.Pow: operator.pow,
}


@dataclasses.dataclass(frozen=True)
class Unresolved:
    """A value that holds variables nobody has set.

    Args:
        text: as it stands in the file.
        names: of the variables.
    """

    text: str
    names: tuple[str, ...]

    def __str__(self) -> str:
        return self.text


@dataclasses.dataclass
class Resolver:
    """Replace variables in texts by their values.

    Args:
        lookup: the value of a variable by its name, or ``None``.
        environment: of the shell that starts the job.
    """

    lookup: Callable[[str], Any]
    environment: Mapping[str, str]

    def resolve(self, text: str) -> Any:
        """Return ``text`` without variables, an `Unresolved`, or the value itself where ``text`` is one variable."""
        if (whole := REFERENCE.fullmatch(text)) is not None:
            return self._value(whole, depth=0, text=text)
        missing: list[str] = []
        result = self._replace(text, missing, depth=0)
        return Unresolved(text, tuple(dict.fromkeys(missing))) if missing else result

    def replace_known(self, text: str) -> str:
        """Return ``text`` with the values of all variables that have one."""
        return self._replace(text, [], depth=0)

    def raw(self, found: re.Match) -> str | None:
        """Return the value of a `REFERENCE`, which may hold further ones, or ``None``."""
        name, operator, default = _parts(found)
        if name.startswith(ARITHMETIC):
            value = self._calculate(name, depth=0, text=found[0])
            return None if isinstance(value, Unresolved) else str(value)
        value = _with_operator(self._known(name), operator, default)
        return None if value is None or _is_argument(value) else str(value)

    def _known(self, name: str) -> Any:
        """Return the value that the file gives, else the environment's: it stands in for arguments of a script."""
        value = self.lookup(name)
        if value is None or (isinstance(value, str) and REFERENCE.fullmatch(value)):
            return self.environment.get(name, value)
        return value

    def names(self, text: str) -> list[str]:
        """Return the names of all variables in ``text``."""
        found = [_parts(reference)[0] for reference in REFERENCE.finditer(text)]
        return [
            name for of in found for name in (_names_in(of) if of.startswith(ARITHMETIC) else [of])
        ]

    def _replace(self, text: str, missing: list[str], *, depth: int) -> str:
        def value(found: re.Match) -> str:
            resolved = self._value(found, depth=depth, text=found[0])
            if isinstance(resolved, Unresolved):
                missing.extend(resolved.names)
                return found[0]
            return str(resolved)

        previous = None
        while previous != text and REFERENCE.search(text) and depth < DEEPEST:
            previous, text = text, REFERENCE.sub(value, text)
            if missing:
                break
            depth += 1
        return text

    def _value(self, found: re.Match, *, depth: int, text: str) -> Any:
        name, operator, default = _parts(found)
        if name.startswith(ARITHMETIC):
            return self._calculate(name, depth=depth, text=text)
        value = _with_operator(self._known(name), operator, default)
        if value is None or depth >= DEEPEST:
            return Unresolved(text, (name,))
        if isinstance(value, str) and REFERENCE.search(value):
            if _is_argument(value):
                return Unresolved(text, (name,))  # the environment may give it by this name
            missing: list[str] = []
            value = self._replace(value, missing, depth=depth + 1)
            return Unresolved(text, tuple(missing)) if missing else value
        return value

    def _calculate(self, expression: str, *, depth: int, text: str) -> Any:
        """Return the whole number that an ``expression`` of `arithmetic` gives, as a text."""
        numbers: dict[str, int] = {}
        missing: list[str] = []
        for name in _names_in(expression):
            reference = REFERENCE.fullmatch(f"${{{name}}}")
            assert reference is not None
            value = (
                Unresolved(name, (name,))
                if depth >= DEEPEST
                else self._value(reference, depth=depth + 1, text=name)
            )
            try:
                numbers[name] = int(str(value))
            except ValueError:
                missing += value.names if isinstance(value, Unresolved) else [name]
        try:
            tree = ast.parse(expression.translate(str.maketrans("[]", "()")), mode="eval")
            return (
                Unresolved(text, tuple(missing)) if missing else str(_evaluate(tree.body, numbers))
            )
        except (SyntaxError, ValueError, ZeroDivisionError):
            return Unresolved(text, tuple(_names_in(expression)))


def arithmetic(text: str) -> str | None:
    """Return a variable that stands for ``$((...))``.

    ``None`` where ``text`` is the output of a command, or more than numbers, variables and signs of `OPERATORS`.
    """
    inner = re.fullmatch(r"\$\(\((.*)\)\)", text, re.DOTALL)
    if inner is None:
        return None
    plain = re.sub(r"\$\{(\w+)\}|\$(\w+)", lambda found: found[1] or found[2], inner[1])
    if re.fullmatch(r"[\w\s()+*/%-]+", plain) is None or re.search(r"\w\s+\w", plain):
        return None
    word = re.sub(r"\s", "", plain).translate(str.maketrans("()", "[]"))
    return f"${{[[{word}]]}}"


def _names_in(expression: str) -> list[str]:
    return re.findall(r"\b[A-Za-z_]\w*", expression)


def _evaluate(node: ast.expr, numbers: Mapping[str, int]) -> int:
    """Return the value of ``node``. Raises ValueError for what is no arithmetic of whole numbers."""
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        return OPERATORS[type(node.op)](
            _evaluate(node.left, numbers), _evaluate(node.right, numbers)
        )
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_evaluate(node.operand, numbers)
    if isinstance(node, ast.Name):
        return numbers[node.id]
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    raise ValueError(f"{ast.unparse(node)} is no arithmetic of whole numbers")


def _is_argument(value: Any) -> bool:
    """Return whether a variable's value is an argument of the script, and no more."""
    found = REFERENCE.fullmatch(value) if isinstance(value, str) else None
    return found is not None and _parts(found)[1] == "" and not _parts(found)[0].isidentifier()


def _with_operator(value: Any, operator: str, default: str) -> Any:
    """Return what the shell, or OmegaConf, makes of a variable with ``operator`` and ``default``."""
    is_empty = value is None or (value == "" and operator.startswith(":"))
    if operator.endswith("+"):
        return "" if is_empty else default
    if is_empty:
        return default if operator[-1:] in ("-", "=", ":", ",") else None
    return value


def _parts(found: re.Match) -> tuple[str, str, str]:
    """Return the name of a variable, the operator after it, and the default."""
    if found["plain"]:
        return found["plain"], "", ""
    inner = found["braced"].strip()
    if inner.startswith(VALUE):
        return "", "-", inner.removeprefix(VALUE)
    for resolver in NAMED:
        if inner.startswith(resolver):
            name, comma, default = inner.removeprefix(resolver).partition(",")
            return name.strip(), comma, default.strip()
    parts = BRACED.fullmatch(inner)
    if parts is None or (
        parts["operator"] == ":" and "," in parts["default"]
    ):  # of a resolver that is not known
        return inner.partition(":")[0], "", ""
    return parts["name"], parts["operator"] or "", parts["default"] or ""
