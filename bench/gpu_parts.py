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
        needs: required modules or programs; "a or b": one of the two is enough.
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
VIRTUAL = "python -m pytest -q tests/comm/test_virtual_ranks.py -k"
COMMANDS: dict[str, tuple[Part, ...]] = {
    "1": (
        Part(
            "check",
            "what is here, and that the kernels compile for it",
            "python -m megatron_hecate check",
            60,
            "GPUs: compiled for sm_",
            # 1: no Megatron, which only the demo needs
            statuses=(0, 1),
        ),
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
            "report",
            "registers, spills, size and wide accesses of the compiled kernels",
            "python bench/compile_report.py --here",
            40,
            "fssdp_gather",
            ("triton or cuobjdump",),
        ),
        Part(
            "counters",
            "hardware counters of the quotas and of sums",
            "python bench/counters.py",
            60,
            r"fssdp_reduce|cannot profile here",
            ("ncu",),
        ),
    ),
    "2": (
        Part(
            "sizes",
            "transfers of experts of real size are bitwise right: Mixtral-8x7B, DeepSeek-V3, "
            "Qwen3-30B-A3B",
            f"{VIRTUAL} 'real_size and cuda'",
            150,
            r"3 passed",
        ),
        Part(
            "overlap",
            "how much longer GEMMs take beside copies",
            "python bench/kernels.py --parts overlap {tiny}",
            90,
            r"copies lasted as long as the GEMMs",
        ),
        Part(
            "step",
            "a MoE layer forward and backward with and without replicas, eager and in a graph, "
            "and the host's time",
            "python bench/step.py {tiny}",
            240,
            r"values with replicas, and of replays, are those without",
        ),
        Part(
            "races",
            "no race in the quotas, in shared memory",
            "python -m pytest -q tests/comm/test_on_gpu.py -k race",
            60,
            r"1 passed",
            ("compute-sanitizer",),
        ),
    ),
    "3": (
        Part(
            "processes",
            "symmetric memory and streams between processes on one GPU; a peer that does not "
            "come is named",
            "python -m pytest -q tests/comm/test_on_gpu.py -k 'not out_of_bounds and not race'",
            100,
            r"3 passed",
        ),
        Part(
            "demo",
            "stock Megatron and our layers train the same model (one rank has no peer, so no "
            "replicas)",
            "python examples/demo.py --gpus 1 --steps 20 --data tests --out build/gpu-demo",
            140,
            "FSSDP trained the same model",
            ("megatron",),
        ),
        Part(
            "replicas",
            "stock Megatron and FSSDP with replicas train the same model: 4 ranks share the "
            "GPU, gloo instead of NCCL",
            "python examples/demo.py --gpus 1 --ranks 4 --steps 10 --data tests "
            "--out build/gpu-replicas --speeds tests/data/free_copies.json",
            180,
            "FSSDP trained the same model",
            ("megatron",),
        ),
        Part(
            "sanitizer",
            "no access is out of bounds",
            "python -m pytest -q tests/comm/test_on_gpu.py -k out_of_bounds",
            100,
            r"1 passed",
            ("compute-sanitizer",),
        ),
    ),
    "4": (
        Part(
            "gemm",
            "TransformerEngine's grouped GEMM with replicas against the same tokens without",
            "python bench/experts_gemm.py",
            60,
            r"Mixtral",
            TRANSFORMER_ENGINE,
        ),
        Part(
            "te",
            "stock Megatron and FSSDP over TransformerEngine's kernels train the same model: "
            "21 settings, 4 ranks",
            "python -m pytest -q -n 4 -rA tests/training/test_on_shared_gpu.py",
            300,
            r"4 passed",
            (*TRANSFORMER_ENGINE, "megatron", "xdist"),
        ),
        Part(
            "host",
            "CPU time that FSSDP adds to a layer over TransformerEngine",
            "python bench/host.py --gpu --experts TEGroupedMLP --homes 8 --microbatches 4",
            120,
            r"\| replicas \|",
            (*TRANSFORMER_ENGINE, "megatron"),
        ),
    ),
}
# minutes of each command
MINUTES = {"1": 6.0, "2": 9.0, "3": 9.0, "4": 9.0}
