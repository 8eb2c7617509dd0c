"""Parts of `gpu.py`: what is run on a GPU, in which command, and how success shows."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Part:
    """Benchmark or test that `gpu.py` runs in a separate process.

    Args:
        name: name for ``--parts``.
        shows: purpose, for the page.
        command: command line; "python" is the running interpreter, and "{tiny}" the flag for tiny
            sizes if these are selected.
        seconds: timeout.
        says: regular expression that the output of a successful run matches.
        needs: required modules or programs.
        statuses: exit statuses of a successful run.
    """

    name: str
    shows: str
    command: str
    seconds: float
    says: str = ""
    needs: tuple[str, ...] = ()
    statuses: tuple[int, ...] = (0,)


TRANSFORMER_ENGINE = ("transformer_engine", "transformer_engine_torch")
# Ranks share the GPU over NCCL (`run_on_shared_gpu`).
NODE = (*TRANSFORMER_ENGINE, "megatron")
VIRTUAL = "python -m pytest -q tests/nvlink/test_virtual_ranks.py -k"


def _parity(group: str, seconds: int) -> Part:
    """Return the part that trains a group of cases of `test_on_shared_gpu`."""
    return Part(
        f"parity-{group}",
        f"stock Megatron and FSSDP train the same model, 4 ranks, both transports: {group}",
        f"python -m pytest -q -s tests/training/test_on_shared_gpu.py -k {group}",
        seconds,
        r"1 passed",
        NODE,
    )


def _steps(model: str, ranks: int, seconds: int, options: str = "") -> Part:
    """Return the part that times steps of a model."""
    return Part(
        f"steps-{model}-{ranks}",
        f"step time and where it goes: stock, ideal, FSSDP in turns, shapes of {model}, {ranks} "
        "ranks",
        f"python bench/node.py --model {model} --ranks {ranks} "
        f"--steps 8 --warmup 3 --profile build/gpu/traces-{model}-{ranks} {options}".strip(),
        seconds,
        r"ratios agree|scale off",
        NODE,
    )


COMMANDS: dict[str, tuple[Part, ...]] = {
    "1": (
        Part(
            "check",
            "what is here, and that planner and kernels compile for it",
            "python -m megatron_hecate check",
            60,
            r"GPUs of compute capability [\d.]+: compiled",
            # 1: no Megatron, which only some parts need
            statuses=(0, 1),
        ),
        _parity("layouts", 180),
        _parity("life", 120),
    ),
    "2": (_steps("qwen3", 8, 270), _steps("mixtral", 8, 250, "--ways nvlink,p2p")),
    "3": (
        _steps("dsv3", 8, 250, "--ways nvlink,p2p"),
        _steps("qwen3", 4, 150, "--jump 8 --regimes gpu"),
        _parity("settings", 150),
    ),
    "4": (
        Part(
            "demo",
            "megatron.training.pretrain, stock and FSSDP, 4 ranks: the same model, and step times",
            "python examples/demo.py --gpus 1 --ranks 4 --steps 20 --data tests "
            "--out build/gpu-demo",
            300,
            "FSSDP trained the same model",
            ("megatron",),
        ),
        _parity("schedules", 120),
        _parity("precisions", 120),
    ),
    "5": (
        Part(
            "values",
            "transfers at random placements are bitwise right, ranks of one launch",
            f"{VIRTUAL} 'random_placements and cuda'",
            45,
            r"2 passed",
        ),
        Part(
            "routing",
            "count, quotas, rerouting, its backward: microseconds and values, one and two "
            "slots, 8 to 64 ranks",
            "python bench/routing.py {tiny}",
            80,
            r"every value is as on the host",
        ),
        Part(
            "rates",
            "rates of fetches and returns, 1 to 132 blocks, against NVLink and the GPU's own copy",
            "python bench/kernels.py --parts rates {tiny}",
            75,
            r"verdicts are made",
        ),
        Part(
            "overlap",
            "how much longer GEMMs take beside copies",
            "python bench/kernels.py --parts overlap {tiny}",
            90,
            r"copies lasted as long as the GEMMs",
        ),
        Part(
            "gemm",
            "TransformerEngine's grouped GEMM with replicas against the same tokens without",
            "python bench/experts_gemm.py",
            60,
            r"Mixtral",
            TRANSFORMER_ENGINE,
        ),
        Part(
            "host",
            "CPU time that FSSDP adds to a layer over TransformerEngine",
            "python bench/host.py --gpu --experts TEGroupedMLP --homes 8 --microbatches 4",
            120,
            r"\| replicas \|",
            NODE,
        ),
    ),
    "6": (
        Part(
            "graph",
            "fetches, returns and the gate in CUDA graphs, 4 ranks over NCCL: every replay is "
            "right; microseconds of graphs, eager launches and tables; a missing peer is named",
            "python bench/graph.py {tiny}",
            120,
            r"verdicts: all true",
        ),
        Part(
            "processes",
            "symmetric memory and streams between processes on one GPU; a peer that does not "
            "come is named",
            "python -m pytest -q tests/nvlink/test_on_gpu.py -k 'not out_of_bounds and not race'",
            100,
            r"\d passed",
        ),
        Part(
            "sizes",
            "transfers of experts of real size are bitwise right: Mixtral-8x7B, DeepSeek-V3, "
            "Qwen3-30B-A3B",
            f"{VIRTUAL} 'real_size and cuda'",
            150,
            r"3 passed",
        ),
        Part(
            "races",
            "no race in the quotas, in shared memory",
            "python -m pytest -q tests/nvlink/test_on_gpu.py -k race",
            60,
            r"1 passed",
            ("compute-sanitizer",),
        ),
        Part(
            "sanitizer",
            "no access is out of bounds",
            "python -m pytest -q tests/nvlink/test_on_gpu.py -k out_of_bounds",
            100,
            r"1 passed",
            ("compute-sanitizer",),
        ),
    ),
}
# minutes of each command
MINUTES = {"1": 6.0, "2": 8.7, "3": 9.2, "4": 9.0, "5": 8.0, "6": 9.0}
