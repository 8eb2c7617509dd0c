"""The kernels' sources: compiled for GPUs, and run on the host under sanitizers, with threads as ranks.

Oracle: the sanitizers, values that the scripts state (`kernel_scripts`), and the disassembler that comes with triton.
Every rank's thread runs as fast as it likes through iterations of random placements, so that nothing but the kernels'
own signals orders them.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from kernel_scripts import Script, Setup, one_hot, random_copies
from mutations import MUTATIONS

from megatron_hecate.comm.nvlink import program
from megatron_hecate.comm.nvlink.program import Program, Signals
from megatron_hecate.comm.nvlink.schedule import Place, Pull, Schedule
from megatron_hecate.device import compile as kernels

TILE = 1024  # bytes: small, so that small chunks have many
SANITIZERS = {"thread": "-fsanitize=thread", "address": "-fsanitize=address,undefined"}
WRAP = 2**32 - 30  # progress counters pass 0 on the way


def _build(folder: Path, sanitizer: str, sources: Path = kernels.SOURCES) -> Path:
    out = folder / f"selftest-{sanitizer}"
    flags = f"-std=c++17 -g -O1 -pthread {SANITIZERS[sanitizer]} -DFSSDP_STALLS -DFSSDP_TILE={TILE}".split()
    subprocess.run(["g++", *flags, "-o", str(out), str(sources / "selftest.cpp")], check=True, timeout=300)
    return out


def _write_script(path: Path, *, half: bool, shift: int, seed: int, blocks: int) -> None:
    """Random placements of six ranks, after two in which one chunk goes to all."""
    rng = np.random.default_rng(seed)
    program.TILE = TILE
    script = Script(Setup(6, 3, 2, (1000, 33, 5000, 7), half=half, shift=shift), begin=WRAP)
    script.iteration(one_hot(6, 1, 5))
    script.iteration(one_hot(6, 2, 5), by_copies=True)
    for i in range(6):
        script.iteration(random_copies(rng, ranks=6, slots=3, experts=2), by_copies=i % 3 == 1)
    script.iteration([])
    script.end()
    script.write(path, blocks=blocks, threads=2)
    program.TILE = 65536


def _run(binary: Path, script: Path, timeout: float = 120) -> subprocess.CompletedProcess:
    options = {"TSAN_OPTIONS": "halt_on_error=1", "UBSAN_OPTIONS": "halt_on_error=1"}
    command = [*_fixed_addresses(), str(binary), str(script)]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, env={**os.environ, **options})


def _fixed_addresses() -> list[str]:
    """ThreadSanitizer of older compilers does not know where newer kernels put memory at random."""
    allowed = shutil.which("setarch") and subprocess.run(["setarch", "-R", "true"], capture_output=True).returncode == 0
    return ["setarch", "-R"] if allowed else []


@pytest.fixture(scope="module")
def selftests(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("selftest")
    return {sanitizer: _build(folder, sanitizer) for sanitizer in SANITIZERS}


@pytest.mark.slow
@pytest.mark.parametrize("sanitizer", list(SANITIZERS))
@pytest.mark.parametrize("half", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("shift", [0, 1], ids=["aligned", "unaligned"])
def test_ranks_as_threads(selftests: dict[str, Path], tmp_path: Path, sanitizer: str, half: bool, shift: int) -> None:
    script = tmp_path / "script"
    _write_script(script, half=half, shift=shift, seed=half + 2 * shift, blocks=2)
    done = _run(selftests[sanitizer], script)
    assert (done.stdout, done.returncode) == ("OK\n", 0), done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("bug", list(MUTATIONS))
def test_a_planted_bug_is_caught(selftests: dict[str, Path], tmp_path: Path, bug: str) -> None:
    """By a sanitizer, a wrong value, or a run that does not end. What sanitizers see depends on the threads' timing."""
    file, text, replacement, sanitizer = MUTATIONS[bug]
    sources, script = tmp_path / "kernels", tmp_path / "script"
    shutil.copytree(kernels.SOURCES, sources)
    source = (sources / file).read_text()
    assert source.count(text) == 1, f"{file} has {source.count(text)} times {text!r}"
    (sources / file).write_text(source.replace(text, replacement))
    binary = _build(tmp_path, sanitizer, sources)
    for seed in range(6):
        _write_script(script, half=seed % 2 == 1, shift=seed // 2 % 2, seed=seed, blocks=3)
        try:
            if _run(binary, script, timeout=60).returncode:
                return
        except subprocess.TimeoutExpired:
            return
    pytest.fail("the bug was not caught")


@pytest.mark.newest
@pytest.mark.fast
@pytest.mark.parametrize("capability", [(8, 0), (9, 0), (10, 0)], ids=str)
def test_they_compile_for_gpus_and_load_16_bytes_at_once(capability: tuple[int, int], tmp_path: Path) -> None:
    """Oracle: the disassembler that comes with triton. No spills, which would be loads and stores of local memory."""
    import triton

    cubin = tmp_path / "kernels.cubin"
    cubin.write_bytes(kernels.cubin(capability, compiler="nvrtc"))
    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    text = subprocess.run([tools / "cuobjdump", "-sass", cubin], capture_output=True, text=True, check=True).stdout
    assert "fssdp_gather" in text and "fssdp_reduce" in text
    assert len(re.findall(r"LDG\.E[.\w]*\.128", text)) >= 8 and len(re.findall(r"STG\.E[.\w]*\.128", text)) >= 8
    assert not re.findall(r"\b(LDL|STL)\b", text), "registers are spilled"
    assert "STRONG.SYS" in text, "signals must be seen by other GPUs"


GRAD, OTHER, TOTAL, NEAR, ODD = (
    Place(0, "grad", 0),
    Place(1, "grad", 0),
    *(Place(0, "main_grad", index) for index in range(3)),
)
EXTENTS = {GRAD: (0x1000, 16), OTHER: (0x9000, 64), TOTAL: (0x2000, 16), NEAR: (0x1010, 16), ODD: (0x2002, 16)}


@pytest.mark.fast
@pytest.mark.parametrize(
    ("pulls", "message"),
    [
        ([Pull((OTHER,), TOTAL, 0, 8), Pull((OTHER,), TOTAL, 4, 12)], r"main_grad.* and .*main_grad.* overlap"),
        ([Pull((GRAD,), NEAR, 0, 8)], r"is read in the step that writes .* over it"),
        ([Pull((OTHER,), ODD, 0, 8)], r"lies at 0x2002, which is not a multiple of its elements' 4 bytes"),
        ([Pull((OTHER,), TOTAL, 8, 20)], r"main_grad.* has no memory for the last 4 elements of the chunk"),
        ([Pull((GRAD, OTHER), GRAD, 0, 16)], ""),  # a sum in place of one of its sources is fine
    ],
)
def test_bad_descriptors(pulls: list[Pull], message: str) -> None:
    signals = Signals(rank=0, progress_at={0: 4096, 1: 8192}, arrived=4200, failure=4300, timeout=1.0)
    schedule = Schedule((tuple(pulls),), frozenset({1}))
    with pytest.raises(ValueError, match=message) if message else contextlib.nullcontext():
        Program(schedule, lambda place: [EXTENTS[place]], signals=signals, itemsize=4, sums=True, begin=1)
