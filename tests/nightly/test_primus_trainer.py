"""Primus' own command line, runtime and trainer, where $HECATE_PRIMUS names a checkout with its Megatron-LM.

Its experiments are shrunk by overrides on its command line. Its Megatron-LM is the submodule, or the folder that
Primus' own variable BACKEND_PATH names. Oracle: the log of the same experiment with stock Megatron.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import sys
import traceback
import types
from pathlib import Path

import pytest
from pretraining import ROOT
from ranks import ranks
from replica_tokens import ReplicaTokens

PRIMUS = Path(os.environ.get("HECATE_PRIMUS", "no checkout")).resolve()
MEGATRON = Path(os.environ.get("BACKEND_PATH", PRIMUS / "third_party" / "Megatron-LM")).resolve()
FREE = ROOT / "tests" / "data" / "free_copies.json"
EXPERIMENT = "qwen3_30B_A3B"
SMALL = """
num_query_groups=2 num_layers=2 hidden_size=32 ffn_hidden_size=64 num_attention_heads=4 kv_channels=8 num_experts=8 moe_router_topk=2
moe_ffn_hidden_size=64 tokenizer_type=NullTokenizer tokenizer_model=None vocab_size=257 seq_length=64
max_position_embeddings=64 micro_batch_size=1 global_batch_size=4 train_iters=5 lr=0.01 lr_warmup_iters=0
expert_model_parallel_size=2 num_workers=0 stderr_sink_level=ERROR
""".split()
# Primus' kernels are for AMD's GPUs, and forced balance leaves nothing to replicate. The last line replaces NCCL and
# other kernels of GPUs, and bf16, in which rounding changes routes.
ON_CPU = """
enable_primus_turbo=false use_turbo_attention=false use_turbo_grouped_gemm=false use_turbo_deepep=false
turbo_sync_free_moe_stage=0 moe_use_fused_router_with_aux_score=false moe_router_force_load_balancing=false
distributed_backend=gloo apply_rope_fusion=false cross_entropy_fusion_impl=native bf16=false
""".split()
# our launcher, and lines for the experiment's file
WAYS = {
    "stock": ([], []),
    "flags of our launcher": (
        f"-m megatron_hecate --moe-fssdp --moe-fssdp-slots 2 --moe-fssdp-speeds {FREE}".split(),
        [],
    ),
    "settings of the experiment": (
        "-m megatron_hecate run --".split(),
        ["moe_fssdp: true", "moe_fssdp_slots: 2", f"moe_fssdp_speeds: {FREE}"],
    ),
}

pytestmark = [
    pytest.mark.newest,
    pytest.mark.skipif(
        not (PRIMUS / "primus").is_dir() or not (MEGATRON / "pretrain_gpt.py").is_file(),
        reason="no checkout of Primus with its Megatron-LM is named",
    ),
]


def _install_on_cpu() -> None:
    """Put torch behind TransformerEngine's kernels, and the CPU behind the Megatron that Primus imports."""
    import megatron_on_cpu
    import te_layers_on_cpu
    import te_on_cpu

    te_on_cpu.install()
    from primus.core.runtime.train_runtime import PrimusRuntime
    from primus.core.utils import module_utils

    # Primus reads the sources of all frames for each line of its log, which takes a minute.
    module_utils.inspect = types.SimpleNamespace(
        stack=lambda: [
            types.SimpleNamespace(frame=frame, lineno=line)
            for frame, line in traceback.walk_stack(sys._getframe(1))
        ]
    )
    train = PrimusRuntime._run_trainer_lifecycle

    def train_on_cpu(runtime: PrimusRuntime) -> None:
        # imported before `for_training`: on import, Megatron probes for a real GPU
        import megatron.core.datasets
        import megatron.training.training

        assert Path(megatron.core.datasets.__file__).is_relative_to(MEGATRON)
        # the helpers of mock data are compiled in the installed wheel only
        wheel = importlib.metadata.distribution("megatron-core")
        megatron.core.datasets.__path__.append(str(wheel.locate_file("megatron/core/datasets")))
        megatron_on_cpu.for_training()
        te_layers_on_cpu.install()
        train(runtime)

    PrimusRuntime._run_trainer_lifecycle = train_on_cpu


@ranks(2, timeout=600, preload=None)
def _train(way: str, folder: Path) -> None:
    """Run Primus' command line in this rank; its logs and the numbers of tokens are in ``folder``."""
    from run_script import run_script

    launcher, lines = WAYS[way]
    folder.mkdir(exist_ok=True)
    os.chdir(folder)
    os.environ.update(PRIMUS_WORKSPACE=str(folder), BACKEND_PATH=str(MEGATRON))
    sys.path.insert(0, str(PRIMUS))
    _install_on_cpu()
    assert not any(name.partition(".")[0] == "megatron" for name in sys.modules), "chosen too early"
    config = folder / "experiment.yaml"
    path = PRIMUS / f"examples/megatron/configs/MI300X/{EXPERIMENT}-BF16-pretrain.yaml"
    config.write_text("\n      ".join([path.read_text().rstrip(), *lines]))
    command = f"{PRIMUS}/primus/cli/main.py train pretrain --config {config}".split()
    overrides = [*SMALL, *ON_CPU]
    sys.argv = ["torchrun", *launcher, *command, *overrides]
    tokens = ReplicaTokens()
    try:
        run_script()
    except SystemExit as ended:  # our launcher's
        assert not ended.code
    counts = folder / f"tokens-{os.environ['RANK']}.json"
    counts.write_text(json.dumps([tokens.all, tokens.of_replicas]))


def _read(folder: Path) -> tuple[list[tuple[float, float]], str, int, int]:
    """Return losses with gradient norms, the log of rank 0, tokens computed, and those by replicas."""
    (first,) = folder.glob("**/rank-0/debug.log")
    (last,) = folder.glob("**/rank-1/debug.log")
    figures = r"iteration +\d+/.*lm loss: ([\d.E+-]+).*grad norm: ([\d.E+-]+)"
    steps = [(float(loss), float(norm)) for loss, norm in re.findall(figures, last.read_text())]
    counts = [json.loads((folder / f"tokens-{rank}.json").read_text()) for rank in (0, 1)]
    computed, by_replicas = map(sum, zip(*counts, strict=True))
    return steps, first.read_text(), computed, by_replicas


def test_an_experiment_trains_as_stock(tmp_path: Path) -> None:
    """Switched on by flags of our launcher, and by settings of the experiment behind our launcher."""
    runs = {}
    for way in WAYS:
        _train(way, tmp_path / way.replace(" ", "-"))
        runs[way] = _read(tmp_path / way.replace(" ", "-"))
    stock, log, total, none = runs.pop("stock")
    stock_losses, stock_norms = zip(*stock, strict=True)
    assert len(stock) == 5 and stock_losses[-1] < stock_losses[0] - 0.1, "nothing was trained"
    assert none == 0 and "FSSDP" not in log
    for way, (steps, log, computed, by_replicas) in runs.items():
        print(f"{way}: {stock} {steps}, {by_replicas} of {computed} tokens")
        losses, norms = zip(*steps, strict=True)
        assert losses == pytest.approx(stock_losses, rel=1e-5), way
        # printed with three digits
        assert norms == pytest.approx(stock_norms, rel=1e-3, abs=1e-3), way
        assert log.count("FSSDP on: ") == 1, way
        assert computed == total and 0 < by_replicas < computed, way
