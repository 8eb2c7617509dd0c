"""CUDA driver calls by `ctypes`; they need only ``libcuda``, which every machine with a GPU has.

The table below declares the driver functions that our kernels need. `cuGetProcAddress` looks up
each function in the version of the table; newer drivers keep older versions.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from ctypes import POINTER, c_char_p, c_int, c_uint, c_ulonglong, c_void_p
from typing import Any

LIBRARY = "libcuda.so.1"
_HANDLE, _OUT = c_void_p, POINTER(c_void_p)
# Per function: the CUDA version that introduced this signature, and the argument types.
_FUNCTIONS: dict[str, tuple[int, tuple[Any, ...]]] = {
    "cuInit": (2000, (c_uint,)),
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
}


class DriverError(RuntimeError):
    """Failed driver call, or missing driver."""


DYNAMIC_SHARED_BYTES: int = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES


def call(name: str, *arguments: Any) -> None:
    """Call the driver's function ``name``.

    Raises:
        DriverError: if it fails, with the driver's name of the error, or if it does not exist.
    """
    status = _function(name)(*arguments)
    if status != 0:
        raise DriverError(f"{name} failed: {_error_name(status)}")


def ensure_context(device: int) -> None:
    """Make the primary context of ``device`` current in this thread, if it has no context.

    A new thread has no context until it calls CUDA's runtime. Autograd's thread for device 0 may
    run a backward before any such call. The driver refuses launches and copies in such threads.
    """
    current = c_void_p()
    call("cuCtxGetCurrent", current)
    if not current.value:
        call("cuCtxSetCurrent", _primary_context(device))


def load_library(binary: bytes) -> int:
    """Load a cubin for all contexts; return its handle."""
    library = c_void_p()
    call("cuLibraryLoadData", library, binary, None, None, 0, None, None, 0)
    return library.value or 0


def kernel(library: int, name: str) -> int:
    """Return the handle of a kernel for `launch`."""
    handle = c_void_p()
    call("cuLibraryGetKernel", handle, library, name.encode())
    return handle.value or 0


def allow_shared_bytes(kernel: int, size: int, device: int) -> None:
    """Raise a kernel's limit of dynamic shared memory per block to ``size`` bytes."""
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
        arguments: `ctypes` objects of the kernel's parameter types; null pointers are allowed.
        blocks: thread blocks of the one-dimensional grid.
        threads: threads per block.
        stream: handle of the stream.
        shared_bytes: dynamic shared memory per block.
    """
    addresses = (c_void_p * len(arguments))(*map(ctypes.addressof, arguments))
    call(
        "cuLaunchKernel", kernel, blocks, 1, 1, threads, 1, 1, shared_bytes, stream, addresses, None
    )


@functools.cache
def _primary_context(device: int) -> int:
    handle = c_int()
    context = c_void_p()
    call("cuDeviceGet", handle, device)
    call("cuDevicePrimaryCtxRetain", context, handle)
    return context.value or 0


def _error_name(status: int) -> str:
    name = c_char_p()
    text = _function("cuGetErrorName")(status, name) == 0 and name.value
    return text.decode() if text else f"error {status}"


@functools.cache
def _function(name: str) -> Any:
    since, arguments = _FUNCTIONS[name]
    address = c_void_p()
    status = c_int()
    try:
        find = ctypes.CDLL(LIBRARY).cuGetProcAddress_v2
    except (OSError, AttributeError) as error:
        raise DriverError(f"no driver of CUDA 12 or newer: {error}") from error
    find.argtypes = (c_char_p, _OUT, c_int, c_ulonglong, POINTER(c_int))
    if find(name.encode(), address, since, 0, status) != 0 or not address.value:
        raise DriverError(f"the driver has no {name} of CUDA {since // 1000}.{since % 1000 // 10}")
    return ctypes.CFUNCTYPE(c_int, *arguments)(address.value)
