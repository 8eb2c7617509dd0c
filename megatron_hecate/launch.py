"""Runs programs (`kernel`): on a GPU's current stream, or at once on the host."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from megatron_hecate import compile as kernels
from megatron_hecate import kernel

BLOCKS: int = 16  # thread blocks of a transfer on a GPU: about one in eight multiprocessors of an H100
THREADS: int = 512  # of a block


def prepare(device: torch.device) -> None:
    """Compile and load the kernels, so that what speaks against them shows now.

    Raises:
        CompileError, PermissionError: as `compile.cubin` and `compile.host_library`.
        RuntimeError: when the GPU does not take them.
    """
    if device.type == "cuda":
        kernel_of("fssdp_gather", device)
    else:
        compile_for_host()


def run(name: str, program: np.ndarray, at: Tensor) -> None:
    """All steps of a transfer, by kernel ``name``.

    Args:
        program: as `kernel.program` makes it, for the address of ``at``.
        at: memory for it, on the device.
    """
    upload(program, at)
    if at.is_cuda:
        launch(name, at)
    else:
        getattr(compile_for_host(), name)(ctypes.c_void_p(at.data_ptr()), 1, 1)


def run_by_copy_engines(program: np.ndarray, at: Tensor, *, stopped: Callable[[], bool]) -> None:
    """All steps of a spAG by plain copies, with no kernel but the one thread block that exchanges signals.

    As `run`. On the host it ends early when ``stopped`` says so.
    """
    upload(program, at)
    steps = kernel.copies(program, at.data_ptr())
    for finished in range(len(steps) + 1):
        if at.is_cuda:
            launch("fssdp_meet", at, finished, blocks=1)
        else:
            compile_for_host().fssdp_meet(ctypes.c_void_p(at.data_ptr()), finished)
            if stopped():
                return
        if finished < len(steps) and len(steps[finished]):
            (batch if at.is_cuda else move)(steps[finished])


def upload(program: np.ndarray, at: Tensor) -> None:
    """Bring ``program`` to ``at``, on the current stream."""
    if at.is_cuda:
        staged = torch.empty(len(program), dtype=torch.uint8, pin_memory=True)
        staged.numpy()[:] = program
        at[: len(program)].copy_(staged, non_blocking=True)
    else:
        at.numpy()[: len(program)] = program


@functools.cache
def compile_for_host() -> ctypes.CDLL:
    """The kernels for CPU ranks.

    Raises:
        CompileError, PermissionError: as `compile.host_library`.
    """
    library = ctypes.CDLL(str(kernels.host_library()))
    size = library.fssdp_size_of_transfer()
    assert size == kernel.TRANSFER.itemsize, f"a transfer has {size} bytes there, {kernel.TRANSFER.itemsize} here"
    return library


@functools.cache
def kernel_of(name: str, device: torch.device) -> int:
    """The function ``name`` for this GPU."""
    from cuda.bindings import driver

    status, function = driver.cuLibraryGetKernel(_library(device), name.encode())
    _check(status, "cuLibraryGetKernel")
    return function


@functools.cache
def _library(device: torch.device) -> int:
    from cuda.bindings import driver

    torch.cuda.init()
    cubin = kernels.cubin(torch.cuda.get_device_capability(device))
    status, library = driver.cuLibraryLoadData(cubin, [], [], 0, [], [], 0)
    _check(status, "cuLibraryLoadData")
    return library


def launch(name: str, at: Tensor, *numbers: int, blocks: int = BLOCKS) -> None:
    """Run the program that lies in ``at``, on the GPU's current stream."""
    from cuda.bindings import driver

    function = driver.CUfunction(int(kernel_of(name, at.device)))
    stream = torch.cuda.current_stream(at.device).cuda_stream
    arguments = ((at.data_ptr(), *numbers), (ctypes.c_void_p, *(ctypes.c_uint,) * len(numbers)))
    (status,) = driver.cuLaunchKernel(function, blocks, 1, 1, THREADS, 1, 1, 0, stream, arguments, 0)
    _check(status, "cuLaunchKernel")


def batch(items: np.ndarray) -> None:
    """Make copies by the GPU's copy engines, where it can, on the current stream, which must not be the default one.

    Args:
        items: [n] `kernel.COPY`.
    """
    from cuda.bindings import driver

    how = driver.CUmemcpyAttributes()
    how.srcAccessOrder = driver.CUmemcpySrcAccessOrder.CU_MEMCPY_SRC_ACCESS_ORDER_STREAM
    how.flags = int(driver.CUmemcpyFlags.CU_MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE)
    to, source = ([driver.CUdeviceptr(address) for address in items[field].tolist()] for field in ("dst", "src"))
    stream = torch.cuda.current_stream().cuda_stream
    status, *_ = driver.cuMemcpyBatchAsync(to, source, items["bytes"].tolist(), len(items), [how], [0], 1, stream)
    _check(status, "cuMemcpyBatchAsync")


def move(items: np.ndarray) -> None:
    """The same on the host."""
    for item in items:
        ctypes.memmove(int(item["dst"]), int(item["src"]), int(item["bytes"]))


def _check(status: object, what: str) -> None:
    if int(status) != 0:  # type: ignore[call-overload]
        raise RuntimeError(f"{what} failed: {status}")
