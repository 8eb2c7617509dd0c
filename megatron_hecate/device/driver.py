"""Calls of CUDA's driver, through ``cuda.bindings``, a dependency of torch's CUDA builds."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from typing import Any


def call(name: str, *arguments: Any) -> Any:
    """Call the driver's function ``name``, and return its result.

    Raises:
        RuntimeError: if it fails, with the driver's name of the error, or if there is no driver
            that has it.
    """
    status, *results = _look_up(name)(*arguments)
    if int(status) != 0:
        raise RuntimeError(f"{name} failed: {status.name}")
    return next(iter(results), None)


@functools.cache
def _look_up(name: str) -> Any:
    # CPU builds of torch come without it.
    from cuda.bindings import driver

    return getattr(driver, name)


def ensure_context(device: int) -> None:
    """Make the primary context of ``device`` current in this thread, if it has no context.

    A new thread has no context until it calls CUDA's runtime. Autograd's thread for device 0 may
    run a backward before any such call. The driver refuses launches and copies in such threads.
    """
    if not int(call("cuCtxGetCurrent")):
        call("cuCtxSetCurrent", _primary_context(device))


@functools.cache
def _primary_context(device: int) -> Any:
    return call("cuDevicePrimaryCtxRetain", call("cuDeviceGet", device))


def load_library(binary: bytes) -> Any:
    """Load a cubin for all contexts; return its handle."""
    return call("cuLibraryLoadData", binary, [], [], 0, [], [], 0)


def kernel(library: Any, name: str) -> int:
    """Return the handle of a kernel for `launch`."""
    return int(call("cuLibraryGetKernel", library, name.encode()))


@functools.cache
def allow_shared_bytes(kernel: int, size: int, device: int) -> None:
    """Raise a kernel's limit of dynamic shared memory per block to ``size`` bytes, once."""
    attributes = _look_up("CUfunction_attribute")
    attribute = attributes.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    call("cuKernelSetAttribute", attribute, size, kernel, device)


def launch(
    kernel: int,
    arguments: Sequence[Any],
    *,
    blocks: int,
    threads: int,
    stream: int,
    shared_bytes: int = 0,
) -> None:
    """Launch a kernel; a context must be current.

    Args:
        kernel: handle of the kernel.
        arguments: `ctypes` objects of the kernel's parameter types; null pointers are allowed.
        blocks: thread blocks of the one-dimensional grid.
        threads: threads per block.
        stream: handle of the stream.
        shared_bytes: dynamic shared memory per block.
    """
    addresses = (ctypes.c_void_p * len(arguments))(*map(ctypes.addressof, arguments))
    table = ctypes.addressof(addresses)
    call("cuLaunchKernel", kernel, blocks, 1, 1, threads, 1, 1, shared_bytes, stream, table, 0)
