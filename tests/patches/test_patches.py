"""The patches in ``patches/`` apply to the Megatron that is installed, and do there what they say.

Oracle: ``patch`` itself, and runs of the unpatched Megatron.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import demo
import pytest
from ranks import ranks

ROOT = Path(__file__).resolve().parents[2]
PATCHES = ROOT / "patches"
SITE = Path(importlib.util.find_spec("megatron.core").origin).parents[
    2
]  # the folder that has megatron/
FOR_WHEEL = sorted((PATCHES / "core_v0.19.0").glob("*.patch"))


def _patch(patch: Path, folder: Path, *options: str) -> str:
    command = [
        "patch",
        "-p1",
        "--forward",
        "--batch",
        f"--directory={folder}",
        f"--input={patch}",
        *options,
    ]
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
    repeated = (
        ("mtp_num_layers", 2),
        ("mtp_use_repeated_layer", True),
        ("mtp_loss_scaling_factor", 1.0),
    )
    case = tiny_gpt.Case(ep=1, grouped=True, settings=repeated)
    tiny_gpt.initialize(case)

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


PLUGIN = """
def register(parser):
    from megatron.training import get_args, training
    from megatron_hecate import HecateConfig, fssdp

    def convert(chunks):
        settings = HecateConfig.from_arguments(get_args())
        return chunks if settings is None else fssdp(settings)(chunks)

    training.register_pre_wrap_hook(convert)
    return HecateConfig.add_arguments(parser)
"""
WITH_PROVIDER = """
import pretrain_gpt
from megatron.core.enums import ModelType
from megatron.training import pretrain
from megatron.training.argument_utils import gpt_config_from_args, pretrain_cfg_container_from_args
from megatron.training.arguments import parse_and_validate_args

args = parse_and_validate_args()
model = gpt_config_from_args(args)

def provider(config=None, pg_collection=None, **where):
    return model.get_builder_cls()(model).build_model(pg_collection, **where)

pretrain_gpt.datasets.is_distributed = True
pretrain(
    pretrain_cfg_container_from_args(args, None), pretrain_gpt.datasets, ModelType.encoder_or_decoder,
    pretrain_gpt.forward_step, model_provider=provider,
)
"""


@pytest.mark.newest
@pytest.mark.slow
def test_a_plugin_needs_neither_launcher_nor_wraps(patched: Path, tmp_path: Path) -> None:
    """The demo's first steps, with a script that has a model config and one that has a model provider.

    Oracle: the same without the plugin's flag, and losses of the unpatched Megatron.
    """
    site = tmp_path / "site"
    (site / "hecate_plugin-1.0.dist-info").mkdir(parents=True)
    (site / "hecate_plugin-1.0.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: hecate-plugin\nVersion: 1.0\n"
    )
    (site / "hecate_plugin-1.0.dist-info" / "entry_points.txt").write_text(
        "[megatron.plugins]\nhecate = hecate_plugin:register\n"
    )
    (site / "hecate_plugin.py").write_text(PLUGIN)
    (site / "with_provider.py").write_text(WITH_PROVIDER)
    text = tmp_path / "text"
    subprocess.run(
        [sys.executable, ROOT / "examples/prepare_bytes.py", ROOT / "megatron_hecate", text],
        check=True,
    )
    words = "--hidden-size 32 --moe-ffn-hidden-size 64 --micro-batch-size 1".split()
    words += "--global-batch-size 4 --train-iters 6".split()
    words = [
        *demo.megatron_flags(),
        *words,
        "--data-path",
        str(text),
        "--data-cache-path",
        str(tmp_path / "cache"),
    ]
    fssdp = ["--moe-fssdp", "--moe-fssdp-speeds", str(ROOT / "tests" / "data" / "free_copies.json")]

    def losses(script: Path, *more: str, before: tuple[Path, ...] = (site, patched)) -> list[float]:
        path = os.pathsep.join(map(str, (*before, ROOT, ROOT / "examples")))
        command = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node=2",
        ]
        command += [str(ROOT / "examples/run_on_cpu.py"), str(script), *words, *more]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
        done = subprocess.run(command, env=environment, text=True, capture_output=True, timeout=200)
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        assert ("FSSDP on: 4 MoE layers" in done.stdout) == bool(more)
        return [float(x) for x in re.findall(r"lm loss: ([\d.E+-]+)", done.stdout)]

    stock = losses(ROOT / "examples/pretrain_gpt.py", before=())
    assert len(stock) == 6
    for script in (ROOT / "examples/pretrain_gpt.py", site / "with_provider.py"):
        assert losses(script) == stock
        assert losses(script, *fssdp) == pytest.approx(stock, rel=1e-5)
