"""Runs programs (`program`): on a GPU's current stream, or at once on the host."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from megatron_hecate.comm.nvlink.program import TRANSFER, Program
from megatron_hecate.device import driver
from megatron_hecate.device.launch import Kernels

# Bytes per second that NVLink carries one way, by a GPU's major compute capability: A100, H100, B200.
LINK_RATES: dict[int, float] = {8: 300e9, 9: 450e9, 10: 900e9}
ROUND_TRIP: float = 2.3e-6  # seconds until bytes of a peer come, while the link is busy
# Bytes of peers that a thread block asks for before it waits, by kernel: `IN_FLIGHT` in kernels/transfer.cuh.
UNDER_WAY: dict[str, int] = {"fssdp_gather": 64 << 10, "fssdp_reduce": 32 << 10}
THREADS: int = 256  # of a block: `Wide` in kernels/device.cu
WARP: int = 32
FEWEST: int = 8  # multiprocessors of a GPU


class TransferKernels(Kernels):
    """The kernels of transfers, compiled and loaded. As `Kernels`.

    Raises:
        RuntimeError: also for a GPU that is too small.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        if not self.on_gpu:
            size = self.function("fssdp_size_of_transfer")()
            assert size == TRANSFER.itemsize, (
                f"a transfer has {size} bytes there, {TRANSFER.itemsize} here"
            )
        self.blocks = _blocks_on(device) if self.on_gpu else dict.fromkeys(UNDER_WAY, 1)

    def run(
        self, name: str, program: Program, at: Tensor, *, met: Callable[[], None] = lambda: None
    ) -> None:
        """All steps of a transfer, by the kernel ``name``, once its peers are here: one small block waits for them.

        Args:
            program: that of the transfer.
            at: memory for it, on the device.
            met: called when the wait for the peers is over, or enqueued.
        """
        self._upload(program, at)
        self._synchronize(program, at, 0)
        met()
        self.run_at(name, at)

    def run_by_copy_engines(
        self,
        program: Program,
        at: Tensor,
        *,
        stopped: Callable[[], bool],
        met: Callable[[], None] = lambda: None,
    ) -> None:
        """All steps of a spAG by plain copies, with no kernel but the one thread block that exchanges signals.

        As `run`. On the host it ends early when ``stopped`` says so.
        """
        self._upload(program, at)
        steps = program.copies()
        for finished in range(len(steps) + 1):
            self._synchronize(program, at, finished)
            if not self.on_gpu and stopped():
                return
            if finished == 0:
                met()
            if finished < len(steps) and len(steps[finished]):
                self.copy(steps[finished])

    def run_at(self, name: str, at: Tensor, *, blocks: int | None = None) -> None:
        """Run the program that lies in ``at`` by the kernel ``name``. Its peers must be here."""
        further = (
            () if self.on_gpu else (ctypes.c_uint(1), ctypes.c_uint(1))
        )  # one block of one thread
        self.launch(
            name,
            ctypes.c_void_p(at.data_ptr()),
            *further,
            blocks=blocks or self.blocks[name],
            threads=THREADS,
        )

    def _synchronize(self, program: Program, at: Tensor, finished: int) -> None:
        """Tell the peers that so many steps are finished, and wait until theirs are: a thread for each of them."""
        threads = -(-program.ranks // WARP) * WARP
        arguments = ctypes.c_void_p(at.data_ptr()), ctypes.c_uint(finished)
        self.launch("fssdp_synchronize", *arguments, blocks=1, threads=threads)

    def copy(self, items: np.ndarray) -> None:
        """Make copies: by the GPU's copy engines where it can, on the current stream, which must not be the default
        one; or on the host.

        Args:
            items: [n] `program.COPY`.
        """
        if not self.on_gpu:
            for item in items:
                ctypes.memmove(int(item["dst"]), int(item["src"]), int(item["bytes"]))
            return
        how = driver.CopyAttributes(
            source_order=driver.IN_STREAM_ORDER, flags=driver.BESIDE_COMPUTING
        )
        to, source, sizes = (
            np.ascontiguousarray(items[field], np.uint64) for field in ("dst", "src", "bytes")
        )
        self._ensure_context()
        driver.call(
            "cuMemcpyBatchAsync",
            *(array.ctypes.data for array in (to, source, sizes)),
            len(items),
            ctypes.byref(how),
            ctypes.c_size_t(0),
            1,
            ctypes.c_size_t(),
            torch.cuda.current_stream().cuda_stream,
        )

    @staticmethod
    def can_batch_copies() -> bool:
        """Whether the driver has `cuMemcpyBatchAsync`."""
        return (driver.version() or 0) >= driver.BATCHED_COPIES

    def _upload(self, program: Program, at: Tensor) -> None:
        """Bring ``program`` to ``at``, on the current stream."""
        program.relocate(at.data_ptr())
        size = len(program.data)
        if self.on_gpu:
            pinned = torch.empty(size, dtype=torch.uint8, pin_memory=True)
            pinned.numpy()[:] = program.data
            at[:size].copy_(pinned, non_blocking=True)
        else:
            at.numpy()[:size] = program.data


def _blocks_on(device: torch.device) -> dict[str, int]:
    """Thread blocks of a transfer on a GPU, by kernel: as many as ask for the bytes that are on their way while the
    link is busy.

    They wait for peers between steps, so all must run at once, and beside whatever those peers wait for: each takes a
    multiprocessor at most, and all of them at most every second of those that this process has.
    """
    multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
    if multiprocessors < FEWEST:
        raise RuntimeError(
            f"transport nvlink needs {FEWEST} multiprocessors of a GPU, this process has {multiprocessors} (a slice by "
            "MIG, or a share by MPS); make it larger, or use p2p"
        )
    major, _ = torch.cuda.get_device_capability(device)
    rate = LINK_RATES.get(major, max(LINK_RATES.values()))
    return {
        name: min(math.ceil(rate * ROUND_TRIP / size), multiprocessors // 2)
        for name, size in UNDER_WAY.items()
    }
