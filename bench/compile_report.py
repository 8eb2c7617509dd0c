"""Report the compiled kernels of every architecture: seconds, registers, spills, size, wide loads.

    python bench/compile_report.py [--here]

Needs no GPU: `sass` reads the cubins. ``--here``: only this machine's GPU, with NVRTC only.
Loads are 16-byte loads of one thread, in the unrolled rounds of a kernel: least and largest number
in flight at the first wait. The bytes in flight of a transfer's blocks follow from this.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "bench")]

import sass  # noqa: E402
from rows import Table  # noqa: E402

from megatron_hecate import code_cache  # noqa: E402
from megatron_hecate.device import compile as kernels  # noqa: E402
from megatron_hecate.nvlink.launch import THREADS  # noqa: E402

ARCHITECTURES: tuple[tuple[int, int], ...] = ((8, 0), (9, 0), (10, 0))
COMPILERS = ("nvrtc", "nvcc")
MOVE = ("fssdp_gather", "fssdp_reduce")
KERNELS = Table("compiled kernels")
FAILURES = Table("not compiled")


def main() -> None:
    """Print a row per architecture, compiler and kernel."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--here", action="store_true", help="report this machine's GPU only")
    compilers = COMPILERS
    architectures = ARCHITECTURES
    if parser.parse_args().here:
        import torch

        compilers = COMPILERS[:1]
        architectures = (torch.cuda.get_device_capability(0),)
    with tempfile.TemporaryDirectory() as folder:
        # An empty cache: a cached cubin would not be compiled and timed.
        os.environ[code_cache.KERNELS.variable] = folder
        for compiler in compilers:
            for capability in architectures:
                report(compiler, capability, Path(folder))


def report(compiler: str, capability: tuple[int, int], folder: Path) -> None:
    """Compile for one architecture with one compiler, and print a row per kernel."""
    about = {"architecture": f"sm_{capability[0]}{capability[1]}", "compiler": compiler}
    start = time.perf_counter()
    try:
        cubin = kernels.cubin(capability, compiler=compiler)
    except kernels.CompileError as error:
        FAILURES.add(**about, why=str(error))
        return
    about["seconds"] = f"{time.perf_counter() - start:.2f}"
    file = folder / "kernels.cubin"
    file.write_bytes(cubin)
    code = sass.disassemble(file)
    for name, (registers, spilled) in sorted(sass.registers_and_stack(file).items()):
        loads = []
        if name in MOVE:
            loads = [each.under_way for each in sass.unrolled(code[name])]
        sizes = [count * sass.VECTOR * THREADS >> 10 for count in loads]
        KERNELS.add(
            **about,
            kernel=name,
            registers=registers,
            bytes_spilled=spilled,
            instructions=len(sass.instructions(code[name])),
            loads_of_16_bytes_under_way=_range(loads),
            **{f"KiB under way of a block of {THREADS} threads": _range(sizes)},
        )


def _range(numbers: list[int]) -> str:
    return f"{min(numbers)} to {max(numbers)}" if numbers else ""


if __name__ == "__main__":
    main()
