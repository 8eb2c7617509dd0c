"""What the compilers make of the kernels, for every architecture: seconds, registers, spills, and loads of 16 bytes.

    python bench/compile_report.py

Needs no GPU: `sass` looks it up in the cubins. Loads are those of one thread, in the unrolled rounds of a kernel: how
many are under way when the first of them is waited for, at least and at most. From that follow the bytes that the
blocks of a transfer have under way.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "bench")]

import sass  # noqa: E402

from megatron_hecate.comm.nvlink.launch import BLOCKS, THREADS  # noqa: E402
from megatron_hecate.device import compile as kernels  # noqa: E402

ARCHITECTURES: tuple[tuple[int, int], ...] = ((8, 0), (9, 0), (10, 0))
MOVE = ("fssdp_gather", "fssdp_reduce")


def main() -> None:
    """Print a row per architecture, compiler and kernel."""
    heads = ["architecture", "compiler", "seconds", "kernel", "registers", "bytes spilled", "16-byte loads under way"]
    heads.append(f"KiB under way, {BLOCKS} blocks of {THREADS} threads")
    print(f"| {' | '.join(heads)} |\n|{'---|' * len(heads)}")
    with tempfile.TemporaryDirectory() as folder:
        os.environ[kernels.CACHE] = folder  # so that it compiles now
        for compiler in ("nvrtc", "nvcc"):
            for major, minor in ARCHITECTURES:
                start = time.perf_counter()
                try:
                    cubin = kernels.cubin((major, minor), compiler=compiler)
                except kernels.CompileError as error:
                    print(f"| sm_{major}{minor} | {compiler} | {error} |{' |' * (len(heads) - 3)}")
                    continue
                head = f"sm_{major}{minor} | {compiler} | {time.perf_counter() - start:.2f}"
                file = Path(folder) / "kernels.cubin"
                file.write_bytes(cubin)
                code = sass.disassemble(file)
                for name, (registers, spilled) in sorted(sass.registers_and_stack(file).items()):
                    loads = [each.under_way for each in sass.unrolled(code[name])] if name in MOVE else []
                    sizes = [count * sass.VECTOR * THREADS * BLOCKS >> 10 for count in loads]
                    cells = (f"{min(numbers)} to {max(numbers)}" if numbers else "" for numbers in (loads, sizes))
                    print(f"| {head} | {name} | {registers} | {spilled} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
