"""Measure the kernels' bandwidth on one GPU, and the slowdown of a concurrent GEMM.

    python bench/kernels.py [--parts rates,overlap]

One GPU has no NVLink to itself: both ends lie in its own memory. So this shows what the kernels can do where the link
does not limit them, for every number of thread blocks. A copy reads and writes a chunk; a sum of 3 gradients reads 3
and the total, and writes the total. *Payload* is what would come over the link: the chunk, or the gradients.

Two verdicts. 16 blocks, as many as a transfer takes, must move as much payload as NVLink 4 carries one way, 450 GB/s.
132 blocks, one on each multiprocessor, must read and write at 90 % (copies) or 85 % (sums) of the rate of the GPU's own
copy of as many bytes. Copies of spAG are made by copy engines as well.

*Overlap*: bf16 GEMMs alone, and beside copies of another stream that begin when they do and last longer. The time in
which Python launches the copies is not in it. *Alone*, the same copies come after the GEMMs: a GPU at its power limit
computes the slower the busier it was, so both must give it the same work and the same pauses.

``--device cpu`` runs the host build, and ``--tiny`` small sizes, to try the script; the numbers mean nothing then.
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

from megatron_hecate.comm.nvlink.launch import LINK_RATES, TransferKernels  # noqa: E402
from megatron_hecate.comm.nvlink.places import Place, Pull  # noqa: E402
from megatron_hecate.comm.nvlink.program import FAILURE, Program, Signals  # noqa: E402
from megatron_hecate.comm.nvlink.schedule import TransferSchedule  # noqa: E402

EXPERTS = {
    "Mixtral-8x7B": 3 * 4096 * 14336,
    "DeepSeek-V3": 3 * 7168 * 2048,
    "Qwen3-30B-A3B": 3 * 2048 * 768,
}
ENGINES: int = 0  # in place of a number of blocks
COUNTS = (1, 2, 4, 8, 16, 32, 64, 132)
OURS = {"spAG": 16, "spRS": 32}  # blocks that a transfer has on an H100
SOURCES: int = 3  # gradients in a sum
NVLINK: float = LINK_RATES[9]  # bytes per second one way, of NVLink 4 (H100 datasheet)
SHARES = {"spAG": 0.90, "spRS": 0.85}  # of the own copy's rate, with every multiprocessor
ITEMSIZE = {"spAG": 2, "spRS": 4}
GEMM: int = 8192


class Bench:
    """Programs for one rank that deals with nobody else, so that nothing waits.

    Args:
        device: where.
        elements: of a chunk.
        sets: of buffers, which launches use in turn.
    """

    def __init__(self, device: torch.device, elements: int, *, sets: int) -> None:
        self.device, self.elements, self.kernels = device, elements, TransferKernels(device)
        self.words = torch.zeros(64, dtype=torch.int32, device=device)
        self.failure = torch.zeros(
            FAILURE.itemsize, dtype=torch.uint8, pin_memory=device.type == "cuda"
        )
        self.weights = torch.randn(sets, 2, elements, device=device, dtype=torch.bfloat16)
        self.grads = torch.randn(sets, SOURCES, elements, device=device)
        self.main_grad = torch.zeros(sets, elements, device=device)
        self._programs: list[object] = []  # what copies by engines refer to

    def launches(self, what: str) -> list[Callable[[int], None]]:
        """What launches ``what`` with so many blocks, or `ENGINES`; one for each set of buffers."""
        return [self._launch(what, number) for number in range(len(self.weights))]

    def _launch(self, what: str, number: int) -> Callable[[int], None]:
        sums = what != "spAG"
        memory = {Place(0, "slot", i): self.weights[number, i] for i in range(2)}
        memory |= {Place(0, "grad", i): self.grads[number, i] for i in range(SOURCES)}
        memory |= {Place(0, "main_grad", 0): self.main_grad[number]}
        if sums:
            sources = tuple(Place(0, "grad", i) for i in range(SOURCES))
            pull = Pull(sources, Place(0, "main_grad", 0), 0, self.elements, add=True)
        else:
            pull = Pull((Place(0, "slot", 0),), Place(0, "slot", 1), 0, self.elements)
        words = self.words.data_ptr()
        program = Program(
            TransferSchedule(((pull,),), frozenset()),
            lambda place: [(memory[place].data_ptr(), self.elements)],
            signals=Signals(0, {0: words}, words + 64, self.failure.data_ptr(), timeout=10.0),
            itemsize=ITEMSIZE[what],
            sums=sums,
            begin=1,
        )
        at = torch.empty(len(program.data), dtype=torch.uint8, device=self.device)
        program.relocate(at.data_ptr())
        at.copy_(torch.from_numpy(program.data))
        self._programs.append(program)
        name = "fssdp_reduce" if sums else "fssdp_gather"
        items = None if sums else program.copies()[0]
        if self.device.type == "cpu":
            host = functools.partial(self.kernels.function(name), ctypes.c_void_p(at.data_ptr()))
            return lambda blocks: host(blocks, 1) if blocks else self.kernels.copy(items)
        return lambda blocks: (
            self.kernels.run_at(name, at, blocks=blocks) if blocks else self.kernels.copy(items)
        )

    def moved(self, what: str) -> int:
        """Bytes read and written."""
        return self.elements * (
            2 * ITEMSIZE[what] if what == "spAG" else SOURCES * ITEMSIZE[what] + 8
        )

    def payload(self, what: str) -> int:
        """Bytes that would come over the link."""
        return self.elements * ITEMSIZE[what] * (1 if what == "spAG" else SOURCES)


def own_copy(size: int, clock: Clock) -> float:
    """Bytes read and written per second by the device's own copy of ``size / 2`` bytes."""
    sets = sets_beyond_cache(size, clock.device)
    pairs = [
        torch.empty(2, size // 2, dtype=torch.uint8, device=clock.device).random_()
        for _ in range(sets)
    ]
    return size / clock.time(*(lambda pair=pair: pair[1].copy_(pair[0]) for pair in pairs)).seconds


def rates(clock: Clock, *, tiny: bool) -> None:
    """Print a row for each expert, transfer and number of blocks."""
    table, found = Table("rates, GB/s"), {}
    counts = (1, 2) if clock.device.type == "cpu" else COUNTS
    for expert, elements in EXPERTS.items():
        elements = elements // 4096 if tiny else elements
        sets = 1 if tiny else sets_beyond_cache(elements * 4, clock.device)
        bench = Bench(clock.device, elements, sets=sets)
        for what, share in SHARES.items():
            moved, payload = bench.moved(what), bench.payload(what)
            own, launches = own_copy(moved, clock), bench.launches(what)
            for blocks in (ENGINES, *counts) if what == "spAG" else counts:
                time = clock.time(*(functools.partial(launch, blocks) for launch in launches))
                rate = moved / time.seconds
                found[expert, what, blocks] = payload / time.seconds, rate / own, share
                table.add(
                    expert=expert,
                    transfer=what,
                    blocks=blocks or "engines",
                    us=time.us,
                    p10=time.low * 1e6,
                    p90=time.high * 1e6,
                    payload=payload / time.seconds / 1e9,
                    read_and_written=rate / 1e9,
                    own_copy=own / 1e9,
                    share=rate / own,
                    host_bound=time.host_bound,
                )
        del bench
    _judge(found)


def _judge(found: dict[tuple[str, str, int], tuple[float, float, float]]) -> None:
    """Print the verdicts on payload per second, and the share of the own copy's rate, of each measurement."""
    table = Table("verdicts")
    for (expert, what, blocks), (payload, share, wanted) in found.items():
        if blocks == OURS[what]:
            reached = payload >= NVLINK
            text = f"{blocks} blocks move {payload / 1e9:.0f} GB/s of payload, NVLink carries {NVLINK / 1e9:.0f}"
        elif blocks == COUNTS[-1]:
            reached = share >= wanted
            text = f"{COUNTS[-1]} blocks read and write at {share:.0%} of the own copy's rate, wanted {wanted:.0%}"
        else:
            continue
        table.add(expert=expert, transfer=what, measured=text, reached=reached)
    print(f"\nverdicts are made of {len(found)} rates")


def overlap(clock: Clock, *, tiny: bool) -> None:
    """Print how much longer bf16 GEMMs take beside copies and sums that last as long as they do."""
    size, elements = (256, 1 << 14) if tiny else (GEMM, EXPERTS["DeepSeek-V3"])
    bench = Bench(clock.device, elements, sets=1 if tiny else 2)
    a, b = (torch.randn(size, size, device=clock.device).bfloat16() for _ in range(2))
    out = torch.empty_like(a)

    def gemms() -> None:
        for _ in range(8):
            torch.mm(a, b, out=out)

    table = Table(f"8 bf16 GEMMs of {size}^3 beside transfers")
    for _ in range(1 if tiny else 10):  # the GPU gets as warm as it will be
        clock.time(gemms)
    all_lasted = True
    for what in ("spAG", "spRS"):
        launches = bench.launches(what)
        for blocks in (ENGINES, *COUNTS) if what == "spAG" else COUNTS:
            run = functools.partial(launches[0], blocks)
            repeats = math.ceil(2 * clock.time(gemms).seconds / clock.time(run).seconds)
            alone, _ = _with_copies(gemms, run, clock, repeats=repeats, beside=False)
            time, lasted = _with_copies(gemms, run, clock, repeats=repeats, beside=True)
            all_lasted &= lasted
            table.add(
                beside=f"{what}, {blocks or 'engines'}",
                alone_ms=alone.seconds * 1e3,
                ms=time.seconds * 1e3,
                longer=time.seconds / alone.seconds - 1,
                tflops=16 * size**3 / time.seconds / 1e12,
                lasted=lasted,
            )
    print(
        f"\ncopies lasted as long as the GEMMs: {'in every row' if all_lasted else 'not in every row'}"
    )


def _with_copies(
    gemms: Callable[[], None], run: Callable[[], None], clock: Clock, *, repeats: int, beside: bool
) -> tuple[Time, bool]:
    """Time ``gemms`` while ``repeats`` of ``run`` go on in another stream, or with those behind them; also return
    whether the copies ended last."""
    side, ends = torch.cuda.Stream(), torch.cuda.Event(enable_timing=True)
    after = torch.cuda.Event(enable_timing=True)

    def copies() -> None:
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(min(repeats, 800)):  # the queue of launches ends at about a thousand
                run()
            ends.record()

    def measured() -> None:
        gemms()
        after.record()

    # Before: the stream is asleep, and both begin when it wakes up.
    time = clock.time(measured, before=copies) if beside else clock.time(measured, after=copies)
    torch.cuda.synchronize()
    return time, after.elapsed_time(ends) >= 0  # of the last sample


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--parts", default="rates,overlap")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--calls", type=int, default=10)
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    device = torch.device(options.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        parser.error("no GPU here; --device cpu tries the script on the host")
    clock = Clock(device, calls=2 if options.tiny else options.calls)
    print(f"{name_of(device)}, torch {torch.__version__}, {sys.argv}")
    if device.type == "cuda":
        torch.cuda.set_stream(torch.cuda.Stream())  # batches of copies are not for the default one
    for part in options.parts.split(","):
        if part == "overlap" and device.type == "cpu":
            print("overlap: needs a GPU")
        else:
            {"rates": rates, "overlap": overlap}[part](
                clock, tiny=options.tiny or device.type == "cpu"
            )


if __name__ == "__main__":
    main()
