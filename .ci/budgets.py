"""Print sizes of the package against their budgets: ``python .ci/budgets.py [CHECKOUT]``.

Exits with 1 when a budget is exceeded. A public name is a function or class at the top level of a
module, without a leading underscore. A tuned constant is a number with a name in capitals at the
top level of a module. Arguments do not count ``self`` and ``cls``.
"""

from __future__ import annotations

import ast
import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

Node = ast.FunctionDef | ast.AsyncFunctionDef
MOST_ARGUMENTS = 6
# Lines of a function, at most. The planner's loops, which numba compiles, may be longer: they work
# on many local arrays, which helpers of theirs would take as more than 6 arguments.
LONGEST = 60
LONGEST_COMPILED = 85
# Folders that the core knows by a protocol only.
BOXES = ("nvlink", "homes", "routes", "record", "graphs")
# Lines by area, at most: lowered with what is deleted. They were raised for CUDA graphs of whole
# iterations, the bound on rank loads, routes as indices, bf16 gradients of replicas, and the tests
# and benchmarks of these; box nvlink fell from 2,067.
AREAS = {
    "core": 14_068,
    "box nvlink": 1_667,
    "box homes": 1_224,
    "box routes": 288,
    "box record": 1_932,
    "box graphs": 174,
    "tools": 4_547,
    "tests": 30_092,
    "bench": 8_272,
}


# A variable or an argument is a noun. These participles, adverbs, prepositions and pronouns once
# stood for one; names that begin with ``of_`` or end with ``_of`` count as well.
NO_NOUNS = """
    found at own known most before way ways now held made of given left taken kept wanted
    needed seen said here there again only both other others rest same after between within
    without into ahead later earlier away back yet still once every each some such then fits
    filled enough done gone passed carried joined moved sent shown told asked chosen used
    unused missing wrong right worst least more less further apart alone together beside upon
    under over under_way sure ready bare whole half ours theirs mine yours
"""
# Such names among 1,000 bound ones, at most.
MOST_NO_NOUNS = 10


def no_nouns(paths: Iterable[Path]) -> tuple[int, str]:
    """Return how many of 1,000 bound names are no nouns, and the most frequent of them."""
    names = []
    for node in (node for path in paths for node in ast.walk(ast.parse(path.read_text()))):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.append(node.id.strip("_"))
        elif isinstance(node, ast.arg) and node.arg not in ("self", "cls", "ctx"):
            names.append(node.arg.strip("_"))
    listed = set(NO_NOUNS.split())
    odd = Counter(
        name for name in names if name in listed or name.startswith("of_") or name.endswith("_of")
    )
    frequent = ", ".join(name for name, _ in odd.most_common(5))
    return -(-1000 * odd.total() // len(names)), frequent


def lines(paths: Iterable[Path]) -> int:
    return sum(len(path.read_text().splitlines()) for path in paths)


def functions(paths: Iterable[Path]) -> list[tuple[Path, Node]]:
    nodes = ((path, node) for path in paths for node in ast.walk(ast.parse(path.read_text())))
    return [(path, node) for path, node in nodes if isinstance(node, Node)]


def is_compiled(node: Node) -> bool:
    """Whether numba compiles a function (``plan.compiled``)."""
    return any(
        isinstance(of, ast.Name) and of.id.startswith("compiled") for of in node.decorator_list
    )


def longest(nodes: Iterable[tuple[Path, Node]]) -> tuple[int, str]:
    """Return lines and name of the longest function."""
    return max(((node.end_lineno or 0) - node.lineno + 1, node.name) for _, node in nodes)


def num_arguments(node: Node) -> int:
    names = [a.arg for a in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
    return len([name for name in names if name not in ("self", "cls")])


def public_names(paths: Iterable[Path]) -> list[str]:
    body = [node for path in paths for node in ast.parse(path.read_text()).body]
    return [
        n.name for n in body if isinstance(n, Node | ast.ClassDef) and not n.name.startswith("_")
    ]


def constants(paths: Iterable[Path]) -> list[str]:
    """Names of numbers, also of products such as ``256 << 20``."""
    found = []
    number = (ast.Constant, ast.BinOp, ast.UnaryOp, ast.Tuple, ast.Call, ast.Attribute, ast.Name)
    known = (*number, ast.operator, ast.unaryop, ast.Load)
    for node in (node for path in paths for node in ast.parse(path.read_text()).body):
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            values = [n.value for n in ast.walk(node.value) if isinstance(n, ast.Constant)]
            is_number = isinstance(node.value, number[:5]) and all(
                isinstance(n, known) for n in ast.walk(node.value)
            )
            is_number = (
                is_number
                and bool(values)
                and all(isinstance(value, int | float) for value in values)
            )
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names = [
                n.id for target in targets for n in ast.walk(target) if isinstance(n, ast.Name)
            ]
            found += [name for name in names if is_number and name.strip("_").isupper()]
    return found


def areas(root: Path) -> list[tuple[str, int, int, str]]:
    """Return a row of the table for each area, with its budget of lines."""
    package = root / "megatron_hecate"
    boxes = {name: sorted((package / name).rglob("*.py")) for name in BOXES}
    tools = sorted((package / "tools").rglob("*.py"))
    apart = {*tools, *(path for paths in boxes.values() for path in paths)}
    sizes = {
        "core": [path for path in package.rglob("*.py") if path not in apart],
        **{f"box {name}": paths for name, paths in boxes.items()},
        "tools": tools,
        "tests": sorted((root / "tests").rglob("*.py")),
        "bench": sorted((root / "bench").rglob("*.py")),
    }
    return [(f"lines of {name}", lines(paths), AREAS[name], "") for name, paths in sizes.items()]


def main(root: Path) -> int:
    """Print the table; returns the exit status."""
    package = root / "megatron_hecate"
    every = sorted(package.rglob("*.py"))
    plan = sorted((package / "plan").glob("*.py"))
    longest_file = max(every, key=lambda path: lines([path]))
    found = functions(every)
    compiled = [(path, node) for path, node in found if is_compiled(node)]
    lines_of_longest, longest_name = longest(pair for pair in found if pair not in compiled)
    lines_of_compiled, compiled_name = longest(compiled)
    wide = [node for _, node in found if num_arguments(node) > MOST_ARGUMENTS]
    rows: list[tuple[str, int, int | None, str]] = [
        ("files", len(every), None, ""),
        ("lines of the package", lines(every), None, ""),
        *areas(root),
        ("public names", len(public_names(every)), None, ""),
        (
            f"functions with more than {MOST_ARGUMENTS} arguments",
            len(wide),
            0,
            ", ".join(n.name for n in wide[:5]),
        ),
        (
            "most arguments",
            max(num_arguments(node) for _, node in found),
            MOST_ARGUMENTS,
            "",
        ),
        ("longest function", lines_of_longest, LONGEST, longest_name),
        ("longest compiled function", lines_of_compiled, LONGEST_COMPILED, compiled_name),
        ("longest file", lines([longest_file]), 400, longest_file.name),
        ("named numbers, all", len(constants(every)), None, ""),
        (
            "names that are no nouns, of 1,000",
            no_nouns(every)[0],
            MOST_NO_NOUNS,
            no_nouns(every)[1],
        ),
        ("plan: lines", lines(plan), None, ""),
        ("plan: files", len(plan), None, ""),
        ("plan: tuned constants", len(constants(plan)), 15, ""),
        ("README: lines", lines([root / "README.md"]), 180, ""),
        (
            "longest page of docs",
            max(lines([page]) for page in (root / "docs").glob("*.md")),
            250,
            "",
        ),
    ]

    def within(size: int, budget: int | None) -> bool:
        return budget is None or size <= budget

    print("| what | size | budget | |\n|---|---|---|---|")
    for what, size, budget, note in rows:
        verdict = "" if within(size, budget) else "**over** "
        print(
            f"| {what} | {size:,} | {'' if budget is None else f'{budget:,}'} | {verdict}{note} |"
        )
    return 0 if all(within(size, budget) for _, size, budget, _ in rows) else 1


if __name__ == "__main__":
    sys.exit(
        main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).resolve().parent.parent)
    )
