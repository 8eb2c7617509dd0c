"""Runs programs (`program`): on a GPU's current stream, or at once on the host."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_hecate.comm.nvlink.compile import cubin, host_library
from megatron_hecate.comm.nvlink.program import TRANSFER, Program

BLOCKS: int = 16  # thread blocks of a transfer on a GPU: about one in eight multiprocessors of an H100
THREADS: int = 512  # of a block
BATCHED_COPIES: int = 12080  # version of CUDA that has `cuMemcpyBatchAsync`


class Kernels:
    """The kernels, compiled and loaded for ``device``.

    Raises:
        CompileError, PermissionError: as `compile.cubin` and `compile.host_library`.
        RuntimeError: when the GPU does not take them.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._library = _load_for_gpu(device) if self._on_gpu else _load_for_host()

    def run(self, name: str, program: Program, at: Tensor) -> None:
        """All steps of a transfer, by the kernel ``name``.

        Args:
            program: that of the transfer.
            at: memory for it, on the device.
        """
        self._upload(program, at)
        self.launch(name, at)

    def run_by_copy_engines(self, program: Program, at: Tensor, *, stopped: Callable[[], bool]) -> None:
        """All steps of a spAG by plain copies, with no kernel but the one thread block that exchanges signals.

        As `run`. On the host it ends early when ``stopped`` says so.
        """
        self._upload(program, at)
        steps = program.copies()
        for finished in range(len(steps) + 1):
            self.launch("fssdp_synchronize", at, finished, blocks=1)
            if not self._on_gpu and stopped():
                return
            if finished < len(steps) and len(steps[finished]):
                self.copy(steps[finished])

    def launch(self, name: str, at: Tensor, *numbers: int, blocks: int = BLOCKS) -> None:
        """Run the program that lies in ``at`` by the kernel ``name``: on the GPU's current stream, or now, in this
        thread. ``numbers`` are its further arguments."""
        if not self._on_gpu:
            getattr(self._library, name)(ctypes.c_void_p(at.data_ptr()), *(numbers or (1, 1)))
            return
        from cuda.bindings import driver

        stream = torch.cuda.current_stream(at.device).cuda_stream
        arguments = ((at.data_ptr(), *numbers), (ctypes.c_void_p, *(ctypes.c_uint,) * len(numbers)))
        (status,) = driver.cuLaunchKernel(self.function(name), blocks, 1, 1, THREADS, 1, 1, 0, stream, arguments, 0)
        _check(status, "cuLaunchKernel")

    def function(self, name: str) -> Any:
        """The kernel ``name``, as the driver or `ctypes` calls it."""
        return _function(self._library, name) if self._on_gpu else getattr(self._library, name)

    def copy(self, items: np.ndarray) -> None:
        """Make copies: by the GPU's copy engines where it can, on the current stream, which must not be the default
        one; or on the host.

        Args:
            items: [n] `program.COPY`.
        """
        if not self._on_gpu:
            for item in items:
                ctypes.memmove(int(item["dst"]), int(item["src"]), int(item["bytes"]))
            return
        from cuda.bindings import driver

        how = driver.CUmemcpyAttributes()
        how.srcAccessOrder = driver.CUmemcpySrcAccessOrder.CU_MEMCPY_SRC_ACCESS_ORDER_STREAM
        how.flags = int(driver.CUmemcpyFlags.CU_MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE)
        to, source = ([driver.CUdeviceptr(address) for address in items[field].tolist()] for field in ("dst", "src"))
        stream = torch.cuda.current_stream().cuda_stream
        status, *_ = driver.cuMemcpyBatchAsync(to, source, items["bytes"].tolist(), len(items), [how], [0], 1, stream)
        _check(status, "cuMemcpyBatchAsync")

    @staticmethod
    def can_batch_copies() -> bool:
        """Whether the driver takes batches of copies."""
        try:
            from cuda.bindings import driver

            status, version = driver.cuDriverGetVersion()
        except (ImportError, OSError, RuntimeError):
            return False
        return int(status) == 0 and version >= BATCHED_COPIES and hasattr(driver, "cuMemcpyBatchAsync")

    def _upload(self, program: Program, at: Tensor) -> None:
        """Bring ``program`` to ``at``, on the current stream."""
        program.relocate(at.data_ptr())
        size = len(program.data)
        if self._on_gpu:
            pinned = torch.empty(size, dtype=torch.uint8, pin_memory=True)
            pinned.numpy()[:] = program.data
            at[:size].copy_(pinned, non_blocking=True)
        else:
            at.numpy()[:size] = program.data


@functools.cache
def _load_for_host() -> ctypes.CDLL:
    library = ctypes.CDLL(str(host_library()))
    size = library.fssdp_size_of_transfer()
    assert size == TRANSFER.itemsize, f"a transfer has {size} bytes there, {TRANSFER.itemsize} here"
    return library


@functools.cache
def _load_for_gpu(device: torch.device) -> Any:
    from cuda.bindings import driver

    torch.cuda.init()
    binary = cubin(torch.cuda.get_device_capability(device))
    status, library = driver.cuLibraryLoadData(binary, [], [], 0, [], [], 0)
    _check(status, "cuLibraryLoadData")
    return library


@functools.cache
def _function(library: Any, name: str) -> Any:
    from cuda.bindings import driver

    status, kernel = driver.cuLibraryGetKernel(library, name.encode())
    _check(status, "cuLibraryGetKernel")
    return driver.CUfunction(int(kernel))


def _check(status: Any, what: str) -> None:
    if int(status) != 0:
        raise RuntimeError(f"{what} failed: {status}")
