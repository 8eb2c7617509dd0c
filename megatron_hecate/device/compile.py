"""Compiles the kernels at first use, and keeps what comes out.

Installing compiles nothing. For a GPU, NVRTC makes a cubin (through ``cuda.bindings``, which torch's CUDA builds bring
along), or nvcc where there is no NVRTC, or one of a newer major version than the driver's, which would not load what it
compiles. For the host, a C++ compiler makes a shared library of the same sources.

Results lie in a folder of the user's own (``$MEGATRON_HECATE_CACHE``, else ``~/.cache/megatron-hecate``), in files
named after all that went into them. They are written under another name and moved into place, so that many ranks, on
many machines that share a home, may do so at once. Each ends in its own checksum.
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
# In a checkout the sources lie beside the package; installed, in it.
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
OPTIONS: tuple[str, ...] = ("-std=c++17",)  # of both compilers for GPUs
OLDEST: int = 80  # compute capability, times ten
CACHE = "MEGATRON_HECATE_CACHE"
_END = b"fssdp\0"  # after the checksum


class CompileError(RuntimeError):
    """The kernels cannot be compiled here."""


def cubin(capability: tuple[int, int], *, compiler: str = "auto") -> bytes:
    """The kernels for a GPU of compute ``capability``, compiled now or before.

    Args:
        compiler: "nvrtc", "nvcc" or "auto", which takes the first of these that is there.

    Raises:
        CompileError: when the GPU is too old, no compiler is found, or it fails or does not know the GPU.
        PermissionError: for a cache folder that others may write, or this user may not.
    """
    arch = capability[0] * 10 + capability[1]
    if arch < OLDEST:
        raise CompileError(
            f"FSSDP needs a GPU of compute capability 8.0 (A100) or more, got {arch / 10}"
        )
    found = _cuda_compiler(compiler)
    target, build = f"sm_{found.best_arch(arch)}", {"nvrtc": _nvrtc, "nvcc": _nvcc}[found.name]
    key = " ".join([found.name, found.version, *OPTIONS])
    return _cached(target, key, ("device.cu", *HEADERS), lambda: build(target))[0]


def host_library() -> Path:
    """The same kernels for this machine's CPU, as a shared library."""
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
            f"{' '.join(compiler)}, from {where}, is no C++ compiler ({error}); install g++, or name another in $CXX"
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
    """What would be used here, a line each for CPU ranks and for GPUs; and whether it suffices."""
    lines, usable = [], {"cpu": True, "cuda": True}
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
    """A compiler for GPUs.

    Args:
        name: "nvrtc" or "nvcc".
        version: as it says it.
        major: of CUDA.
        archs: compute capabilities that it compiles for, times ten.
    """

    name: str
    version: str
    major: int
    archs: Sequence[int]

    def best_arch(self, arch: int) -> int:
        """The newest that it compiles for whose machine code runs on ``arch``: of the same major version, and no newer.

        Raises:
            CompileError: when there is none.
        """
        fitting = [
            known for known in self.archs if known // 10 == arch // 10 and OLDEST <= known <= arch
        ]
        if fitting:
            return max(fitting)
        known = ", ".join(f"sm_{known}" for known in sorted(self.archs))
        raise CompileError(
            f"{self} compiles for {known}; none of these runs on a GPU of compute capability {arch / 10}: install a "
            "newer one, on the path or in $CUDA_HOME"
        )

    def __str__(self) -> str:
        return f"{self.name} {self.version}"


def explain_unloadable(error: Exception) -> str:
    """Why the driver did not load the compiled kernels, and the way out."""
    compiler, driver_version = _cuda_compiler("auto"), driver.version() or 0
    known = driver_version // 1000
    text = f"{error}: {compiler} compiled the kernels, the driver is of CUDA {known}.{driver_version % 1000 // 10}"
    if compiler.major <= known:
        return f"{text}; remove {_cache_folder()}, and where that does not help, update the driver"
    return (
        f"{text}, which loads no machine code of CUDA {compiler.major}. Update the driver to one of CUDA "
        f"{compiler.major}, or install a compiler of CUDA {known}: nvcc, on the path or in $CUDA_HOME, or pip install "
        f"'cuda-bindings<{known + 1}' nvidia-cuda-nvrtc-cu{known}"
    )


def _cuda_compiler(wanted: str) -> _CudaCompiler:
    """The compiler for GPUs: of those that are there, the first that is no newer than the driver, else the first."""
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
    newest = (driver.version() or sys.maxsize) // 1000
    if (
        wanted in ("auto", "nvcc")
        and not (found and found[0].major <= newest)
        and (path := _nvcc_path()) is not None
    ):
        found.append(_nvcc_at(path))
    if not found:
        raise CompileError(
            f"no compiler for CUDA found ({missing}; no nvcc on the path or in $CUDA_HOME); pip install cuda-bindings "
            "nvidia-cuda-nvrtc"
        )
    return next((compiler for compiler in found if compiler.major <= newest), found[0])


def _nvcc_at(path: str) -> _CudaCompiler:
    said, archs = (
        _run([path, "--version"]),
        re.findall(r"sm_(\d+)", _run([path, "--list-gpu-code"])),
    )
    release = re.search(r"release (\d+)\.", said)
    if release is None:
        raise CompileError(f"{path} --version says no release of CUDA: {said.strip()!r}")
    return _CudaCompiler(
        "nvcc", said.splitlines()[-1], int(release[1]), [int(arch) for arch in archs]
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
    """Where compiled kernels are kept; made if need be.

    Raises:
        PermissionError: when others may write there, or this user may not: what lies there will be executed.
    """
    named, shared = os.environ.get(CACHE), os.environ.get("XDG_CACHE_HOME")
    try:
        folder = (
            Path(named).resolve()
            if named
            else Path(shared or Path.home() / ".cache") / "megatron-hecate"
        )
    except RuntimeError as error:
        raise PermissionError(
            f"no folder for compiled kernels ({error}); name one in ${CACHE}"
        ) from error
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise PermissionError(
            f"{folder} cannot be made ({error}); name another folder in ${CACHE}"
        ) from error
    about = folder.stat()
    if about.st_uid != os.getuid() or about.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise PermissionError(
            f"{folder} belongs to user {about.st_uid}, mode {stat.S_IMODE(about.st_mode):o}: compiled kernels must lie "
            f"where only this user ({os.getuid()}) may write; chmod go-w it, or name another folder in ${CACHE}"
        )
    if not os.access(folder, os.W_OK | os.X_OK):
        raise PermissionError(f"{folder} cannot be written; name another folder in ${CACHE}")
    return folder


def _cached(
    target: str, compiler: str, sources: tuple[str, ...], build: Callable[[], bytes]
) -> tuple[bytes, Path]:
    """What ``build`` makes of the sources, and its file."""
    key = hashlib.sha256(repr((target, compiler)).encode())
    for name in sources:
        key.update((SOURCES / name).read_bytes())
    path = _cache_folder() / f"{target}-{key.hexdigest()[:20]}"
    if (made := _read(path)) is not None:
        return made, path
    made = build()
    descriptor, temporary = tempfile.mkstemp(dir=path.parent)  # mode 600
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
    """What a file holds, if there is one, it is this user's, and whole."""
    try:
        about, held = path.stat(), path.read_bytes()
    except FileNotFoundError:
        return None
    if about.st_uid != os.getuid() or about.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise PermissionError(
            f"{path} belongs to user {about.st_uid}, mode {stat.S_IMODE(about.st_mode):o}, and would be executed as a "
            "compiled kernel; remove it"
        )
    made, digest = held[: -32 - len(_END)], held[-32 - len(_END) :]
    if digest != hashlib.sha256(made).digest() + _END:
        warnings.warn(f"{path} is damaged ({len(held)} bytes); compiling again", stacklevel=2)
        return None
    return made
