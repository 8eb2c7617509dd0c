"""The patches in ``patches/`` apply to the Megatron that is installed, and do there what they say.

Oracle: ``patch`` itself, and runs of the unpatched Megatron.
"""

from __future__ import annotations

import importlib.util
import subprocess
from pathlib import Path

import pytest

PATCHES = Path(__file__).resolve().parent.parent / "patches"
SITE = Path(importlib.util.find_spec("megatron.core").origin).parents[2]  # the folder that has megatron/
FOR_WHEEL = sorted((PATCHES / "core_v0.19.0").glob("*.patch"))


def _patch(patch: Path, folder: Path, *options: str) -> str:
    command = ["patch", "-p1", "--forward", "--batch", f"--directory={folder}", f"--input={patch}", *options]
    done = subprocess.run(command, text=True, capture_output=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.newest
@pytest.mark.fast
@pytest.mark.parametrize("patch", FOR_WHEEL, ids=lambda patch: patch.stem)
def test_applies_to_the_installed_megatron(patch: Path) -> None:
    assert "FAILED" not in _patch(patch, SITE, "--dry-run")
    assert patch.read_text().startswith("Subject: "), "it has no reason"


@pytest.mark.fast
def test_main_has_the_same_patches_with_the_same_reasons() -> None:
    both = [
        {p.name: p.read_text().split("\ndiff ")[0] for p in (PATCHES / tag).glob("*.patch")}
        for tag in ("core_v0.19.0", "main")
    ]
    assert both[0] == both[1] and len(both[0]) == 3
