"""Self-tests of the kernels' sources: built for the host with a sanitizer, as they are or with a bug planted, and run."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
from pathlib import Path

from megatron_hecate.device.compile import SOURCES

SANITIZERS = {"thread": "-fsanitize=thread", "address": "-fsanitize=address,undefined"}


def build(folder: Path, name: str, sanitizer: str, *defines: str, sources: Path = SOURCES) -> Path:
    """Return the program that ``name`` of the sources is built to."""
    out = folder / f"{name}-{sanitizer}"
    flags = f"-std=c++17 -g -O1 -pthread {SANITIZERS[sanitizer]} -DFSSDP_STALLS".split()
    command = ["g++", *flags, *defines, "-o", str(out), str(sources / f"{name}.cpp")]
    subprocess.run(command, check=True, timeout=300)
    return out


def build_planted(
    folder: Path, name: str, mutation: tuple[str, str, str, str], *defines: str
) -> Path:
    """Return the program with a bug: a file of the sources, text in it, its replacement, and the sanitizer."""
    file, text, replacement, sanitizer = mutation
    sources = folder / "kernels"
    shutil.copytree(SOURCES, sources)
    source = (sources / file).read_text()
    assert source.count(text) == 1, f"{file} has {source.count(text)} times {text!r}"
    (sources / file).write_text(source.replace(text, replacement))
    return build(folder, name, sanitizer, *defines, sources=sources)


@functools.cache
def _fixed_addresses() -> tuple[str, ...]:
    """ThreadSanitizer of older compilers does not know where newer kernels put memory at random."""
    fixed = ("setarch", "-R")
    if shutil.which(fixed[0]) is None:
        return ()
    return () if subprocess.run([*fixed, "true"], capture_output=True).returncode else fixed


def run(program: Path, file: Path, timeout: float = 120) -> subprocess.CompletedProcess:
    options = {"TSAN_OPTIONS": "halt_on_error=1", "UBSAN_OPTIONS": "halt_on_error=1"}
    return subprocess.run(
        [*_fixed_addresses(), str(program), str(file)],
        capture_output=True,
        text=True,
        timeout=timeout,
        env={**os.environ, **options},
    )


def fails(program: Path, file: Path, timeout: float) -> bool:
    """Whether a sanitizer or a wrong value ends the program, or nothing does in time."""
    try:
        return run(program, file, timeout).returncode != 0
    except subprocess.TimeoutExpired:
        return True
