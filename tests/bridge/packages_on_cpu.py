"""What Megatron-Bridge can be imported with on a CPU.

Importing this module puts a CPU behind ``torch.cuda`` and TransformerEngine, and stand-ins in the place of packages
that Bridge imports without need. It comes before Megatron.
"""

from __future__ import annotations

import abc
import importlib.abc
import importlib.machinery
import sys
import types
from typing import Any

import te_on_cpu

te_on_cpu.install()
import megatron.training.training  # noqa: E402, F401

ABSENT = (
    "comet_ml",
    "fast_hadamard_transform",
    "megatron.bridge.diffusion",  # there, but of no interest, and it needs much
    "megatron.energon",
    "mlflow",
    "modelopt",
    "nvidia_resiliency_ext",
    "open_clip",
    "webdataset",
)


class _AnyName(abc.ABCMeta):
    """A class that has every attribute, each such a class again."""

    def __getattr__(cls, name: str) -> Any:
        return _stand_in(name)

    def __getitem__(cls, item: Any) -> Any:
        return cls

    def __or__(cls, other: Any) -> Any:
        return cls

    __ror__ = __or__


def _stand_in(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return _AnyName(
        name, (), {"__init__": lambda self, *args, **kwargs: None, "__call__": lambda self, f: f}
    )


class _Packages(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Makes `ABSENT` packages and all their modules, in which every name is a class that does nothing."""

    def find_spec(
        self, name: str, path: Any = None, target: Any = None
    ) -> importlib.machinery.ModuleSpec | None:
        if any(name == absent or name.startswith(f"{absent}.") for absent in ABSENT):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        module = types.ModuleType(spec.name)
        module.__version__ = "0"
        module.__getattr__ = _stand_in
        return module

    def exec_module(self, module: types.ModuleType) -> None: ...


sys.meta_path.insert(0, _Packages())
