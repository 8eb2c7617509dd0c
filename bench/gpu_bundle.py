"""Build an archive of the packages that a machine without internet lacks for `make gpu`.

    make gpu-bundle IMAGE=LIST     or  python bench/gpu_bundle.py --for-image LIST
    python bench/gpu_bundle.py --install build/gpu-image.tar          there, beside our sources

LIST holds the machine's packages, as printed by ``pip list --format=freeze``; a line without a
version matches any. The machine has one GPU, Python 3.12 and a torch built for CUDA 13. The archive
holds wheels of the missing packages, at the versions installed here: with our sources it fits into
64 MiB. It is unpacked to ``build/gpu-site``, where `gpu.py` finds it; nothing is installed into the
machine's Python. TransformerEngine, which no registry has built, is apart (docs/gpu.md).
"""

from __future__ import annotations

import argparse
import importlib.metadata
import subprocess
import sys
import tarfile
import tempfile
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
# largest size in bytes of our sources and the archive
TOGETHER: int = 64 << 20
SITE = ROOT / "build" / "gpu-site"
ARCHIVE = ROOT / "build" / "gpu-image.tar"
PIP: tuple[str, ...] = (sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check")
TARGET: tuple[str, ...] = ("--python-version", "3.12", "--only-binary", ":all:", "--no-deps")
PLATFORMS: tuple[str, ...] = (
    "manylinux_2_28_x86_64",
    "manylinux_2_17_x86_64",
    "manylinux2014_x86_64",
    "any",
)


def missing(names: Iterable[str], image: Mapping[str, str]) -> dict[str, str]:
    """List the direct and indirect requirements of ``names`` that ``image`` lacks.

    Requirements of a package in the image are not checked: they were installed with it.

    Args:
        names: requirements.
        image: versions by canonical name, "" for any.

    Returns:
        Versions installed here, by canonical name.
    """
    versions: dict[str, str] = {}
    queue = [Requirement(name) for name in names]
    while queue:
        requirement = queue.pop()
        name = canonicalize_name(requirement.name)
        version = image.get(name)
        fits = version is not None and (
            not version or requirement.specifier.contains(version, prereleases=True)
        )
        if fits or name in versions:
            continue
        distribution = importlib.metadata.distribution(name)
        versions[name] = distribution.version
        needs = (Requirement(line) for line in distribution.requires or ())
        queue += [
            need for need in needs if need.marker is None or need.marker.evaluate({"extra": ""})
        ]
    return dict(sorted(versions.items()))


def read_image(text: str) -> dict[str, str]:
    """Parse lines such as ``numpy==2.5.2``, ``numpy 2.5.2`` or ``numpy``.

    Returns:
        Versions by canonical name, "" for any.
    """
    versions = {}
    for line in text.splitlines():
        words = line.partition("#")[0].replace("==", " ").split()
        if words:
            versions[canonicalize_name(words[0])] = "".join(words[1:2])
    return versions


def own_requirements() -> list[str]:
    """List this project's requirements, including the ones that demo and tests share."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    names = []
    for text in [*project["dependencies"], *project["optional-dependencies"]["training"]]:
        marker = Requirement(text).marker
        if marker is None or marker.evaluate():
            names.append(text)
    return names


def download(names: Iterable[str], into: Path) -> None:
    """Download wheels for Linux on x86-64.

    Args:
        names: packages, each ``name==version`` or a name.
        into: folder for the wheels.

    Raises:
        SystemExit: if a package has no wheel, with pip's message.
    """
    into.mkdir(parents=True, exist_ok=True)
    platforms = [word for name in PLATFORMS for word in ("--platform", name)]
    done = subprocess.run(
        [*PIP, "download", *TARGET, *platforms, "--dest", str(into), *names],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise SystemExit(f"pip has no wheel of a package:\n{done.stderr.strip()[-2000:]}")


def build(image: Path, archive: Path) -> None:
    """Build the archive for a machine with the packages in ``image``, and print its content.

    Args:
        image: file with the machine's packages.
        archive: path of the archive.

    Raises:
        SystemExit: if the archive and our sources together are too large.
    """
    versions = missing(own_requirements(), read_image(image.read_text()))
    pinned = [f"{name}=={version}" for name, version in versions.items()]
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
    """Install the wheels of an archive of `build` into the folder ``site``."""
    with tempfile.TemporaryDirectory() as folder:
        with tarfile.open(archive) as tar:
            tar.extractall(folder, filter="data")
        wheels = sorted(map(str, Path(folder).glob("*.whl")))
        pip = [*PIP, "install", "--no-index", "--no-deps", "--no-compile", "--upgrade"]
        subprocess.run([*pip, "--target", str(site), *wheels], check=True)
    print(f"{site}: {len(wheels)} packages")


def main() -> None:
    """Build or install the archive."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    group = parser.add_mutually_exclusive_group(required=True)
    add = group.add_argument
    add("--for-image", type=Path, metavar="LIST", help="build, without the packages in LIST")
    add("--install", type=Path, metavar="ARCHIVE", help="unpack an archive of --for-image")
    options = parser.parse_args()
    if options.install is not None:
        install(options.install, SITE)
    else:
        build(options.for_image, ARCHIVE)


if __name__ == "__main__":
    main()
