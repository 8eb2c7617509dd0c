"""Functions that numba compiles at their first call, and the folder of the machine code.

Numba is imported at the first of these calls, so a process that plans nothing (a benchmark of the
kernels, a job without slots) does not need numba. Where its import fails, that call raises
``ImportError``: there is no planner without numba. Functions of `compiled_if_possible`, which
transports also call where nothing is planned, then run as plain Python, many times slower.

Numba's own cache is next to the source, or in a folder named after the source's path: one cache per
checkout, and none where the package is read-only. Ours is in ``$NUMBA_CACHE_DIR``, else
``$XDG_CACHE_HOME/megatron-hecate``, else ``~/.cache/megatron-hecate``: one file per function and
signature. The file name is a hash of every input of the compilation: all sources of `plan` and of
the function's own folder (numba looks at the function's own file only), the signature, the
processor and the versions. A compiled function calls compiled functions of these folders only.
Files are written under a temporary name and then renamed, so that many ranks can write them
concurrently.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any


def compiled(function: Callable) -> Compiled:
    """Compile ``function`` with numba at its first call per signature, or load cached code."""
    return Compiled(function)


def compiled_if_possible(function: Callable) -> Compiled:
    """Compile ``function`` as `compiled` does, or call it as it is if numba cannot be imported."""
    return Compiled(function, or_plain=True)


class Compiled:
    """A function that numba compiles.

    Args:
        function: plain Python function, within the subset that numba supports.
        or_plain: True to call the plain function if numba cannot be imported.
    """

    def __init__(self, function: Callable, *, or_plain: bool = False) -> None:
        self._function = function
        self._or_plain = or_plain
        functools.update_wrapper(self, function)

    def __call__(self, *args: Any) -> Any:
        """Call the compiled function.

        Raises:
            ImportError: if numba cannot be imported and the plain function is not an alternative.
        """
        return self._callable(*args)

    @cached_property
    def _callable(self) -> Callable:
        try:
            return self.dispatcher
        except ImportError:
            if self._or_plain:
                return self._function
            raise

    @cached_property
    def dispatcher(self) -> Any:
        """Numba's dispatcher of the function."""
        try:
            from megatron_hecate.plan.machine_code import dispatcher_of
        except ImportError as error:
            raise ImportError(
                f"planning needs numba, which cannot be imported ({error}); pip install numba, in "
                "a version for this numpy"
            ) from error
        return dispatcher_of(self._function)

    @property
    def _numba_type_(self) -> Any:
        """Type by which numba resolves a call of this function in another compiled one."""
        return self.dispatcher._numba_type_


def cache_folder() -> Path:
    """Return the folder for machine code, which may not exist yet.

    Raises:
        FileNotFoundError: if neither variable is set and this user has no home folder.
    """
    if named := os.environ.get("NUMBA_CACHE_DIR"):
        return Path(named)
    shared = os.environ.get("XDG_CACHE_HOME")
    if shared:
        return Path(shared) / "megatron-hecate"
    try:
        return Path.home() / ".cache" / "megatron-hecate"
    except RuntimeError as error:
        raise FileNotFoundError(str(error)) from None
