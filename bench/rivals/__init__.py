"""Planners of published systems beside ours: own implementations from public descriptions, never the systems' own code.

Every file in this folder that defines a `Planner` with a ``name`` is found by itself: a new rival is a new file.
What a rival's paper leaves open is decided in its favour and said in its docstring.

| file | what |
|---|---|
| `planner` | the interface: place before the gate, correct after it, split the tokens; what moves for it |
| `split` | what a split is; even among holders, and sources for given totals |
| `score` | one step of one planner in figures |
| `simulated` | a planner in the simulation of whole steps |
| `report` | table, CSV and the dump |
| `algorithm2` | homes of all layers by the Hecate paper; no planner, `bench/homes.py` compares it |
| all others | one planner each |
"""

from __future__ import annotations

import importlib
import pkgutil

from rivals.planner import Planner


def find_planners() -> dict[str, type[Planner]]:
    """Every planner in this folder by name, in alphabetical order."""
    found: dict[str, type[Planner]] = {}
    for module in pkgutil.iter_modules(__path__, prefix="rivals."):
        for value in vars(importlib.import_module(module.name)).values():
            if isinstance(value, type) and issubclass(value, Planner) and "name" in vars(value):
                assert found.setdefault(value.name, value) is value, (
                    f"two planners are named {value.name}"
                )
    return dict(sorted(found.items()))
