"""Machine code of numba's that is kept: `compiled` says where. Numba is not imported before something is planned."""

from __future__ import annotations

import functools
import hashlib
import os
import pickle
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numba
from numba.core import serialize
from numba.core.caching import CompileResultCacheImpl, FunctionCache, _CacheLocator

from megatron_hecate.plan.compiled import cache_folder

_SOURCES = hashlib.sha256(
    b"".join(path.read_bytes() for path in sorted(Path(__file__).parent.glob("*.py")))
)
_DIGEST = hashlib.sha256().digest_size


def dispatcher_of(function: Callable) -> Any:
    """Numba's dispatcher of ``function``, which compiles or loads it at its first call with each signature."""
    dispatcher: Any = numba.njit(nogil=True)(function)
    dispatcher._cache = _Cache(function)
    return dispatcher


class _Nowhere(_CacheLocator):
    """Numba asks for a place of an index, which `_Cache` does not have."""

    def __init__(self, py_file: str) -> None:
        self._py_file = py_file  # numba names it in warnings

    def get_cache_path(self) -> str:
        return ""

    def get_source_stamp(self) -> str:
        return ""

    def get_disambiguator(self) -> str:
        return ""

    @classmethod
    def from_function(cls, py_func: Callable, py_file: str) -> _Nowhere:
        return cls(py_file)


class _Results(CompileResultCacheImpl):
    _locator_classes: list[Any] = [_Nowhere]


class _Cache(FunctionCache):
    """The compiled signatures of one function, a file each."""

    _impl_class = _Results

    def _path(self, signature: Any, codegen: Any) -> Path:
        key = (
            self._index_key(signature, codegen),
            _SOURCES.hexdigest(),
            numba.__version__,
            sys.version,
        )
        name = f"{self._py_func.__module__}.{self._py_func.__qualname__}".replace("<", "").replace(
            ">", ""
        )
        return cache_folder() / f"{name}-{hashlib.sha256(repr(key).encode()).hexdigest()[:20]}.nbc"

    def _load_overload(self, sig: Any, target_context: Any) -> Any:
        try:
            path = self._path(sig, target_context.codegen())
            about, held = path.stat(), path.read_bytes()
        except OSError:
            return None
        if about.st_uid not in (
            0,
            os.getuid(),
        ):  # it will be executed; root may have made it for an image
            return None
        data = held[:-_DIGEST]
        if held[-_DIGEST:] != hashlib.sha256(data).digest():
            warnings.warn(f"{path} is damaged ({len(held)} bytes); compiling again", stacklevel=2)
            return None
        return self._impl.rebuild(target_context, pickle.loads(data))

    def _save_overload(self, sig: Any, data: Any) -> None:
        if not self._impl.check_cachable(data):
            return
        made = serialize.dumps(self._impl.reduce(data))
        try:
            _write(self._path(sig, data.codegen), made + hashlib.sha256(made).digest())
        except OSError as error:
            _warn_once(str(error))


def _write(path: Path, content: bytes) -> None:
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    descriptor, temporary = tempfile.mkstemp(dir=path.parent)  # mode 600
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


@functools.cache
def _warn_once(problem: str) -> None:
    warnings.warn(
        f"each process compiles the planner anew, some 20 seconds, since it cannot be kept ({problem}); name a folder "
        "in $NUMBA_CACHE_DIR",
        stacklevel=2,
    )
