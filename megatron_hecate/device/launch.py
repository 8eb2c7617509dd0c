"""Kernel launches: on a GPU's current stream, or synchronously on the host in this thread."""

from __future__ import annotations

import ctypes
import functools
import sys
from collections.abc import Callable
from typing import Any

import torch

from megatron_hecate import code_cache
from megatron_hecate.device import driver
from megatron_hecate.device.compile import cubin, load_host_library

# dynamic shared memory of a thread block that needs no opt-in
SHARED_BYTES: int = 48 << 10
Argument = ctypes.c_void_p | ctypes.c_uint | ctypes.c_int | ctypes.c_ulonglong


class Kernels:
    """The kernels, compiled and loaded for ``device``.

    Raises:
        CompileError, PermissionError: see `compile.cubin` and `compile.host_library`.
        RuntimeError: if the driver cannot load the compiled kernels.
    """

    def __init__(self, device: torch.device) -> None:
        self.on_gpu = device.type == "cuda"
        self._device = device
        # Looks up a kernel by name: a driver handle on a GPU, a `ctypes` function on the host.
        self.function = _load_for_gpu(device) if self.on_gpu else _load_for_host()

    @property
    def most_shared_bytes(self) -> int:
        """Limit for a thread block's shared memory, in bytes."""
        if not self.on_gpu:
            return sys.maxsize
        return torch.cuda.get_device_properties(self._device).shared_memory_per_block_optin

    def launch(
        self, name: str, *arguments: Argument, blocks: int, threads: int, shared_bytes: int = 0
    ) -> None:
        """Launch the kernel ``name`` on the GPU's current stream.

        On the host, call the function of that name in ``kernels/host.cpp`` synchronously in this
        thread.

        Args:
            name: name of the kernel.
            arguments: kernel arguments in order.
            blocks: number of thread blocks.
            threads: threads per block.
            shared_bytes: dynamic shared memory per block, at most `most_shared_bytes`.
        """
        function = self.function(name)
        if not self.on_gpu:
            function(*arguments)
            return
        index = self._device.index
        if index is None:
            index = torch.cuda.current_device()
        driver.ensure_context(index)
        stream = torch.cuda.current_stream(self._device).cuda_stream
        if shared_bytes > SHARED_BYTES:
            driver.allow_shared_bytes(function, self.most_shared_bytes, index)
        driver.launch(
            function,
            arguments,
            blocks=blocks,
            threads=threads,
            shared_bytes=shared_bytes,
            stream=stream,
        )


@functools.cache
def _load_for_host() -> Callable[[str], Any]:
    return functools.cache(functools.partial(getattr, load_host_library()))


@functools.cache
def _load_for_gpu(device: torch.device) -> Callable[[str], Any]:
    torch.cuda.init()
    binary = cubin(torch.cuda.get_device_capability(device))
    try:
        library = driver.load_library(binary)
    except RuntimeError as error:
        raise RuntimeError(
            f"{error}: the driver does not load the kernels that NVRTC compiled; update it to "
            f"NVRTC's version of CUDA, or remove {code_cache.folder()}"
        ) from error
    return functools.cache(functools.partial(driver.kernel, library))
