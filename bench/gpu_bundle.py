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
# largest size of a piece in bytes
PIECE: int = 60_000_000
# largest size in bytes of our sources and the archive for an image
TOGETHER: int = 64 << 20
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
# Check, join and install: ./install.sh [FOLDER]. Needs Python 3.12 with torch ($PYTHON, else
# python3).
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
# A virtual environment created from another one sees only the packages of the first one.
"$python" -c "import site; print(*site.getsitepackages(), sep='\\n')" \\
    >"$(.venv/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")/base.pth"
pip=(.venv/bin/python -m pip install --quiet --disable-pip-version-check --no-index --no-deps)
install() { "${pip[@]}" "$@"; }
install wheels/*.whl
install --no-build-isolation --editable .
if [ -e te ]; then
    # Its PyTorch half is compiled here: minutes, with a C++ compiler and a CUDA toolkit.
    site=$(.venv/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")
    find="import nvidia; print(next(iter(nvidia.__path__)))"
    nvidia=$("$python" -c "$find" 2>/dev/null) || nvidia=
    # TransformerEngine searches cuDNN here.
    [ -z "$nvidia" ] || [ -e "$site/nvidia" ] || ln -s "$nvidia" "$site/nvidia"
    install te/*.whl
    for include in "$site"/nvidia/*/include; do CPATH=$include:${CPATH:-}; done
    export CPATH NVTE_FRAMEWORK=pytorch MAX_JOBS=${MAX_JOBS:-$(nproc)}
    timeout 1200 .venv/bin/python -m pip install --quiet --no-index --no-deps \\
        --no-build-isolation te/*.tar.gz || true
    # Megatron does not start with an incomplete TransformerEngine.
    .venv/bin/python -c "import torch, transformer_engine.pytorch" || {
        te=(transformer_engine{,_cu13,_torch})
        .venv/bin/python -m pip uninstall --quiet --yes "${te[@]}" 2>/dev/null
        # A remaining folder would look like a package.
        rm -rf "$site/transformer_engine"
        echo "TransformerEngine could not be built or imported: it is not installed," \\
            "and parts that need it will be left out"
    }
fi
echo "Ready. Now run: cd $folder && make gpu"
"""


def closure(names: Iterable[str]) -> dict[str, str]:
    """List the direct and indirect requirements of ``names``, except torch's, with versions.

    Versions are of the packages installed here.
    """
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
        # A package for another platform, or a tool that is not installed here.
        except importlib.metadata.PackageNotFoundError:
            continue
        found[name] = about.version
        for line in about.requires or ():
            needed = Requirement(line)
            extras = wanted.extras or {""}
            marker = needed.marker
            if marker is None or any(marker.evaluate({"extra": extra}) for extra in extras):
                todo.append(needed)
    return found


def missing(names: Iterable[str], image: Mapping[str, str]) -> dict[str, str]:
    """List the direct and indirect requirements of ``names`` that ``image`` lacks.

    Requirements of a package in the image are not checked: they were installed with it.

    Args:
        names: requirements.
        image: versions by canonical name, "" for any.

    Returns:
        Versions installed here, by canonical name.
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
    """Parse lines such as ``numpy==2.5.2``, ``numpy 2.5.2`` or ``numpy``.

    Returns:
        Versions by canonical name, "" for any.
    """
    found = {}
    for line in text.splitlines():
        words = line.partition("#")[0].replace("==", " ").split()
        if words:
            found[canonicalize_name(words[0])] = "".join(words[1:2])
    return found


def for_image(listed: Path, archive: Path) -> None:
    """Build the archive for a machine with the packages in ``listed``, and print its content.

    Args:
        listed: file with the machine's packages.
        archive: path of the archive.

    Raises:
        SystemExit: if the archive and our sources together are too large.
    """
    lacking = missing(own_requirements(), read_image(listed.read_text()))
    pinned = [f"{name}=={version}" for name, version in lacking.items()]
    with tempfile.TemporaryDirectory() as folder:
        download(pinned, Path(folder))
        archive.parent.mkdir(parents=True, exist_ok=True)
        with tarfile.open(archive, "w") as tar:
            tar.add(folder, arcname=".")
    command = ["git", "-C", str(ROOT), "ls-files", "-z"]
    listing = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    files = [ROOT / name for name in listing.split("\0") if name]
    tree = sum(file.stat().st_size for file in files if file.exists())
    size = archive.stat().st_size
    if tree + size > TOGETHER:
        raise SystemExit(
            f"{size / 1e6:.1f} MB of wheels and {tree / 1e6:.1f} MB of sources are more than 64 MiB"
        )
    print(
        f"{archive}: {' '.join(pinned)}; {size / 1e6:.1f} MB, plus {tree / 1e6:.1f} MB of sources"
    )


def install(archive: Path, site: Path) -> None:
    """Install the wheels of an archive of `for_image` into the folder ``site``."""
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
    """List this project's requirements, including the ones that demo and tests share."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    found = []
    for text in [*project["dependencies"], *project["optional-dependencies"]["training"]]:
        marker = Requirement(text).marker
        if marker is None or marker.evaluate():
            found.append(text)
    return found


def download(names: Iterable[str], into: Path) -> None:
    """Download wheels for Linux on x86-64.

    Args:
        names: packages, each ``name==version`` or a name.
        into: folder for the wheels.

    Raises:
        SystemExit: if a package has no wheel, with pip's message.
    """
    into.mkdir(parents=True, exist_ok=True)
    platforms: list[str] = []
    for name in PLATFORMS:
        platforms += ["--platform", name]
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
    """Split ``archive`` into pieces, and write ``SHA256SUMS``.

    Args:
        archive: archive to split; pieces are named after it.
        into: folder for the pieces.
        size: largest size of a piece in bytes.

    Returns:
        Paths of the pieces.
    """
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
    """Unpack the committed sources; returns the commit, which is also written to ``COMMIT``."""
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
    """Build the bundle, and print its content."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "gpu-bundle")
    parser.add_argument(
        "--without-te", action="store_true", help="leave out TransformerEngine, the largest part"
    )
    parser.add_argument(
        "--for-image", type=Path, metavar="LIST", help="only packages that LIST lacks"
    )
    parser.add_argument(
        "--install", type=Path, metavar="ARCHIVE", help="unpack an archive of --for-image"
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
    # Tools that are not installed here have no version.
    unpinned = [tool for tool in TOOLS if tool not in {*tools, *known}]
    download([*pinned, *unpinned], content / "wheels")
    if not options.without_te:
        _download_te(content / "te")
    for part in ("wheels", "te"):
        files = sorted((content / part).glob("*"))
        size = sum(file.stat().st_size for file in files)
        print(f"{part}: {len(files)} files, {size / 1e6:.1f} MB")
    archive = options.out / "gpu-bundle.tar"
    # Without compression: wheels are compressed already.
    with tarfile.open(archive, "w") as tar:
        tar.add(content, arcname=".")
    shutil.rmtree(content)
    pieces = split(archive, options.out)
    archive.unlink()
    (options.out / "install.sh").write_text(INSTALL)
    (options.out / "install.sh").chmod(0o755)
    whole = sum(piece.stat().st_size for piece in pieces)
    print(f"{options.out}: commit {commit}, {len(pieces)} pieces, {whole / 1e6:.1f} MB in all")
    print(
        f"{time.monotonic() - began:.0f} s; copy the folder to the machine and run ./install.sh "
        "there"
    )


def _download_te(into: Path) -> None:
    """Download TransformerEngine; its PyTorch half as sources, since no registry has it built."""
    download([f"transformer_engine=={TE}", f"transformer_engine_cu13=={TE}", *TE_NEEDS], into)
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    pip += ["--no-binary", ":all:", "--no-build-isolation", "--dest", str(into)]
    subprocess.run([*pip, f"transformer_engine_torch=={TE}"], check=True)


if __name__ == "__main__":
    main()
