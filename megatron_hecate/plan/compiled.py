"""Functions that numba compiles at their first call.

Numba is imported at the first of these calls, so a process that plans nothing (a benchmark of the
kernels, a job without slots) does not need numba. Where its import fails, that call raises
``ImportError``: there is no planner without numba. Functions of `compiled`, which
transports also call where nothing is planned, then run as plain Python, many times slower.

Machine code is kept in the folder of `code_cache`.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from functools import cached_property
from typing import Any


def compiled(function: Callable) -> Compiled:
    """Compile ``function`` with numba at its first call per signature, or load cached code."""
    return Compiled(function)


def compiled(function: Callable) -> Compiled:
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


def in_turn(notice: Callable[[], None]) -> contextlib.AbstractContextManager[None]:
    """Let one process of this machine compile what the block calls; see `machine_code.in_turn`."""
    try:
        from megatron_hecate.plan import machine_code
    except ImportError:
        # Nothing will be compiled.
        return contextlib.nullcontext()
    return machine_code.in_turn(notice)
