"""Analyse a kernel's machine code with the disassembler of triton."""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import re
import shutil
import subprocess
from pathlib import Path

VECTOR: int = 16  # bytes of a load
REGISTER = re.compile(r"(\[?)\bR(\d+)\b")


@dataclasses.dataclass(frozen=True)
class Round:
    """Loads of 16 bytes by one thread from one array, until the first of them is waited for.

    Args:
        loads: how many.
        under_way: with those from other arrays.
    """

    loads: int
    under_way: int


def disassemble(cubin: Path) -> dict[str, str]:
    """The code of each kernel."""
    text = _run("-sass", cubin)
    return dict(re.findall(r"Function : (\w+)\n(.*?)(?=\n\t+Function : |\Z)", text, re.S))


def registers_and_stack(cubin: Path) -> dict[str, tuple[int, int]]:
    """Registers per thread, and bytes of local memory, of each kernel."""
    uses = re.findall(
        r"Function (\w+):\s+REG:(\d+) STACK:(\d+) .*LOCAL:(\d+)", _run("-res-usage", cubin)
    )
    return {
        name: (int(registers), int(stack) + int(local)) for name, registers, stack, local in uses
    }


def instructions(code: str) -> list[str]:
    """In order, without addresses and predicates."""
    found = re.findall(r"/\*[0-9a-f]{4,}\*/\s+(.*?)\s*;", code)
    return [re.sub(r"^@!?U?P\w+\s+", "", line) for line in found]


def rounds(code: str) -> list[Round]:
    """The rounds of a kernel in the order of its code, each counted once, also in a loop.

    A thread waits for a load at the first instruction that reads or writes a register into which it loads. Loads are
    from one array when they have one register for a base, and different offsets from it.
    """
    base_of: dict[int, int] = {}  # the array of each load under way, by its first register
    arrays: dict[int, int] = {}  # by base register, as long as that stands
    loads: list[int] = []  # of each array
    found: dict[int, Round] = {}
    for line in instructions(code):
        operation, _, operands = line.partition(" ")
        is_load = operation.startswith("LDG") and operation.endswith(".128")
        touched = _touched(operation, operands)
        for load in [load for load in base_of if touched & set(range(load, load + 4))]:
            array = base_of[load]
            found.setdefault(array, Round(loads[array], len(base_of)))
            del base_of[load]
        named = REGISTER.findall(operands)
        if is_load:
            into, base = int(named[0][1]), next(int(number) for bracket, number in named if bracket)
            if base not in arrays:
                arrays[base] = len(loads)
                loads.append(0)
            base_of[into] = arrays[base]
            loads[arrays[base]] += 1
        if named and not named[0][0]:  # the first operand is written
            written = range(int(named[0][1]), int(named[0][1]) + _width(operation))
            arrays = {
                base: array for base, array in arrays.items() if not {base, base + 1} & set(written)
            }
    return [found[array] for array in sorted(found)]


def _width(operation: str) -> int:
    """Registers of an operand."""
    return 4 if ".128" in operation else 2 if ".64" in operation or ".WIDE" in operation else 1


def _touched(operation: str, operands: str) -> set[int]:
    """Registers that an instruction reads or writes."""
    return {
        register
        for bracket, number in REGISTER.findall(operands)
        for register in range(int(number), int(number) + (2 if bracket else _width(operation)))
    }


def unrolled(code: str) -> list[Round]:
    """The rounds of a kernel without those for what is left at the end, which load one vector from an array."""
    return [found for found in rounds(code) if found.loads > 1]


def _run(what: str, cubin: Path) -> str:
    return subprocess.run(
        [_tool(), what, cubin], capture_output=True, text=True, check=True, timeout=60
    ).stdout


def _tool() -> str:
    """Triton's, or a CUDA toolkit's.

    Raises:
        FileNotFoundError: where there is neither.
    """
    spec = importlib.util.find_spec("triton")
    places = (
        [Path(spec.origin).parent / "backends" / "nvidia" / "bin"]
        if spec is not None and spec.origin
        else []
    )
    places.append(Path(os.environ.get("CUDA_HOME", "/usr/local/cuda")) / "bin")
    found = shutil.which("cuobjdump", path=os.pathsep.join(map(str, places))) or shutil.which(
        "cuobjdump"
    )
    if found is None:
        raise FileNotFoundError(
            "no cuobjdump, neither of triton nor of a CUDA toolkit; pip install triton"
        )
    return found
