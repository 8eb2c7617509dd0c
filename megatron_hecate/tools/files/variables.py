"""Resolve variables in settings.

Shells write ``$EP``, ``${EP}``, ``${EP:-8}`` and arithmetic such as ``$((GPUS / 2))``. YAML files
of several frameworks write ``${EP:8}`` and ``${a.b}``.
"""

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
# resolvers of OmegaConf that take a name and a default
NAMED = ("oc.env:", "env:", "oc.select:")
# resolver of OmegaConf that takes a value
VALUE = "oc.decode:"
# limit of variables within variables
DEEPEST: int = 20
# Prefix of an expression in the place of a variable's name. The expression has brackets for
# parentheses and no spaces, because the name must stay one word.
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
    """Value with variables that are not set.

    Args:
        text: text of the value in the file.
        names: names of the variables.
    """

    text: str
    names: tuple[str, ...]

    def __str__(self) -> str:
        return self.text


@dataclasses.dataclass
class Resolver:
    """Resolver of variables in texts.

    Args:
        lookup: function from a variable's name to its value, or ``None``.
        environment: variables of the shell that starts the job.
    """

    lookup: Callable[[str], Any]
    environment: Mapping[str, str]

    def resolve(self, text: str) -> Any:
        """Return ``text`` with the values of its variables, or an `Unresolved`.

        If ``text`` is one variable, the result is the variable's value, of any type.
        """
        if (whole := REFERENCE.fullmatch(text)) is not None:
            return self._value(whole, depth=0, text=text)
        missing: list[str] = []
        result = self._replace(text, missing, depth=0)
        if missing:
            return Unresolved(text, tuple(dict.fromkeys(missing)))
        return result

    def replace_known(self, text: str) -> str:
        """Return ``text`` with the values of its known variables."""
        return self._replace(text, [], depth=0)

    def raw(self, found: re.Match) -> str | None:
        """Return the value of a `REFERENCE`, or ``None``. It may contain further variables."""
        name, mark, default = _parts(found)
        if name.startswith(ARITHMETIC):
            value = self._calculate(name, depth=0, text=found[0])
            if isinstance(value, Unresolved):
                return None
            return str(value)
        value = _with_operator(self._known(name), mark, default)
        if value is None or _is_argument(value):
            return None
        return str(value)

    def _known(self, name: str) -> Any:
        """Return a variable's value from the file, else from the environment.

        The environment also gives values to variables that are set from arguments of the script.
        """
        value = self.lookup(name)
        if value is None or (isinstance(value, str) and REFERENCE.fullmatch(value)):
            return self.environment.get(name, value)
        return value

    def names(self, text: str) -> list[str]:
        """Return the names of all variables in ``text``."""
        names: list[str] = []
        for reference in REFERENCE.finditer(text):
            name = _parts(reference)[0]
            if name.startswith(ARITHMETIC):
                names += _names_in(name)
            else:
                names.append(name)
        return names

    def _replace(self, text: str, missing: list[str], *, depth: int) -> str:
        def value(found: re.Match) -> str:
            resolved = self._value(found, depth=depth, text=found[0])
            if isinstance(resolved, Unresolved):
                missing.extend(resolved.names)
                return found[0]
            return str(resolved)

        previous = None
        while previous != text and REFERENCE.search(text) and depth < DEEPEST:
            previous = text
            text = REFERENCE.sub(value, text)
            if missing:
                break
            depth += 1
        return text

    def _value(self, found: re.Match, *, depth: int, text: str) -> Any:
        name, mark, default = _parts(found)
        if name.startswith(ARITHMETIC):
            return self._calculate(name, depth=depth, text=text)
        value = _with_operator(self._known(name), mark, default)
        if value is None or depth >= DEEPEST:
            return Unresolved(text, (name,))
        if isinstance(value, str) and REFERENCE.search(value):
            if _is_argument(value):
                # the user can set it in the environment by this name
                return Unresolved(text, (name,))
            missing: list[str] = []
            value = self._replace(value, missing, depth=depth + 1)
            if missing:
                return Unresolved(text, tuple(missing))
        return value

    def _calculate(self, expression: str, *, depth: int, text: str) -> Any:
        """Return the whole number of an ``expression`` of `arithmetic` as a text."""
        numbers: dict[str, int] = {}
        missing: list[str] = []
        for name in _names_in(expression):
            value = self._operand(name, depth=depth)
            try:
                numbers[name] = int(str(value))
            except ValueError:
                if isinstance(value, Unresolved):
                    missing += value.names
                else:
                    missing.append(name)
        try:
            tree = ast.parse(expression.translate(str.maketrans("[]", "()")), mode="eval")
            if missing:
                return Unresolved(text, tuple(missing))
            return str(_evaluate(tree.body, numbers))
        except (SyntaxError, ValueError, ZeroDivisionError):
            return Unresolved(text, tuple(_names_in(expression)))

    def _operand(self, name: str, *, depth: int) -> Any:
        """Return the value of a variable in an expression at ``depth``."""
        if depth >= DEEPEST:
            return Unresolved(name, (name,))
        reference = REFERENCE.fullmatch(f"${{{name}}}")
        assert reference is not None
        return self._value(reference, depth=depth + 1, text=name)


def arithmetic(text: str) -> str | None:
    """Return a variable that stands for ``$((...))``, with the expression as its name.

    ``None`` for the output of a command, and for an expression with other parts than numbers,
    variables and signs of `OPERATORS`.
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
    """Return the value of ``node``.

    Raises:
        ValueError: for an expression that is no arithmetic of whole numbers.
    """
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
    """Return whether a variable's value is just an argument of the script, such as ``$1``."""
    if not isinstance(value, str):
        return False
    found = REFERENCE.fullmatch(value)
    if found is None:
        return False
    name, mark, _ = _parts(found)
    return mark == "" and not name.isidentifier()


def _with_operator(value: Any, mark: str, default: str) -> Any:
    """Return the value of a variable with a default, as the shell or OmegaConf computes it.

    Args:
        value: value of the variable alone, or ``None``.
        mark: operator between name and default, such as ``:-``.
        default: text behind the operator.
    """
    is_empty = value is None or (value == "" and mark.startswith(":"))
    if mark.endswith("+"):
        return "" if is_empty else default
    if not is_empty:
        return value
    if mark[-1:] in ("-", "=", ":", ","):
        return default
    return None


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
    # an unknown resolver of OmegaConf with its arguments
    if parts is None or (parts["operator"] == ":" and "," in parts["default"]):
        return inner.partition(":")[0], "", ""
    return parts["name"], parts["operator"] or "", parts["default"] or ""
