"""Public launch scripts' flags, shrunk by one set of rules to what a few CPU ranks train in seconds.

`read` returns the scripts of ``tests/data/launch_scripts.json``; `shrink` applies the rules:

* `AT_MOST`: sizes become at most this, divided between fewer ranks. A pipeline stage has two layers, a virtual stage
  one, and at most one layer in front is dense. A layout keeps its first stages and its last one, cut to as many layers.
* At most four ranks: where sizes need more, context parallelism, else the pipeline, becomes 1 (`OF_STAGES`).
* `LEFT_OUT`: what a CPU cannot run, each with its reason.
* `REPLACED`: an equivalent that a CPU can run, each with its reason.
* `TRAINING`: data, learning rates and lengths of a test; `LOCAL`: modules of Megatron without apex.
"""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path

SCRIPTS = Path(__file__).resolve().parents[1] / "data" / "launch_scripts.json"
MAX_RANKS = 4

AT_MOST = {
    "--tensor-model-parallel-size": 2,
    "--pipeline-model-parallel-size": 2,
    "--context-parallel-size": 2,
    "--expert-model-parallel-size": 2,
    "--expert-tensor-parallel-size": 2,
    "--num-virtual-stages-per-pipeline-rank": 2,
    "--num-layers-per-virtual-pipeline-stage": 1,
    "--decoder-first-pipeline-num-layers": 1,
    "--decoder-last-pipeline-num-layers": 1,
    "--hidden-size": 64,
    "--ffn-hidden-size": 64,
    "--num-attention-heads": 4,
    "--num-query-groups": 2,
    "--kv-channels": 16,
    "--q-lora-rank": 16,
    "--kv-lora-rank": 16,
    "--qk-head-dim": 16,
    "--qk-pos-emb-head-dim": 8,
    "--v-head-dim": 16,
    "--num-experts": 16,
    "--moe-router-topk": 4,
    "--moe-router-num-groups": 4,
    "--moe-router-group-topk": 2,
    "--moe-ffn-hidden-size": 32,
    "--moe-shared-expert-intermediate-size": 32,
}
_OWN_TESTS = "runs in tests of its own, over an emulator: "
_QUANTIZED = (
    _OWN_TESTS
    + "tests/training/test_layouts.py and test_quantized.py; tokens of a GEMM share scales"
)
_KERNEL = "needs a kernel of the GPU"
_ATTENTION = "attention of the CPU has neither windows nor offsets"
_GRAPHS = _OWN_TESTS + "tests/training/test_cuda_graphs.py"
_OFFLOADED = "copies to pinned memory by CUDA streams"
_ON_HOST = _OWN_TESTS + "tests/training/test_optimizers.py"
# The only schedule that Megatron allows in bf16 alone: with it --bf16 stays.
COMBINED = "--overlap-moe-expert-parallel-comm"
LEFT_OUT = {
    "--bf16": "rounding changes routes, and so losses by 1e-3: fp32",
    "--fp8-format": _QUANTIZED,
    "--fp8-recipe": _QUANTIZED,
    "--fp8-param-gather": _QUANTIZED,
    "--fp8-amax-compute-algo": _QUANTIZED,
    "--fp8-amax-history-len": _QUANTIZED,
    "--reuse-grad-buf-for-mxfp8-param-ag": _QUANTIZED,
    "--first-last-layers-bf16": _QUANTIZED,
    "--moe-router-padding-for-fp8": _QUANTIZED,
    "--moe-router-padding-for-quantization": _QUANTIZED,
    "--cuda-graph-impl": _GRAPHS,
    "--cuda-graph-modules": _GRAPHS,
    "--te-rng-tracker": _GRAPHS,
    "--fine-grained-activation-offloading": _OFFLOADED,
    "--offload-modules": _OFFLOADED,
    "--offload-optimizer-states": _OFFLOADED,
    "--optimizer-cpu-offload": _ON_HOST,
    "--overlap-cpu-optimizer-d2h-h2d": _ON_HOST,
    "--tp-comm-overlap": _KERNEL + " and symmetric memory",
    "--moe-permute-fusion-into-hybridep": _KERNEL + " of HybridEP",
    "--moe-router-force-load-balancing": "random routes are balanced: nothing to replicate",
    "--softmax-type": _ATTENTION,
    "--window-size": _ATTENTION,
    "--window-attn-skip-freq": _ATTENTION,
    "--enable-gpt-oss": "converts checkpoints; Megatron-LM's script reads it, its wheel does not",
}
# left out where the pipeline becomes one stage
OF_STAGES = (
    "--num-virtual-stages-per-pipeline-rank",
    "--num-layers-per-virtual-pipeline-stage",
    "--pipeline-model-parallel-layout",
    "--decoder-first-pipeline-num-layers",
    "--decoder-last-pipeline-num-layers",
)
REPLACED = {
    ("--cross-entropy-fusion-impl", "te"): ("native", _KERNEL + " in Triton"),
}
TRAINING = """
    --seq-length 64 --max-position-embeddings 64 --micro-batch-size 1 --train-iters 5
    --lr 3e-3 --min-lr 3e-4 --lr-decay-style cosine --lr-decay-iters 5 --clip-grad 1.0 --weight-decay 0.1 --seed 1234 --init-method-std 0.1
    --attention-dropout 0 --hidden-dropout 0 --position-embedding-type rope --distributed-backend gloo
    --tokenizer-type NullTokenizer --vocab-size 257 --split 100,0,0 --eval-iters 0 --eval-interval 1000000
    --log-interval 1 --num-workers 0 --no-rope-fusion --no-create-attention-mask-in-dataloader
"""
LOCAL = "--no-persist-layer-norm --no-masked-softmax-fusion"
MICROBATCHES = 4


@dataclasses.dataclass(frozen=True)
class Script:
    """The flags of a public launch script.

    Args:
        name: a short name.
        settings: settings that distinguish it, for a table.
        sources: repository, commit, path and licence of each file that the flags come from.
        flags: flags and their values, as quoted.
    """

    name: str
    settings: str
    sources: tuple[dict[str, str], ...]
    flags: str


@dataclasses.dataclass(frozen=True)
class Shrunk:
    """Arguments for a few CPU ranks.

    Args:
        ranks: number of processes.
        arguments: Megatron's arguments.
        left_out: flags of the script that are not among them.
    """

    ranks: int
    arguments: tuple[str, ...]
    left_out: tuple[str, ...]


def read() -> dict[str, Script]:
    """Return the public scripts by name."""
    rows = json.loads(SCRIPTS.read_text())
    scripts = [
        Script(row["name"], row["settings"], tuple(row["sources"]), row["flags"]) for row in rows
    ]
    return {script.name: script for script in scripts}


def parse(flags: str) -> dict[str, list[str]]:
    """Return the values of each flag; the last occurrence of a flag counts, as in argparse."""
    parsed: dict[str, list[str]] = {}
    values: list[str] = []
    for word in flags.split():
        if word.startswith("--"):
            values = parsed[word] = []
        else:
            values.append(word)
    return parsed


def shrink(script: Script) -> Shrunk:
    """Apply the rules of this module."""
    flags = parse(script.flags)
    left_out = [flag for flag in flags if flag in LEFT_OUT]
    if COMBINED in flags:
        left_out.remove("--bf16")
    for flag in left_out:
        del flags[flag]
    for (flag, value), (instead, _) in REPLACED.items():
        if flags.get(flag) == [value]:
            flags[flag] = [instead]
    virtual = _virtual_stages(flags)
    for flag, limit in AT_MOST.items():
        if flag in flags:
            flags[flag] = [str(min(int(flags[flag][0]), limit))]
    layout = _Layout.of(flags)
    if layout.ranks > MAX_RANKS:
        flags["--context-parallel-size"] = ["1"]
        layout = _Layout.of(flags)
    if layout.ranks > MAX_RANKS:
        left_out += _without_pipeline(flags)
        virtual = 1
        layout = _Layout.of(flags)
    _shrink_layers(flags, layout.pp, min(virtual, 2))
    words = [word for flag, values in flags.items() for word in (flag, *values)]
    if flags.get("--transformer-impl") == ["local"]:
        words += LOCAL.split()
    data_parallel = layout.ranks // (layout.tp * layout.pp * layout.cp)
    words += [*TRAINING.split(), "--global-batch-size", str(MICROBATCHES * data_parallel)]
    return Shrunk(layout.ranks, tuple(words), tuple(left_out))


@dataclasses.dataclass(frozen=True)
class _Layout:
    tp: int
    pp: int
    cp: int
    ep: int
    etp: int

    @classmethod
    def of(cls, flags: dict[str, list[str]]) -> _Layout:
        names = ("tensor-model", "pipeline-model", "context", "expert-model", "expert-tensor")
        sizes = [int(flags.get(f"--{name}-parallel-size", ["1"])[0]) for name in names]
        if "--expert-tensor-parallel-size" not in flags:
            sizes[-1] = sizes[0]
        return cls(*sizes)

    @property
    def ranks(self) -> int:
        """The fewest ranks that this layout needs."""
        return max(self.tp * self.cp, self.etp * self.ep) * self.pp


def _stages(layout: str) -> list[str]:
    """Return the letters of each stage of a layout, as Megatron parses it."""
    spelled = re.sub(r"\(([^)]*)\)\*(\d+)", lambda part: part[1] * int(part[2]), layout)
    spelled = re.sub(r"(\w)\*(\d+)", lambda part: part[1] * int(part[2]), spelled)
    return spelled.split("|")


def _virtual_stages(flags: dict[str, list[str]]) -> int:
    stages = int(flags["--pipeline-model-parallel-size"][0])
    if found := flags.get("--num-virtual-stages-per-pipeline-rank"):
        return int(found[0])
    if found := flags.get("--num-layers-per-virtual-pipeline-stage"):
        extra = {flag for flag in flags if flag.startswith("--account-for-")}
        layers = int(flags["--num-layers"][0]) + len(extra)
        return layers // stages // int(found[0])
    if found := flags.get("--pipeline-model-parallel-layout"):
        return len(_stages(found[0])) // stages
    return 1


def _without_pipeline(flags: dict[str, list[str]]) -> list[str]:
    """Make the pipeline one stage; returns the flags that divided it."""
    flags["--pipeline-model-parallel-size"] = ["1"]
    dividing = [flag for flag in OF_STAGES if flag in flags]
    for flag in dividing:
        del flags[flag]
    return dividing


def _shrink_layers(flags: dict[str, list[str]], stages: int, virtual: int) -> None:
    """Two layers a stage, or one a virtual stage, at most one of them dense."""
    per_stage = 1 if virtual > 1 else 2
    layers = stages * virtual * per_stage
    layers -= sum(flag.startswith("--account-for-") for flag in flags)
    for end in ("first", "last"):
        if flag := flags.get(f"--decoder-{end}-pipeline-num-layers"):
            layers += int(flag[0]) - per_stage
    if found := flags.get("--pipeline-model-parallel-layout"):
        spelled = _stages(found[0])
        kept = [*spelled[: stages * virtual - 1], spelled[-1]]
        kept = [re.sub("t+", "t" * per_stage, stage) for stage in kept]
        flags["--pipeline-model-parallel-layout"] = ["|".join(kept)]
        layers = "".join(kept).count("t")
    flags["--num-layers"] = [str(layers)]
    found = flags.get("--moe-layer-freq", ["1"])[0]
    if found.strip("(").startswith("[0]"):
        flags["--moe-layer-freq"] = [f"([0]+[1]*{layers - 1})"]
    elif found != "1":
        flags["--moe-layer-freq"] = [f"([1]*{layers})"]
