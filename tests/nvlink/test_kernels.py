"""The kernels' sources: compiled for GPUs, and run on the host under sanitizers, with threads as ranks.

Oracle: the sanitizers, values that the scripts state (`kernel_scripts`), and the disassembler that comes with triton.
Every rank's thread runs as fast as it likes through iterations of random placements, so that nothing but the kernels'
own signals orders them.
"""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import sass
import torch
from kernel_scripts import REDUCES, Script, Setup, one_hot, random_copies
from mutations import MUTATIONS
from selftests import SANITIZERS, build, build_planted, fails, run

from megatron_hecate.comm.transport import Copy
from megatron_hecate.device import compile as kernels
from megatron_hecate.nvlink import launch
from megatron_hecate.nvlink.memory import FAILURE, Memory, Signals, describe
from megatron_hecate.nvlink.tables import DomainPlan

SMALL = "-DFSSDP_TILE=1024"  # bytes of a tile: small chunks have many
WRAP = 2**32 - 30  # progress counters pass 0 on the way
SUMS = [f"fssdp_reduce_{grad}_{main}" for grad, main in REDUCES]


def _write_script(path: Path, *, seed: int, blocks: int) -> None:
    """Random placements of six ranks, after two in which one chunk goes to all.

    The seed chooses alignment and types of gradients as well: any four seeds in a row, all types.
    """
    rng = np.random.default_rng(seed)
    bits = list(REDUCES)[seed % len(REDUCES)]
    setup = Setup(6, 3, 2, (1000, 123, 5000, 7), shift=seed // 2 % 2, bits=bits)
    script = Script(setup, begin=WRAP)
    script.iteration(one_hot(6, 1, 5))
    script.iteration(one_hot(6, 2, 5))
    for _ in range(6):
        script.iteration(random_copies(rng, ranks=6, slots=3, experts=2))
        for experts in (5, 5, 3, 5, 4):
            script.exchange(rng, experts)
    script.iteration([])
    script.end()
    script.write(path, blocks=blocks, threads=2)


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("selftest")
    return {sanitizer: build(folder, "selftest", sanitizer, SMALL) for sanitizer in SANITIZERS}


@pytest.mark.slow
@pytest.mark.parametrize("sanitizer", list(SANITIZERS))
@pytest.mark.parametrize("seed", range(4))
def test_ranks_as_threads(
    programs: dict[str, Path], tmp_path: Path, sanitizer: str, seed: int
) -> None:
    script = tmp_path / "script"
    _write_script(script, seed=seed, blocks=2)
    done = run(programs[sanitizer], script)
    assert (done.stdout, done.returncode) == ("OK\n", 0), done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("bug", list(MUTATIONS))
def test_a_planted_bug_is_caught(tmp_path: Path, bug: str) -> None:
    """By a sanitizer, a wrong value, or a run that does not end. What sanitizers see depends on the threads' timing."""
    script = tmp_path / "script"
    binary = build_planted(tmp_path, "selftest", MUTATIONS[bug], SMALL)
    for seed in range(6):
        _write_script(script, seed=seed, blocks=3)
        if fails(binary, script, timeout=60):
            return
    pytest.fail("the bug was not caught")


@pytest.fixture(scope="module", params=[(8, 0), (9, 0), (10, 0)], ids=str)
def cubin(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("cubin") / "kernels.cubin"
    path.write_bytes(kernels.cubin(request.param))
    return path


@pytest.mark.newest
@pytest.mark.fast
def test_loads_under_way_fill_the_link(cubin: Path) -> None:
    """Oracle: the disassembler that comes with triton.

    Before a thread waits for bytes, it has asked for as many as the number of blocks rests on: 64 KiB of a block in a
    copy; in a sum 32 KiB of gradients and what they are added to. A block leaves half of a multiprocessor's registers
    to others. Two addresses may be spilled, between tiles.
    """
    code, sizes = sass.disassemble(cubin), sass.registers_and_stack(cubin)
    for name, kind in (("fssdp_gather", "gather"), *((name, "reduce") for name in SUMS)):
        in_a_load = sass.VECTOR * launch.THREADS
        best = max(each.under_way for each in sass.unrolled(code[name]))
        assert best * in_a_load >= launch.UNDER_WAY[kind], sass.unrolled(code[name])
        registers, stack = sizes[name]
        assert -(-registers // 8) * 8 * launch.THREADS * 2 <= 65536 and stack <= 16, sizes[name]


@pytest.mark.newest
@pytest.mark.fast
def test_what_peers_write_is_read_anew(cubin: Path) -> None:
    """Oracle: the disassembler. What was written before a signal is seen after it: a load of a signal is followed by
    dropping the first-level cache; a signal is stored after a fence for the system. Peers' memory is never read through
    the cache for what does not change (.CONSTANT), and not kept in the first-level cache (.NA)."""
    code = sass.disassemble(cubin)
    for name in ("fssdp_gather", *SUMS, "fssdp_synchronize"):
        lines = sass.instructions(code[name])
        acquires = [i for i, line in enumerate(lines) if line.startswith("LDG.E.STRONG.SYS ")]
        releases = [i for i, line in enumerate(lines) if line.startswith("STG.E.STRONG.SYS ")]
        assert acquires and all("CCTL.IVALL" in lines[i + 1 : i + 6] for i in acquires)
        assert releases and all(
            any(re.match(r"MEMBAR\.\w+\.SYS", line) for line in lines[i - 4 : i]) for i in releases
        )
        wide = [line for line in lines if re.match(r"LDG?\..*\.128", line)]
        assert all(line.startswith("LDG.E.NA.128 ") for line in wide)
        assert bool(wide) == (name != "fssdp_synchronize")
        assert not any(".CONSTANT" in line for line in lines)


@pytest.mark.newest
@pytest.mark.fast
def test_loads_of_peers_are_read_anew(cubin: Path) -> None:
    """Oracle: the disassembler, as above. The counts signal, and the quotas read after it."""
    code = sass.disassemble(cubin)
    for name in ("fssdp_count", "fssdp_count_choices"):
        lines = sass.instructions(code[name])
        (signal,) = (i for i, line in enumerate(lines) if line.startswith("STG.E.STRONG.SYS "))
        assert any(re.match(r"MEMBAR\.\w+\.SYS", line) for line in lines[signal - 4 : signal])
    lines = sass.instructions(code["fssdp_quotas"])
    assert not any(".CONSTANT" in line for line in lines)
    polls = [i for i, line in enumerate(lines) if line.startswith("LDG.E.STRONG.SYS ")]
    assert any(any("CCTL.IVALL" in line for line in lines[i + 1 : i + 6]) for i in polls)


@pytest.mark.fast
def test_as_many_threads_as_the_kernels_are_made_for() -> None:
    """Of a block; a tile is one round of it."""
    (threads,) = re.findall(r"THREADS = (\d+) };", (kernels.SOURCES / "device.cu").read_text())
    (vectors,) = re.findall(r"IN_FLIGHT = (\d+) };", (kernels.SOURCES / "transfer.cuh").read_text())
    (tile,) = re.findall(r"FSSDP_TILE (\d+)", (kernels.SOURCES / "schedule.cuh").read_text())
    assert int(threads) == launch.THREADS
    assert int(threads) * int(vectors) * sass.VECTOR == int(tile)


@pytest.mark.fast
@pytest.mark.parametrize("peer_is_here", [True, False])
def test_nothing_moves_before_the_ranks_have_met(peer_is_here: bool) -> None:
    """Whatever the peer's memory holds, it is read only if the peer has come; and the record says who has not."""
    record = np.zeros((), FAILURE)
    words = np.zeros((2, 128), np.uint32)  # of each rank: counters, and from word 64 on a chunk
    words[0, 1] = 6 if peer_is_here else 1  # what the peer has told
    words[1, 64:] = np.arange(64)
    progress = words[0].ctypes.data, words[1].ctypes.data
    signals = Signals(
        rank=0,
        progress=progress,
        arrived=progress[0] + 16,
        epoch=progress[0] + 32,
        failure=record.ctypes.data,
        timeout=0.05,
    )
    table = DomainPlan((Copy(1, 0, 0, 0),), 0, ((0, 1),)).table
    chunk = progress[0] + 256, 0
    nothing = 0, 0
    memory = Memory(((0,),), (200,), (chunk, chunk, nothing, nothing), table.ctypes.data)
    description = torch.zeros(2048, dtype=torch.uint8)
    data = describe(memory, signals, description.data_ptr())
    description[: len(data)] = torch.from_numpy(data)
    run = launch.TransferKernels(torch.device("cpu")).run
    run("fssdp_gather", description, position=3, away=False, ranks=2)
    assert (words[0, 64:114] == (words[1, 64:114] if peer_is_here else 0)).all()
    # what this rank tells: it came, and has finished
    assert words[1, 0] == (6 if peer_is_here else 3)
    if not peer_is_here:
        said = [record[name].astype("i4") for name in ("failed", "peer", "expected", "seen")]
        assert said == [1, 1, 0, -2]
