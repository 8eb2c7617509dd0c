"""Modules that test files import at their top, and ranks load when a test first asks for something in them.

They import Megatron, on a CPU that stands in for a GPU: the process of pytest must not, and a rank must choose its
TransformerEngine before (`te_on_cpu.install`).
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import Any

NAMES = """budgeted dense_routes flex_backends graphs_on_cpu grouped_tensors_on_cpu joint_operators loops operators_on_cpu
    quantizers_on_cpu restarts stash_on_cpu static_experts te_on_cpu tex_on_cpu tiny_gpt tiny_hybrid""".split()


class LazyModule(ModuleType):
    """Stands for the module of its name, also where an attribute is set."""

    def _load(self) -> ModuleType:
        if sys.modules.get(self.__name__) is self:
            del sys.modules[self.__name__]
        return importlib.import_module(self.__name__)

    def __getattr__(self, name: str) -> Any:
        # pytest looks for marks of its own in whatever a test file names
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._load(), name)

    def __setattr__(self, name: str, value: object) -> None:
        setattr(self._load(), name, value)

    def __delattr__(self, name: str) -> None:
        delattr(self._load(), name)


def install() -> None:
    """Have an import of one of `NAMES` wait until it is used."""
    for name in NAMES:
        sys.modules.setdefault(name, LazyModule(name))
