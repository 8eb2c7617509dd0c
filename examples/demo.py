"""The main job: train a small MoE GPT on real text, with stock Megatron and with FSSDP, and compare.

    make demo                      text: the standard library of the running Python
    make demo DATA=~/some/folder   any folder with text or source code

First with uneven routing (a constant is added to the router's logits of some experts), then with balanced routing. Both
jobs take turns, a few steps each, so that what else runs on the machine slows both alike.

Everything goes through ``megatron.training.pretrain`` on 2 processes (a CPU is enough), or on ``--gpus N`` GPUs. The
FSSDP run differs from the stock run by the launcher and a flag: ``-m megatron_hecate --moe-fssdp``. Stock Megatron then
loads its checkpoint. Tables go to the screen; plots, checkpoint and logs go to ``--out``, and so do the page and the
trace that ``python -m megatron_hecate --report`` makes of the FSSDP run's record.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import threading
import time
from pathlib import Path

import numpy as np
from turns import STEPS, VARIABLE, Turns

HERE = Path(__file__).resolve().parent
RANKS = 2
SKEW: float = 2.0  # of two ranks, one gets nearly all tokens of a layer
BALANCED_STEPS: int = 15
NOISY: float = 1.25  # of the turns' upper quartile by the lower one
MARK = "megatron-hecate-demo.txt"  # tells a demo's folder from any other
MODEL = """
    --num-layers 4 --hidden-size 128 --num-attention-heads 4 --seq-length 128 --max-position-embeddings 128
    --num-experts 16 --moe-router-topk 2 --moe-ffn-hidden-size 512 --swiglu --disable-bias-linear
    --normalization RMSNorm --position-embedding-type rope --untie-embeddings-and-output-weights
    --attention-dropout 0 --hidden-dropout 0 --moe-router-load-balancing-type none --moe-router-dtype fp32
    --moe-token-dispatcher-type alltoall
"""
TRAINING = """
    --micro-batch-size 16 --global-batch-size 64 --lr 1e-3 --min-lr 1e-4 --lr-decay-style cosine --lr-warmup-iters 5
    --weight-decay 0.01 --clip-grad 1.0 --use-distributed-optimizer --seed 1234
    --tokenizer-type NullTokenizer --vocab-size 257 --make-vocab-size-divisible-by 64 --split 100,0,0
    --eval-iters 0 --eval-interval 1000000 --log-interval 1 --num-workers 0
"""
CPU = "--distributed-backend gloo"
PLAIN = """
    --transformer-impl local --no-persist-layer-norm --no-gradient-accumulation-fusion
    --no-masked-softmax-fusion --no-bias-dropout-fusion --no-bias-gelu-fusion --no-bias-swiglu-fusion --no-rope-fusion
    --attention-softmax-in-fp32
"""


@dataclasses.dataclass(frozen=True)
class Run:
    """What one run recorded, over both ranks. S steps, L layers."""

    loss: np.ndarray  # [S] mean over the step's tokens
    routed: np.ndarray  # [S, L] max / mean tokens per home rank, as the router chose
    computed: np.ndarray  # [S, L] max / mean tokens per rank, as really computed
    seconds: np.ndarray  # [S]
    replica_bytes: int  # most held by any rank
    home_bytes: int  # expert weights of a rank
    peak_rss: int  # of any rank's process


def megatron_flags(*, ranks: int = RANKS, gpus: int = 0) -> list[str]:
    """All but those of data, checkpoints and length."""
    words = [
        *MODEL.split(),
        "--expert-model-parallel-size",
        str(ranks),
        *TRAINING.split(),
        *PLAIN.split(),
    ]
    return words if gpus else [*words, *CPU.split()]


@dataclasses.dataclass(frozen=True)
class Place:
    """Where jobs run.

    Args:
        out: folder of logs and of the probes' records.
        ranks: processes of a job.
        gpus: number of GPUs; 0 trains on the CPU. One GPU is shared by all ranks.
        skew: of routing, see `probe`.
    """

    out: Path
    ranks: int
    gpus: int
    skew: float

    def start(
        self, name: str, arguments: list[str], fssdp: list[str] | None, turns: str = ""
    ) -> subprocess.Popen:
        """Start a job.

        Args:
            name: of the job.
            arguments: Megatron's flags.
            fssdp: our launcher's flags; ``None`` is stock Megatron.
            turns: value of `turns.VARIABLE`.
        """
        command = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            f"--nproc-per-node={self.ranks}",
            "--standalone",
        ]
        if not self.gpus:
            command += [str(HERE / "run_on_cpu.py")]
        elif self.ranks > self.gpus:
            command += [str(HERE / "run_on_shared_gpu.py")]
        command += [] if fssdp is None else ["-m", "megatron_hecate", *fssdp]
        command += [str(HERE / "pretrain_gpt.py"), *arguments]
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "PYTHONWARNINGS": "ignore",
            VARIABLE: turns,
        }
        environment |= {"HECATE_PROBE": str(self.out / name), "HECATE_SKEW": str(self.skew)}
        environment |= {} if self.gpus else {"CUDA_VISIBLE_DEVICES": ""}
        shown = " ".join(
            Path(word).name if "/" in word else word
            for word in command[5 : command.index(arguments[0])]
        )
        print(f"\n{name}: torchrun --nproc-per-node={self.ranks} {shown} ...", flush=True)
        return subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )


def launch(place: Place, jobs: dict[str, tuple[list[str], list[str] | None]]) -> list[Run]:
    """Train one job, or two that take turns, showing progress.

    Args:
        place: where they run.
        jobs: Megatron's flags and our launcher's, by name; ``None`` instead of the latter is stock Megatron.

    Raises:
        SystemExit: when training fails; the end of its log is shown.
    """
    turns = Turns.begin(place.out / "-".join(jobs), *jobs) if len(jobs) == 2 else [""]
    processes: dict[str, subprocess.Popen] = {}
    readers: list[threading.Thread] = []
    try:
        for (name, (arguments, fssdp)), turn in zip(jobs.items(), turns, strict=True):
            processes[name] = process = place.start(name, arguments, fssdp, turn)
            readers.append(
                threading.Thread(target=_read_log, args=(name, process, place.out / f"{name}.log"))
            )
            readers[-1].start()
        # A job that fails would leave the other one waiting for its turn.
        while any(process.poll() is None for process in processes.values()):
            if any(process.poll() for process in processes.values()):
                break
            time.sleep(0.2)
    finally:
        for process in processes.values():
            process.terminate()
    for reader in readers:
        reader.join()
    failed = [name for name, process in processes.items() if process.wait() > 0]
    for name in failed or [name for name, process in processes.items() if process.returncode]:
        log = place.out / f"{name}.log"
        tail = "".join(log.read_text().splitlines(keepends=True)[-40:])
        raise SystemExit(
            f"{name} failed with {processes[name].returncode}; the end of {log}:\n{tail}"
        )
    return [_read(place.out / name, place.ranks) for name in jobs]


def _read_log(name: str, process: subprocess.Popen, log: Path) -> None:
    with log.open("w") as file:
        for line in process.stdout:
            file.write(line)
            _show(name, line)


def _show(name: str, line: str) -> None:
    """Print what a person wants to see of Megatron's log: switched-on lines and every fifth iteration."""
    found = re.search(
        r"iteration +(\d+)/ +(\d+) .*per iteration \(ms\): ([\d.]+) .* lm loss: ([\d.E+-]+)", line
    )
    if found and int(found[1]) % 5 == 0:
        loss, seconds = float(found[4]), float(found[3]) / 1e3
        print(
            f"  {name:>16}: step {found[1]}/{found[2]}  loss {loss:.4f}  {seconds:.2f} s",
            flush=True,
        )
    elif "FSSDP on" in line or "successfully saved" in line or "successfully loaded" in line:
        print(f"  {name:>16}: {line.strip()}", flush=True)


def _read(folder: Path, ranks: int) -> Run:
    lines = [[json.loads(x) for x in (folder / f"rank{r}.jsonl").open()] for r in range(ranks)]
    ends = [rank.pop() for rank in lines]
    experts = np.array([[step["experts"] for step in rank] for rank in lines]).sum(
        axis=0
    )  # [S, L, E]
    routed = experts.reshape(*experts.shape[:2], ranks, -1).sum(
        axis=3
    )  # homes are Megatron's contiguous partition
    computed = np.array([[step["computed"] for step in rank] for rank in lines])  # [R, S, L]
    totals = np.array([[(step["loss"], step["tokens"]) for step in rank] for rank in lines]).sum(
        axis=0
    )
    return Run(
        loss=totals[:, 0] / totals[:, 1],
        routed=routed.max(axis=2) / routed.mean(axis=2),
        computed=computed.max(axis=0) / computed.mean(axis=0),
        seconds=np.array([step["seconds"] for step in lines[0]]),
        replica_bytes=max(step["replica_bytes"] for rank in lines for step in rank),
        home_bytes=max(end["home_bytes"] for end in ends),
        peak_rss=max(end["peak_rss"] for end in ends),
    )


@dataclasses.dataclass(frozen=True)
class Gain:
    """Step time of stock Megatron by that of FSSDP, from paired turns.

    Args:
        middle, low, high: median and quartiles of the turns' ratios.
    """

    middle: float
    low: float
    high: float

    @classmethod
    def of(cls, stock: Run, ours: Run) -> Gain:
        """Compare the medians of each turn, all but the first, which has caches to fill and no forecast."""
        steps = len(stock.seconds) // STEPS * STEPS
        turns = [
            np.median(run.seconds[:steps].reshape(-1, STEPS), axis=1)[1:] for run in (stock, ours)
        ]
        low, middle, high = np.quantile(turns[0] / turns[1], (0.25, 0.5, 0.75))
        return cls(float(middle), float(low), float(high))

    @property
    def is_clear(self) -> bool:
        """Whether the turns agree: on a busy machine they may not."""
        return self.high <= NOISY * self.low

    def __str__(self) -> str:
        return f"{self.middle:.2f} (quartiles {self.low:.2f} to {self.high:.2f})"


def conclude(stock: Run, ours: Run, gain: Gain, balanced: Gain) -> str:
    """Say in words what was gained."""
    steady = slice(STEPS, None)
    before, after = (run.computed[steady].mean() for run in (stock, ours))
    if not (gain.is_clear and balanced.is_clear):
        return (
            f"The machine is too busy to compare step times: stock/FSSDP is {gain} with uneven routing and {balanced} "
            f"with balanced routing. The fullest rank computed {after:.2f} instead of {before:.2f} times the mean."
        )
    return (
        f"With uneven routing a step took {1 / gain.middle:.0%} of stock Megatron's time: the fullest rank computed "
        f"{after:.2f} instead of {before:.2f} times the mean. With balanced routing it took {1 / balanced.middle:.0%}."
    )


def report(stock: Run, ours: Run, resumed: Run, *, saved_at: int, out: Path) -> bool:
    """Print the tables and write the plots; whether FSSDP trained the model stock Megatron trained."""
    difference = np.abs(stock.loss - ours.loss) / stock.loss
    print("\n| step | loss, stock | loss, FSSDP | relative difference |\n|---|---|---|---|")
    for step, (a, b, d) in enumerate(zip(stock.loss, ours.loss, difference, strict=True), start=1):
        print(f"| {step} | {a:.6f} | {b:.6f} | {d:.1e} |")
    steady = slice(5, None)  # the first iterations have no forecast, or warm caches
    print("\nImbalance, mean of the steps after the fifth:")
    print("| layer | routed | computed, stock | computed, FSSDP |\n|---|---|---|---|")
    for layer in range(stock.routed.shape[1]):
        values = (ours.routed, stock.computed, ours.computed)
        print(
            f"| {layer + 1} | "
            + " | ".join(f"{v[steady, layer].mean():.3f}" for v in values)
            + " |"
        )
    gain, (a, b) = Gain.of(stock, ours), (np.median(run.seconds[steady]) for run in (stock, ours))
    again = np.abs(resumed.loss - ours.loss[saved_at:]) / ours.loss[saved_at:]
    mib = 2**20
    same = difference[:20].max() <= 1e-5 and again.max() <= 1e-4
    rows = [
        ("", "stock", "FSSDP"),
        ("---", "---", "---"),
        ("median step time", f"{a:.3f} s", f"{b:.3f} s"),
        (f"stock/FSSDP, of turns of {STEPS} steps", "", str(gain)),
        ("largest relative loss difference, first 20 steps", "", f"{difference[:20].max():.1e}"),
        (f"the same, all {len(difference)} steps", "", f"{difference.max():.1e}"),
        ("expert weights of a rank", f"{stock.home_bytes / mib:.1f} MiB", "the same"),
        (
            "replicas of a rank, weights and fp32 gradients, at most",
            "0",
            f"{ours.replica_bytes / mib:.1f} MiB",
        ),
        (
            "peak memory of a process; FSSDP's with numba, and with saving a checkpoint",
            f"{stock.peak_rss / mib:.0f} MiB",
            f"{ours.peak_rss / mib:.0f} MiB",
        ),
        (
            f"loss of the {len(again)} steps after FSSDP's checkpoint, stock against FSSDP",
            "",
            f"{again.max():.1e}",
        ),
    ]
    print("\n" + "\n".join("| " + " | ".join(row) + " |" for row in rows) + "\n")
    series = (range(1, len(stock.loss) + 1), stock.loss, ours.loss, stock.seconds, ours.seconds)
    with (out / "steps.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["step", "stock_loss", "fssdp_loss", "stock_seconds", "fssdp_seconds"])
        writer.writerows(zip(*series, strict=True))
    plot(stock, ours, out)
    print(f"Plots, steps.csv, logs and the checkpoint are in {out}/")
    print(
        "FSSDP trained the same model as stock Megatron."
        if same
        else "THE RUNS DIFFER: see the table above."
    )
    return bool(same)


def plot(stock: Run, ours: Run, out: Path) -> None:
    """``loss.png``: both losses and their difference. ``imbalance.png``: per layer over steps, before and after."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    steps = np.arange(1, len(stock.loss) + 1)
    figure, (top, bottom) = plt.subplots(2, 1, figsize=(8, 6), sharex=True, height_ratios=(3, 1))
    top.plot(steps, stock.loss, color="tab:blue", linewidth=5, alpha=0.35, label="stock Megatron")
    top.plot(steps, ours.loss, color="tab:red", linewidth=1.2, label="FSSDP")
    top.set_ylabel("loss (nats per byte)")
    top.legend()
    bottom.semilogy(
        steps, np.maximum(np.abs(stock.loss - ours.loss) / stock.loss, 1e-9), color="black"
    )
    bottom.set_ylabel("relative difference")
    bottom.set_xlabel("step")
    figure.tight_layout()
    figure.savefig(out / "loss.png", dpi=120)

    layers = stock.computed.shape[1]
    figure, axes = plt.subplots(1, layers, figsize=(3.4 * layers, 3.2), sharey=True)
    for layer, axis in enumerate(axes):
        axis.plot(steps, stock.computed[:, layer], color="tab:blue", label="stock Megatron")
        axis.plot(steps, ours.computed[:, layer], color="tab:red", label="FSSDP")
        axis.set_title(f"layer {layer + 1}")
        axis.set_xlabel("step")
    axes[0].set_ylabel("max / mean tokens computed per rank")
    axes[0].legend()
    figure.tight_layout()
    figure.savefig(out / "imbalance.png", dpi=120)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--data", type=Path, default=Path(sysconfig.get_paths()["stdlib"]), help="folder of text"
    )
    parser.add_argument("--out", type=Path, default=Path("demo-out"))
    parser.add_argument(
        "--steps", type=int, default=25, help="optimizer steps before the checkpoint"
    )
    parser.add_argument("--slots", type=int, default=2)
    parser.add_argument("--gpus", type=int, default=0, help="0 trains on the CPU")
    parser.add_argument(
        "--ranks", type=int, help=f"processes; the GPUs, or {RANKS} on a CPU; one GPU can be shared"
    )
    parser.add_argument(
        "--speeds", type=Path, help="measured speeds, by which copies are judged to pay"
    )
    arguments = parser.parse_args()
    ranks, gpus = arguments.ranks or arguments.gpus or RANKS, arguments.gpus
    if gpus not in {0, 1, ranks}:
        parser.error(f"--ranks {ranks} on --gpus {gpus}: ranks share one GPU, or have one each")
    if sys.version_info < (3, 12):
        raise SystemExit(
            "The demo trains through megatron.training, which the megatron-core wheel holds from 0.17 on, for Python "
            f"3.12 or newer; this is Python {sys.version.split()[0]}. Install Python 3.12 and run make demo again."
        )
    from prepare_bytes import prepare, text_files

    began = time.monotonic()
    out, data = arguments.out.expanduser().resolve(), arguments.data.expanduser()
    if not text_files(data):
        raise SystemExit(
            f"{data} {'holds no text' if data.is_dir() else 'is not a folder'}; set DATA to a folder with text"
        )
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
    documents, tokens = prepare(data, out / "text")
    print(f"{documents} documents, {tokens:,} tokens (bytes) from {data}")
    last = arguments.steps + 5
    common = [*megatron_flags(ranks=ranks, gpus=gpus), "--data-path", str(out / "text")]
    common += ["--data-cache-path", str(out / "cache"), "--train-iters", str(last)]
    save = ["--save", str(out / "checkpoint"), "--save-interval", str(arguments.steps)]
    load = ["--load", str(out / "checkpoint"), "--ckpt-step", str(arguments.steps)]

    place = Place(out, ranks, gpus, SKEW)
    slots = arguments.slots if ranks > 1 else 0  # a single rank has nobody to share experts with
    flags = ["--moe-fssdp", "--moe-fssdp-slots", str(slots), "--moe-fssdp-record", str(out / "run")]
    flags += ["--moe-fssdp-trace", f"{arguments.steps // 2}-{arguments.steps // 2 + 1}"]
    transport = ["--moe-fssdp-transport", "nvlink"] if gpus and ranks > gpus else []
    if arguments.speeds is not None:
        transport += ["--moe-fssdp-speeds", str(arguments.speeds.resolve())]
    flags += transport
    stock, ours = launch(place, {"stock": (common, None), "fssdp": ([*common, *save], flags)})
    (resumed,) = launch(place, {"stock-resumed": ([*common, *load], None)})
    even = [
        *common,
        "--train-iters",
        str(min(BALANCED_STEPS, arguments.steps)),
        "--moe-router-force-load-balancing",
    ]
    slots_only = flags[: flags.index("--moe-fssdp-record")]
    jobs = {"stock-balanced": (even, None), "fssdp-balanced": (even, [*slots_only, *transport])}
    balanced = Gain.of(*launch(place, jobs))
    same = report(stock, ours, resumed, saved_at=arguments.steps, out=out)
    print()
    command = [
        sys.executable,
        "-m",
        "megatron_hecate",
        "--report",
        str(out / "run"),
        "--out",
        str(out / "report.html"),
    ]
    made = subprocess.run(command).returncode == 0
    print(f"\n{conclude(stock, ours, Gain.of(stock, ours), balanced)}")
    print(
        f"What every layer and rank did: {out}/report.html. {time.monotonic() - began:.0f} s in all."
    )
    return 0 if same and made else 1


if __name__ == "__main__":
    sys.exit(main())
