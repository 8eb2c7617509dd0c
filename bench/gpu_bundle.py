"""Build archives with all that `make gpu` needs on a machine without internet.

    make gpu-bundle     or  python bench/gpu_bundle.py [--out build/gpu-bundle] [--without-te]

The machine has one GPU, Python 3.12 and a torch built for CUDA 13. The bundle holds our committed
sources, wheels of Megatron and of all other requirements that torch does not bring, at the versions
installed here, and TransformerEngine: its core for CUDA 13 as a wheel, its PyTorch half as sources,
since no registry has it built. It is one tar archive, in pieces small enough to upload, with
``SHA256SUMS`` and ``install.sh``, which checks, joins and installs the pieces.

    make gpu-bundle IMAGE=LIST     or  python bench/gpu_bundle.py --for-image LIST
    python bench/gpu_bundle.py --install build/gpu-image.tar          there, beside our sources

LIST holds the machine's packages, as printed by ``pip list --format=freeze``; a line without a
version matches any. The archive then holds only wheels of missing packages, in one piece: with our
sources it fits into 64 MiB. It is unpacked to ``build/gpu-site``, where `gpu.py` finds it; nothing
is installed into the machine's Python.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
PIECE: int = 60_000_000  # bytes
TOGETHER: int = 64 << 20  # bytes of our sources and the archive for an image
SITE = ROOT / "build" / "gpu-site"
TOOLS: tuple[str, ...] = (
    "pytest",
    "matplotlib",
    "hypothesis",
    "pip",
    "setuptools",
    "wheel",
    "ninja",
    "pybind11",
)
TE: str = "2.20.2"
TE_NEEDS: tuple[str, ...] = (
    "onnxscript",
    "onnx",
    "onnx-ir",
    "nvdlfw-inspect",
    "nvidia-cudnn-frontend",
    "ml-dtypes",
)
TARGET: tuple[str, ...] = ("--python-version", "3.12", "--only-binary", ":all:", "--no-deps")
PLATFORMS: tuple[str, ...] = (
    "manylinux_2_28_x86_64",
    "manylinux_2_17_x86_64",
    "manylinux2014_x86_64",
    "any",
)
INSTALL = """#!/usr/bin/env bash
# Check, join and install: ./install.sh [FOLDER]. Needs Python 3.12 whose torch is there ($PYTHON, else python3).
set -euo pipefail
cd "$(dirname "$0")"
folder=${1:-megatron-hecate}
python=${PYTHON:-python3}
sha256sum --check --quiet SHA256SUMS
mkdir -p "$folder"
cat gpu-bundle.tar.?? | tar -x -C "$folder"
cd "$folder"
"$python" -c "import torch; print('torch', torch.__version__, 'for CUDA', torch.version.cuda)"
"$python" -m venv --system-site-packages .venv
# a virtual environment that was made from another one sees only the first one's packages
"$python" -c "import site; print(*site.getsitepackages(), sep='\\n')" \\
    >"$(.venv/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")/base.pth"
install() { .venv/bin/python -m pip install --quiet --disable-pip-version-check --no-index --no-deps "$@"; }
install wheels/*.whl
install --no-build-isolation --editable .
if [ -e te ]; then
    # its half for PyTorch is compiled here, which takes minutes, a C++ compiler and a CUDA toolkit
    site=$(.venv/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")
    nvidia=$("$python" -c "import nvidia; print(next(iter(nvidia.__path__)))" 2>/dev/null) || nvidia=
    [ -z "$nvidia" ] || [ -e "$site/nvidia" ] || ln -s "$nvidia" "$site/nvidia" # where it looks for cuDNN
    install te/*.whl
    for include in "$site"/nvidia/*/include; do CPATH=$include:${CPATH:-}; done
    export CPATH NVTE_FRAMEWORK=pytorch MAX_JOBS=${MAX_JOBS:-$(nproc)}
    timeout 1200 .venv/bin/python -m pip install --quiet --no-index --no-deps --no-build-isolation te/*.tar.gz || true
    # half of it would stop Megatron from starting
    .venv/bin/python -c "import torch, transformer_engine.pytorch" || {
        .venv/bin/python -m pip uninstall --quiet --yes transformer_engine{,_cu13,_torch} 2>/dev/null
        rm -rf "$site/transformer_engine" # what is left would look like a package
        echo "TransformerEngine could not be built or imported: it is not installed, and what needs it will be left out"
    }
fi
echo "Ready. Now run: cd $folder && make gpu"
"""


def closure(names: Iterable[str]) -> dict[str, str]:
    """What ``names`` need, directly or not, and the versions that are installed here; none of what torch needs."""
    of_torch = set(_walk(["torch"]))
    return {name: version for name, version in sorted(_walk(names).items()) if name not in of_torch}


def _walk(names: Iterable[str]) -> dict[str, str]:
    found: dict[str, str] = {}
    todo = [Requirement(name) for name in names]
    while todo:
        wanted = todo.pop()
        name = canonicalize_name(wanted.name)
        if name in found:
            continue
        try:
            about = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            continue  # of another platform, or a tool that is installed nowhere here
        found[name] = about.version
        for line in about.requires or ():
            needed = Requirement(line)
            extras = wanted.extras or {""}
            if needed.marker is None or any(
                needed.marker.evaluate({"extra": extra}) for extra in extras
            ):
                todo.append(needed)
    return found


def missing(names: Iterable[str], image: Mapping[str, str]) -> dict[str, str]:
    """What of the needs of ``names``, directly or not, ``image`` lacks, and the versions that are installed here.

    What needs something that is there already is not looked into: it came with its own needs.

    Args:
        image: versions by canonical name, "" for any.
    """
    found: dict[str, str] = {}
    todo = [Requirement(name) for name in names]
    while todo:
        wanted = todo.pop()
        name = canonicalize_name(wanted.name)
        there = image.get(name)
        fits = there is not None and (
            not there or wanted.specifier.contains(there, prereleases=True)
        )
        if fits or name in found:
            continue
        about = importlib.metadata.distribution(name)
        found[name] = about.version
        needs = (Requirement(line) for line in about.requires or ())
        todo += [
            need for need in needs if need.marker is None or need.marker.evaluate({"extra": ""})
        ]
    return dict(sorted(found.items()))


def read_image(text: str) -> dict[str, str]:
    """Versions by canonical name, of lines such as ``numpy==2.5.2``, ``numpy 2.5.2`` or ``numpy``."""
    lines = [line.partition("#")[0].replace("==", " ").split() for line in text.splitlines()]
    return {canonicalize_name(line[0]): line[1] if len(line) > 1 else "" for line in lines if line}


def for_image(listed: Path, archive: Path) -> None:
    """Make the archive for a machine that has what ``listed`` names, and print what is in it.

    Raises:
        SystemExit: where the archive and our sources together are too large.
    """
    pinned = [
        f"{name}=={version}"
        for name, version in missing(own_requirements(), read_image(listed.read_text())).items()
    ]
    with tempfile.TemporaryDirectory() as folder:
        download(pinned, Path(folder))
        archive.parent.mkdir(parents=True, exist_ok=True)
        with tarfile.open(archive, "w") as tar:
            tar.add(folder, arcname=".")
    files = subprocess.run(
        ["git", "-C", str(ROOT), "ls-files", "-z"], capture_output=True, text=True, check=True
    ).stdout
    tree = sum(
        (ROOT / name).stat().st_size
        for name in files.split("\0")
        if name and (ROOT / name).exists()
    )
    size = archive.stat().st_size
    if tree + size > TOGETHER:
        raise SystemExit(
            f"{size / 1e6:.1f} MB of wheels and {tree / 1e6:.1f} MB of sources are more than 64 MiB"
        )
    print(
        f"{archive}: {' '.join(pinned)}; {size / 1e6:.1f} MB, beside {tree / 1e6:.1f} MB of sources"
    )


def install(archive: Path, site: Path) -> None:
    """Unpack an archive of `for_image` into ``site``, which becomes a folder of packages."""
    with tempfile.TemporaryDirectory() as folder:
        with tarfile.open(archive) as tar:
            tar.extractall(folder, filter="data")
        pip = [
            sys.executable,
            "-m",
            "pip",
            "install",
            "--quiet",
            "--disable-pip-version-check",
            "--no-index",
            "--no-deps",
        ]
        wheels = sorted(map(str, Path(folder).glob("*.whl")))
        subprocess.run(
            [*pip, "--no-compile", "--upgrade", "--target", str(site), *wheels], check=True
        )
    print(f"{site}: {len(wheels)} packages")


def own_requirements() -> list[str]:
    """Those of this project, with what the demo and the tests share."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [*project["dependencies"], *project["optional-dependencies"]["training"]]
    return [
        text for text in wanted if (marker := Requirement(text).marker) is None or marker.evaluate()
    ]


def download(names: Iterable[str], into: Path) -> None:
    """The wheels of ``names``, each ``name==version`` or a name, for Linux on x86-64.

    Raises:
        SystemExit: naming those for which there is none.
    """
    into.mkdir(parents=True, exist_ok=True)
    platforms = [word for name in PLATFORMS for word in ("--platform", name)]
    pip = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--disable-pip-version-check",
        *TARGET,
        *platforms,
    ]
    done = subprocess.run(
        [*pip, "--dest", str(into), *names], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(f"pip found not all wheels:\n{done.stderr.strip()[-2000:]}")


def split(archive: Path, into: Path, *, size: int = PIECE) -> list[Path]:
    """Pieces of ``archive`` with at most ``size`` bytes, named after it, and ``SHA256SUMS``."""
    pieces = []
    for number, piece in enumerate(_pieces(archive, size)):
        assert number < 100, f"{archive} has more than 100 pieces of {size} bytes"
        pieces.append(into / f"{archive.name}.{number:02}")
        pieces[-1].write_bytes(piece)
    sums = [f"{hashlib.sha256(piece.read_bytes()).hexdigest()}  {piece.name}\n" for piece in pieces]
    (into / "SHA256SUMS").write_text("".join(sums))
    return pieces


def _pieces(archive: Path, size: int) -> Iterator[bytes]:
    with archive.open("rb") as file:
        while piece := file.read(size):
            yield piece


def sources(into: Path) -> str:
    """Unpack what is committed; returns the commit, which goes into a file ``COMMIT`` as well."""
    into.mkdir(parents=True)
    git = ["git", "-C", str(ROOT)]
    tar = subprocess.run([*git, "archive", "HEAD"], capture_output=True, check=True).stdout
    subprocess.run(["tar", "-x", "-C", str(into)], input=tar, check=True)
    commit = subprocess.run(
        [*git, "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True, check=True
    )
    (into / "COMMIT").write_text(commit.stdout)
    return commit.stdout.strip()


def main() -> None:
    """Make the bundle, and print what is in it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "gpu-bundle")
    parser.add_argument(
        "--without-te", action="store_true", help="leave TransformerEngine out, which is most of it"
    )
    parser.add_argument(
        "--for-image", type=Path, metavar="LIST", help="only what the machine of LIST lacks"
    )
    parser.add_argument(
        "--install", type=Path, metavar="ARCHIVE", help="unpack what --for-image made"
    )
    options = parser.parse_args()
    if options.install is not None:
        install(options.install, SITE)
        return
    if options.for_image is not None:
        for_image(options.for_image, ROOT / "build" / "gpu-image.tar")
        return
    began = time.monotonic()
    shutil.rmtree(options.out, ignore_errors=True)
    content = options.out / "content"
    commit = sources(content)
    pinned = [f"{name}=={version}" for name, version in closure(own_requirements()).items()]
    known = {canonicalize_name(text.partition("==")[0]) for text in pinned}
    tools = closure(TOOLS)
    pinned += [f"{name}=={version}" for name, version in tools.items() if name not in known]
    download(
        [*pinned, *(tool for tool in TOOLS if tool not in {*tools, *known})], content / "wheels"
    )
    if not options.without_te:
        download(
            [f"transformer_engine=={TE}", f"transformer_engine_cu13=={TE}", *TE_NEEDS],
            content / "te",
        )
        pip = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "--quiet",
            "--no-deps",
            "--no-binary",
            ":all:",
        ]
        pip += [
            "--no-build-isolation",
            "--dest",
            str(content / "te"),
            f"transformer_engine_torch=={TE}",
        ]
        subprocess.run(pip, check=True)
    for part in ("wheels", "te"):
        files = sorted((content / part).glob("*"))
        print(
            f"{part}: {len(files)} files, {sum(file.stat().st_size for file in files) / 1e6:.1f} MB"
        )
    archive = options.out / "gpu-bundle.tar"
    with tarfile.open(archive, "w") as tar:  # wheels are compressed already
        tar.add(content, arcname=".")
    shutil.rmtree(content)
    pieces = split(archive, options.out)
    archive.unlink()
    (options.out / "install.sh").write_text(INSTALL)
    (options.out / "install.sh").chmod(0o755)
    whole = sum(piece.stat().st_size for piece in pieces)
    print(f"{options.out}: commit {commit}, {len(pieces)} pieces, {whole / 1e6:.1f} MB in all")
    print(
        f"{time.monotonic() - began:.0f} s; carry the folder to the machine and run ./install.sh there"
    )


if __name__ == "__main__":
    main()
