"""Runs the scripts of `kernel_scripts` in one process: all ranks' memory on one device, transfers by all ranks at once.

On a GPU the ranks of a transfer are one cooperative launch: all blocks are resident and may wait for each other. On the
host they are threads.
"""

from __future__ import annotations

import ctypes
from collections import deque
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from kernel_scripts import BYTE, CHECK, COPIES, FLOAT, HALF, NONE, REDUCE, WRITE, Script
from torch import Tensor

from megatron_hecate import kernel, launch
from megatron_hecate.kernel import COPY, SOURCE, SUM, TRANSFER

ADDRESS = (1 << 40) - 1  # of a byte in its rank's memory


def run(script: Script, device: str, *, blocks: int) -> None:
    """All of ``script``; raises AssertionError where a check fails."""
    memory = torch.zeros(script.ranks, -(-script.end // 256) * 256, dtype=torch.uint8, device=device)
    memory[:, : 4 * script.ranks].view(torch.int32).fill_(int(np.uint32(script.told).astype(np.int32)))
    todo = [deque(_operations(words)) for words in script.words]
    while any(todo):
        for rank, operations in enumerate(todo):
            while operations and operations[0][0] in (WRITE, CHECK):
                _local(memory[rank], rank, operations.popleft())
        waiting = {rank: operations[0] for rank, operations in enumerate(todo) if operations}
        if not waiting:
            return
        begins = {rank: int(_header(op[3])["begin"]) for rank, op in waiting.items()}
        first = min(begins.values(), key=lambda begin: int(np.uint32((begin - script.told) % 2**32)))
        together = [rank for rank, begin in begins.items() if begin == first]
        _launch(memory, {rank: todo[rank].popleft() for rank in together}, blocks=blocks)


def _operations(words: list[int]) -> list[tuple]:
    """(operation, address, ...) one by one; of a transfer, its program as bytes in the end."""
    found, at = [], 0
    while at < len(words):
        op = words[at]
        if op == WRITE:
            size = 5
            found.append(tuple(words[at : at + size]))
        elif op == CHECK:
            size = 6 + words[at + 5]
            found.append(tuple(words[at : at + size]))
        else:
            size = 3 + -(-words[at + 2] // 8)
            program = np.array(words[at + 3 : at + size], "<u8").view(np.uint8)[: words[at + 2]].copy()
            found.append((*words[at : at + 3], program))
        at += size
    return found


def _header(program: np.ndarray) -> np.ndarray:
    return program[: TRANSFER.itemsize].view(TRANSFER)[0]


def _bits(seed: int, elements: int) -> np.ndarray:
    """[elements] as ``random_bits`` of ``kernels/selftest.cpp``."""
    with np.errstate(over="ignore"):
        x = np.uint64(seed + 1) * np.uint64(0x9E3779B97F4A7C15)
        x = x + np.arange(elements, dtype=np.uint64) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(31))) * np.uint64(0x94D049BB133111EB)
    return (x >> np.uint64(32)).astype(np.uint32)


def floats(seed: int, elements: int) -> np.ndarray:
    """[elements] fp32, all of them bf16 as well."""
    bits = _bits(seed, elements)
    value = ((bits & 0xFF).astype(np.int32) - 128).astype(np.float32) * (np.uint32(1) << (bits >> 28)).astype(
        np.float32
    )
    return (value.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)


def _values(kind: int, seed: int, elements: int) -> np.ndarray:
    """[bytes]"""
    if kind == BYTE:
        return (_bits(seed, elements) & 0xFF).astype(np.uint8)
    values = floats(seed, elements).view(np.uint32)
    return (values >> np.uint32(16)).astype("<u2").view(np.uint8) if kind == HALF else values.view(np.uint8)


def _local(memory: Tensor, rank: int, op: tuple) -> None:
    what, address, kind, elements, seed, *rest = op
    at, size = address & ADDRESS, elements * {BYTE: 1, HALF: 2, FLOAT: 4}[kind]
    if what == WRITE:
        memory[at : at + size].copy_(torch.from_numpy(_values(kind, seed, elements)))
        return
    seeds = rest[1:]
    if kind == FLOAT:
        total = floats(seeds[0], elements)
        for seed_ in seeds[1:]:
            total = total + floats(seed_, elements)
        expected = (total if seed == NONE else floats(seed, elements) + total).view(np.uint8)
    else:
        expected = _values(kind, seed, elements)
    seen = memory[at : at + size].cpu().numpy()
    wrong = np.flatnonzero(seen != expected)
    assert not len(wrong), f"rank {rank}: byte {wrong[0]} of {size} at {at:#x} is not as it should be"


def _relocate(program: np.ndarray, at: int, bases: list[int], *, sums: bool) -> None:
    """Turn addresses of ranks' memory into those on the device, as ``load`` of ``kernels/selftest.cpp`` does.

    Args:
        at: of the program in its rank's memory.
    """

    def moved(addresses: np.ndarray) -> np.ndarray:
        ranks = (addresses >> np.uint64(40)).astype(np.int64) - 1
        return np.array([*bases, 0], np.uint64)[ranks] + (addresses & np.uint64(ADDRESS))  # rank -1: no address

    def part(address: int, dtype: np.dtype, count: int) -> np.ndarray:
        begin = (int(address) & ADDRESS) - at
        return program[begin : begin + count * dtype.itemsize].view(dtype)

    header = program[: TRANSFER.itemsize].view(TRANSFER)
    for step in header["steps"][0][: int(header["num_steps"][0])]:
        items = part(step["items"], SUM if sums else COPY, int(step["count"]))
        items["dst"] = moved(items["dst"])
        if sums:
            sources = part(step["sources"], SOURCE, int(items["sources"].sum()))
            sources["src"] = moved(sources["src"])
        else:
            items["src"] = moved(items["src"])
    for name in ("progress", "progress_at", "arrived", "failure"):
        header[name] = moved(header[name])
    header["steps"]["items"] = moved(header["steps"]["items"])
    header["steps"]["sources"] = moved(header["steps"]["sources"])


def _launch(memory: Tensor, operations: dict[int, tuple], *, blocks: int) -> None:
    bases = [row.data_ptr() for row in memory]
    headers = np.zeros(len(operations), TRANSFER)
    for i, (rank, (op, address, _, program)) in enumerate(operations.items()):
        at = address & ADDRESS
        _relocate(program, at, bases, sums=op == REDUCE)
        headers[i] = _header(program)
        memory[rank, at : at + len(program)].copy_(torch.from_numpy(program))
    (kind,) = {op[0] for op in operations.values()}
    on_device = torch.from_numpy(headers.view(np.uint8)).to(memory.device)
    if kind == COPIES:
        items = [kernel.copies(op[3], bases[rank] + (op[1] & ADDRESS)) for rank, op in operations.items()]
        for step in range(len(items[0]) + 1):
            _all_at_once("fssdp_meet", on_device, len(operations), step, blocks=1)
            for steps in items:
                _copy(steps[step] if step < len(steps) else [], memory.is_cuda)
    else:
        _all_at_once("fssdp_reduce" if kind == REDUCE else "fssdp_gather", on_device, len(operations), blocks=blocks)


def _copy(items: np.ndarray, on_gpu: bool) -> None:
    if on_gpu and len(items):
        with torch.cuda.stream(torch.cuda.Stream()):
            launch.batch(items)
        torch.cuda.synchronize()
    elif not on_gpu:
        launch.move(items)


def _all_at_once(name: str, headers: Tensor, ranks: int, *numbers: int, blocks: int) -> None:
    """The kernel ``name`` for all ranks: one launch, or a thread each."""
    if not headers.is_cuda:
        host = getattr(launch.compile_for_host(), name)
        more = numbers or (blocks, 1)
        with ThreadPoolExecutor(ranks) as pool:
            at = [ctypes.c_void_p(headers.data_ptr() + i * TRANSFER.itemsize) for i in range(ranks)]
            assert not any(pool.map(lambda address: host(address, *more), at)), "a rank did not come"
        return
    from cuda.bindings import driver

    function = driver.CUfunction(int(launch.kernel_of(name, headers.device)))
    stream = torch.cuda.current_stream().cuda_stream
    arguments = ((headers.data_ptr(), *numbers), (ctypes.c_void_p, *(ctypes.c_uint,) * len(numbers)))
    (status,) = driver.cuLaunchCooperativeKernel(function, blocks, ranks, 1, launch.THREADS, 1, 1, 0, stream, arguments)
    assert int(status) == 0, status
    torch.cuda.synchronize()
