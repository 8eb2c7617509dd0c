"""What imports what, and how large it all is. Oracle: section 8 of the design, and the budgets in ``.ci/budgets.py``.

A package that drags in Megatron, or modules that know more than they should, break users late.
"""

from __future__ import annotations

import ast
import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

import megatron_hecate

pytestmark = pytest.mark.fast

PACKAGE = Path(megatron_hecate.__file__).parent
CHECKOUT = PACKAGE.parent
FILES = sorted(PACKAGE.rglob("*.py"))
# A room may import rooms of earlier floors, and itself. "" is the package's own __init__.
FLOORS = [
    {"files"},
    {"code_cache"},
    {"config"},
    {"trace", "plan", "device"},
    {"faults"},
    {"comm"},
    {"routing", "replicas"},
    {"megatron"},
    {"step"},
    # boxes: the core, above, knows them by a protocol only
    {"nvlink", "homes", "routes", "record", "graphs"},
    {"switch_on"},
    {""},
    {"enable"},
    {"bridge"},
    {"tools"},
    {"__main__"},
]
FLOOR = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}
WITH_MEGATRON = set(
    """
    megatron switch_on enable bridge step.layer_state record.job_sizes
    record.job_metrics record.observe record.recorder tools.check tools.command_line
    """.split()
)
OF_PLAN = set(
    """
    __future__ collections dataclasses functools hashlib heapq itertools json math numba numpy
    operator pathlib torch typing zlib
    """.split()
)
OF_COMPILED = {"contextlib", "pickle", "sys", "warnings"}  # they keep machine code in files


def _room(module: str) -> str:
    """Of a module's name after ``megatron_hecate.``."""
    return module.partition(".")[0]


def _imports(path: Path) -> list[str]:
    """Absolute names of all that a file imports, also inside functions."""
    names = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} imports relatively"
            names += [f"{node.module}.{alias.name}" for alias in node.names]
    return names


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_point_one_way(path: Path) -> None:
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    module = ".".join(part for part in parts if part != "__init__")
    room = _room(module)
    for name in _imports(path):
        top, _, rest = name.partition(".")
        if top == "megatron_hecate":
            other = _room(rest) if _room(rest) in FLOOR else ""
            # which is lazy: it imports Megatron
            is_lazy = (room, rest) == ("", "switch_on.convert")
            is_below = other == room or FLOOR[other] < FLOOR[room]
            assert is_lazy or is_below, f"{module} must not import {name}"
        elif top == "megatron":
            assert {room, module} & WITH_MEGATRON, f"{module} must not import {name}"
        elif room == "plan" or module == "homes.planner":
            allowed = OF_PLAN | (OF_COMPILED if module == "plan.compiled" else set())
            is_allowed = top in allowed and not name.startswith("torch.distributed")
            assert is_allowed, f"plan imports {name}"


def test_no_test_imports_another_one() -> None:
    for path in (CHECKOUT / "tests").rglob("*.py"):
        imported = [name for name in _imports(path) if re.search(r"(^|\.)test_", name)]
        assert not imported, f"{path} imports {imported}: shared code belongs to tests/support"


def test_sizes_stay_within_their_budgets(capsys: pytest.CaptureFixture) -> None:
    spec = importlib.util.spec_from_file_location("budgets", CHECKOUT / ".ci" / "budgets.py")
    budgets = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(budgets)
    status = budgets.main(CHECKOUT)
    over = [line for line in capsys.readouterr().out.splitlines() if "**over**" in line]
    assert status == 0, "\n".join(over)


def test_importing_touches_neither_megatron_nor_cuda() -> None:
    code = """
import os, sys
before = dict(os.environ)
import megatron_hecate, megatron_hecate.plan, megatron_hecate.switch_on.connect, megatron_hecate.replicas.layer_replicas
import megatron_hecate.tools.report, megatron_hecate.tools.what_if  # also used where no job runs
assert megatron_hecate.HecateConfig().slots == 2
assert not [m for m in sys.modules if m == "megatron" or m.startswith("megatron.")], "megatron was imported"
import torch
assert not torch.cuda.is_initialized()
assert dict(os.environ) == before
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120, cwd=CHECKOUT)


def test_the_cpu_stand_in_refuses_a_gpu() -> None:
    code = """
import torch
torch.cuda.is_available = lambda: True
import megatron_on_cpu
current_device = torch.cuda.current_device
try:
    megatron_on_cpu.install()
except RuntimeError as error:
    assert "for machines without a GPU" in str(error)
else:
    raise SystemExit("it loaded")
assert torch.cuda.current_device is current_device, "something was replaced"
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120, cwd=CHECKOUT / "examples")
    for path in FILES:
        assert "megatron_on_cpu" not in path.read_text(), f"{path} must not know of the stand-in"


# Attributes of any type, whose values are of others' classes: a moment of torch or the host, torch's store, a namespace of
# argparse, a value of a setting.
OF_OTHERS = {
    "OverlapMeter._end",
    "Stopwatch._end",
    "JobMetrics._store",
    "Rule.instead",
}


def test_no_attribute_hides_one_of_our_objects() -> None:
    """An attribute typed ``Any`` would be an arrow that the import graph does not show."""
    hidden = set()
    for path in sorted(PACKAGE.rglob("*.py")):
        classes = [n for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.ClassDef)]
        for kind in classes:
            fields = [node for node in kind.body if isinstance(node, ast.AnnAssign)]
            fields += [
                node
                for node in ast.walk(kind)
                if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Attribute)
            ]
            for field in fields:
                if ast.unparse(field.annotation) in ("Any", "Any | None"):
                    name = ast.unparse(field.target).removeprefix("self.")
                    hidden.add(f"{kind.name}.{name}")
    assert hidden <= OF_OTHERS, hidden - OF_OTHERS
