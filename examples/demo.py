"""Train a small MoE GPT on real text, with stock Megatron and with FSSDP, and compare.

    make demo                      # text: the standard library of the running Python
    make demo DATA=~/some/folder   # any folder with text or source code

    python examples/demo.py --gpus 1 --ranks 4      # 4 ranks that share a GPU, over NCCL

First with uneven routing (a constant is added to the router's logits of some experts), then with
balanced routing. On CPUs both jobs take turns, a few steps each, so that other load on the machine
slows both equally. On GPUs the model is larger, in bf16, with TransformerEngine's layers where it
is installed, and jobs run one after another.

All jobs run ``megatron.training.pretrain`` on 2 processes (a CPU is enough), or on ``--gpus N``
GPUs, each alone or with several ranks (`run_on_shared_gpu`). The FSSDP run differs from the stock
run by the launcher and a flag: ``-m megatron_hecate run --moe-fssdp``. Stock Megatron then loads
its checkpoint. Tables are printed; plots, checkpoint and logs are written to ``--out``, and so are
the page that ``megatron-hecate report`` makes from the FSSDP run's record.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import threading
import time
from collections.abc import Mapping
from pathlib import Path

from demo_results import Gain, Run, conclude, report
from run_on_shared_gpu import mps, rank_environment, torchrun
from turns import VARIABLE, Turns

HERE = Path(__file__).resolve().parent
RANKS = 2
# added to router logits: of two ranks, one gets nearly all tokens of a layer
SKEW: float = 2.0
BALANCED_STEPS: int = 15
# file that marks a demo's folder, which the next demo may delete
MARK = "megatron-hecate-demo.txt"
MODEL = """
    --num-layers 4 --hidden-size 128 --num-attention-heads 4
    --seq-length 128 --max-position-embeddings 128
    --num-experts 16 --moe-router-topk 2 --moe-ffn-hidden-size 512 --swiglu --disable-bias-linear
    --normalization RMSNorm --position-embedding-type rope --untie-embeddings-and-output-weights
    --attention-dropout 0 --hidden-dropout 0
    --moe-router-load-balancing-type none --moe-router-dtype fp32
    --moe-token-dispatcher-type alltoall
"""
TRAINING = """
    --micro-batch-size 16 --global-batch-size 64
    --lr 1e-3 --min-lr 1e-4 --lr-decay-style cosine --lr-warmup-iters 5
    --weight-decay 0.01 --clip-grad 1.0 --use-distributed-optimizer --seed 1234
    --tokenizer-type NullTokenizer --vocab-size 257 --make-vocab-size-divisible-by 64
    --split 100,0,0
    --eval-iters 0 --eval-interval 1000000 --log-interval 1 --num-workers 0
"""
CPU = "--distributed-backend gloo"
# without TransformerEngine, apex and Megatron's fused CUDA kernels
PLAIN = """
    --transformer-impl local --no-persist-layer-norm --no-gradient-accumulation-fusion
    --no-masked-softmax-fusion --no-bias-dropout-fusion --no-bias-gelu-fusion
    --no-bias-swiglu-fusion --no-rope-fusion
    --attention-softmax-in-fp32
"""
# GEMMs that take longer than the host needs to launch them, on an eighth of an H100 as well
ON_GPU = """
    --bf16 --num-layers 2 --hidden-size 1024 --num-attention-heads 16 --moe-ffn-hidden-size 4096
    --seq-length 2048 --max-position-embeddings 2048 --micro-batch-size 8
"""
TRANSFORMER_ENGINE = "--transformer-impl transformer_engine --moe-grouped-gemm"
# sequences of a rank in a step on GPUs
RANK_BATCH: int = 16
# largest relative difference of losses, first 20 steps and after the checkpoint
FP32_LIMITS = (1e-5, 1e-4)
BF16_LIMITS = (1e-2, 1e-2)


def megatron_flags(*, ranks: int = RANKS, gpus: int = 0) -> list[str]:
    """Build Megatron's flags, except for data, checkpoints and length."""
    words = [*MODEL.split(), "--expert-model-parallel-size", str(ranks), *TRAINING.split()]
    if not gpus:
        return [*words, *PLAIN.split(), *CPU.split()]
    # Megatron's parser takes the last value of a flag that is given twice.
    words += [*ON_GPU.split(), "--global-batch-size", str(RANK_BATCH * ranks)]
    if importlib.util.find_spec("transformer_engine") is not None:
        return [*words, *TRANSFORMER_ENGINE.split()]
    return [*words, *PLAIN.split()]


@dataclasses.dataclass(frozen=True)
class Place:
    """Machine and folder on which jobs run.

    Args:
        out: folder of logs and of the probes' records.
        ranks: processes of a job.
        gpus: number of GPUs; 0 trains on the CPU. The ranks share them.
        variables: further environment variables.
    """

    out: Path
    ranks: int
    gpus: int
    variables: Mapping[str, str]

    def start(
        self, name: str, arguments: list[str], fssdp: list[str] | None, turns: str = ""
    ) -> subprocess.Popen:
        """Start a job.

        Args:
            name: name of the job.
            arguments: Megatron's flags.
            fssdp: our launcher's flags; ``None`` is stock Megatron.
            turns: value of `turns.VARIABLE`.
        """
        command = self._command(fssdp)
        # One thread per rank, since ranks share the cores.
        environment = {
            **os.environ,
            **self.variables,
            "OMP_NUM_THREADS": "1",
            "PYTHONWARNINGS": "ignore",
            VARIABLE: turns,
            "HECATE_PROBE": str(self.out / name),
            "HECATE_SKEW": str(SKEW),
        }
        # On a GPU compiling Megatron's small functions takes longer than this training.
        environment["TORCHDYNAMO_DISABLE"] = "1"
        shown = [Path(word).name if "/" in word else word for word in command]
        print(f"\n{name}: {' '.join(shown)} ...", flush=True)
        return subprocess.Popen(
            [*command, *arguments],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def _command(self, fssdp: list[str] | None) -> list[str]:
        """Build the command that starts the ranks, without Megatron's flags."""
        if self.gpus:
            words = [sys.executable, str(HERE / "run_on_shared_gpu.py"), f"--ranks={self.ranks}"]
        else:
            words = torchrun(self.ranks, [str(HERE / "run_on_cpu.py")])
        if fssdp is not None:
            words += ["-m", "megatron_hecate", "run", *fssdp, "--"]
        return [*words, str(HERE / "pretrain_gpt.py")]


Jobs = Mapping[str, tuple[list[str], list[str] | None]]


def train(place: Place, jobs: Jobs) -> list[Run]:
    """Train the jobs: on CPUs in turns, on GPUs, which nothing else uses, one after another."""
    if not place.gpus:
        return launch(place, jobs)
    return [run for name, job in jobs.items() for run in launch(place, {name: job})]


def launch(place: Place, jobs: Jobs) -> list[Run]:
    """Train one job, or two that take turns, and print their progress.

    Args:
        place: machine and folder.
        jobs: Megatron's flags and our launcher's, by name; ``None`` instead of the latter is
            stock Megatron.

    Raises:
        SystemExit: when training fails, with the end of its log.
    """
    turns = [""]
    if len(jobs) == 2:
        turns = Turns.begin(place.out / "-".join(jobs), *jobs)
    processes: dict[str, subprocess.Popen] = {}
    readers: list[threading.Thread] = []
    failed: list[str] = []
    try:
        for (name, (arguments, fssdp)), turn in zip(jobs.items(), turns, strict=True):
            process = place.start(name, arguments, fssdp, turn)
            processes[name] = process
            log = place.out / f"{name}.log"
            readers.append(threading.Thread(target=_read_log, args=(name, process, log)))
            readers[-1].start()
        # A job that fails would leave the other one waiting for its turn.
        while any(process.poll() is None for process in processes.values()):
            if failed := [name for name, process in processes.items() if process.poll()]:
                break
            time.sleep(0.2)
    finally:
        # Also after an interrupt, so that no rank keeps training.
        for process in processes.values():
            process.terminate()
    for reader in readers:
        reader.join()
    _check_ended(place, processes, failed)
    return [Run.read(place.out / name, place.ranks) for name in jobs]


def _check_ended(place: Place, processes: dict[str, subprocess.Popen], failed: list[str]) -> None:
    """Exit with the end of the log if a job failed.

    Args:
        place: machine and folder.
        processes: jobs by name.
        failed: jobs that failed by themselves before we terminated the others.
    """
    failed += [name for name, process in processes.items() if process.wait()]
    if not failed:
        return
    name = failed[0]
    log = place.out / f"{name}.log"
    tail = "".join(log.read_text().splitlines(keepends=True)[-40:])
    raise SystemExit(f"{name} failed with {processes[name].returncode}; the end of {log}:\n{tail}")


def _read_log(name: str, process: subprocess.Popen, log: Path) -> None:
    """Copy a job's output to ``log`` and print its progress."""
    with log.open("w") as file:
        for line in process.stdout:
            file.write(line)
            _show(name, line)


def _show(name: str, line: str) -> None:
    """Print every fifth iteration, FSSDP's first line, and saved and loaded checkpoints."""
    found = re.search(
        r"iteration +(\d+)/ +(\d+) .*per iteration \(ms\): ([\d.]+) .* lm loss: ([\d.E+-]+)", line
    )
    if found and int(found[1]) % 5 == 0:
        loss = float(found[4])
        seconds = float(found[3]) / 1e3
        progress = f"step {found[1]}/{found[2]}  loss {loss:.4f}  {seconds:.2f} s"
        print(f"  {name:>16}: {progress}", flush=True)
    elif "FSSDP on" in line or "successfully saved" in line or "successfully loaded" in line:
        print(f"  {name:>16}: {line.strip()}", flush=True)


def _arguments() -> argparse.Namespace:
    """Parse the command line; sets ``ranks`` where not given."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--data", type=Path, default=Path(sysconfig.get_paths()["stdlib"]), help="folder of text"
    )
    parser.add_argument("--out", type=Path, default=Path("demo-out"), help="folder of results")
    parser.add_argument(
        "--steps", type=int, default=25, help="optimizer steps before the checkpoint"
    )
    parser.add_argument("--slots", type=int, default=2, help="replicas per rank and layer")
    parser.add_argument("--gpus", type=int, default=0, help="number of GPUs; 0 trains on the CPU")
    parser.add_argument(
        "--ranks", type=int, help=f"processes; default: as many as GPUs, or {RANKS} on a CPU"
    )
    parser.add_argument(
        "--speeds", type=Path, help="file of measured speeds, for the cost of copies"
    )
    arguments = parser.parse_args()
    arguments.ranks = arguments.ranks or arguments.gpus or RANKS
    if arguments.gpus and arguments.ranks % arguments.gpus:
        parser.error(
            f"--ranks {arguments.ranks} is not a multiple of --gpus {arguments.gpus}: "
            "GPUs are shared evenly"
        )
    return arguments


def _make_folder(out: Path) -> None:
    """Make an empty folder ``out``; exit if it exists and is not of an earlier demo."""
    if out.exists():
        if not (out / MARK).exists():
            raise SystemExit(
                f"{out} exists and is not of an earlier demo; choose another folder with OUT="
            )
        shutil.rmtree(out)
    out.mkdir(parents=True)
    (out / MARK).write_text(
        "Written by make demo, which may delete this folder when it runs again.\n"
    )


def _prepare_text(data: Path, out: Path) -> None:
    """Write the text in ``data`` as a dataset into the new folder ``out``."""
    from prepare_bytes import prepare, text_files

    if not text_files(data):
        reason = "holds no text" if data.is_dir() else "is not a folder"
        raise SystemExit(f"{data} {reason}; set DATA to a folder with text")
    _make_folder(out)
    documents, tokens = prepare(data, out / "text")
    print(f"{documents} documents, {tokens:,} tokens (bytes) from {data}")


def _check_gpus(ranks: int, gpus: int) -> dict[str, str]:
    """Return the environment variables of the ranks: the GPUs that they see.

    Raises:
        SystemExit: when ranks cannot train on so many GPUs here.
    """
    if not gpus:
        # The stand-ins for the CPU refuse to start where torch finds a GPU.
        return {"CUDA_VISIBLE_DEVICES": ""}
    import torch

    present = torch.cuda.device_count()
    if present < gpus:
        raise SystemExit(f"--gpus {gpus}: torch finds {present} GPUs here")
    visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(present)))
    try:
        rank_environment(ranks // gpus)
    except ValueError as error:
        raise SystemExit(str(error)) from error
    return {"CUDA_VISIBLE_DEVICES": ",".join(visible.split(",")[:gpus])}


def _train_all(place: Place, arguments: argparse.Namespace) -> tuple[list[Run], Gain]:
    """Train all jobs.

    Returns:
        Runs with uneven routing: stock, FSSDP, and stock from FSSDP's checkpoint; and the gain with
        balanced routing.
    """
    out = place.out
    steps = arguments.steps
    common = megatron_flags(ranks=place.ranks, gpus=place.gpus)
    common += ["--data-path", str(out / "text"), "--data-cache-path", str(out / "cache")]
    common += ["--train-iters", str(steps + 5)]
    save = ["--save", str(out / "checkpoint"), "--save-interval", str(steps)]
    load = ["--load", str(out / "checkpoint"), "--ckpt-step", str(steps)]
    # A single rank has no other rank to copy experts to.
    slots = arguments.slots if place.ranks > 1 else 0
    switch_on = ["--moe-fssdp", "--moe-fssdp-slots", str(slots)]
    if arguments.speeds is not None:
        switch_on += ["--moe-fssdp-speeds", str(arguments.speeds.resolve())]
    record = ["--moe-fssdp-record", str(out / "run")]
    ours = ([*common, *save], [*switch_on, *record])
    runs = train(place, {"stock": (common, None), "fssdp": ours})
    runs += train(place, {"stock-resumed": ([*common, *load], None)})
    # Megatron's parser takes the last value of a flag that is given twice.
    even = [*common, "--train-iters", str(min(BALANCED_STEPS, steps))]
    even.append("--moe-router-force-load-balancing")
    jobs = {"stock-balanced": (even, None), "fssdp-balanced": (even, switch_on)}
    return runs, Gain.of(*train(place, jobs))


def main() -> int:
    """Train, compare, and write the report; returns 1 if the runs differ or no page was made."""
    arguments = _arguments()
    if sys.version_info < (3, 12):
        raise SystemExit(
            "The demo trains through megatron.training, which the megatron-core wheel holds from "
            f"0.17 on, for Python 3.12 or newer; this is Python {sys.version.split()[0]}. "
            "Install Python 3.12 and run make demo again."
        )
    began = time.monotonic()
    ranks, gpus = arguments.ranks, arguments.gpus
    variables = _check_gpus(ranks, gpus)
    out = arguments.out.expanduser().resolve()
    _prepare_text(arguments.data.expanduser(), out)
    with mps() if ranks > gpus > 0 else contextlib.nullcontext({}) as of_mps:
        place = Place(out, ranks, gpus, variables={**variables, **of_mps})
        (stock, ours, resumed), balanced = _train_all(place, arguments)

    limits = BF16_LIMITS if gpus else FP32_LIMITS
    same = report(stock, ours, resumed, limits=limits, out=out)
    print()
    page = out / "report.html"
    command = [sys.executable, "-m", "megatron_hecate", "report", str(out / "run")]
    made = subprocess.run([*command, "--out", str(page)]).returncode == 0
    print(f"\n{conclude(stock, ours, Gain.of(stock, ours), balanced)}")
    print(f"All layers and ranks: {page}. {time.monotonic() - began:.0f} s in all.")
    return 0 if same and made else 1


if __name__ == "__main__":
    sys.exit(main())
