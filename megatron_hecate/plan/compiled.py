"""How the planner's core is compiled: by numba, once per machine, into a cache beside the sources or in the user's own.

Compiled functions contain those they call, but numba looks at a function's own file only to see whether what it cached
is stale. Here all files of the folder count.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numba
from numba.core.options import DefaultOptions

SOURCES: int = zlib.crc32(b"".join(path.read_bytes() for path in sorted(Path(__file__).parent.glob("*.py"))))


def compiled(function: Callable, **options: bool) -> Any:
    """``numba.njit`` with a cache, where there is a folder to write it to; without the GIL, without fast-math."""
    try:
        dispatcher = numba.njit(cache=True, nogil=True, **options)(function)
        dispatcher._cache._cache_file._source_stamp = SOURCES
    except (RuntimeError, AttributeError):  # no such folder; NUMBA_DISABLE_JIT, or a numba that caches otherwise
        return numba.njit(nogil=True, **options)(function)
    return dispatcher


def borrowing(function: Callable) -> Any:
    """`compiled`, for what allocates nothing: the arrays that it is given are not counted as in use.

    Counting takes two atomic operations for each, which is most of the time of a short function. Numba keeps the option
    to itself; without it functions are only slower.
    """
    return compiled(function, _nrt=False) if hasattr(DefaultOptions, "_nrt") else compiled(function)
