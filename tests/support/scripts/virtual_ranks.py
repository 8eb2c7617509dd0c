"""Several ranks in one process: on a GPU in one cooperative launch, on the host by threads.

What comes out is compared with what the scripts state (`kernel_scripts`), bit for bit.
"""

from __future__ import annotations

import ctypes
from collections import deque
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from kernel_scripts import CHECK, REDUCES, WRITE, Operation, Script, Setup, one_hot, random_copies
from torch import Tensor

from megatron_hecate.device import driver
from megatron_hecate.nvlink.launch import THREADS, WARP, TransferKernels
from megatron_hecate.nvlink.memory import TRANSFER


class VirtualRanks:
    """All ranks of a script, with their memory on one device."""

    def __init__(self, setup: Setup, device: str, *, blocks: int, begin: int = 0) -> None:
        self._blocks, self._kernels = blocks, TransferKernels(torch.device(device))
        self._memory = torch.empty(0)

        def allocate(size: int) -> list[int]:
            self._memory = torch.zeros(setup.ranks, size, dtype=torch.uint8, device=device)
            return [row.data_ptr() for row in self._memory]

        self.script = Script(setup, begin=begin, allocate=allocate, device=device)
        told = int(np.uint32(self.script.told).astype(np.int32))
        self._memory[:, : 4 * setup.ranks].view(torch.int32).fill_(told)

    def finish(self) -> None:
        """The rest of the script, and a look at the memory between regions."""
        self.script.end()
        self.run()

    def run(self) -> None:
        """The script so far, which is then forgotten; raises AssertionError where a check fails."""
        todo = [deque(operations) for operations in self.script.operations]
        for operations in self.script.operations:
            operations.clear()  # so that data is freed when it was used
        while any(todo):
            for rank, operations in enumerate(todo):
                while operations and operations[0].kind in (WRITE, CHECK):
                    op = operations.popleft()
                    begin = op.address - self.script.bases[rank]
                    memory = self._memory[rank, begin : begin + len(op.data)]
                    if op.kind == WRITE:
                        memory.copy_(op.data)
                    elif not torch.equal(memory, op.data):
                        wrong, size = int((memory != op.data).nonzero()[0]), len(op.data)
                        pytest.fail(
                            f"rank {rank}: byte {wrong} of {size} at {begin:#x} is not as it should be"
                        )
            # All ranks take part in every transfer.
            if any(todo):
                self._transfer([operations.popleft() for operations in todo])

    def _transfer(self, operations: list[Operation]) -> None:
        ((kind, position),) = {(op.kind, op.position) for op in operations}
        for rank, op in enumerate(operations):
            begin = op.address - self.script.bases[rank]
            self._memory[rank, begin : begin + len(op.data)].copy_(op.data)
        headers = torch.cat([op.data[: TRANSFER.itemsize] for op in operations])
        headers = headers.to(self._memory.device)
        names = {number: f"fssdp_reduce_{a}_{b}" for (a, b), number in REDUCES.items()}
        arguments = ctypes.c_uint(position), ctypes.c_uint(0)
        ranks = len(operations)
        self._launch(
            "fssdp_synchronize", headers, arguments[:1], ranks=ranks, threads=WARP, blocks=1
        )
        name = names.get(kind, "fssdp_gather")
        self._launch(name, headers, arguments, ranks=ranks, threads=THREADS, blocks=self._blocks)

    def _launch(
        self,
        name: str,
        headers: Tensor,
        numbers: tuple[ctypes.c_uint, ...],
        *,
        ranks: int,
        threads: int,
        blocks: int,
    ) -> None:
        """The kernel ``name`` for all ranks: one launch, or a thread each."""
        function = self._kernels.function(name)
        if not headers.is_cuda:
            addresses = [
                ctypes.c_void_p(headers.data_ptr() + i * TRANSFER.itemsize) for i in range(ranks)
            ]
            with ThreadPoolExecutor(ranks) as pool:
                # a C function ignores arguments that it does not take
                failed = pool.map(lambda address: function(address, *numbers, blocks, 1), addresses)
                assert not any(failed), "a rank did not come"
            return
        stream = torch.cuda.current_stream().cuda_stream
        values = ctypes.c_void_p(headers.data_ptr()), *numbers
        arguments = (ctypes.c_void_p * len(values))(*map(ctypes.addressof, values))
        sizes = (blocks, ranks, 1, threads, 1, 1, 0)
        end = (stream, ctypes.addressof(arguments))
        driver.call("cuLaunchCooperativeKernel", function, *sizes, *end)
        torch.cuda.synchronize()


def check_random_placements(device: str, shift: int) -> None:
    """Run three iterations of six ranks on ``device``, for all types of gradients.

    Args:
        device: ``cpu`` or ``cuda``.
        shift: elements by which the experts' tensors miss their alignment.
    """
    rng = np.random.default_rng(shift)
    for bits in REDUCES:
        setup = Setup(6, 3, 2, (40000, 33, 7), shift=shift, bits=bits)
        ranks = VirtualRanks(setup, device, blocks=2, begin=2**32 - 20)
        ranks.script.iteration(one_hot(6, 1, 5))
        for _ in range(2):
            ranks.script.iteration(random_copies(rng, ranks=6, slots=3, experts=2))
        ranks.finish()


def check_one_hot_experts(device: str, sizes: tuple[int, ...]) -> None:
    """Copy one expert, whose tensors have these numbers of elements, from its home to three ranks, and sum back."""
    ranks = VirtualRanks(Setup(4, 1, 1, sizes), device, blocks=8)
    for home in (1, 2):
        ranks.script.iteration(one_hot(4, home, 3))
        ranks.run()
    ranks.finish()
