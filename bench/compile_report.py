"""What the compilers make of the kernels, for every architecture: seconds, registers, spills, 16-byte accesses.

    python bench/compile_report.py

Needs no GPU. Looked up in the cubins with the disassembler that comes with triton.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from megatron_hecate.device import compile as kernels  # noqa: E402

ARCHITECTURES: tuple[tuple[int, int], ...] = ((8, 0), (9, 0), (10, 0))


def main() -> None:
    """Print a row per architecture, compiler and kernel."""
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"

    def dump(what: str, cubin: Path) -> str:
        return subprocess.run([tool, what, cubin], capture_output=True, text=True, check=True, timeout=60).stdout

    print("| architecture | compiler | seconds | kernel | registers | bytes spilled | 16-byte loads, stores |")
    print("|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        os.environ[kernels.CACHE] = folder  # so that it compiles now
        for compiler in ("nvrtc", "nvcc"):
            for capability in ARCHITECTURES:
                start = time.perf_counter()
                try:
                    cubin = kernels.cubin(capability, compiler=compiler)
                except kernels.CompileError as error:
                    print(f"| sm_{capability[0]}{capability[1]} | {compiler} | {error} | | | | |")
                    continue
                seconds = time.perf_counter() - start
                file = Path(folder) / "kernels.cubin"
                file.write_bytes(cubin)
                uses = re.findall(r"Function (\w+):\s+REG:(\d+) STACK:(\d+) .*LOCAL:(\d+)", dump("-res-usage", file))
                code = dict(re.findall(r"Function : (\w+)\n(.*?)(?=\n\t+Function : |\Z)", dump("-sass", file), re.S))
                for name, registers, stack, local in sorted(uses):
                    wide = [len(re.findall(rf"{op}\.E[.\w]*\.128", code[name])) for op in ("LDG", "STG")]
                    print(
                        f"| sm_{capability[0]}{capability[1]} | {compiler} | {seconds:.2f} | {name} | {registers} | "
                        f"{int(stack) + int(local)} | {wide[0]}, {wide[1]} |"
                    )


if __name__ == "__main__":
    main()
