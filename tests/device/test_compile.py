"""Compiling at first use, and the folder that keeps results. Oracle: literal messages, and a compiler that counts."""

from __future__ import annotations

import os
import stat
import sys
import types
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from megatron_hecate import files
from megatron_hecate.code_cache import DIGEST_BYTES, VARIABLE
from megatron_hecate.device import compile
from megatron_hecate.device.compile import CompileError, cubin, host_library

pytestmark = pytest.mark.fast
COMPILER = """#!/bin/sh
while [ "$1" != -o ]; do shift; done
echo compiled > "$2"
echo once >> "$COUNT"
"""


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder for results, and a C++ compiler that takes no time and counts its runs in ``count``."""
    compiler = tmp_path / "compiler"
    compiler.write_text(COMPILER)
    compiler.chmod(0o700)
    folder = tmp_path / "cache"
    for name, value in (
        (VARIABLE, folder),
        ("CXX", compiler),
        ("COUNT", tmp_path / "count"),
    ):
        monkeypatch.setenv(name, str(value))
    return folder


@pytest.mark.parametrize(
    ("capability", "arch"),
    [((9, 0), 90), ((8, 9), 80), ((10, 3), 100), ((10, 0), 100), ((12, 1), None), ((8, 0), 80)],
)
def test_machine_code_of_an_older_minor_version_serves(
    cache: Path, monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], arch: int | None
) -> None:
    """As CUDA's manual says: a cubin runs on its own and later minor versions of a major one."""
    nvrtc = types.SimpleNamespace(
        nvrtcVersion=lambda: (0, 12, 9), nvrtcGetSupportedArchs=lambda: (0, [80, 90, 100, 110])
    )
    monkeypatch.setitem(sys.modules, "cuda.bindings", types.SimpleNamespace(nvrtc=nvrtc))
    monkeypatch.setattr(compile, "_compile_cubin", lambda _, target: target.encode())
    if arch is None:
        message = r"NVRTC 12\.9 does not compile for compute capability 12\.1; install a newer"
        with pytest.raises(CompileError, match=message):
            cubin(capability)
    else:
        assert cubin(capability) == f"sm_{arch}".encode()


def _runs(cache: Path) -> int:
    count = cache.parent / "count"
    return len(count.read_text().splitlines()) if count.exists() else 0


def test_what_is_too_old_or_has_no_compiler(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    message = r"needs a GPU of compute capability 8.0 \(A100\) or more, got 7.5"
    with pytest.raises(CompileError, match=message):
        cubin((7, 5))
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    with pytest.raises(CompileError, match=r"no compiler for GPUs .*pip install cuda-bindings"):
        cubin((9, 0))
    failing = cache.parent / "fails"
    failing.write_text("#!/bin/sh\necho no such flag >&2; exit 1\n")
    failing.chmod(0o700)
    absent = r"need a C\+\+ compiler .*install g\+\+ .*or name another in \$CXX"
    for compiler, path, message in (
        ("", "/nowhere", absent),
        ("/nowhere/c++", "/nowhere", absent),
        (failing, os.environ["PATH"], r"exit status 1.* no such flag"),
    ):
        monkeypatch.setenv("CXX", str(compiler))
        monkeypatch.setenv("PATH", path)
        with pytest.raises(CompileError, match=message):
            host_library()


def test_the_cache_is_private_and_used(cache: Path) -> None:
    assert host_library() == host_library() and _runs(cache) == 1
    (file,) = cache.iterdir()
    assert [stat.S_IMODE(path.stat().st_mode) for path in (cache, file)] == [0o700, 0o600]
    assert file.read_bytes()[:-DIGEST_BYTES] == b"compiled\n"
    file.write_bytes(file.read_bytes()[:-1])
    assert host_library() == file and _runs(cache) == 2, "a damaged file is replaced"


def test_what_others_may_write_is_not_executed(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = host_library()
    for path, mode, right in ((file, 0o666, 0o600), (cache, 0o777, 0o700)):
        path.chmod(mode)
        with pytest.raises(
            PermissionError,
            match=rf"{path} .*mode {mode:o}: compiled code must lie where only this user.*; run chmod go-w {path} as",
        ):
            host_library()
        path.chmod(right)
    uid = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    if uid == 0:
        assert host_library() == file, "root's files, as in an image"
        os.chown(file, 54321, -1)
    with pytest.raises(
        PermissionError, match=r"belongs to user \d+.*or root may write;.* name another"
    ):
        host_library()


def test_a_filled_cache_needs_no_compiler_and_no_writing(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a login node with the cache of the nodes, or in an image."""
    file = host_library()
    cache.chmod(0o500)
    monkeypatch.setattr(files, "replace", None)
    for name, value in (("CXX", "/nowhere/c++"), ("PATH", "/nowhere")):
        monkeypatch.setenv(name, value)
        assert host_library() == file
    cache.chmod(0o700)


def test_a_cache_that_cannot_be_made(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache.write_text("")
    for folder in (cache, cache / "folder"):
        monkeypatch.setenv(VARIABLE, str(folder))
        with pytest.raises(OSError, match=r"name another folder in \$MEGATRON_HECATE_CACHE"):
            host_library()


def test_many_may_fill_the_cache_at_once(cache: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        paths = set(pool.map(lambda _: host_library(), range(32)))
    assert len(paths) == len(list(cache.iterdir())) == 1
