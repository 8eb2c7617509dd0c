"""Megatron's own training loop over TransformerEngine, stock and with FSSDP, on ranks that share one GPU.

    python bench/te_jobs.py
    python bench/te_jobs.py --jobs bf16 graphs --out build/te-jobs

Each job is `examples/pretrain_gpt.py` with the flags of the demo and those of `JOBS`. It is right when losses of both
agree within what bf16 allows, and replicas computed tokens. gloo stands in for NCCL, and processes take turns on the
GPU, so nothing here is a measure of speed.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "bench"), str(ROOT / "examples")]

from prepare_bytes import prepare  # noqa: E402
from rows import Table  # noqa: E402

from megatron_hecate.record import run_folder  # noqa: E402
from megatron_hecate.record.analysis import Figures  # noqa: E402

RANKS: int = 4
STEPS: int = 8
SECONDS: float = 120  # of a run
MODEL = f"""
    --num-layers 4 --hidden-size 256 --num-attention-heads 4 --seq-length 128 --max-position-embeddings 128
    --num-experts 16 --moe-router-topk 2 --moe-ffn-hidden-size 512 --swiglu --disable-bias-linear
    --normalization RMSNorm --position-embedding-type rope --untie-embeddings-and-output-weights
    --attention-dropout 0 --hidden-dropout 0 --moe-router-load-balancing-type none --moe-router-dtype fp32
    --moe-token-dispatcher-type alltoall --moe-grouped-gemm --moe-permute-fusion
    --expert-model-parallel-size {RANKS} --transformer-impl transformer_engine --attention-backend auto
"""
TRAINING = f"""
    --bf16 --micro-batch-size 4 --global-batch-size 64 --lr 1e-3 --lr-decay-style constant --weight-decay 0.01
    --clip-grad 1.0 --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather --seed 1234
    --tokenizer-type NullTokenizer --vocab-size 257 --make-vocab-size-divisible-by 64 --split 100,0,0
    --eval-iters 0 --eval-interval 1000000 --log-interval 1 --num-workers 0 --train-iters {STEPS}
"""
# name: (Megatron's flags, FSSDP's flags)
JOBS: dict[str, tuple[str, str]] = {
    "bf16": ("", ""),
    "layer": (
        "--recompute-granularity selective --recompute-modules moe_act layernorm core_attn",
        "--moe-fssdp-lifetime layer",
    ),
    "late": ("", "--moe-fssdp-late-replicas 2"),
    "combined": ("--overlap-moe-expert-parallel-comm --delay-wgrad-compute", ""),
    "graphs": (
        "--cuda-graph-impl transformer_engine --cuda-graph-modules attn moe_router --te-rng-tracker",
        "",
    ),
    "tp2": ("--tensor-model-parallel-size 2 --sequence-parallel --expert-tensor-parallel-size 1", ""),
    "fp8": (
        "--fp8-format e4m3 --fp8-recipe blockwise --fp8-param-gather --moe-router-padding-for-quantization",
        "",
    ),
}
ENVIRONMENT = {"tp2": {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}}  # Megatron asks for it
TOLERANCE: float = 1e-2  # of losses, relative: activations have 8 bits


def train(job: str, text: Path, folder: Path, *, fssdp: bool) -> np.ndarray:
    """Train ``job``; [S] losses as Megatron prints them.

    Raises:
        RuntimeError: when training fails; with the end of its log.
    """
    megatron, ours = JOBS[job]
    name = "fssdp" if fssdp else "stock"
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={RANKS}", "--standalone"]
    command += [str(ROOT / "examples" / "run_on_shared_gpu.py")]
    if fssdp:
        command += ["-m", "megatron_hecate", "--moe-fssdp", "--moe-fssdp-slots", "2", "--moe-fssdp-transport", "nvlink"]
        command += ["--moe-fssdp-speeds", str(ROOT / "tests" / "free_copies.json"), *ours.split()]
        command += ["--moe-fssdp-record", str(folder / "run")]
    command += [str(ROOT / "examples" / "pretrain_gpt.py"), *MODEL.split(), *TRAINING.split(), *megatron.split()]
    command += ["--data-path", str(text), "--data-cache-path", str(folder / name)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", "TORCHDYNAMO_DISABLE": "1"}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environment |= ENVIRONMENT.get(job, {})
    log = folder / f"{name}.log"
    with log.open("w") as file:
        try:
            ended = subprocess.run(command, stdout=file, stderr=file, env=environment, timeout=SECONDS)
            status = f"exit status {ended.returncode}"
        except subprocess.TimeoutExpired:
            status = f"still running after {SECONDS:.0f} s"
    printed = log.read_text()
    losses = [float(loss) for loss in re.findall(r"lm loss: ([\d.E+-]+)", printed)]
    if status != "exit status 0" or len(losses) != STEPS:
        raise RuntimeError(f"{job}, {name}: {status}, {len(losses)} of {STEPS} steps\n{printed[-5000:]}")
    return np.array(losses)


def compare(job: str, text: Path, out: Path) -> dict[str, object]:
    """Train ``job`` with stock Megatron and with FSSDP; a row of the table."""
    folder = out / job
    folder.mkdir(parents=True)
    row: dict[str, object] = {"job": job}
    try:
        stock = train(job, text, folder, fssdp=False)
        ours = train(job, text, folder, fssdp=True)
    except RuntimeError as failed:
        print(failed, flush=True)
        return {**row, "result": "FAILED"}
    figures = Figures(run_folder.read(folder / "run"))
    before, after = (figures.imbalance(load)[2:].max() for load in (figures.before, figures.after))
    apart = float((np.abs(stock - ours) / stock).max())
    print(f"{job}: losses of stock {stock}, of FSSDP {ours}", flush=True)
    good = apart <= TOLERANCE and figures.replicas.sum() > 0 and after < before
    return {
        **row,
        "result": "as stock" if good else "DIFFERS",
        "losses apart, relative": f"{apart:.1e}",
        "loss": f"{stock[0]:.3f} to {stock[-1]:.3f}",
        "fullest rank by the mean": f"{before:.3f} -> {after:.3f}",
        "replicas of a layer": float(figures.replicas.sum(axis=2).mean()),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--jobs", nargs="+", choices=list(JOBS), default=list(JOBS))
    at_once = max(1, (os.cpu_count() or 1) // RANKS)
    parser.add_argument("--at-once", type=int, default=at_once, help="jobs beside each other (%(default)s)")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "te-jobs", help="folder of logs (%(default)s)")
    options = parser.parse_args()
    out = options.out.resolve()
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    prepare(ROOT / "tests", out / "text")
    with ThreadPoolExecutor(options.at_once) as pool:
        rows = list(pool.map(lambda job: compare(job, out / "text", out), options.jobs))
    table = Table("Megatron's training loop over TransformerEngine, 4 ranks on one GPU")
    for row in rows:
        table.add(**row)
    good = all(row["result"] == "as stock" for row in rows)
    print("\nEvery job trained as stock Megatron." if good else "\nNot every job trained as stock Megatron.")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
