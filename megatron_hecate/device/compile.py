"""Compilation of the kernels at first use, with a persistent cache.

Installing the package compiles nothing. For a GPU, NVRTC compiles a cubin (through
``cuda.bindings``, a dependency of torch's CUDA builds). nvcc replaces NVRTC where NVRTC is missing,
or where its major version is newer than the driver's, which could not load the cubin. For the host,
a C++ compiler builds a shared library from the same sources.

Results are kept in `code_cache.KERNELS`; a file's name is a hash of all inputs.
"""

from __future__ import annotations

import ctypes
import dataclasses
import hashlib
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from megatron_hecate.code_cache import KERNELS
from megatron_hecate.device import driver

HERE = Path(__file__).resolve().parent
# The sources are next to the package in a checkout, and inside it when installed.
SOURCES: Path = next(
    p
    for p in (HERE.parents[1] / "kernels", HERE.parents[0] / "kernels")
    if (p / "device.cu").exists()
)
HEADERS: tuple[str, ...] = tuple(
    f"{name}.cuh"
    for name in (
        "schedule",
        "signals",
        "gather",
        "reduce",
        "transfer",
        "gate",
        "quotas",
        "sources",
        "reroute",
    )
)
# options of NVRTC and nvcc
OPTIONS: tuple[str, ...] = ("-std=c++17",)
# minimum compute capability, times ten
OLDEST: int = 80


class CompileError(RuntimeError):
    """Failed or impossible compilation of the kernels."""


def cubin(capability: tuple[int, int], *, compiler: str = "auto") -> bytes:
    """Compile the kernels for a GPU, or load them from the cache.

    Args:
        capability: compute capability, major and minor.
        compiler: "nvrtc", "nvcc", or "auto" for the first available one.

    Raises:
        CompileError: if the GPU is too old, or no compiler is found, supports it, or succeeds.
        OSError: if the folder of the cache cannot be used, see `code_cache.CodeCache`.
    """
    arch = capability[0] * 10 + capability[1]
    if arch < OLDEST:
        raise CompileError(
            f"FSSDP needs a GPU of compute capability 8.0 (A100) or more, got {arch / 10}"
        )
    cuda_compiler = _cuda_compiler(compiler)
    target = f"sm_{cuda_compiler.best_arch(arch)}"
    build = {"nvrtc": _nvrtc, "nvcc": _nvcc}[cuda_compiler.name]
    key = " ".join([cuda_compiler.name, cuda_compiler.version, *OPTIONS])
    return _cached(target, key, ("device.cu", *HEADERS), lambda: build(target))[0]


def host_library() -> Path:
    """Build the same kernels for this machine's CPU; return the path of the shared library.

    Raises:
        CompileError: if the library is not cached and no compiler is found or succeeds.
        OSError: if the folder of the cache cannot be used, see `code_cache.CodeCache`.
    """
    flags = ["-O2", "-std=c++17", "-shared", "-fPIC", "-pthread"]

    def build() -> bytes:
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "host.so"
            _run([*_host_compiler(), *flags, "-o", str(out), str(SOURCES / "host.cpp")])
            return out.read_bytes()

    # Not the compiler's version: machines without a compiler use what another one has cached.
    machine = " ".join([os.uname().machine, *platform.libc_ver(), *flags])
    return _cached("host", machine, ("host.cpp", *HEADERS), build)[1]


def load_host_library() -> ctypes.CDLL:
    """Load the library of `host_library`.

    Raises:
        CompileError, OSError: as `host_library`, and if the folder's file system executes nothing.
    """
    path = host_library()
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise OSError(f"{error}; name another folder in ${KERNELS.variable}") from None


def _host_compiler() -> list[str]:
    """Find the C++ compiler, as the first words of its command."""
    named = shlex.split(os.environ.get("CXX", ""))
    compiler = named or [path for path in (shutil.which("c++"), shutil.which("g++")) if path][:1]
    if not compiler:
        raise CompileError(
            "no C++ compiler found; install one (apt-get install g++), or name one in $CXX"
        )
    try:
        if _run([*compiler, "--version"]).strip():
            return compiler
        reason = "it prints no version"
    except CompileError as error:
        reason = str(error)
    where = "$CXX" if named else "the path"
    raise CompileError(
        f"{' '.join(compiler)}, from {where}, is no C++ compiler ({reason}); "
        "install g++, or name another in $CXX"
    )


def describe(capabilities: Iterable[tuple[int, int]] = ()) -> tuple[list[str], bool]:
    """Compile for CPU ranks and GPUs.

    Args:
        capabilities: compute capabilities of GPUs besides those of this machine.

    Returns:
        Lines about the compilers, and whether the needed one works.
    """
    lines = []
    usable = {"cpu": True, "cuda": True}
    try:
        lines.append(f"CPU ranks: compiled, {load_host_library()._name}")
    except (CompileError, OSError) as error:
        lines.append(f"CPU ranks: {error}")
        usable["cpu"] = False
    capabilities_here = map(torch.cuda.get_device_capability, range(torch.cuda.device_count()))
    targets = sorted({*capabilities_here, *capabilities})
    kind = "cuda" if targets else "cpu"
    try:
        lines.append(f"GPUs: kernels are compiled by {_cuda_compiler('auto')}")
    except CompileError as error:
        lines.append(f"GPUs: {error}")
        usable["cuda"] = False
        targets = []
    for capability in targets:
        name = "{}.{}".format(*capability)
        try:
            cubin(capability)
            lines.append(f"GPUs: compiled for compute capability {name}, in {KERNELS.folder}")
        except (CompileError, OSError) as error:
            lines.append(f"GPUs of compute capability {name}: {error}")
            usable["cuda"] = False
    return lines, usable[kind]


@dataclasses.dataclass(frozen=True)
class _CudaCompiler:
    """Compiler for GPUs.

    Args:
        name: "nvrtc" or "nvcc".
        version: the compiler's own version string.
        major: major version of CUDA.
        archs: supported compute capabilities, times ten.
    """

    name: str
    version: str
    major: int
    archs: Sequence[int]

    def best_arch(self, arch: int) -> int:
        """Find the newest supported target for ``arch``: same major version, not newer.

        Raises:
            CompileError: if there is no such target.
        """
        fitting = [
            candidate
            for candidate in self.archs
            if candidate // 10 == arch // 10 and OLDEST <= candidate <= arch
        ]
        if fitting:
            return max(fitting)
        candidate = ", ".join(f"sm_{candidate}" for candidate in sorted(self.archs))
        raise CompileError(
            f"{self} compiles for {candidate}; none of these runs on a GPU of compute capability "
            f"{arch / 10}: install a newer compiler, on the path or in $CUDA_HOME"
        )

    def __str__(self) -> str:
        return f"{self.name} {self.version}"


def explain_unloadable(error: Exception) -> str:
    """Explain a driver's refusal of the compiled kernels, with the way out."""
    compiler = _cuda_compiler("auto")
    driver_version = driver.version() or 0
    driver_major = driver_version // 1000
    minor = driver_version % 1000 // 10
    text = f"{error}: {compiler} compiled the kernels, the driver is of CUDA {driver_major}.{minor}"
    if compiler.major <= driver_major:
        return f"{text}; remove {KERNELS.folder}, and where that does not help, update the driver"
    return (
        f"{text}, which loads no machine code of CUDA {compiler.major}. "
        f"Update the driver to one of CUDA {compiler.major}, or install a compiler of CUDA "
        f"{driver_major}: nvcc, on the path or in $CUDA_HOME, or pip install "
        f"'cuda-bindings<{driver_major + 1}' nvidia-cuda-nvrtc-cu{driver_major}"
    )


def _cuda_compiler(kind: str) -> _CudaCompiler:
    """Choose the first available compiler that is not newer than the driver, else the first."""
    compilers: list[_CudaCompiler] = []
    problem = "NVRTC was not asked for"
    if kind in ("auto", "nvrtc"):
        try:
            from cuda.bindings import nvrtc

            _, major, minor = nvrtc.nvrtcVersion()
            compilers.append(
                _CudaCompiler("nvrtc", f"{major}.{minor}", major, nvrtc.nvrtcGetSupportedArchs()[1])
            )
        except (ImportError, OSError, RuntimeError) as error:
            problem = f"NVRTC: {error}"
    # without a driver no compiler is too new
    newest = (driver.version() or sys.maxsize) // 1000
    if (
        kind in ("auto", "nvcc")
        and not (compilers and compilers[0].major <= newest)
        and (path := _nvcc_path()) is not None
    ):
        compilers.append(_nvcc_at(path))
    if not compilers:
        raise CompileError(
            f"no compiler for CUDA found ({problem}; no nvcc on the path or in $CUDA_HOME); "
            "pip install cuda-bindings nvidia-cuda-nvrtc"
        )
    return next((compiler for compiler in compilers if compiler.major <= newest), compilers[0])


def _nvcc_at(path: str) -> _CudaCompiler:
    version = _run([path, "--version"])
    archs = re.findall(r"sm_(\d+)", _run([path, "--list-gpu-code"]))
    release = re.search(r"release (\d+)\.", version)
    if release is None:
        raise CompileError(f"{path} --version names no release of CUDA: {version.strip()!r}")
    return _CudaCompiler(
        "nvcc", version.splitlines()[-1], int(release[1]), [int(arch) for arch in archs]
    )


def _nvcc_path() -> str | None:
    home = os.environ.get("CUDA_HOME", "/usr/local/cuda")
    return shutil.which("nvcc") or shutil.which("nvcc", path=str(Path(home) / "bin"))


def _nvrtc(arch: str) -> bytes:
    from cuda.bindings import nvrtc

    def call(name: str, *args: Any) -> Any:
        status, *values = getattr(nvrtc, name)(*args)
        if int(status) != 0:
            raise CompileError(f"{name}: {status.name}")
        return values[0] if values else None

    texts = [(SOURCES / name).read_bytes() for name in HEADERS]
    names = [name.encode() for name in HEADERS]
    source = (SOURCES / "device.cu").read_bytes()
    outcome = call("nvrtcCreateProgram", source, b"device.cu", len(texts), texts, names)
    options = [f"--gpu-architecture={arch}".encode(), *(option.encode() for option in OPTIONS)]
    (status,) = nvrtc.nvrtcCompileProgram(outcome, len(options), options)
    if int(status) != 0:
        log = b" " * call("nvrtcGetProgramLogSize", outcome)
        call("nvrtcGetProgramLog", outcome, log)
        raise CompileError(
            f"NVRTC cannot compile the kernels for {arch}: {log.rstrip(bytes(1)).decode().strip()}"
        )
    out = b" " * call("nvrtcGetCUBINSize", outcome)
    call("nvrtcGetCUBIN", outcome, out)
    nvrtc.nvrtcDestroyProgram(outcome)
    return out


def _nvcc(arch: str) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "device.cubin"
        _run(
            [
                str(_nvcc_path()),
                *OPTIONS,
                "-cubin",
                f"-arch={arch}",
                "-o",
                str(out),
                str(SOURCES / "device.cu"),
            ]
        )
        return out.read_bytes()


def _run(command: list[str]) -> str:
    try:
        process = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CompileError(f"{command[0]}: {error}") from error
    if process.returncode:
        raise CompileError(f"{' '.join(command)} failed:\n{process.stderr.strip()}")
    return process.stdout


def _cached(
    target: str, compiler: str, sources: tuple[str, ...], build: Callable[[], bytes]
) -> tuple[bytes, Path]:
    """Build or load a binary of the sources; return its content and its file."""
    key = hashlib.sha256(repr((target, compiler)).encode())
    for name in sources:
        key.update((SOURCES / name).read_bytes())
    name = f"{target}-{key.hexdigest()[:20]}"
    path = KERNELS.folder / name
    if (code := KERNELS.read(name)) is not None:
        return code, path
    with KERNELS.turn():
        # Another process may have compiled meanwhile.
        if (code := KERNELS.read(name)) is None:
            code = build()
            KERNELS.write(name, code)
    return code, path
