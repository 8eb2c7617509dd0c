"""Functions that numba compiles, and the cache of their machine code in the folder of `code_cache`.

Numba's own cache cannot be read in a folder that this user cannot write, as in an image, and does
not notice a change in the file of a called function. Ours has one file per function, signature and
processor. Its name is a hash of every input of the compilation: all sources of `plan` and of the
function's own folder, the signature, the processor and the versions. A compiled function calls
compiled functions of these folders only. The 75 files of a start load in 1.1 s of CPU time.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import pickle
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numba
from numba.core import serialize
from numba.core.caching import NullCache
from numba.core.compiler import CompileResult

from megatron_hecate import code_cache

# Blocks of `in_turn` that have compiled nothing yet: what begins their turn.
_waiting: list[Callable[[], None]] = []


def compiled(function: Callable) -> Any:
    """Compile ``function`` at its first call per signature, or load cached code."""
    dispatcher: Any = numba.njit(nogil=True)(function)
    dispatcher._cache = _Cache(function)
    return dispatcher


@contextlib.contextmanager
def in_turn(notice: Callable[[], None]) -> Iterator[None]:
    """Let one process of this machine compile what the block calls, and others load the result.

    The turn begins with the first function that is not cached, so ranks load at the same time.

    Args:
        notice: called before this process compiles, or waits for another one.
    """
    with contextlib.ExitStack() as turn:

        def begin() -> None:
            notice()
            turn.enter_context(code_cache.turn())

        _waiting.append(begin)
        try:
            yield
        finally:
            if begin in _waiting:
                _waiting.remove(begin)


@functools.cache
def _hash_sources(folder: Path) -> str:
    """Hash all sources of ``folder`` and of `plan`."""
    paths = [*sorted(Path(__file__).parent.glob("*.py")), *sorted(folder.glob("*.py"))]
    sources = [path.read_bytes() for path in paths]
    return hashlib.sha256(b"".join(sources)).hexdigest()


class _Cache(NullCache):
    """Cache of one function: a file per compiled signature and processor."""

    def __init__(self, function: Callable) -> None:
        self._function = function

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        target_context.refresh()
        name = self._file_name(sig, target_context.codegen())
        code = _read(name)
        if code is None and _waiting:
            _waiting.pop()()
            code = _read(name)
        if code is None:
            return None
        return CompileResult._rebuild(target_context, *pickle.loads(code))

    def save_overload(self, sig: Any, cres: Any) -> None:
        # Its code holds addresses of this process.
        if cres.library.has_dynamic_globals:
            return
        try:
            code = serialize.dumps(cres._reduce())
            code_cache.write(self._file_name(sig, cres.codegen), code)
        except OSError as error:
            _warn_once(str(error))

    def _file_name(self, signature: Any, codegen: Any) -> str:
        """Return the file of a signature: ``FUNCTION-HASH.nbc``."""
        code = self._function.__code__
        sources = _hash_sources(Path(code.co_filename).parent)
        processor = codegen.magic_tuple()
        versions = (numba.__version__, sys.version)
        inputs = (signature, processor, code.co_code, sources, versions)
        function = f"{self._function.__module__}.{self._function.__qualname__}"
        # A local function's qualified name has "<locals>".
        function = function.replace("<", "").replace(">", "")
        digest = hashlib.sha256(repr(inputs).encode()).hexdigest()
        return f"{function}-{digest[:20]}.nbc"


def _read(name: str) -> bytes | None:
    try:
        return code_cache.read(name)
    except OSError as error:
        _warn_once(str(error))
        return None


@functools.cache
def _warn_once(problem: str) -> None:
    warnings.warn(
        "each process compiles the planner again, for about 20 seconds, because its machine code "
        f"cannot be cached ({problem})",
        stacklevel=2,
    )
