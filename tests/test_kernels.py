"""The kernels' sources: compiled for GPUs, and run on the host under sanitizers, with threads as ranks.

Every rank's thread runs as fast as it likes through iterations of random placements, so that nothing but the kernels'
own signals orders them. ``python tests/mutations.py`` plants bugs and checks that these runs catch them.
"""

from __future__ import annotations

import os
import re
import shutil
import stat
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from kernel_scripts import Script, hot, random_loans

from megatron_hecate import compile as kernels
from megatron_hecate import kernel
from megatron_hecate.kernel import Wire
from megatron_hecate.schedule import Loan, Place, Pull, Schedule

TILE = 1024  # bytes: small, so that small chunks have many
SANITIZERS = {"thread": "-fsanitize=thread", "address": "-fsanitize=address,undefined"}
WRAP = 2**32 - 30  # progress counters pass 0 on the way


def build_selftest(folder: Path, sanitizer: str, sources: Path = kernels.SOURCES) -> Path:
    out = folder / f"selftest-{sanitizer}"
    flags = f"-std=c++17 -g -O1 -pthread {SANITIZERS[sanitizer]} -DFSSDP_STALLS -DFSSDP_TILE={TILE}".split()
    subprocess.run(["g++", *flags, "-o", str(out), str(sources / "selftest.cpp")], check=True, timeout=300)
    return out


def write_script(
    path: Path, *, ranks: int, half: bool, shift: int, seed: int, blocks: int, iterations: int = 6
) -> None:
    """Random placements, after one in which every chunk that is lent is wanted by all."""
    rng = np.random.default_rng(seed)
    kernel.TILE = TILE
    script = Script(ranks, slots=3, lent=2, sizes=(1000, 33, 5000, 7), half=half, begin=WRAP, shift=shift)
    script.iteration(hot(ranks, 1, ranks - 1))
    script.iteration(hot(ranks, 2, ranks - 1), copies=True)
    for i in range(iterations):
        script.iteration(random_loans(rng, ranks=ranks, slots=3, lent=2, fill=0.7), copies=i % 3 == 1)
    script.iteration([])
    script.write(path, blocks=blocks, threads=2)
    kernel.TILE = 65536


def run_selftest(program: Path, script: Path, timeout: float = 120) -> subprocess.CompletedProcess:
    options = {"TSAN_OPTIONS": "halt_on_error=1", "UBSAN_OPTIONS": "halt_on_error=1"}
    command = [*_fixed_addresses(), str(program), str(script)]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, env={**os.environ, **options})


def _fixed_addresses() -> list[str]:
    """ThreadSanitizer of older compilers does not know where newer kernels put memory at random."""
    allowed = shutil.which("setarch") and subprocess.run(["setarch", "-R", "true"], capture_output=True).returncode == 0
    return ["setarch", "-R"] if allowed else []


@pytest.fixture(scope="module")
def selftests(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("selftest")
    return {sanitizer: build_selftest(folder, sanitizer) for sanitizer in SANITIZERS}


@pytest.mark.parametrize("sanitizer", list(SANITIZERS))
@pytest.mark.parametrize("half", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("shift", [0, 1], ids=["aligned", "unaligned"])
def test_ranks_as_threads(selftests: dict[str, Path], tmp_path: Path, sanitizer: str, half: bool, shift: int) -> None:
    script = tmp_path / "script"
    write_script(script, ranks=6, half=half, shift=shift, seed=half + 2 * shift, blocks=2)
    done = run_selftest(selftests[sanitizer], script)
    assert (done.stdout, done.returncode) == ("OK\n", 0), done.stdout + done.stderr


def test_a_rank_that_does_not_come_is_named(selftests: dict[str, Path], tmp_path: Path) -> None:
    script = Script(3, slots=1, lent=1, sizes=(100,), begin=WRAP, timeout=0.2)
    script.iteration([Loan(0, 0, 1, 0)])
    script.words[0].clear()  # rank 0 does nothing
    script.guards.clear()
    script.write(tmp_path / "script", blocks=2, threads=2)
    done = run_selftest(selftests["address"], tmp_path / "script")
    assert done.returncode == 1
    assert re.search(r"FAIL rank 1 waits for rank 0: expected step 1, seen -1", done.stdout), done.stdout


def test_descriptors_have_the_sizes_that_the_kernels_expect() -> None:
    from megatron_hecate import launch

    launch.compile_for_host()


ARCHITECTURES = ((8, 0), (9, 0), (10, 0))


@pytest.mark.newest
@pytest.mark.parametrize("capability", ARCHITECTURES, ids=lambda c: f"sm_{c[0]}{c[1]}")
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


def test_what_is_too_old_or_has_no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(kernels.CompileError, match=r"needs a GPU of compute capability 8.0 or more, got 7.5; use p2p"):
        kernels.cubin((7, 5))
    monkeypatch.setattr(kernels, "_nvcc_path", lambda: None)
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    with pytest.raises(kernels.CompileError, match=r"no compiler for CUDA found .*pip install cuda-bindings"):
        kernels.cubin((9, 0))
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(kernels.CompileError, match=r"no C\+\+ compiler found; install g\+\+"):
        kernels.host_library()


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setenv(kernels.CACHE, str(folder))
    return folder


def _made(count: list[int]) -> bytes:
    count.append(1)
    return b"compiled"


def _get(count: list[int]) -> bytes:
    return kernels._cached("test", "compiler 1", ("schedule.cuh",), lambda: _made(count))[0]


def test_the_cache_is_private_and_used(cache: Path) -> None:
    count: list[int] = []
    assert _get(count) == _get(count) == b"compiled" and len(count) == 1
    (file,) = cache.iterdir()
    assert stat.S_IMODE(cache.stat().st_mode) == 0o700 and stat.S_IMODE(file.stat().st_mode) == 0o600


def test_a_damaged_file_is_made_again(cache: Path) -> None:
    count: list[int] = []
    _get(count)
    (file,) = cache.iterdir()
    file.write_bytes(file.read_bytes()[:-7])
    with pytest.warns(UserWarning, match="is damaged"):
        assert _get(count) == b"compiled"
    assert _get(count) == b"compiled" and len(count) == 2


def test_what_others_may_write_is_not_executed(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    count: list[int] = []
    _get(count)
    (file,) = cache.iterdir()
    file.chmod(0o666)
    with pytest.raises(PermissionError, match=r"mode 666, and would be executed as a compiled kernel; remove it"):
        _get(count)
    file.chmod(0o600)
    cache.chmod(0o777)
    with pytest.raises(PermissionError, match=r"mode 777: compiled kernels must lie where only this user"):
        _get(count)
    cache.chmod(0o700)
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    with pytest.raises(PermissionError, match=r"belongs to user \d+"):
        _get(count)


def test_a_cache_that_cannot_be_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(kernels.CACHE, str(tmp_path / "file" / "cache"))
    with pytest.raises(PermissionError, match=r"cannot be made .*name another folder in \$MEGATRON_HECATE_CACHE"):
        _get([])


def test_many_may_fill_the_cache_at_once(cache: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        assert set(pool.map(lambda _: _get([]), range(32))) == {b"compiled"}
    assert len(list(cache.iterdir())) == 1, "no temporary file is left"


SIGNALS = kernel.Signals(progress=4096, progress_at={0: 4096, 1: 8192}, arrived=4200, failure=4300)


def _program(pulls: list[Pull], extents: dict[Place, list[tuple[int, int]]]) -> np.ndarray:
    plan = Schedule((tuple(pulls),), frozenset({1}))
    return kernel.program(plan, extents.__getitem__, SIGNALS, wire=Wire(4, sums=True), rank=0, begin=1, timeout=1.0)


GRAD, OTHER, TOTAL = Place(0, "grad", 0), Place(1, "grad", 0), Place(0, "total", 0)


@pytest.mark.parametrize(
    ("pulls", "message"),
    [
        ([Pull((OTHER,), TOTAL, 0, 8), Pull((OTHER,), TOTAL, 4, 12)], r"total.* and .*total.* overlap"),
        ([Pull((GRAD,), Place(0, "total", 1), 0, 8)], r"is read in the step that writes .* over it"),
        (
            [Pull((OTHER,), Place(0, "total", 2), 0, 8)],
            r"lies at 0x2002, which is not a multiple of its elements' 4 bytes",
        ),
        ([Pull((OTHER,), TOTAL, 8, 20)], r"total.* has no memory for the last 4 elements of the chunk"),
    ],
)
def test_bad_descriptors(pulls: list[Pull], message: str) -> None:
    extents = {
        GRAD: [(0x1000, 16)],
        OTHER: [(0x9000, 64)],
        TOTAL: [(0x2000, 16)],
        Place(0, "total", 1): [(0x1010, 16)],
        Place(0, "total", 2): [(0x2002, 16)],
    }
    with pytest.raises(ValueError, match=message):
        _program(pulls, extents)
    _program([Pull((GRAD, OTHER), GRAD, 0, 16)], extents)  # a sum in place of one of its sources is fine
