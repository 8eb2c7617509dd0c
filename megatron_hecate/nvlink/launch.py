"""Launch transfers on a GPU's current stream, or synchronously on the host."""

from __future__ import annotations

import ctypes
import math

import torch
from torch import Tensor

from megatron_hecate.device.launch import Kernels

# Bandwidth of NVLink in one direction, bytes per second, by major compute capability of the GPU:
# A100, H100, B200.
LINK_RATES: dict[int, float] = {8: 300e9, 9: 450e9, 10: 900e9}
# Multiprocessors of such a GPU, without MIG and MPS.
MULTIPROCESSORS: dict[int, int] = {8: 108, 9: 132, 10: 148}
ROUND_TRIP: float = 2.3e-6  # latency of a read from a peer over a busy link, seconds
# Bytes from peers that a thread block keeps in flight, by kernel: `IN_FLIGHT` in transfer.cuh.
UNDER_WAY: dict[str, int] = {"gather": 64 << 10, "reduce": 32 << 10}
THREADS: int = 256  # threads of a block: `Wide` in kernels/device.cu
WARP: int = 32
FEWEST: int = 8  # least multiprocessors of a supported GPU


class TransferKernels(Kernels):
    """The kernels of transfers, compiled and loaded. Args and errors as `Kernels`.

    Raises:
        RuntimeError: also for a GPU with too few multiprocessors.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        if self.on_gpu:
            self.blocks = _blocks_on(device)
        else:
            self.blocks = dict.fromkeys(UNDER_WAY, 1)

    def run(self, name: str, description: Tensor, *, position: int, away: bool, ranks: int) -> None:
        """Run all steps of a transfer by the kernel ``name``, after a barrier with its peers.

        A kernel of one small thread block waits for the peers, so that the many blocks of the
        transfer do not occupy multiprocessors until then.

        Args:
            name: kernel.
            description: memory with the description, see `memory.describe`.
            position: progress counters since the epoch, the same on all ranks and larger than at
                the end of the previous transfer.
            away: whether to run the last step alone, after messages of other domains.
            ranks: number of ranks of the domain.
        """
        # One thread per peer.
        threads = -(-ranks // WARP) * WARP
        arguments = ctypes.c_void_p(description.data_ptr()), ctypes.c_uint(position % 2**32)
        self.launch("fssdp_synchronize", *arguments, blocks=1, threads=threads)
        # Functions of the host build take the numbers of blocks and threads, one of each.
        sizes = () if self.on_gpu else (ctypes.c_uint(1), ctypes.c_uint(1))
        self.launch(
            name,
            *arguments,
            ctypes.c_uint(away),
            *sizes,
            blocks=self.blocks[name.partition("_")[2].partition("_")[0]],
            threads=THREADS,
        )


def _blocks_on(device: torch.device) -> dict[str, int]:
    """Return the thread blocks of a transfer, by kernel.

    Together the blocks keep bandwidth times latency of the link in flight. Processes that share a
    GPU share its link as well, so each has as large a share of the blocks as of the
    multiprocessors. Blocks wait for peers between steps, so all blocks must run at the same time,
    together with the work that the peers wait for: each block takes a multiprocessor at most, and
    all blocks together at most half of the multiprocessors of this process.
    """
    multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
    if multiprocessors < FEWEST:
        raise RuntimeError(
            f"transport nvlink needs {FEWEST} multiprocessors of a GPU, this process has "
            f"{multiprocessors} (a MIG slice or an MPS share); make it larger, or use p2p"
        )
    major, _ = torch.cuda.get_device_capability(device)
    rate = LINK_RATES.get(major, max(LINK_RATES.values()))
    num_multiprocessors = MULTIPROCESSORS.get(major, max(MULTIPROCESSORS.values()))
    share = min(1.0, multiprocessors / num_multiprocessors)
    return {
        name: min(math.ceil(share * math.ceil(rate * ROUND_TRIP / size)), multiprocessors // 2)
        for name, size in UNDER_WAY.items()
    }
