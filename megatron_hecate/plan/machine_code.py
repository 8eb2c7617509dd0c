"""Persistent cache of numba's machine code, in the folder of `compiled`.

Only `compiled` imports this module, and only when something is planned, because it imports numba.
"""

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

_DIGEST = hashlib.sha256().digest_size


def dispatcher_of(function: Callable) -> Any:
    """Make numba's dispatcher of ``function``; it compiles or loads at each new signature."""
    dispatcher: Any = numba.njit(nogil=True)(function)
    dispatcher._cache = _Cache(function)
    return dispatcher


@functools.cache
def _hash_sources(folder: Path) -> str:
    """Hash all sources of ``folder`` and of `plan`."""
    folders = (Path(__file__).parent, folder)
    sources = [path.read_bytes() for where in folders for path in sorted(where.glob("*.py"))]
    return hashlib.sha256(b"".join(sources)).hexdigest()


class _Nowhere(_CacheLocator):
    """Locator without a path, because `_Cache` has no index file; numba requires a locator."""

    def __init__(self, py_file: str) -> None:
        # numba names the file in its warnings
        self._py_file = py_file

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
    """Cache of one function: a file per compiled signature."""

    _impl_class = _Results

    def _path(self, signature: Any, codegen: Any) -> Path:
        # numba's key covers the signature, the processor and the function's own bytecode; the hash
        # of all sources in its folder covers the functions that it calls
        key = (
            self._index_key(signature, codegen),
            _hash_sources(Path(self._py_func.__code__.co_filename).parent),
            numba.__version__,
            sys.version,
        )
        digest = hashlib.sha256(repr(key).encode()).hexdigest()[:20]
        name = f"{self._py_func.__module__}.{self._py_func.__qualname__}"
        # a local function's qualified name has "<locals>"
        name = name.replace("<", "").replace(">", "")
        return cache_folder() / f"{name}-{digest}.nbc"

    def _load_overload(self, sig: Any, target_context: Any) -> Any:
        try:
            path = self._path(sig, target_context.codegen())
            status = path.stat()
            content = path.read_bytes()
        except OSError:
            return None
        # The content is executed, so another user's file is ignored. Root is trusted: a container
        # image may be built with a filled cache.
        if status.st_uid not in (0, os.getuid()):
            return None
        data = content[:-_DIGEST]
        if content[-_DIGEST:] != hashlib.sha256(data).digest():
            message = f"{path} is damaged ({len(content)} bytes); compiling again"
            warnings.warn(message, stacklevel=2)
            return None
        return self._impl.rebuild(target_context, pickle.loads(data))

    def _save_overload(self, sig: Any, data: Any) -> None:
        if not self._impl.check_cachable(data):
            return
        content = serialize.dumps(self._impl.reduce(data))
        try:
            _write(self._path(sig, data.codegen), content + hashlib.sha256(content).digest())
        except OSError as error:
            _warn_once(str(error))


def _write(path: Path, content: bytes) -> None:
    # parents by the umask, but not writable by others, who could replace the folder
    missing = [parent for parent in path.parent.parents if not parent.exists()]
    for parent in reversed(missing):
        parent.mkdir(mode=0o755, exist_ok=True)
    path.parent.mkdir(mode=0o700, exist_ok=True)
    # `mkstemp` makes a file of mode 600; the rename is atomic, so no reader sees a partial file
    descriptor, temporary = tempfile.mkstemp(dir=path.parent)
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
        "each process compiles the planner again, for about 20 seconds, because its machine code "
        f"cannot be cached ({problem}); name a folder in $NUMBA_CACHE_DIR",
        stacklevel=2,
    )
