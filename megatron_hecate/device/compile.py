"""Compilation of the kernels at first use, with a persistent cache.

Installing the package compiles nothing. For a GPU, NVRTC compiles a cubin (through
``cuda.bindings``, a dependency of torch's CUDA builds). For the host, a C++ compiler builds a
shared library from the same sources.

Results are kept in the folder of `code_cache`; a file's name is a hash of all inputs.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatron_hecate import code_cache

HERE = Path(__file__).resolve().parent
# The sources are next to the package in a checkout, and inside it when installed.
SOURCES: Path = next(
    p
    for p in (HERE.parents[1] / "kernels", HERE.parents[0] / "kernels")
    if (p / "device.cu").exists()
)
HEADERS: tuple[str, ...] = tuple(sorted(path.name for path in SOURCES.glob("*.cuh")))
# minimum compute capability, times ten
OLDEST: int = 80


class CompileError(RuntimeError):
    """Failed or impossible compilation of the kernels."""


def cubin(capability: tuple[int, int]) -> bytes:
    """Compile the kernels for a GPU of compute capability (major, minor), or load the kernels.

    Raises:
        CompileError: if the GPU is too old, or NVRTC is missing, does not support it, or fails.
        OSError: if the folder of the cache cannot be used, see `code_cache`.
    """
    arch = capability[0] * 10 + capability[1]
    if arch < OLDEST:
        raise CompileError(
            f"FSSDP needs a GPU of compute capability 8.0 (A100) or more, got {arch / 10}"
        )
    nvrtc = _import_nvrtc()
    _, major, minor = nvrtc.nvrtcVersion()
    # A cubin runs on its own and later minor versions of a major one.
    fitting = [
        candidate
        for candidate in nvrtc.nvrtcGetSupportedArchs()[1]
        if candidate // 10 == arch // 10 and candidate <= arch
    ]
    if not fitting:
        raise CompileError(
            f"NVRTC {major}.{minor} does not compile for compute capability {arch / 10}; "
            "install a newer nvidia-cuda-nvrtc"
        )
    target = f"sm_{max(fitting)}"
    compiler = f"nvrtc {major}.{minor}"
    sources = ("device.cu", *HEADERS)
    path = _cached(target, compiler, sources=sources, build=lambda: _compile_cubin(nvrtc, target))
    return path.read_bytes()[: -code_cache.DIGEST_BYTES]


def load_host_library() -> ctypes.CDLL:
    """Load the library of `host_library`.

    Raises:
        CompileError, OSError: as `host_library`, and if the folder's file system executes nothing.
    """
    path = host_library()
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise OSError(f"{error}; name another folder in ${code_cache.VARIABLE}") from None


def host_library() -> Path:
    """Build the same kernels for this machine's CPU; return the path of the shared library.

    Raises:
        CompileError: if the library is not cached and no compiler is found or succeeds.
        OSError: if the folder of the cache cannot be used, see `code_cache`.
    """
    flags = ["-O2", "-std=c++17", "-shared", "-fPIC", "-pthread"]
    # Not the compiler's version: machines without a compiler use what another one has cached.
    machine = " ".join([os.uname().machine, *platform.libc_ver(), *flags])
    sources = ("host.cpp", *HEADERS)
    return _cached("host", machine, sources=sources, build=lambda: _compile_library(flags))


def _compile_library(flags: list[str]) -> bytes:
    """Compile the shared library for this machine's CPU."""
    compiler = shlex.split(os.environ.get("CXX", "")) or [shutil.which("c++") or "g++"]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "host.so")
        command = [*compiler, *flags, "-o", str(path), str(SOURCES / "host.cpp")]
        try:
            subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
            return path.read_bytes()
        except (OSError, subprocess.SubprocessError) as error:
            stderr = getattr(error, "stderr", None) or ""
            raise CompileError(
                f"CPU ranks need a C++ compiler ({error}); install g++ (apt-get install g++), or "
                f"name another in $CXX. {stderr}"
            ) from error


def _import_nvrtc() -> Any:
    try:
        from cuda.bindings import nvrtc

        nvrtc.nvrtcVersion()
    except (ImportError, OSError, RuntimeError) as error:
        raise CompileError(
            f"no compiler for GPUs ({error}); pip install cuda-bindings nvidia-cuda-nvrtc"
        ) from error
    return nvrtc


def _compile_cubin(nvrtc: Any, target: str) -> bytes:
    """Compile the kernels for a GPU, such as ``sm_90``."""

    def call(name: str, *args: Any) -> Any:
        status, *values = getattr(nvrtc, name)(*args)
        if int(status) != 0:
            raise CompileError(f"{name}: {status.name}")
        return values[0] if values else None

    texts = [(SOURCES / name).read_bytes() for name in HEADERS]
    names = [name.encode() for name in HEADERS]
    source = (SOURCES / "device.cu").read_bytes()
    program = call("nvrtcCreateProgram", source, b"device.cu", len(texts), texts, names)
    # Lambdas are functions of the device as well.
    options = [f"--gpu-architecture={target}".encode(), b"-std=c++17", b"-default-device"]
    (status,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
    if int(status) != 0:
        log = b" " * call("nvrtcGetProgramLogSize", program)
        call("nvrtcGetProgramLog", program, log)
        text = log.rstrip(bytes(1)).decode().strip()
        raise CompileError(f"NVRTC cannot compile the kernels for {target}: {text}")
    code = b" " * call("nvrtcGetCUBINSize", program)
    call("nvrtcGetCUBIN", program, code)
    nvrtc.nvrtcDestroyProgram(program)
    return code


def _cached(
    target: str, compiler: str, *, sources: tuple[str, ...], build: Callable[[], bytes]
) -> Path:
    """Build or load a binary of the sources; return its file."""
    key = hashlib.sha256(repr((target, compiler)).encode())
    for name in sources:
        key.update((SOURCES / name).read_bytes())
    return code_cache.load_or_build(f"{target}-{key.hexdigest()[:20]}", build)
