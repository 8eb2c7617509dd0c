"""`bench/gpu.py` as a machine with a GPU would run it, without one: its commands, over a driver that is a stand-in.

The interpreter has what such a machine has, and no more: torch with what it needs, numba, pytest; no Megatron, no
TransformerEngine. The tree is a copy without git.
Sizes are tiny: what is shown is that every part that can run does and says what it must, that nothing is launched or
captured which a driver would refuse, and that the page holds the numbers; not the numbers themselves.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sysconfig
import venv
from importlib import metadata
from pathlib import Path

import gpu
import gpu_bundle
import launch
import pytest
import rows
from quick import quick

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.newest
IMAGE = ("torch", "numba", "packaging", "pytest", "setuptools")  # with what they need
PARTS_OF_TREE = ("bench", "examples", "kernels", "megatron_hecate", "tests", "pyproject.toml")
START = """
import os, sys
if "FSSDP_PART" in os.environ or any(word.endswith("gpu_machine.py") for word in sys.orig_argv):
    sys.path[:0] = [{folders}]
    import kit_on_cpu
    kit_on_cpu.install()
"""


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The tree, and the Python of that machine."""
    folder = tmp_path_factory.mktemp("machine")
    tree, packages = folder / "tree", folder / "packages"
    tree.mkdir()
    packages.mkdir()
    for name in PARTS_OF_TREE:
        source = ROOT / name
        copy = shutil.copytree if source.is_dir() else shutil.copy
        copy(source, tree / name)
    (tree / "COMMIT").write_text("rehearsed")
    for name in gpu_bundle.missing(IMAGE, {}):
        for file in metadata.distribution(name).files or ():
            top = file.parts[0]
            if top not in ("..", "__pycache__") and not (packages / top).exists():
                (packages / top).symlink_to(Path(str(metadata.distribution(name).locate_file(top))))
    venv.create(folder / "python", with_pip=False, symlinks=True)
    python = folder / "python" / "bin" / "python"
    site = Path(sysconfig.get_path("purelib", "venv", {"base": str(folder / "python")}))
    (site / "image.pth").write_text(f"{packages}\n")
    names = (*launch.SUPPORT, "examples", "bench", ".")
    folders = ", ".join(repr(str(tree / name)) for name in names)
    (site / "sitecustomize.py").write_text(START.format(folders=folders))
    return tree, python


def _call(
    machine: tuple[Path, Path], out: Path, *arguments: str, timeout: float
) -> subprocess.CompletedProcess[str]:
    tree, python = machine
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "FSSDP"))}
    environment |= {"TEST_FOLDER": str(tree), "OMP_NUM_THREADS": "1", "HOME": str(tree)}
    command = [str(python), "bench/gpu.py", "--tiny", "--out", str(out), *arguments]
    return subprocess.run(
        command, cwd=tree, env=environment, capture_output=True, text=True, timeout=timeout
    )


# what stands in cannot: it hides nothing from compute-sanitizer, and runs no Megatron
NOT_HERE = {"sanitizer", "races"}
# no TransformerEngine, no Megatron
LEFT_OUT = {
    part.name
    for parts in gpu.COMMANDS.values()
    for part in parts
    if {"megatron", "transformer_engine"} & set(part.needs)
}
ON_PAGE = {
    "check": ["GPU: a GPU on a CPU", "commit rehearsed"],
    "graph": ["| layers | 2 | 132 | yes |", "| gate | 2 | 132 | yes |", "on rank 0 of 2"],
    "routing": ["**after the gate, microseconds**", "| 8 | 64 | 2 | 5 | nothing |"],
    "rates": ["**rates, GB/s**", "**verdicts**", "16 blocks move"],
    "overlap": ["beside transfers**", "| spAG, 16 |"],
    "gemm": ["left out transformer_engine and transformer_engine_torch not installed"],
    "host": ["left out transformer_engine and transformer_engine_torch and megatron not installed"],
    "demo": ["| demo | left out megatron not installed |"],
}


@pytest.mark.parametrize("number", quick(gpu.COMMANDS, ["6"]))
def test_a_command(machine: tuple[Path, Path], tmp_path: Path, number: str) -> None:
    """All of its parts that can run here do, in its time. ``pytest -s -m slow`` shows the page."""
    parts = [part.name for part in gpu.COMMANDS[number] if part.name not in NOT_HERE]
    minutes = gpu.MINUTES[number]
    words = ("--parts", ",".join(parts), "--minutes", str(minutes))
    done = _call(machine, tmp_path, *words, timeout=60 * minutes + 60)
    page = (tmp_path / "page.md").read_text()
    print(f"\n{done.stdout}\n{page}")
    log = tmp_path / "log.txt"
    said = log.read_text()[-6000:] if log.exists() else "no part ran"
    ended = {r["part"]: r["ended"] for r in rows.read(tmp_path / "rows.jsonl") if "ended" in r}
    right = {name: "left out" if name in LEFT_OUT else "passed" for name in parts}
    assert ended == right, f"{page}\n{said}"
    assert done.returncode == 0, done.stderr
    for text in (text for name in parts for text in ON_PAGE.get(name, ())):
        assert text in page, f"{text!r} is not in\n{page}"
