"""Which versions of other packages are taken. Oracle: versions that containers and releases have."""

from __future__ import annotations

import tomllib

import pytest
from packaging.requirements import Requirement
from pretraining import ROOT

pytestmark = pytest.mark.fast

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
# of containers and of development too; packages that are not here are taken in any version
TAKEN = {
    "torch": "2.11.0a0+eb65b36914.nv26.02 2.11.0 2.13.0+cpu",
    "megatron-core": "0.16.1 0.18.0.dev0 0.20.0rc0 0.20.0rc0+d98e8a64",
}
REFUSED = {"torch": "2.10.0 2.10.1+cu130"}


def test_versions_that_pip_takes() -> None:
    requirements = [*PROJECT["dependencies"], *PROJECT["optional-dependencies"]["megatron"]]
    for name, specifier in ((r.name, r.specifier) for r in map(Requirement, requirements)):
        assert name in TAKEN or not specifier, f"{name}: add the container's version here"
        for versions, taken in ((TAKEN, True), (REFUSED, False)):
            for version in versions.get(name, "").split():
                assert specifier.contains(version, prereleases=True) is taken, (name, version)


@pytest.mark.parametrize(
    ("version", "fits"),
    [
        ("0.15.0rc8", False),
        # main after the branch of 0.16, which Primus pins
        ("0.16.0rc0", True),
        ("0.16.0", False),
        ("0.16.1", True),
        ("0.19.2+91b6a64", True),
        ("0.21.0.dev0", False),
        ("main", False),
    ],
)
def test_megatron_core(version: str, fits: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    import megatron.core

    from megatron_hecate.megatron import assumptions

    monkeypatch.setattr(megatron.core, "__version__", version)
    problems = assumptions.broken_assumptions(())
    assert problems == ([] if fits else [f"megatron-core {version} is outside 0.16.1 to 0.20"])
