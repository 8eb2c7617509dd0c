"""Several ranks in one process: on a GPU, where there is one, in one launch; on the host by threads.

Oracle: what the scripts state (`kernel_scripts`), bit for bit. On a GPU the ranks of a transfer are one cooperative
launch: all blocks are resident and may wait for each other.
"""

from __future__ import annotations

import ctypes
import os
from collections import deque
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from kernel_scripts import (
    CHECK,
    COPIES,
    REDUCE,
    WRITE,
    Operation,
    Script,
    Setup,
    one_hot,
    random_copies,
)
from torch import Tensor

from megatron_hecate.comm.nvlink.launch import THREADS, WARP, TransferKernels
from megatron_hecate.comm.nvlink.program import COPY, TRANSFER
from megatron_hecate.comm.transport import Copy
from megatron_hecate.device import driver

DEVICES = [
    pytest.param("cpu", marks=pytest.mark.fast),
    pytest.param(
        "cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
    ),
]
# Elements of an expert's tensors; where a whole command of `bench/gpu.py` is only rehearsed, few of them.
SHRUNK = 4096 if os.environ.get("FSSDP_TINY") else 1
EXPERTS = {
    name: (2 * hidden * ffn // SHRUNK, hidden * ffn // SHRUNK)
    for name, hidden, ffn in (
        ("mixtral", 4096, 14336),
        ("deepseek-v3", 7168, 2048),
        ("qwen3-30b", 2048, 768),
    )
}


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
            waiting = [operations for operations in todo if operations]
            first = min((operations[0].number for operations in waiting), default=0)
            together = [
                operations.popleft() for operations in waiting if operations[0].number == first
            ]
            if together:
                self._transfer(together)

    def _transfer(self, operations: list[Operation]) -> None:
        (kind,) = {op.kind for op in operations}
        for op in operations:
            rank = max(r for r, base in enumerate(self.script.bases) if base <= op.address)
            begin = op.address - self.script.bases[rank]
            self._memory[rank, begin : begin + len(op.data)].copy_(op.data)
        headers = np.concatenate([op.program[: TRANSFER.itemsize] for op in operations])
        at = torch.from_numpy(headers).to(self._memory.device)
        if kind != COPIES:
            name = "fssdp_reduce" if kind == REDUCE else "fssdp_gather"
            self._launch("fssdp_synchronize", at, ranks=len(operations), numbers=(0,), blocks=1)
            self._launch(name, at, ranks=len(operations), numbers=(), blocks=self._blocks)
            return
        steps = int(headers[: TRANSFER.itemsize].view(TRANSFER)["num_steps"][0])
        for step in range(steps + 1):
            self._launch("fssdp_synchronize", at, ranks=len(operations), numbers=(step,), blocks=1)
            for op in operations if step < steps else ():
                self._copy(op, step)

    def _copy(self, op: Operation, step: int) -> None:
        """The copies of a step, by copy engines."""
        header = op.program[: TRANSFER.itemsize].view(TRANSFER)["steps"][0][step]
        begin = int(header["items"]) - op.address
        items = op.program[begin : begin + int(header["count"]) * COPY.itemsize].view(COPY)
        if len(items) and self._memory.is_cuda:
            with torch.cuda.stream(torch.cuda.Stream()):
                self._kernels.copy(items)
            torch.cuda.synchronize()
        elif len(items):
            self._kernels.copy(items)

    def _launch(
        self, name: str, headers: Tensor, *, ranks: int, numbers: tuple[int, ...], blocks: int
    ) -> None:
        """The kernel ``name`` for all ranks: one launch, or a thread each."""
        function = self._kernels.function(name)
        if not headers.is_cuda:
            addresses = [
                ctypes.c_void_p(headers.data_ptr() + i * TRANSFER.itemsize) for i in range(ranks)
            ]
            with ThreadPoolExecutor(ranks) as pool:
                failed = pool.map(
                    lambda address: function(address, *(numbers or (blocks, 1))), addresses
                )
                assert not any(failed), "a rank did not come"
            return
        stream = torch.cuda.current_stream().cuda_stream
        arguments = [ctypes.c_void_p(headers.data_ptr()), *map(ctypes.c_uint, numbers)]
        addresses = (ctypes.c_void_p * len(arguments))(*map(ctypes.addressof, arguments))
        threads = WARP if numbers else THREADS
        driver.call(
            "cuLaunchCooperativeKernel",
            function,
            blocks,
            ranks,
            1,
            threads,
            1,
            1,
            0,
            stream,
            addresses,
        )
        torch.cuda.synchronize()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("shift", [0, 1], ids=["aligned", "unaligned"])
def test_random_placements(device: str, shift: int) -> None:
    rng = np.random.default_rng(shift)
    setup = Setup(6, 3, 2, (40000, 33, 50000, 7), shift=shift)
    ranks = VirtualRanks(setup, device, blocks=2, begin=2**32 - 20)
    ranks.script.iteration(one_hot(6, 1, 5))
    for i in range(4):
        ranks.script.iteration(
            random_copies(rng, ranks=6, slots=3, experts=2), by_copies=i % 2 == 1
        )
    ranks.finish()


@pytest.mark.parametrize("device", DEVICES[1:])
@pytest.mark.parametrize("name", list(EXPERTS))
def test_experts_of_real_size(device: str, name: str) -> None:
    """All is drawn and compared on the GPU, in some 30 GB for Mixtral."""
    ranks = VirtualRanks(Setup(4, 1, 1, EXPERTS[name]), device, blocks=8)
    for home, by_copies in ((1, False), (2, True)):
        ranks.script.iteration(one_hot(4, home, 3), by_copies=by_copies)
        ranks.run()
    ranks.finish()


@pytest.mark.fast
def test_a_wrong_byte_is_found() -> None:
    """What the script compares is compared: of slots, sums, and memory that nobody may write."""
    for memory in ("slot", "main_grad", "guard"):
        ranks = VirtualRanks(Setup(2, 1, 1, (4000, 33)), "cpu", blocks=1)
        ranks.script.iteration([Copy(0, 0, 1, 0)])
        if memory == "guard":
            ranks.run()
            ranks._memory[1, ranks.script.regions["send", 0][0][0] - 1] ^= 1
        else:
            (rank,) = {"slot": (1,), "main_grad": (0,)}[memory]
            at = ranks.script.bases[rank] + ranks.script.regions[memory, 0][0][0]
            operations = ranks.script.operations[rank]
            (number,) = [
                i for i, op in enumerate(operations) if (op.kind, op.address) == (CHECK, at)
            ]
            wrong = operations[number].data.clone()
            wrong[-1] ^= 1
            operations[number] = operations[number]._replace(data=wrong)
        with pytest.raises(
            pytest.fail.Exception, match=r"byte \d+ of \d+ at 0x\w+ is not as it should be"
        ):
            ranks.finish()
