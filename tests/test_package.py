"""The sdist and the wheel: what they hold, what they say, and that the wheel works where nothing of the checkout is.

Oracle: a literal list of files beside the modules of the checkout; `packaging`'s validation of the metadata; a fresh
environment. Builds run without network and without isolation, from a copy of the checkout.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
from packaging.metadata import Metadata
from pretraining import ROOT

from megatron_hecate import __version__

pytestmark = pytest.mark.newest

KERNELS = {
    "device.cu", "gate.cuh", "gather.cuh", "host.cpp", "quotas.cuh", "reduce.cuh", "reroute.cuh", "schedule.cuh",
    "selftest.cpp", "selftest_gate.cpp", "signals.cuh", "sources.cuh", "transfer.cuh",
}  # fmt: skip
PAGE = {
    "charts.js", "page.css", "page.html", "page.js", "summary.js", "uplot.LICENSE", "uplot.min.css", "uplot.min.js",
}  # fmt: skip
LICENCES = {"LICENSE", "NOTICE", "megatron_hecate/tools/page/uplot.LICENSE"}
BUILD = "import sys\nfrom setuptools import build_meta\nprint(getattr(build_meta, sys.argv[1])(sys.argv[2]))"


@dataclasses.dataclass(frozen=True)
class Built:
    """Results of a build.

    Args:
        source: folder of the unpacked sdist.
        wheel: path of the wheel, which was built in ``source``.
    """

    source: Path
    wheel: Path

    def in_wheel(self) -> set[str]:
        with zipfile.ZipFile(self.wheel) as archive:
            return set(archive.namelist())

    def read(self, name: str) -> bytes:
        with zipfile.ZipFile(self.wheel) as archive:
            return archive.read(name)


@dataclasses.dataclass(frozen=True)
class Environment:
    """Fresh virtual environment, with the wheel and the packages of this one.

    Args:
        folder: its folder; processes run in `work`, far from the checkout.
    """

    folder: Path

    @property
    def work(self) -> Path:
        return self.folder / "work"

    def run(self, *command: str, timeout: float = 120) -> subprocess.CompletedProcess:
        path = os.pathsep.join((str(self.folder / "bin"), os.environ["PATH"]))
        environment = {name: os.environ[name] for name in os.environ if name != "PYTHONPATH"}
        environment |= {"PATH": path, "MEGATRON_HECATE_CACHE": str(self.folder / "cache")}
        environment |= {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
        return subprocess.run(
            command,
            cwd=self.work,
            env=environment,
            text=True,
            capture_output=True,
            timeout=timeout,
        )


def _build(kind: str, source: Path, out: Path) -> Path:
    command = [sys.executable, "-c", BUILD, f"build_{kind}", str(out)]
    done = subprocess.run(command, cwd=source, text=True, capture_output=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    return out / done.stdout.splitlines()[-1]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    folder = tmp_path_factory.mktemp("build")
    (out := folder / "dist").mkdir()
    ignored = shutil.ignore_patterns(
        ".?*", "build", "dist", "*.egg-info", "__pycache__", "data", "demo-out"
    )
    shutil.copytree(ROOT, folder / "checkout", ignore=ignored)
    sdist = _build("sdist", folder / "checkout", out)
    with tarfile.open(sdist) as archive:
        archive.extractall(folder / "unpacked", filter="data")
    (source,) = (folder / "unpacked").iterdir()
    return Built(source, _build("wheel", source, out))


@pytest.fixture(scope="module")
def environment(built: Built, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    import torch

    environment = Environment(tmp_path_factory.mktemp("environment"))
    environment.work.mkdir()
    python = environment.folder / "bin" / "python"
    install = [
        "-m",
        "pip",
        "--python",
        str(python),
        "install",
        "--no-deps",
        "--no-index",
        "--quiet",
    ]
    for command in (
        ["-m", "venv", "--without-pip", str(environment.folder)],
        [*install, "--disable-pip-version-check", str(built.wheel)],
    ):
        done = subprocess.run(
            [sys.executable, *command], text=True, capture_output=True, timeout=300
        )
        assert done.returncode == 0, done.stdout + done.stderr
    (packages,) = environment.folder.glob("lib/python*/site-packages")
    # a folder in a .pth file comes behind the environment's own packages
    (packages / "base.pth").write_text(f"{Path(torch.__file__).parents[1]}\n")
    return environment


def _modules(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in (folder / "megatron_hecate").rglob("*.py")}


def test_the_wheel_is_complete_and_holds_nothing_else(built: Built) -> None:
    found = {name for name in built.in_wheel() if ".dist-info/" not in name}
    data = {"megatron_hecate/py.typed"}
    data |= {f"megatron_hecate/kernels/{name}" for name in KERNELS}
    data |= {f"megatron_hecate/tools/page/{name}" for name in PAGE}
    assert found == _modules(ROOT) | data
    for name in KERNELS:
        assert (
            built.read(f"megatron_hecate/kernels/{name}") == (ROOT / "kernels" / name).read_bytes()
        )


def test_metadata(built: Built) -> None:
    info = f"megatron_hecate-{__version__}.dist-info"
    metadata = Metadata.from_email(built.read(f"{info}/METADATA"), validate=True)
    assert metadata.metadata_version == "2.4" and str(metadata.version) == __version__
    assert metadata.license_expression == "Apache-2.0 AND MIT"
    assert set(metadata.license_files) == LICENCES
    for name in LICENCES:
        assert built.read(f"{info}/licenses/{name}") == (ROOT / name).read_bytes()
    assert "Development Status :: 3 - Alpha" in metadata.classifiers
    assert set(metadata.project_urls) >= {"Paper", "Megatron-LM"}
    assert metadata.description.startswith("# megatron-hecate\n")
    scripts = built.read(f"{info}/entry_points.txt").decode()
    assert (
        scripts.split()
        == "[console_scripts] megatron-hecate = megatron_hecate.__main__:main".split()
    )


def test_the_notice_names_the_release_of_uplot_that_is_inside() -> None:
    page = ROOT / "megatron_hecate" / "tools" / "page"
    release = re.search(r"\(v([\d.]+)\)", (page / "uplot.min.js").read_text()[:200])[1]
    notice = (ROOT / "NOTICE").read_text()
    assert f"uPlot {release}, https://github.com/leeoniya/uPlot" in notice
    holder = re.search(r"Copyright.*", (page / "uplot.LICENSE").read_text())[0]
    assert holder in notice and "Licence: MIT" in notice


def test_the_installed_commands(environment: Environment) -> None:
    found = environment.run(
        "python", "-c", "import megatron_hecate; print(megatron_hecate.__file__)"
    )
    assert found.stdout.startswith(str(environment.folder / "lib")), found.stdout + found.stderr
    done = environment.run("megatron-hecate", "--version")
    assert (done.returncode, done.stdout) == (0, f"megatron-hecate {__version__}\n"), done.stderr
    done = environment.run("megatron-hecate", "report", "--help")
    assert done.returncode == 0 and done.stdout.startswith("usage: megatron-hecate report ")
    # Planner and kernels are compiled into an empty folder.
    done = environment.run("megatron-hecate", "check", timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    core = importlib.metadata.version("megatron-core")
    assert f"megatron-core {core}: fits\n" in done.stdout
    # from the sources in the wheel, into the named folder
    assert f"CPU ranks: compiled, in {environment.folder / 'cache'}\n" in done.stdout
    typed = "import importlib.resources as r; print((r.files('megatron_hecate') / 'py.typed').is_file())"
    assert environment.run("python", "-c", typed).stdout == "True\n"
