"""Every command without what it needs: one line that names it, and no traceback.

Oracle: the dependencies in pyproject.toml; literal lines.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import recorded
from pretraining import ROOT

from megatron_hecate.__main__ import main
from megatron_hecate.tools import check

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PACKAGES = [re.match(r"[\w-]+", text)[0] for text in PROJECT["dependencies"]]
# as an uninstalled package, and as an installed one that fails
NOT_THERE = """
import sys
class Finder:
    def find_spec(name, path=None, target=None):
        if name == "{0}":
            raise ModuleNotFoundError("No module named '{0}'", name=name)
sys.meta_path.insert(0, Finder)
"""
BROKEN = "raise ImportError('{0} is broken:\\n\\n  no library')"
SETTINGS = '{"expert_model_parallel_size": 2, "num_experts": 8}'


def _without(
    package: str, folder: Path, *words: str, is_broken: bool = False
) -> tuple[int, str, str]:
    """Run a command without ``package``; return its status and output."""
    (hidden := folder / f"without-{package}-{is_broken}").mkdir(exist_ok=True)
    if package == "megatron":  # a namespace without `core`
        (hidden / package).mkdir()
        (hidden / package / "__init__.py").touch()
    elif is_broken:
        (hidden / f"{package}.py").write_text(BROKEN.format(package))
    else:
        (hidden / "sitecustomize.py").write_text(NOT_THERE.format(package))
    path = os.pathsep.join([str(hidden), str(ROOT)])
    done = subprocess.run(
        [sys.executable, "-m", "megatron_hecate", *words],
        env={**os.environ, "PYTHONPATH": path, "PYTHONWARNINGS": "ignore"},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert "Traceback" not in done.stderr, done.stderr
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize("package", [*PACKAGES, "megatron"])
def test_check_names_the_package_and_goes_on(package: str, tmp_path: Path) -> None:
    """What the rest does there is said, too."""
    status, out, _ = _without(package, tmp_path, "check")
    line = f"{package} cannot be imported (No module named '{package}'): pip install {package}"
    if package == "megatron":
        line = "megatron-core is not installed: pip install -e '.[megatron]', or put your checkout on the path"
    assert status == 1 and line in out.splitlines(), out
    for part in ("planner: numba", "kernels, of quotas and of transport nvlink: CPU ranks: "):
        assert (part in out) == (package != "torch"), out


@pytest.mark.fast
def test_all_dependencies_are_named() -> None:
    assert sorted(check.PACKAGES) == sorted(PACKAGES)


@pytest.mark.parametrize("package", ["torch", "megatron"])
def test_settings_are_checked_without_megatron_and_torch(package: str, tmp_path: Path) -> None:
    (tmp_path / "job.json").write_text(SETTINGS)
    found = _without(package, tmp_path, "check", "--settings", "job.json")
    assert found == (0, "would switch on\n", "")


@pytest.mark.parametrize(
    ("package", "command"),
    [("torch", "report"), ("torch", "measure"), ("numpy", "run"), ("numba", "what-if"), ("packaging", "run")],
)  # fmt: skip
def test_a_command_names_the_package_that_it_needs(
    package: str, command: str, tmp_path: Path
) -> None:
    size = recorded.Size(num=3, layers=2)
    recorded.write(tmp_path / "record", size, held=recorded.arrays(size, fssdp=False))
    (tmp_path / "script.py").write_text(f"import {package}\n")
    words = {"measure": ["speeds.json"], "run": ["--moe-fssdp", "--", "script.py"]}
    arguments = [command, *words.get(command, ["record"])]
    status, out, err = _without(package, tmp_path, *arguments)
    line = f"{package} cannot be imported (No module named '{package}'): pip install {package}\n"
    assert (status, out) == (1, "") and err.endswith(f"megatron-hecate: {line}"), err
    if command == "report":
        _, _, err = _without(package, tmp_path, *arguments, is_broken=True)
        assert f"{package} cannot be imported ({package} is broken: no library): pip" in err


def test_a_package_of_the_script_itself_keeps_its_traceback(tmp_path: Path) -> None:
    """Which is the script's, also if a package that nobody imported is missing."""
    (tmp_path / "script.py").write_text("import a_package_of_its_own\n")
    with pytest.raises(AssertionError, match="No module named 'a_package_of_its_own'"):
        _without("tqdm", tmp_path, "run", "script.py")


@pytest.mark.fast
def test_a_machine_without_a_compiler(
    tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing compiled, no compiler: ``check`` fails and says what to install; with one it succeeds."""
    assert main(["check"]) == 0
    said = capsys.readouterr().out
    assert re.search(r"megatron-core \S+: fits", said) and "transport p2p" in said
    assert "CPU ranks: compiled, " in said
    monkeypatch.setenv("MEGATRON_HECATE_CACHE", str(tmp_path / "empty"))
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.delenv("CXX", raising=False)
    assert main(["check"]) == 1
    line = "CPU ranks: CPU ranks need a C++ compiler ("
    assert line in capsys.readouterr().out
