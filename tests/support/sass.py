"""Analyse a kernel's machine code with triton's disassembler."""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import re
import shutil
import subprocess
from pathlib import Path

# bytes of a load
VECTOR: int = 16
REGISTER = re.compile(r"(\[?)\bR(\d+)\b")


@dataclasses.dataclass(frozen=True)
class Round:
    """Loads of 16 bytes by one thread from one array, up to the first wait for one of the loads.

    Args:
        loads: number of loads from this array.
        under_way: number of loads in flight at the wait, from all arrays.
    """

    loads: int
    under_way: int


def disassemble(cubin: Path) -> dict[str, str]:
    """Disassemble the code of each kernel."""
    text = _run("-sass", cubin)
    return dict(re.findall(r"Function : (\w+)\n(.*?)(?=\n\t+Function : |\Z)", text, re.S))


def registers_and_stack(cubin: Path) -> dict[str, tuple[int, int]]:
    """Read the registers per thread and the bytes of local memory of each kernel."""
    uses = re.findall(
        r"Function (\w+):\s+REG:(\d+) STACK:(\d+) .*LOCAL:(\d+)", _run("-res-usage", cubin)
    )
    return {
        name: (int(registers), int(stack) + int(local)) for name, registers, stack, local in uses
    }


def instructions(code: str) -> list[str]:
    """List the instructions in order, without addresses and predicates."""
    found = re.findall(r"/\*[0-9a-f]{4,}\*/\s+(.*?)\s*;", code)
    return [re.sub(r"^@!?U?P\w+\s+", "", line) for line in found]


def rounds(code: str) -> list[Round]:
    """List the rounds of a kernel in the order of its code; a round in a loop counts once.

    A thread waits for a load at the first instruction that reads or writes a target register of the
    load. Loads with the same base register, at different offsets, are from one array.
    """
    # array of each load in flight, by its first target register
    base_of: dict[int, int] = {}
    # array by base register, until the register is overwritten
    arrays: dict[int, int] = {}
    # number of loads of each array
    loads: list[int] = []
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
            into = int(named[0][1])
            base = next(int(number) for bracket, number in named if bracket)
            if base not in arrays:
                arrays[base] = len(loads)
                loads.append(0)
            base_of[into] = arrays[base]
            loads[arrays[base]] += 1
        # The instruction writes its first operand.
        if named and not named[0][0]:
            first = int(named[0][1])
            written = set(range(first, first + _width(operation)))
            for base in [base for base in arrays if {base, base + 1} & written]:
                del arrays[base]
    return [found[array] for array in sorted(found)]


def _width(operation: str) -> int:
    """Count the registers of an operand."""
    if ".128" in operation:
        return 4
    if ".64" in operation or ".WIDE" in operation:
        return 2
    return 1


def _touched(operation: str, operands: str) -> set[int]:
    """List the registers that an instruction reads or writes."""
    found: set[int] = set()
    for bracket, number in REGISTER.findall(operands):
        # An address has 64 bits, in two registers.
        width = 2 if bracket else _width(operation)
        found.update(range(int(number), int(number) + width))
    return found


def unrolled(code: str) -> list[Round]:
    """List the rounds of a kernel without remainders, which load one vector from an array."""
    return [found for found in rounds(code) if found.loads > 1]


def _run(what: str, cubin: Path) -> str:
    command = [_tool(), what, cubin]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    return done.stdout


def _tool() -> str:
    """Find ``cuobjdump`` in triton or in a CUDA toolkit.

    Raises:
        FileNotFoundError: if there is none.
    """
    spec = importlib.util.find_spec("triton")
    places = []
    if spec is not None and spec.origin:
        places.append(Path(spec.origin).parent / "backends" / "nvidia" / "bin")
    places.append(Path(os.environ.get("CUDA_HOME", "/usr/local/cuda")) / "bin")
    path = os.pathsep.join(map(str, places))
    found = shutil.which("cuobjdump", path=path) or shutil.which("cuobjdump")
    if found is None:
        raise FileNotFoundError(
            "no cuobjdump, neither in triton nor in a CUDA toolkit; pip install triton"
        )
    return found
