"""Functions that numba compiles at their first call, and the folder that keeps the machine code.

Numba is imported at the first of these calls: whoever plans nothing, such as a benchmark of the kernels or a job
without slots, needs none. Where it cannot be imported, that call raises ``ImportError``: nothing is planned without it.

Numba's own cache lies beside the source, or under a name made of its path: one for each checkout, and none where the
package cannot be written. This one lies in ``$NUMBA_CACHE_DIR``, else ``$XDG_CACHE_HOME/megatron-hecate``, else
``~/.cache/megatron-hecate``, in one file for each function and signature. A file's name tells all that went into it:
the sources of `plan`, of which numba sees only the function's own, the signature, the processor, and versions. Files
are written under another name and moved into place, so that many ranks may do so at once.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any


def compiled(function: Callable) -> Compiled:
    """Let numba compile ``function`` at its first call with each signature, or load it where that was done before."""
    return Compiled(function)


class Compiled:
    """A function that numba compiles.

    Args:
        function: in Python.
    """

    def __init__(self, function: Callable) -> None:
        self._function = function
        functools.update_wrapper(self, function)

    def __call__(self, *args: Any) -> Any:
        """Raises ImportError: where numba cannot be imported."""
        return self.dispatcher(*args)

    @cached_property
    def dispatcher(self) -> Any:
        """Numba's own."""
        try:
            from megatron_hecate.plan.machine_code import dispatcher_of
        except ImportError as error:
            raise ImportError(
                f"planning needs numba, which cannot be imported ({error}); pip install numba, at a version for this "
                "numpy"
            ) from error
        return dispatcher_of(self._function)

    @property
    def _numba_type_(self) -> Any:
        """By which numba finds a function that another one calls."""
        return self.dispatcher._numba_type_


def cache_folder() -> Path:
    """Where machine code is kept; it need not exist."""
    if named := os.environ.get("NUMBA_CACHE_DIR"):
        return Path(named)
    shared = (
        os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser()
    )  # as it is for users without a home
    return Path(shared) / "megatron-hecate"
