"""Launches the kernels: on a GPU's current stream, or at once on the host, in this thread."""

from __future__ import annotations

import ctypes
import functools
import sys
from typing import Any

import torch

from megatron_hecate.device import driver
from megatron_hecate.device.compile import cubin, explain_unloadable, host_library

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

    def launch(
        self, name: str, *arguments: Argument, blocks: int, threads: int, shared_bytes: int = 0
    ) -> None:
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
        self._ensure_context()
        stream = torch.cuda.current_stream(self._device).cuda_stream
        function = self.function(name)
        if shared_bytes > SHARED_BYTES:
            _allow_shared_bytes(function, shared_bytes, self._index)
        driver.launch(
            function,
            arguments,
            blocks=blocks,
            threads=threads,
            shared_bytes=shared_bytes,
            stream=stream,
        )

    def function(self, name: str) -> Any:
        """The kernel ``name``, as the driver or `ctypes` calls it."""
        return _function(self._library, name) if self.on_gpu else getattr(self._library, name)

    @property
    def _index(self) -> int:
        index = self._device.index
        return torch.cuda.current_device() if index is None else index

    def _ensure_context(self) -> None:
        """Before calls of the driver that need a current context: see `driver.ensure_context`."""
        driver.ensure_context(self._index)


@functools.cache
def _load_for_host() -> ctypes.CDLL:
    return ctypes.CDLL(str(host_library()))


@functools.cache
def _load_for_gpu(device: torch.device) -> int:
    torch.cuda.init()
    binary = cubin(torch.cuda.get_device_capability(device))
    try:
        return driver.load_library(binary)
    except driver.DriverError as error:
        raise RuntimeError(explain_unloadable(error)) from error


@functools.cache
def _function(library: int, name: str) -> int:
    return driver.kernel(library, name)


@functools.cache
def _allow_shared_bytes(function: int, size: int, device: int) -> None:
    driver.allow_shared_bytes(function, size, device)
