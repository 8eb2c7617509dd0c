"""Measure the kernels' bandwidth on one GPU, and the slowdown of a concurrent GEMM.

    python bench/kernels.py [--parts rates,overlap]

One GPU has no NVLink to itself: source and destination are both in its own memory. The table thus
shows the kernels' limits without a link, for every number of thread blocks. A spAG reads and writes
a chunk; a spRS reads a gradient and its total, and writes the total, both fp32 or both bf16.
*Payload* is the data that would cross the link: the chunk, or the gradient.

There are two verdicts. With the thread blocks of a transfer on an H100 (16 for copies, 32 for
sums), the payload must reach the bandwidth of NVLink 4 in one direction, 450 GB/s. With 132 blocks,
one per multiprocessor, reads and writes must reach 90 % (copies) or 85 % (sums) of the rate of the
GPU's own copy of equal size.

*Overlap*: bf16 GEMMs alone, and concurrent with copies on another stream that begin with the GEMMs
and last longer. The time includes no kernel launches from Python. For *alone*, the same copies run
after the GEMMs: at its power limit a GPU computes more slowly the busier it was, so both
measurements must have the same work and the same pauses.

``--tiny`` tries the script at small sizes; the numbers are then meaningless.
"""

from __future__ import annotations

import argparse
import ctypes
import functools
import math
import sys
from collections.abc import Callable
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "bench")]

from gpu_clock import Clock, Time, name_of, sets_beyond_cache  # noqa: E402
from rows import Table  # noqa: E402

from megatron_hecate.comm.transport import Copy  # noqa: E402
from megatron_hecate.nvlink.launch import LINK_RATES, THREADS, TransferKernels  # noqa: E402
from megatron_hecate.nvlink.memory import FAILURE, Memory, Signals, describe  # noqa: E402
from megatron_hecate.nvlink.tables import DomainPlan  # noqa: E402

EXPERTS = {
    "Mixtral-8x7B": 3 * 4096 * 14336,
    "DeepSeek-V3": 3 * 7168 * 2048,
    "Qwen3-30B-A3B": 3 * 2048 * 768,
}
COUNTS = (1, 2, 4, 8, 16, 32, 64, 132)
# thread blocks of a transfer on an H100
OURS = {"spAG": 16, "spRS": 32, "spRS bf16": 32}
KERNELS = {
    "spAG": "fssdp_gather",
    "spRS": "fssdp_reduce_32_32",
    "spRS bf16": "fssdp_reduce_16_16",
}
# bytes per second in one direction of NVLink 4 (H100 datasheet)
NVLINK: float = LINK_RATES[9]
# required share of the own copy's rate, with one block per multiprocessor
SHARES = {"spAG": 0.90, "spRS": 0.85, "spRS bf16": 0.85}
ITEMSIZE = {"spAG": 2, "spRS": 4, "spRS bf16": 2}
GEMM: int = 8192


class Bench:
    """Transfers of one rank without peers, so that none waits.

    Args:
        device: device of the buffers.
        elements: elements of a chunk.
        sets: sets of buffers, which launches use in turn.
    """

    def __init__(self, device: torch.device, elements: int, *, sets: int) -> None:
        self.device = device
        self.elements = elements
        self.kernels = TransferKernels(device)
        self.words = torch.zeros(64, dtype=torch.int32, device=device)
        # Kernels report a failure in host memory, so it is pinned.
        self.failure = torch.zeros(FAILURE.itemsize, dtype=torch.uint8, pin_memory=True)
        # Of each set: source and destination, of 4 bytes per element at most.
        self.buffers = torch.randn(sets, 2, elements, device=device)
        # The home sends the chunk, and collects its gradient, to itself.
        table = DomainPlan((Copy(0, 0, 0, 0),), 0, ((0,),)).table
        # Of a spAG the first step alone: into the send buffer.
        packing = DomainPlan((Copy(0, 0, 1, 0),), 0, ((0, 1),)).table
        self.tables = [torch.from_numpy(numbers).to(device) for numbers in (packing, table)]
        self.position = 1

    def launches(self, transfer: str) -> list[Callable[[int], None]]:
        """Build launchers of ``transfer`` per set of buffers; argument: blocks."""
        return [self._launch(transfer, number) for number in range(len(self.buffers))]

    def _launch(self, transfer: str, number: int) -> Callable[[int], None]:
        """Build the launcher of ``transfer`` on one set of buffers."""
        description = self._describe(transfer, number)

        def launch(blocks: int) -> None:
            arguments = (
                ctypes.c_void_p(description.data_ptr()),
                ctypes.c_uint(self.position),
                ctypes.c_uint(0),
            )
            self.kernels.launch(KERNELS[transfer], *arguments, blocks=blocks, threads=THREADS)

        return launch

    def _describe(self, transfer: str, number: int) -> torch.Tensor:
        """Describe ``transfer``; source and destination are in this rank's memory."""
        itemsize = ITEMSIZE[transfer]
        source, into = (buffer.data_ptr() for buffer in self.buffers[number])
        nothing = 0, 0
        if transfer == "spAG":
            size, table, home, chunks = self.elements * itemsize, 0, source, [(into, 0)]
        else:
            size, table, home, chunks = self.elements, 1, into, [nothing, (source, 0)]
        chunks += [nothing] * (4 - len(chunks))
        memory = Memory(((home,),), (size,), tuple(chunks), self.tables[table].data_ptr())
        words = self.words.data_ptr()
        signals = Signals(0, [words], words + 64, words + 128, self.failure.data_ptr(), timeout=10)
        description = torch.zeros(2048, dtype=torch.uint8, device=self.device)
        data = torch.from_numpy(describe(memory, signals, description.data_ptr()))
        description[: len(data)] = data.to(self.device)
        return description

    def moved(self, transfer: str) -> int:
        """Compute the bytes read and written by ``transfer``."""
        # Of a spRS the total is read and written.
        return self.elements * ITEMSIZE[transfer] * (2 if transfer == "spAG" else 3)

    def payload(self, transfer: str) -> int:
        """Compute the bytes of ``transfer`` that would cross the link."""
        return self.elements * ITEMSIZE[transfer]


def own_copy(size: int, clock: Clock) -> float:
    """Measure the bytes read and written per second by the device's own copy of ``size / 2`` bytes.

    Args:
        size: bytes read and written together.
        clock: clock of the device.
    """
    # Launches rotate over more memory than the L2 cache, so that all reads are from device memory.
    sets = sets_beyond_cache(size, clock.device)
    pairs = [
        torch.empty(2, size // 2, dtype=torch.uint8, device=clock.device).random_()
        for _ in range(sets)
    ]
    copies = [functools.partial(pair[1].copy_, pair[0]) for pair in pairs]
    return size / clock.time(*copies).seconds


def rates(clock: Clock, *, tiny: bool) -> None:
    """Print a row for each expert, transfer and number of blocks."""
    table = Table("rates, GB/s")
    found = {}
    for expert, elements in EXPERTS.items():
        sets = sets_beyond_cache(elements * 4, clock.device)
        if tiny:
            elements //= 4096
            sets = 1
        bench = Bench(clock.device, elements, sets=sets)
        for transfer, share in SHARES.items():
            moved = bench.moved(transfer)
            payload = bench.payload(transfer)
            own = own_copy(moved, clock)
            launches = bench.launches(transfer)
            for blocks in COUNTS:
                time = clock.time(*(functools.partial(launch, blocks) for launch in launches))
                rate = moved / time.seconds
                found[expert, transfer, blocks] = (payload / time.seconds, rate / own, share)
                table.add(
                    expert=expert,
                    transfer=transfer,
                    blocks=blocks,
                    us=time.us,
                    p10=time.low * 1e6,
                    p90=time.high * 1e6,
                    payload=payload / time.seconds / 1e9,
                    read_and_written=rate / 1e9,
                    own_copy=own / 1e9,
                    share=rate / own,
                    host_bound=time.host_bound,
                )
        # Free the buffers before the next expert's buffers are allocated.
        del bench
    _report_verdicts(found)


def _report_verdicts(found: dict[tuple[str, str, int], tuple[float, float, float]]) -> None:
    """Print the verdicts.

    Args:
        found: payload in bytes per second, share of the own copy's rate, and required share, by
            expert, transfer and number of blocks.
    """
    table = Table("verdicts")
    for (expert, transfer, blocks), (payload, share, wanted) in found.items():
        if blocks == OURS[transfer]:
            reached = payload >= NVLINK
            text = (
                f"{blocks} blocks move {payload / 1e9:.0f} GB/s of payload, "
                f"NVLink carries {NVLINK / 1e9:.0f}"
            )
        elif blocks == COUNTS[-1]:
            reached = share >= wanted
            text = (
                f"{COUNTS[-1]} blocks read and write at {share:.0%} of the own copy's rate, "
                f"wanted {wanted:.0%}"
            )
        else:
            continue
        table.add(expert=expert, transfer=transfer, measured=text, reached=reached)
    print(f"\nverdicts are made of {len(found)} rates")


def overlap(clock: Clock, *, tiny: bool) -> None:
    """Print the slowdown of bf16 GEMMs by concurrent copies and sums that outlast the GEMMs."""
    size = GEMM
    elements = EXPERTS["DeepSeek-V3"]
    sets = 2
    warm_up = 10
    if tiny:
        size = 256
        elements = 1 << 14
        sets = 1
        warm_up = 1
    bench = Bench(clock.device, elements, sets=sets)
    a, b = (torch.randn(size, size, device=clock.device).bfloat16() for _ in range(2))
    out = torch.empty_like(a)

    def gemms() -> None:
        for _ in range(8):
            torch.mm(a, b, out=out)

    table = Table(f"8 bf16 GEMMs of {size}^3 beside transfers")
    # Warm up to the GPU's steady temperature, on which its clock rate depends.
    for _ in range(warm_up):
        clock.time(gemms)
    all_lasted = True
    for transfer in KERNELS:
        launches = bench.launches(transfer)
        for blocks in COUNTS:
            run = functools.partial(launches[0], blocks)
            # Twice the time of the GEMMs, so that the copies outlast GEMMs that they slow down.
            repeats = math.ceil(2 * clock.time(gemms).seconds / clock.time(run).seconds)
            alone, _ = _with_copies(gemms, run, clock, repeats=repeats, beside=False)
            time, lasted = _with_copies(gemms, run, clock, repeats=repeats, beside=True)
            all_lasted &= lasted
            table.add(
                beside=f"{transfer}, {blocks}",
                alone_ms=alone.seconds * 1e3,
                ms=time.seconds * 1e3,
                longer=time.seconds / alone.seconds - 1,
                tflops=16 * size**3 / time.seconds / 1e12,
                lasted=lasted,
            )
    where = "in every row" if all_lasted else "not in every row"
    print(f"\ncopies lasted as long as the GEMMs: {where}")


def _with_copies(
    gemms: Callable[[], None], run: Callable[[], None], clock: Clock, *, repeats: int, beside: bool
) -> tuple[Time, bool]:
    """Time ``gemms`` with copies on another stream.

    Args:
        gemms: launcher of the GEMMs.
        run: launcher of one copy.
        clock: clock of the device.
        repeats: number of copies.
        beside: whether the copies run concurrently with the GEMMs, else after the GEMMs.

    Returns:
        Time of the GEMMs, and whether the copies of the last sample ended last.
    """
    side = torch.cuda.Stream()
    ends = torch.cuda.Event(enable_timing=True)
    after = torch.cuda.Event(enable_timing=True)

    def copies() -> None:
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            # The queue holds about a thousand launches; a full one would block Python.
            for _ in range(min(repeats, 800)):
                run()
            ends.record()

    def measured() -> None:
        gemms()
        after.record()

    if beside:
        # The clock blocks the stream during `before`, so that both start when it unblocks.
        time = clock.time(measured, before=copies)
    else:
        time = clock.time(measured, after=copies)
    torch.cuda.synchronize()
    return time, after.elapsed_time(ends) >= 0


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--parts", default="rates,overlap")
    parser.add_argument("--calls", type=int, default=10)
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    device = torch.device("cuda")
    clock = Clock(device, calls=2 if options.tiny else options.calls)
    print(f"{name_of(device)}, torch {torch.__version__}, {sys.argv}")
    # The default stream takes no batches of copies.
    torch.cuda.set_stream(torch.cuda.Stream())
    for part in options.parts.split(","):
        {"rates": rates, "overlap": overlap}[part](clock, tiny=options.tiny)


if __name__ == "__main__":
    main()
