"""Calls of CUDA's driver by `ctypes`: they need ``libcuda`` alone, which every machine with a GPU has.

The table below declares the functions that our kernels need. `cuGetProcAddress` looks each of them up in the version
that the table names; newer drivers keep older versions.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from ctypes import POINTER, c_char_p, c_int, c_size_t, c_uint, c_ulonglong, c_void_p
from typing import Any

LIBRARY = "libcuda.so.1"
# CUDA 12.8 brought cuMemcpyBatchAsync. CUDA 13 changed its arguments, and keeps this version as well.
BATCHED_COPIES: int = 12080
_HANDLE, _OUT = c_void_p, POINTER(c_void_p)
# CUDA's version since which the driver has a function with these arguments, as its header declares them.
_FUNCTIONS: dict[str, tuple[int, tuple[Any, ...]]] = {
    "cuInit": (2000, (c_uint,)),
    "cuDriverGetVersion": (2020, (POINTER(c_int),)),
    "cuGetErrorName": (6000, (c_int, POINTER(c_char_p))),
    "cuDeviceGet": (2000, (POINTER(c_int), c_int)),
    "cuDevicePrimaryCtxRetain": (7000, (_OUT, c_int)),
    "cuCtxGetCurrent": (4000, (_OUT,)),
    "cuCtxSetCurrent": (4000, (_HANDLE,)),
    "cuLibraryLoadData": (12000, (_OUT, c_void_p, _OUT, _OUT, c_uint, _OUT, _OUT, c_uint)),
    "cuLibraryGetKernel": (12000, (_OUT, _HANDLE, c_char_p)),
    "cuKernelSetAttribute": (12000, (c_int, c_int, _HANDLE, c_int)),
    "cuLaunchKernel": (4000, (_HANDLE, *(c_uint,) * 7, _HANDLE, _OUT, _OUT)),
    "cuLaunchCooperativeKernel": (9000, (_HANDLE, *(c_uint,) * 7, _HANDLE, _OUT)),
    "cuMemcpyBatchAsync": (
        BATCHED_COPIES,
        (
            c_void_p,
            c_void_p,
            c_void_p,
            c_size_t,
            c_void_p,
            POINTER(c_size_t),
            c_size_t,
            POINTER(c_size_t),
            _HANDLE,
        ),
    ),
}


class DriverError(RuntimeError):
    """A call of the driver failed, or there is no driver."""


class CopyAttributes(ctypes.Structure):
    """``CUmemcpyAttributes``; hints of locations count for managed memory only."""

    _fields_ = (
        ("source_order", c_int),
        ("source_hint", c_int * 2),
        ("destination_hint", c_int * 2),
        ("flags", c_uint),
    )


IN_STREAM_ORDER: int = 1  # CU_MEMCPY_SRC_ACCESS_ORDER_STREAM
DYNAMIC_SHARED_BYTES: int = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
BESIDE_COMPUTING: int = 1  # CU_MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE


def call(name: str, *arguments: Any) -> None:
    """Call the driver's function ``name``.

    Raises:
        DriverError: when it fails, with the driver's name of the error, or there is no such function.
    """
    status = _function(name)(*arguments)
    if status != 0:
        raise DriverError(f"{name} failed: {_error_name(status)}")


def version() -> int | None:
    """CUDA's version as the driver knows it, 1000 times the major and 10 times the minor; ``None`` without a driver."""
    found = c_int()
    try:
        call("cuDriverGetVersion", found)
    except DriverError:
        return None
    return found.value


def ensure_context(device: int) -> None:
    """Make the primary context of ``device`` current in this thread, unless a context is.

    New threads have none until they call CUDA's runtime, which autograd's thread for device 0 need not do before it
    runs a backward. The driver refuses launches and copies in such threads.
    """
    current = c_void_p()
    call("cuCtxGetCurrent", current)
    if not current.value:
        call("cuCtxSetCurrent", _primary_context(device))


def load_library(binary: bytes) -> int:
    """The handle of a cubin, for all contexts."""
    library = c_void_p()
    call("cuLibraryLoadData", library, binary, None, None, 0, None, None, 0)
    return library.value or 0


def kernel(library: int, name: str) -> int:
    """The handle of a kernel, by which `launch` knows it."""
    found = c_void_p()
    call("cuLibraryGetKernel", found, library, name.encode())
    return found.value or 0


def allow_shared_bytes(kernel: int, size: int, device: int) -> None:
    """Let thread blocks of a kernel have ``size`` bytes of dynamic shared memory on ``device``."""
    call("cuKernelSetAttribute", DYNAMIC_SHARED_BYTES, size, kernel, device)


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
        arguments: `ctypes` objects, of the types that the kernel has; null pointers among them.
        blocks: thread blocks of the one-dimensional grid.
        threads: of a block.
        stream: handle of the stream.
        shared_bytes: dynamic shared memory of a block.
    """
    addresses = (c_void_p * len(arguments))(*map(ctypes.addressof, arguments))
    call(
        "cuLaunchKernel", kernel, blocks, 1, 1, threads, 1, 1, shared_bytes, stream, addresses, None
    )


@functools.cache
def _primary_context(device: int) -> int:
    handle, context = c_int(), c_void_p()
    call("cuDeviceGet", handle, device)
    call("cuDevicePrimaryCtxRetain", context, handle)
    return context.value or 0


def _error_name(status: int) -> str:
    name = c_char_p()
    known = _function("cuGetErrorName")(status, name) == 0 and name.value
    return known.decode() if known else f"error {status}"


@functools.cache
def _function(name: str) -> Any:
    since, arguments = _FUNCTIONS[name]
    address, status = c_void_p(), c_int()
    try:
        find = ctypes.CDLL(LIBRARY).cuGetProcAddress_v2
    except (OSError, AttributeError) as error:
        raise DriverError(f"no driver of CUDA 12 or newer: {error}") from error
    find.argtypes = (c_char_p, _OUT, c_int, c_ulonglong, POINTER(c_int))
    if find(name.encode(), address, since, 0, status) != 0 or not address.value:
        raise DriverError(f"the driver has no {name} of CUDA {since // 1000}.{since % 1000 // 10}")
    return ctypes.CFUNCTYPE(c_int, *arguments)(address.value)
