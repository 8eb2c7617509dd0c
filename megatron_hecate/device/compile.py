"""Compilation of the kernels at first use, with a persistent cache.

Installing the package compiles nothing. For a GPU, NVRTC compiles a cubin (through
``cuda.bindings``, a dependency of torch's CUDA builds). nvcc replaces NVRTC where NVRTC is missing,
or where its major version is newer than the driver's, which could not load the cubin. For the host,
a C++ compiler builds a shared library from the same sources.

Results are cached in a folder of the user (``$MEGATRON_HECATE_CACHE``, else
``~/.cache/megatron-hecate``); a file's name is a hash of all inputs. Files are written under a
temporary name and then renamed, so that ranks on several machines with a shared home can write them
concurrently. Each file ends with its checksum.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
import re
import shlex
import shutil
import stat
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

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
CACHE = "MEGATRON_HECATE_CACHE"
# marker after the checksum
_END = b"fssdp\0"


class CompileError(RuntimeError):
    """Failed or impossible compilation of the kernels."""


def cubin(capability: tuple[int, int], *, compiler: str = "auto") -> bytes:
    """Compile the kernels for a GPU, or load them from the cache.

    Args:
        capability: compute capability, major and minor.
        compiler: "nvrtc", "nvcc", or "auto" for the first available one.

    Raises:
        CompileError: if the GPU is too old, or no compiler is found, supports it, or succeeds.
        PermissionError: if other users can write to the cache folder, or this user cannot.
    """
    arch = capability[0] * 10 + capability[1]
    if arch < OLDEST:
        raise CompileError(
            f"FSSDP needs a GPU of compute capability 8.0 (A100) or more, got {arch / 10}"
        )
    found = _cuda_compiler(compiler)
    target = f"sm_{found.best_arch(arch)}"
    build = {"nvrtc": _nvrtc, "nvcc": _nvcc}[found.name]
    key = " ".join([found.name, found.version, *OPTIONS])
    return _cached(target, key, ("device.cu", *HEADERS), lambda: build(target))[0]


def host_library() -> Path:
    """Build the same kernels for this machine's CPU; return the path of the shared library."""
    named = shlex.split(os.environ.get("CXX", ""))
    compiler = named or [path for path in (shutil.which("c++"), shutil.which("g++")) if path][:1]
    if not compiler:
        raise CompileError(
            "no C++ compiler found; install one (apt-get install g++), or name one in $CXX"
        )
    try:
        version = _run([*compiler, "--version"]).splitlines()[0]
    except (CompileError, IndexError) as error:
        where = "$CXX" if named else "the path"
        raise CompileError(
            f"{' '.join(compiler)}, from {where}, is no C++ compiler ({error}); "
            "install g++, or name another in $CXX"
        ) from error
    flags = ["-O2", "-std=c++17", "-shared", "-fPIC", "-pthread"]

    def build() -> bytes:
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "host.so"
            _run([*compiler, *flags, "-o", str(out), str(SOURCES / "host.cpp")])
            return out.read_bytes()

    machine = " ".join([version, os.uname().machine, *flags])
    return _cached("host", machine, ("host.cpp", *HEADERS), build)[1]


def describe() -> tuple[list[str], bool]:
    """Return lines about the compilers for CPU ranks and GPUs, and whether the needed one works."""
    lines = []
    usable = {"cpu": True, "cuda": True}
    try:
        lines.append(f"CPU ranks: compiled, {host_library()}")
    except (CompileError, OSError) as error:
        lines.append(f"CPU ranks: {error}")
        usable["cpu"] = False
    devices = range(torch.cuda.device_count())
    try:
        lines.append(f"GPUs: kernels are compiled by {_cuda_compiler('auto')}")
        for capability in sorted({torch.cuda.get_device_capability(i) for i in devices}):
            cubin(capability)
            lines.append(
                f"GPUs: compiled for sm_{capability[0]}{capability[1]}, in {_cache_folder()}"
            )
    except (CompileError, OSError) as error:
        lines.append(f"GPUs: {error}")
        usable["cuda"] = False
    return lines, usable["cuda" if devices else "cpu"]


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
            known for known in self.archs if known // 10 == arch // 10 and OLDEST <= known <= arch
        ]
        if fitting:
            return max(fitting)
        known = ", ".join(f"sm_{known}" for known in sorted(self.archs))
        raise CompileError(
            f"{self} compiles for {known}; none of these runs on a GPU of compute capability "
            f"{arch / 10}: install a newer compiler, on the path or in $CUDA_HOME"
        )

    def __str__(self) -> str:
        return f"{self.name} {self.version}"


def explain_unloadable(error: Exception) -> str:
    """Explain a driver's refusal of the compiled kernels, with the way out."""
    compiler = _cuda_compiler("auto")
    driver_version = driver.version() or 0
    known = driver_version // 1000
    minor = driver_version % 1000 // 10
    text = f"{error}: {compiler} compiled the kernels, the driver is of CUDA {known}.{minor}"
    if compiler.major <= known:
        return f"{text}; remove {_cache_folder()}, and where that does not help, update the driver"
    return (
        f"{text}, which loads no machine code of CUDA {compiler.major}. "
        f"Update the driver to one of CUDA {compiler.major}, or install a compiler of CUDA "
        f"{known}: nvcc, on the path or in $CUDA_HOME, or pip install "
        f"'cuda-bindings<{known + 1}' nvidia-cuda-nvrtc-cu{known}"
    )


def _cuda_compiler(wanted: str) -> _CudaCompiler:
    """Choose the first available compiler that is not newer than the driver, else the first."""
    found: list[_CudaCompiler] = []
    missing = "NVRTC was not asked for"
    if wanted in ("auto", "nvrtc"):
        try:
            from cuda.bindings import nvrtc

            _, major, minor = nvrtc.nvrtcVersion()
            found.append(
                _CudaCompiler("nvrtc", f"{major}.{minor}", major, nvrtc.nvrtcGetSupportedArchs()[1])
            )
        except (ImportError, OSError, RuntimeError) as error:
            missing = f"NVRTC: {error}"
    # without a driver no compiler is too new
    newest = (driver.version() or sys.maxsize) // 1000
    if (
        wanted in ("auto", "nvcc")
        and not (found and found[0].major <= newest)
        and (path := _nvcc_path()) is not None
    ):
        found.append(_nvcc_at(path))
    if not found:
        raise CompileError(
            f"no compiler for CUDA found ({missing}; no nvcc on the path or in $CUDA_HOME); "
            "pip install cuda-bindings nvidia-cuda-nvrtc"
        )
    return next((compiler for compiler in found if compiler.major <= newest), found[0])


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
    made = call("nvrtcCreateProgram", source, b"device.cu", len(texts), texts, names)
    options = [f"--gpu-architecture={arch}".encode(), *(option.encode() for option in OPTIONS)]
    (status,) = nvrtc.nvrtcCompileProgram(made, len(options), options)
    if int(status) != 0:
        log = b" " * call("nvrtcGetProgramLogSize", made)
        call("nvrtcGetProgramLog", made, log)
        raise CompileError(
            f"NVRTC cannot compile the kernels for {arch}: {log.rstrip(bytes(1)).decode().strip()}"
        )
    out = b" " * call("nvrtcGetCUBINSize", made)
    call("nvrtcGetCUBIN", made, out)
    nvrtc.nvrtcDestroyProgram(made)
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
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CompileError(f"{command[0]}: {error}") from error
    if done.returncode:
        raise CompileError(f"{' '.join(command)} failed:\n{done.stderr.strip()}")
    return done.stdout


def _cache_folder() -> Path:
    """Return the cache folder of compiled kernels; create it if it is missing.

    Raises:
        PermissionError: if other users can write there, because its files are executed, or if this
            user cannot.
    """
    named = os.environ.get(CACHE)
    shared = os.environ.get("XDG_CACHE_HOME")
    try:
        if named:
            folder = Path(named).resolve()
        else:
            folder = Path(shared or Path.home() / ".cache") / "megatron-hecate"
    except RuntimeError as error:
        raise PermissionError(
            f"no folder for compiled kernels ({error}); name one in ${CACHE}"
        ) from error
    try:
        # The umask decides on the mode of parents, but others must not write there: they could
        # replace the folder.
        missing = [parent for parent in folder.parents if not parent.exists()]
        for parent in reversed(missing):
            parent.mkdir(mode=0o755, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise PermissionError(
            f"{folder} cannot be made ({error}); name another folder in ${CACHE}"
        ) from error
    about = folder.stat()
    is_own = about.st_uid == os.getuid()
    if not is_own or about.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        # only the owner can change the mode
        way_out = f"run chmod go-w {folder}, or name" if is_own else "name"
        raise PermissionError(
            f"{folder} belongs to user {about.st_uid}, mode {stat.S_IMODE(about.st_mode):o}: "
            f"compiled kernels must lie where only this user ({os.getuid()}) may write; "
            f"{way_out} another folder in ${CACHE}"
        )
    if not os.access(folder, os.W_OK | os.X_OK):
        raise PermissionError(f"{folder} cannot be written; name another folder in ${CACHE}")
    return folder


def _cached(
    target: str, compiler: str, sources: tuple[str, ...], build: Callable[[], bytes]
) -> tuple[bytes, Path]:
    """Build or load a binary of the sources; return its content and its file."""
    key = hashlib.sha256(repr((target, compiler)).encode())
    for name in sources:
        key.update((SOURCES / name).read_bytes())
    path = _cache_folder() / f"{target}-{key.hexdigest()[:20]}"
    if (made := _read(path)) is not None:
        return made, path
    made = build()
    # `mkstemp` makes a file of mode 600; the rename is atomic, so no reader sees a partial file
    descriptor, temporary = tempfile.mkstemp(dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(made + hashlib.sha256(made).digest() + _END)
            file.flush()
            os.fsync(file.fileno())
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    return made, path


def _read(path: Path) -> bytes | None:
    """Read a cached binary; ``None`` if the file is missing or damaged.

    Raises:
        PermissionError: if another user owns the file or can write to it.
    """
    try:
        about = path.stat()
        held = path.read_bytes()
    except FileNotFoundError:
        return None
    if about.st_uid != os.getuid() or about.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise PermissionError(
            f"{path} belongs to user {about.st_uid}, mode {stat.S_IMODE(about.st_mode):o}, "
            "and would be executed as a compiled kernel; remove it"
        )
    made = held[: -32 - len(_END)]
    digest = held[-32 - len(_END) :]
    if digest != hashlib.sha256(made).digest() + _END:
        warnings.warn(f"{path} is damaged ({len(held)} bytes); compiling again", stacklevel=2)
        return None
    return made
