"""Which versions of other packages are taken. Oracle: versions that containers and releases have."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

pytestmark = pytest.mark.fast

PROJECT = tomllib.loads((Path(__file__).resolve().parent.parent / "pyproject.toml").read_text())[
    "project"
]


def _takes(requirement: str, version: str) -> bool:
    """As pip decides on a package that is installed."""
    return Requirement(requirement).specifier.contains(version, prereleases=True)


def test_torch_of_containers() -> None:
    (torch,) = [name for name in PROJECT["dependencies"] if name.startswith("torch")]
    for version in ("2.11.0a0+eb65b36914.nv26.02", "2.11.0", "2.13.0+cpu"):
        assert _takes(torch, version)
    assert not _takes(torch, "2.10.0") and not _takes(torch, "2.10.1+cu130")


def test_other_packages_before_their_release() -> None:
    for requirement in PROJECT["dependencies"]:
        if not requirement.startswith("torch"):
            assert not Requirement(requirement).specifier, (
                f"{requirement}: add the container's version here"
            )
    (megatron,) = PROJECT["optional-dependencies"]["megatron"]
    for version in ("0.16.1", "0.18.0.dev0", "0.20.0rc0", "0.20.0rc0+d98e8a64"):
        assert _takes(megatron, version)


@pytest.mark.parametrize(
    ("version", "fits"),
    [
        ("0.15.0rc8", False),
        # main after the branch of 0.16, which Primus pins
        ("0.16.0rc0", True),
        ("0.16.0", False),
        ("0.16.1rc0", True),
        ("0.16.1", True),
        ("0.19.2+91b6a64", True),
        ("0.20.3", True),
        ("0.21.0.dev0", False),
        ("1.0", False),
        ("main", False),
    ],
)
def test_megatron_core(version: str, fits: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    import megatron.core

    from megatron_hecate.megatron import assumptions

    monkeypatch.setattr(megatron.core, "__version__", version)
    problems = assumptions.broken_assumptions(())
    assert problems == ([] if fits else [f"megatron-core {version} is outside 0.16.1 to 0.20"])
