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
from megatron_hecate.code_cache import KERNELS
from megatron_hecate.device import compile
from megatron_hecate.device.compile import CompileError, cubin, host_library

pytestmark = pytest.mark.fast
COMPILER = """#!/bin/sh
if [ "$1" = --version ]; then echo compiler 1; exit; fi
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
        (KERNELS.variable, folder),
        ("CXX", compiler),
        ("COUNT", tmp_path / "count"),
    ):
        monkeypatch.setenv(name, str(value))
    return folder


NVCC = """#!/bin/sh
case "$1" in
  --version) echo "release $RELEASE, V$RELEASE.1"; exit;;
  --list-gpu-code) printf 'sm_80\\nsm_90\\nsm_100\\nsm_110\\n'; exit;;
esac
for option; do case "$option" in -arch=*) arch="$option";; esac; done
while [ "$1" != -o ]; do shift; done
echo "$RELEASE $arch" > "$2"
"""


@pytest.fixture
def nvcc(cache: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An nvcc of CUDA 12.9 that writes its version and target instead of a cubin, where there is no NVRTC."""
    path = cache.parent / "bin" / "nvcc"
    path.parent.mkdir()
    path.write_text(NVCC)
    path.chmod(0o700)
    monkeypatch.setenv("PATH", f"{path.parent}:{os.environ['PATH']}")
    monkeypatch.setenv("RELEASE", "12.9")
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    return path


@pytest.mark.parametrize(
    ("capability", "arch"),
    [((9, 0), 90), ((8, 9), 80), ((10, 3), 100), ((10, 0), 100), ((12, 1), None), ((8, 0), 80)],
)
def test_machine_code_of_an_older_minor_version_serves(
    nvcc: Path, capability: tuple[int, int], arch: int | None
) -> None:
    """As CUDA's manual says: a cubin runs on its own and later minor versions of a major one."""
    if arch is None:
        message = r"nvcc .*12\.9.* compiles for sm_80, sm_90, sm_100, sm_110; none of these runs .* capability 12\.1"
        with pytest.raises(CompileError, match=message):
            cubin(capability)
    else:
        assert cubin(capability) == f"12.9 -arch=sm_{arch}\n".encode()


@pytest.mark.parametrize(
    ("of_driver", "chosen"), [(12040, "nvcc"), (13000, "nvrtc"), (None, "nvrtc")]
)
def test_a_compiler_of_the_driver_s_version_is_taken(
    nvcc: Path, monkeypatch: pytest.MonkeyPatch, of_driver: int | None, chosen: str
) -> None:
    """NVRTC of CUDA 13 beside nvcc of CUDA 12. A driver loads no machine code of a newer major version."""
    nvrtc = types.SimpleNamespace(
        nvrtcVersion=lambda: (0, 13, 1), nvrtcGetSupportedArchs=lambda: (0, [90])
    )
    monkeypatch.setitem(sys.modules, "cuda.bindings", types.SimpleNamespace(nvrtc=nvrtc))
    monkeypatch.setattr(compile.driver, "version", lambda: of_driver)
    monkeypatch.setattr(compile, "_nvrtc", lambda arch: b"nvrtc")
    assert cubin((9, 0)) == {"nvrtc": b"nvrtc", "nvcc": b"12.9 -arch=sm_90\n"}[chosen]


def _runs(cache: Path) -> int:
    count = cache.parent / "count"
    return len(count.read_text().splitlines()) if count.exists() else 0


def test_what_is_too_old_or_has_no_compiler(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        CompileError, match=r"needs a GPU of compute capability 8.0 \(A100\) or more, got 7.5"
    ):
        cubin((7, 5))
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setenv("CUDA_HOME", "/nowhere")
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    with pytest.raises(
        CompileError, match=r"no compiler for CUDA found .*pip install cuda-bindings"
    ):
        cubin((9, 0))
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(
        CompileError, match=r"no C\+\+ compiler found; install one \(apt-get install g\+\+\)"
    ):
        host_library()
    monkeypatch.setenv("CXX", "/nowhere/c++")
    with pytest.raises(
        CompileError,
        match=r"/nowhere/c\+\+, from \$CXX, is no C\+\+ compiler .*or name another in \$CXX",
    ):
        host_library()


def test_the_cache_is_private_and_used(cache: Path) -> None:
    assert host_library() == host_library() and _runs(cache) == 1
    (file,) = cache.iterdir()
    assert (
        stat.S_IMODE(cache.stat().st_mode) == 0o700 and stat.S_IMODE(file.stat().st_mode) == 0o600
    )


def test_what_others_may_write_is_not_executed(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = host_library()
    for path, mode, right in ((file, 0o666, 0o600), (cache, 0o777, 0o700)):
        path.chmod(mode)
        with pytest.raises(
            PermissionError,
            match=rf"{path} .*mode {mode:o}: compiled code must lie where only this user.*; run chmod go-w {path}, or name",
        ):
            host_library()
        path.chmod(right)
    uid = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    if uid == 0:
        assert host_library() == file, "root's files, as in an image"
        os.chown(file, 54321, -1)
    with pytest.raises(
        PermissionError, match=r"belongs to user \d+.*or root may write; name another"
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
        monkeypatch.setenv(KERNELS.variable, str(folder))
        with pytest.raises(OSError, match=r"name another folder in \$MEGATRON_HECATE_CACHE"):
            host_library()


def test_many_may_fill_the_cache_at_once(cache: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        assert (
            len(set(pool.map(lambda _: host_library(), range(32))))
            == len(list(cache.iterdir()))
            == 1
        )
