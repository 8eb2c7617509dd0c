"""The sdist and the wheel: what they hold, what they say, and that the wheel works where nothing of the checkout is.

Oracle: a literal list of files beside the modules of the checkout; `packaging`'s validation of the metadata; versions
that containers and releases have; a fresh environment. Builds run without network and without isolation, from a copy
of the checkout.
"""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gpu_parts
import pytest
import torch
from packaging.metadata import Metadata
from packaging.requirements import Requirement
from pretraining import ROOT

from megatron_hecate import __version__

pytestmark = pytest.mark.newest

KERNELS = {
    "device.cu", "gate.cuh", "gather.cuh", "host.cpp", "loads.cuh", "quotas.cuh", "reduce.cuh", "reroute.cuh",
    "schedule.cuh", "selftest.cpp", "selftest_gate.cpp", "signals.cuh", "sources.cuh", "transfer.cuh",
}  # fmt: skip
PAGE = {
    "charts.js", "page.css", "page.html", "page.js", "summary.js", "uplot.LICENSE", "uplot.min.css", "uplot.min.js",
}  # fmt: skip
LICENCES = {"LICENSE", "NOTICE", "megatron_hecate/tools/page/uplot.LICENSE"}
BUILD = "import sys\nfrom setuptools import build_meta\nprint(getattr(build_meta, sys.argv[1])(sys.argv[2]))"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
# of containers and of development too; packages that are not here are taken in any version
TAKEN = {
    "torch": "2.11.0a0+eb65b36914.nv26.02 2.11.0 2.13.0+cpu",
    "megatron-core": "0.16.1 0.18.0.dev0 0.20.0rc0 0.20.0rc0+d98e8a64",
}
REFUSED = {"torch": "2.10.0 2.10.1+cu130"}


def _run(*command: object, **settings: Any) -> str:
    """Return the output of a command that succeeds."""
    settings = {"timeout": 300, **settings}
    done = subprocess.run(list(map(str, command)), text=True, capture_output=True, **settings)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def _build(kind: str, source: Path, out: Path) -> Path:
    printed = _run(sys.executable, "-c", BUILD, f"build_{kind}", out, cwd=source)
    return out / printed.splitlines()[-1]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[zipfile.ZipFile]:
    """The wheel that the sdist makes."""
    folder = tmp_path_factory.mktemp("build")
    (out := folder / "dist").mkdir()
    ignored = ".?*", "build", "dist", "*.egg-info", "__pycache__", "data", "demo-out"
    shutil.copytree(ROOT, folder / "checkout", ignore=shutil.ignore_patterns(*ignored))
    with tarfile.open(_build("sdist", folder / "checkout", out)) as archive:
        archive.extractall(folder / "unpacked", filter="data")
    (source,) = (folder / "unpacked").iterdir()
    with zipfile.ZipFile(_build("wheel", source, out)) as archive:
        yield archive


@pytest.fixture(scope="module")
def environment(wheel: zipfile.ZipFile, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a fresh virtual environment, with the wheel and the packages of this one."""
    folder = tmp_path_factory.mktemp("environment")
    _run(sys.executable, "-m", "venv", "--without-pip", folder)
    install = "install --no-deps --no-index --quiet --disable-pip-version-check".split()
    pip = [sys.executable, "-m", "pip", "--python", folder / "bin" / "python"]
    _run(*pip, *install, wheel.filename)
    (packages,) = folder.glob("lib/python*/site-packages")
    # a folder in a .pth file comes behind the environment's own packages
    (packages / "base.pth").write_text(f"{Path(torch.__file__).parents[1]}\n")
    return folder


def _modules(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in (folder / "megatron_hecate").rglob("*.py")}


def test_the_wheel_is_complete_and_holds_nothing_else(wheel: zipfile.ZipFile) -> None:
    found = {name for name in wheel.namelist() if ".dist-info/" not in name}
    data = {"megatron_hecate/py.typed"}
    data |= {f"megatron_hecate/kernels/{name}" for name in KERNELS}
    data |= {f"megatron_hecate/tools/page/{name}" for name in PAGE}
    assert found == _modules(ROOT) | data
    for name in KERNELS:
        kernel = wheel.read(f"megatron_hecate/kernels/{name}")
        assert kernel == (ROOT / "kernels" / name).read_bytes()


def test_metadata(wheel: zipfile.ZipFile) -> None:
    info = f"megatron_hecate-{__version__}.dist-info"
    metadata = Metadata.from_email(wheel.read(f"{info}/METADATA"), validate=True)
    assert metadata.metadata_version == "2.4" and str(metadata.version) == __version__
    assert metadata.license_expression == "Apache-2.0 AND MIT"
    assert set(metadata.license_files) == LICENCES
    for name in LICENCES:
        assert wheel.read(f"{info}/licenses/{name}") == (ROOT / name).read_bytes()
    assert "Development Status :: 3 - Alpha" in metadata.classifiers
    assert set(metadata.project_urls) >= {"Paper", "Megatron-LM"}
    assert metadata.description.startswith("# megatron-hecate\n")
    scripts = wheel.read(f"{info}/entry_points.txt").decode().split()
    assert scripts == "[console_scripts] megatron-hecate = megatron_hecate.__main__:main".split()


@pytest.mark.fast
def test_versions_that_pip_takes() -> None:
    requirements = [*PROJECT["dependencies"], *PROJECT["optional-dependencies"]["megatron"]]
    for name, specifier in ((r.name, r.specifier) for r in map(Requirement, requirements)):
        assert name in TAKEN or not specifier, f"{name}: add the container's version here"
        for versions, taken in ((TAKEN, True), (REFUSED, False)):
            for version in versions.get(name, "").split():
                assert specifier.contains(version, prereleases=True) is taken, (name, version)


def test_the_notice_names_the_release_of_uplot_that_is_inside() -> None:
    page = ROOT / "megatron_hecate" / "tools" / "page"
    release = re.search(r"\(v([\d.]+)\)", (page / "uplot.min.js").read_text()[:200])[1]
    notice = (ROOT / "NOTICE").read_text()
    assert f"uPlot {release}, https://github.com/leeoniya/uPlot" in notice
    holder = re.search(r"Copyright.*", (page / "uplot.LICENSE").read_text())[0]
    assert holder in notice and "Licence: MIT" in notice


def test_the_installed_commands(environment: Path, tmp_path: Path) -> None:
    """Far from the checkout; planner and kernels are compiled into an empty folder."""
    settings = {name: os.environ[name] for name in os.environ if name != "PYTHONPATH"}
    settings["PATH"] = os.pathsep.join((str(environment / "bin"), os.environ["PATH"]))
    settings |= {"MEGATRON_HECATE_CACHE": str(tmp_path / "cache"), "OMP_NUM_THREADS": "1"}
    settings |= {"PYTHONWARNINGS": "ignore"}

    def run(*command: str) -> str:
        return _run(*command, cwd=tmp_path, env=settings, timeout=600)

    place = run("python", "-c", "import megatron_hecate; print(megatron_hecate.__file__)")
    assert place.startswith(str(environment / "lib"))
    assert run("megatron-hecate", "--version") == f"megatron-hecate {__version__}\n"
    assert run("megatron-hecate", "report", "--help").startswith("usage: megatron-hecate report ")
    said = run("megatron-hecate", "check", "--compile-for", "9.0")
    assert f"megatron-core {importlib.metadata.version('megatron-core')}: fits\n" in said
    # from the sources in the wheel, into the named folder
    assert f"CPU ranks: compiled, in {tmp_path / 'cache'}\n" in said
    assert re.search(gpu_parts.COMMANDS["1"][0].says, said), "what `make gpu` reads"
