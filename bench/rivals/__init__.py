"""Planners of published systems and ours, implemented from public descriptions.

No code of the systems is used. `find_planners` finds every file in this folder that defines a
`Planner` with a ``name``: a new rival is a new file. Open points of a rival's paper are decided in
its favour; its docstring lists these decisions.

| file | content |
|---|---|
| `planner` | the interface: place before the gate, correct after it, split tokens, count moves |
| `split` | quotas; even split among holders, and sources for given totals |
| `score` | figures of one step of one planner |
| `copies` | traffic of copies |
| `report` | the table |
| other files | one planner each |
"""

from __future__ import annotations

import importlib
import pkgutil

from rivals.planner import Planner


def find_planners() -> dict[str, type[Planner]]:
    """Find every planner in this folder; returns planners by name, in alphabetical order."""
    found: dict[str, type[Planner]] = {}
    for module in pkgutil.iter_modules(__path__, prefix="rivals."):
        for value in vars(importlib.import_module(module.name)).values():
            if isinstance(value, type) and issubclass(value, Planner) and "name" in vars(value):
                assert found.setdefault(value.name, value) is value, (
                    f"two planners are named {value.name}"
                )
    return dict(sorted(found.items()))
