"""Imports of our modules that wrap Megatron, as soon as the running script has imported Megatron.

A script may choose its Megatron by changing ``sys.path`` first, so the launcher must not import
Megatron itself.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types
from typing import Any

# Our modules that wrap functions and classes of a package, by the package.
_OURS = {
    "megatron.core": "megatron_hecate.switch_on.entry",
    "megatron.training": "megatron_hecate.enable",
    "megatron.bridge": "megatron_hecate.bridge",
}


def import_after_megatron() -> None:
    """Import each of our modules right after its package, or now if that has been imported."""
    for package, module in _OURS.items():
        if package in sys.modules:
            _import_ours(module)
        else:
            sys.meta_path.insert(0, _After(package, module))


def _import_ours(name: str) -> None:
    """Import one of our modules, which wraps functions of Megatron or has a function that does."""
    module = importlib.import_module(name)
    if hasattr(module, "install"):
        module.install()


class _After(importlib.abc.MetaPathFinder):
    """Finder that imports one of our modules as soon as a package has been imported.

    Args:
        package: name of the package.
        module: name of our module.
    """

    def __init__(self, package: str, module: str) -> None:
        self._package = package
        self._ours = module

    def find_spec(
        self, name: str, path: Any = None, target: Any = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != self._package:
            return None
        # the lookup must not find this finder, which stays until our module is imported: a script
        # may look for a package before its path is set, or ignore an error of an import
        sys.meta_path.remove(self)
        try:
            spec = importlib.util.find_spec(name)
        finally:
            sys.meta_path.insert(0, self)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def exec_module(module: types.ModuleType) -> None:
            execute(module)
            _import_ours(self._ours)
            if self in sys.meta_path:
                sys.meta_path.remove(self)

        spec.loader.exec_module = exec_module
        return spec
