"""Launches the kernels: on a GPU's current stream, or at once on the host, in this thread."""

from __future__ import annotations

import ctypes
import functools
import sys
from typing import Any

import torch

from megatron_hecate.device.compile import cubin, host_library

SHARED_BYTES: int = 48 << 10  # of a block, without asking
Argument = ctypes.c_void_p | ctypes.c_uint | ctypes.c_int | ctypes.c_ulonglong


class Kernels:
    """The kernels, compiled and loaded for ``device``.

    Raises:
        CompileError, PermissionError: as `compile.cubin` and `compile.host_library`.
        RuntimeError: when the GPU does not take them.
    """

    def __init__(self, device: torch.device) -> None:
        self.on_gpu, self._device = device.type == "cuda", device
        self._library = _load_for_gpu(device) if self.on_gpu else _load_for_host()

    @property
    def most_shared_bytes(self) -> int:
        """Bytes of shared memory that a thread block may have."""
        if not self.on_gpu:
            return sys.maxsize
        return torch.cuda.get_device_properties(self._device).shared_memory_per_block_optin

    def launch(self, name: str, *arguments: Argument, blocks: int, threads: int, shared_bytes: int = 0) -> None:
        """Run the kernel ``name``: on the GPU's current stream, or now, in this thread, by the function of that name
        in ``kernels/host.cpp``.

        Args:
            name: the kernel.
            arguments: of the kernel, in order.
            blocks: thread blocks.
            threads: of a block.
            shared_bytes: dynamic shared memory of a block, at most `most_shared_bytes`.
        """
        if not self.on_gpu:
            getattr(self._library, name)(*arguments)
            return
        from cuda.bindings import driver

        stream = torch.cuda.current_stream(self._device).cuda_stream
        packed = (tuple(argument.value for argument in arguments), tuple(type(argument) for argument in arguments))
        if shared_bytes > SHARED_BYTES:
            _allow_shared_bytes(self._library, name, self._device, shared_bytes)
        grid, block = (blocks, 1, 1), (threads, 1, 1)
        (status,) = driver.cuLaunchKernel(self.function(name), *grid, *block, shared_bytes, stream, packed, 0)
        check(status, "cuLaunchKernel")

    def function(self, name: str) -> Any:
        """The kernel ``name``, as the driver or `ctypes` calls it."""
        return _function(self._library, name) if self.on_gpu else getattr(self._library, name)


@functools.cache
def _load_for_host() -> ctypes.CDLL:
    return ctypes.CDLL(str(host_library()))


@functools.cache
def _load_for_gpu(device: torch.device) -> Any:
    from cuda.bindings import driver

    torch.cuda.init()
    binary = cubin(torch.cuda.get_device_capability(device))
    status, library = driver.cuLibraryLoadData(binary, [], [], 0, [], [], 0)
    check(status, "cuLibraryLoadData")
    return library


@functools.cache
def _function(library: Any, name: str) -> Any:
    from cuda.bindings import driver

    status, kernel = driver.cuLibraryGetKernel(library, name.encode())
    check(status, "cuLibraryGetKernel")
    return driver.CUfunction(int(kernel))


@functools.cache
def _allow_shared_bytes(library: Any, name: str, device: torch.device, size: int) -> None:
    from cuda.bindings import driver

    attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    kernel = driver.CUkernel(int(_function(library, name)))
    (status,) = driver.cuKernelSetAttribute(attribute, size, kernel, device.index or 0)
    check(status, "cuKernelSetAttribute")


def check(status: Any, what: str) -> None:
    """RuntimeError when the driver's call ``what`` did not succeed."""
    if int(status) != 0:
        raise RuntimeError(f"{what} failed: {status}")
