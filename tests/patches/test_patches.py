"""The patches in ``patches/`` apply to the Megatron that is installed, and do there what they say.

Oracle: ``patch`` itself, and runs of the unpatched Megatron.
"""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from ranks import ranks

ROOT = Path(__file__).resolve().parents[2]
PATCHES = ROOT / "patches"
# the folder that has megatron/
SITE = Path(importlib.util.find_spec("megatron.core").origin).parents[2]
FOR_WHEEL = sorted((PATCHES / "core_v0.19.0").glob("*.patch"))


def _patch(patch: Path, folder: Path, *options: str) -> str:
    places = [f"--directory={folder}", f"--input={patch}"]
    command = ["patch", "-p1", "--forward", "--batch", *places, *options]
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


@pytest.fixture(scope="module")
def patched(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a copy of the installed Megatron that has all patches."""
    folder = tmp_path_factory.mktemp("patched")
    shutil.copytree(
        SITE / "megatron", folder / "megatron", ignore=shutil.ignore_patterns("__pycache__")
    )
    for patch in FOR_WHEEL:
        _patch(patch, folder)
    return folder


@ranks(1, preload=lambda folder: None if folder else "te")
def _mtp_gradients(folder: Path | None) -> None:
    """In a first microbatch, with and without fused weight gradients; with ``folder`` these must be the same."""
    if folder is not None:
        sys.path.insert(0, str(folder))
    import te_on_cpu

    te_on_cpu.install()
    import megatron.core
    import tiny_gpt

    assert folder is None or Path(megatron.core.__file__).is_relative_to(folder)
    repeated = dict(mtp_num_layers=2, mtp_use_repeated_layer=True, mtp_loss_scaling_factor=1.0)
    case = tiny_gpt.initialized(ep=1, grouped=True, settings=repeated)

    def fuse(chunks: list) -> list:
        for module in (m for m in chunks[0].modules() if hasattr(m, "fuse_wgrad_accumulation")):
            module.fuse_wgrad_accumulation = True
        return chunks

    plain, fused = tiny_gpt.train(case, steps=1), tiny_gpt.train(case, steps=1, hook=fuse)
    assert plain.losses == fused.losses
    largest = max(float(g.abs().max()) for g in plain.grads.values())
    differ = {
        n for n in plain.grads if (plain.grads[n] - fused.grads[n]).abs().max() > 1e-5 * largest
    }
    experts_of_mtp = {
        n for n, grad in plain.grads.items() if ".mtp." in n and ".experts." in n and grad.any()
    }
    assert experts_of_mtp and differ == (set() if folder else experts_of_mtp), differ


@pytest.mark.newest
@pytest.mark.slow
def test_a_repeated_mtp_layer_keeps_its_gradients(patched: Path) -> None:
    """Oracle: gradients that autograd sums. The first line fails once Megatron has mended it: drop the patch."""
    _mtp_gradients(None)
    _mtp_gradients(patched)
