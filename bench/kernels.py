"""How fast the kernels move bytes on one GPU, and what they take from a GEMM beside them.

    python bench/kernels.py

One GPU has no NVLink to itself: both ends lie in its own memory, and the baseline is its own device-to-device copy. So
this shows what the kernels can do where the link does not limit them, for every number of thread blocks. Rates are
bytes read and written per second: a copy reads and writes a chunk; a sum of k gradients reads k and the total, and
writes the total. The baseline copies as many bytes. Medians of ``--calls`` launches. Copies of spAG are made by copy
engines as well.

``--device cpu`` runs the host build, to try the script; its numbers mean nothing.
"""

from __future__ import annotations

import argparse
import ctypes
import functools
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from megatron_hecate.comm.nvlink.launch import TransferKernels  # noqa: E402
from megatron_hecate.comm.nvlink.program import FAILURE, Program, Signals  # noqa: E402
from megatron_hecate.comm.nvlink.schedule import Place, Pull, Schedule  # noqa: E402

EXPERTS = {"Mixtral-8x7B": 3 * 4096 * 14336, "DeepSeek-V3": 3 * 7168 * 2048, "Qwen3-30B-A3B": 3 * 2048 * 768}
BLOCKS = (1, 2, 4, 8, 16, 32, 64, 132)
SOURCES = 3  # gradients in a sum
TARGETS = {"spAG": 0.90, "spRS bf16": 0.85, "spRS fp32": 0.85}


class Bench:
    """Programs for one rank that deals with nobody else, so that nothing waits."""

    def __init__(self, device: torch.device, elements: int) -> None:
        self.device, self.elements, self.kernels = device, elements, TransferKernels(device)
        self.words = torch.zeros(64, dtype=torch.int32, device=device)
        self.failure = torch.zeros(FAILURE.itemsize, dtype=torch.uint8, pin_memory=device.type == "cuda")
        self.weights = torch.randn(2, elements, device=device).bfloat16()
        self.grads = torch.randn(SOURCES, elements, device=device)
        self.half = self.grads.bfloat16()
        self.main_grad = torch.zeros(elements, device=device)

    def launch(self, what: str) -> Callable[[int], None]:
        """What launches ``what`` with so many blocks; 0: by copy engines."""
        sums, grads = what != "spAG", self.half if what == "spRS bf16" else self.grads
        memory = {Place(0, "slot", i): self.weights[i] for i in range(2)}
        memory |= {Place(0, "grad", i): grads[i] for i in range(SOURCES)} | {Place(0, "main_grad", 0): self.main_grad}
        if sums:
            sources = tuple(Place(0, "grad", i) for i in range(SOURCES))
            pull = Pull(sources, Place(0, "main_grad", 0), 0, self.elements, add=True)
        else:
            pull = Pull((Place(0, "slot", 0),), Place(0, "slot", 1), 0, self.elements)
        words = self.words.data_ptr()
        program = Program(
            Schedule(((pull,),), frozenset()),
            lambda place: [(memory[place].data_ptr(), self.elements)],
            signals=Signals(0, {0: words}, words + 64, self.failure.data_ptr(), timeout=10.0),
            itemsize=grads.element_size() if sums else 2,
            sums=sums,
            begin=1,
        )
        at = torch.empty(len(program.data), dtype=torch.uint8, device=self.device)
        program.relocate(at.data_ptr())
        at.copy_(torch.from_numpy(program.data))
        name = "fssdp_reduce" if sums else "fssdp_gather"
        items = None if sums else program.copies()[0]
        if self.device.type == "cpu":
            host = self.kernels.function(name)
            run = functools.partial(host, ctypes.c_void_p(at.data_ptr()))
            return lambda blocks: run(blocks, 1) if blocks else self.kernels.copy(items)
        return lambda blocks: self.kernels.run_at(name, at, blocks=blocks) if blocks else self.kernels.copy(items)

    def moved(self, what: str) -> int:
        """Bytes read and written."""
        size = {"spAG": 2, "spRS bf16": 2, "spRS fp32": 4}[what]
        return self.elements * (2 * size if what == "spAG" else SOURCES * size + 8)

    def seconds(self, run: Callable[[], object], calls: int) -> float:
        """Median time of ``run``."""
        times = []
        for _ in range(calls + 2):
            if self.device.type == "cuda":
                begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                begin.record()
                run()
                end.record()
                torch.cuda.synchronize()
                times.append(begin.elapsed_time(end) / 1e3)
            else:
                start = time.perf_counter()
                run()
                times.append(time.perf_counter() - start)
        return statistics.median(times[2:])

    def copy_rate(self, size: int, calls: int) -> float:
        """Bytes read and written per second by the device's own copy of ``size / 2`` bytes."""
        a, b = (torch.empty(size // 2, dtype=torch.uint8, device=self.device) for _ in range(2))
        return size / self.seconds(lambda: b.copy_(a), calls)


def gemm_slowdown(bench: Bench, run: Callable[[], object], calls: int) -> float:
    """How much longer bf16 GEMMs take while ``run`` goes on beside them, all the time."""
    a = torch.randn(8192, 8192, device=bench.device).bfloat16()
    out = torch.empty_like(a)

    def gemms() -> None:
        for _ in range(8):
            torch.mm(a, a, out=out)

    alone = bench.seconds(gemms, calls)
    one, side = bench.seconds(run, calls), torch.cuda.Stream()
    repeats = int(np.ceil(2 * alone / one))

    def both() -> None:
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(repeats):
                run()
        gemms()

    together = bench.seconds(both, calls)
    torch.cuda.synchronize()
    return together / alone - 1


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--calls", type=int, default=10)
    options = parser.parse_args()
    device = torch.device(options.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        parser.error("no GPU here; --device cpu tries the script on the host")
    name = torch.cuda.get_device_name() if device.type == "cuda" else "host, one thread per block"
    print(f"{name}, torch {torch.__version__}; GB/s read and written, share of the device's own copy; {sys.argv}\n")
    if device.type == "cuda":
        torch.cuda.set_stream(torch.cuda.Stream())  # batches of copies are not for the default one
    blocks = BLOCKS if device.type == "cuda" else (1, 2)
    heads = " | ".join(["copy engines", *(f"{b} blocks" for b in blocks)])
    print(f"| expert | | own copy | {heads} | target |")
    print("|---|---|---|" + "---|" * (len(blocks) + 2))
    for expert, elements in EXPERTS.items():
        bench = Bench(device, elements if device.type == "cuda" else elements // 64)
        for what, target in TARGETS.items():
            run, size = bench.launch(what), bench.moved(what)
            own = bench.copy_rate(size, options.calls)
            by = [0, *blocks] if what == "spAG" else blocks
            rates = [size / bench.seconds(lambda b=b, run=run: run(b), options.calls) for b in by]
            cells = " | ".join(f"{rate / 1e9:.0f} ({rate / own:.0%})" for rate in rates)
            cells = cells if what == "spAG" else f"| {cells}"
            print(f"| {expert} | {what} | {own / 1e9:.0f} | {cells} | {target:.0%} |", flush=True)
        del bench
    if device.type == "cuda":
        bench = Bench(device, EXPERTS["DeepSeek-V3"])
        gather = bench.launch("spAG")
        print(f"\n| beside bf16 GEMMs of 8192^3 | {heads} |")
        print("|---|" + "---|" * (len(blocks) + 1))
        slower = [gemm_slowdown(bench, lambda b=b: gather(b), options.calls) for b in (0, *blocks)]
        print(f"| they take longer by | {' | '.join(f'{share:.1%}' for share in slower)} |")


if __name__ == "__main__":
    main()
