"""What imports what. A package that drags in Megatron, or modules that know more than they should, break users late."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import megatron_hecate

PACKAGE = Path(megatron_hecate.__file__).parent
# Who may import whom: a module may import those of earlier rows only (and, inside plan/, each other).
LAYERS = [
    {"config", "plan", "exchange", "compile"},
    {"p2p", "trace", "agreement", "device_quotas", "metrics", "schedule"},
    {"transfer", "kernel", "hierarchy"},
    {"peers", "launch"},
    {"sm"},
    {"collectives", "memory", "overlap", "transports"},
    {"trial", "report", "observe", "lend", "clock", "seams", "measure", "materialization"},
    {"slots", "dispatcher"},
    {"experts", "quotas", "model"},
    {"state"},
    {"layer"},
    {"__init__"},
    {"enable"},
    {"__main__"},
]
WITH_MEGATRON = {"seams", "dispatcher", "experts", "quotas", "state", "layer", "enable", "__main__"}
WITHOUT_MEGATRON = {name for names in LAYERS for name in names} - WITH_MEGATRON


def _module(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def _imports(path: Path) -> list[str]:
    """Absolute names of all modules a file imports, also inside functions."""
    names = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names += [f"{node.module}.{alias.name}" for alias in node.names]
    return names


FILES = sorted(PACKAGE.rglob("*.py"))


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_point_one_way(path: Path) -> None:
    row = {name: i for i, names in enumerate(LAYERS) for name in names}
    module = _module(path)
    for name in _imports(path):
        if name.startswith("megatron_hecate"):
            other = name.split(".")[1] if "." in name else "__init__"
            other = other if other in row else "__init__"
            below = row[other] < row[module] or other == module
            lazy = module == "__init__" and other == "layer"  # inside the function that needs it
            assert below or lazy or other == "__init__", f"{module} must not import {other}"
        if name == "megatron" or name.startswith("megatron."):
            assert module not in WITHOUT_MEGATRON, f"{module} must not import {name}"
        if module == "plan":
            assert name.split(".")[0] in {
                "__future__",
                "dataclasses",
                "collections",
                "functools",
                "hashlib",
                "itertools",
                "json",
                "llvmlite",
                "math",
                "numba",
                "numpy",
                "operator",
                "pathlib",
                "typing",
                "zlib",
            } or (name.startswith("megatron_hecate.plan")), f"plan must stay pure, imports {name}"


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_files_stay_short(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= 300


def test_importing_touches_neither_megatron_nor_cuda() -> None:
    code = """
import os, sys
before = dict(os.environ)
import megatron_hecate, megatron_hecate.plan, megatron_hecate.collectives, megatron_hecate.slots
assert megatron_hecate.HecateConfig().slots == 2
assert not [m for m in sys.modules if m == "megatron" or m.startswith("megatron.")], "megatron was imported"
import torch
assert not torch.cuda.is_initialized()
assert dict(os.environ) == before
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120, cwd=PACKAGE.parent)


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
    examples = PACKAGE.parent / "examples"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120, cwd=examples)
    for path in FILES:
        assert "megatron_on_cpu" not in path.read_text(), f"{path} must not know of the stand-in"
