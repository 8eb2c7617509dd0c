"""Where a step's time goes: `bench/node_spans.py`.

Oracle: steps of some microseconds, worked out by hand; that columns sum to a step, `test_node.py` sees in a rehearsal.
If a moment counted twice, or for a transfer that a GEMM hides, the table would send us after the wrong kernel.
"""

from __future__ import annotations

import dataclasses
import gzip
import json
import re
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import node_spans
import pytest
from node_spans import Trace, category, rank_times, read, where_time_goes

pytestmark = pytest.mark.fast
ROOT = Path(__file__).parents[2]
# From traces of H100s, with the columns that a reader would expect.
NAMES = {
    "nvjet_hsh_128x256_64x4_2x1_v_bz_coopA_NNN": "GEMM",
    "void cutlass::device_kernel<cutlass::gemm::kernel::GemmUniversal<cutlass::gemm::GroupProblem>": "GEMM",
    "sm90_xmma_gemm_bf16f32_bf16f32_f32_tn_n_tilesize128x128x64_cublas": "GEMM",
    "void cutlass::device_kernel<flash::FlashAttnBwd<flash::CollectiveMainloopBwd<2>>>": "attention",
    "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7": "attention",
    "_unpermute_bwd_with_merging_probs_kernel": "permute and sort",
    "_row_id_map_pass_1_kernel": "permute and sort",
    "_sort_chunks_by_map_kernel": "permute and sort",
    "void at::native::index_elementwise_kernel<128, 4, at::native::gpu_index_kernel>": "permute and sort",
    "fssdp_quotas": "FSSDP routing",
    "fssdp_reroute_gradient_32": "FSSDP routing",
    "Memset (Device)": "gradient sums, zeroing",
    "void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<float>>": "gradient sums, zeroing",
    "void multi_tensor_apply_kernel<TensorListMetadata<4>, AdamFunctor<float>>": "optimizer",
    "void layer_norm::ln_fwd_kernel<layer_norm::Kernel_traits<__nv_bfloat16>>": "other compute",
    "void at::native::sbtopk::gatherTopK<float, unsigned int, 2, false>": "other compute",
    "Memcpy DtoH (Device -> Pinned)": "memory copies",
}
EP = {"Process Group Name": "7", "Process Group Description": "EXPERT_MODEL_PARALLEL_GROUP"}
OURS = {"Process Group Name": "9f", "Process Group Description": "fssdp transfers"}
ALL_TO_ALL = {"Collective name": "all_to_allv", "dtype": "BFloat16", **EP}


@dataclasses.dataclass
class Rank:
    """A trace file to be, in whole microseconds of the machine's clock."""

    begin: int
    end: int
    events: list[dict[str, Any]] = dataclasses.field(default_factory=list)

    def __post_init__(self) -> None:
        self.host("step", self.begin, self.end)

    def host(
        self, name: str, begin: int, end: int, cat: str = "user_annotation", **args: Any
    ) -> None:
        event = {"ph": "X", "cat": cat, "name": name, "pid": 1, "tid": 1, "args": args}
        self.events.append({**event, "ts": begin, "dur": end - begin})

    def gpu(
        self, name: str, begin: int, end: int, launched: int | None = None, **args: Any
    ) -> None:
        number = len(self.events)
        cat = f"gpu_{name[:6].lower()}" if name.startswith("Mem") else "kernel"
        self.host(name, begin, end, cat, correlation=number, stream=7, **args)
        start = begin if launched is None else launched
        self.host("cudaLaunchKernel", start, start + 1, "cuda_runtime", correlation=number)
        # Another thread, such as that of the backward, is in no span.
        if launched is None:
            self.events[-1]["tid"] = 2

    def text(self) -> str:
        header = {"schemaVersion": 1, "baseTimeNanoseconds": 0}
        # Kineto writes numbers with three decimals, and other kinds of events too.
        others = [{"ph": "M", "name": "process_name", "pid": 1, "args": {"name": "python"}}]
        others += [
            {**self.events[0], "cat": "gpu_user_annotation"},
            {"ph": "f", "id": 1, "cat": "ac2g"},
        ]
        return json.dumps({**header, "traceEvents": [*others, *self.events]})


def traces_of(ranks: Sequence[Rank], folder: Path) -> list[Trace]:
    for number, rank in enumerate(ranks):
        path = folder / f"stock-rank{number}.json.gz"
        path.write_bytes(gzip.compress(rank.text().encode()))
    return node_spans.read_folder(folder)["stock"]


def test_kernels_are_known_by_their_names() -> None:
    """Our sources' own, too: a new or renamed kernel must not fall to other compute."""
    assert {name: category(name) for name in NAMES} == NAMES
    command = ["g++", "-E", "-P", "-x", "c++", str(ROOT / "kernels" / "device.cu")]
    source = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    launched = re.findall(
        r'extern "C" __global__ void __launch_bounds__\([^)]*\)\s+(\w+)\(', source
    )
    assert len(launched) == source.count("__global__") >= 11
    assert all(name.startswith("fssdp_") for name in launched)
    kinds = {name: category(name) for name in launched}
    assert set(kinds.values()) == {
        *("FSSDP routing", "FSSDP fetch", "FSSDP return", "FSSDP fetch or return")
    }, kinds


def test_messages_of_a_transfer_are_no_all_to_all(tmp_path: Path) -> None:
    """Kernels of one name: the span of the launch, or the group, or the call tells which it is."""
    ranks = [Rank(0, 100), Rank(0, 100)]
    for number, rank in enumerate(ranks):
        kernel = "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)"
        # The kernel of coalesced calls has no parameters itself; rank 1 arrives 4 us later.
        rank.host("fssdp/late 3", 1, 9)
        rank.host("fssdp/spAG start 3", 2, 8)
        rank.host("record_param_comms", 3, 4, "cpu_op", **{"Collective name": "send", **OURS})
        rank.gpu(kernel, 10 + 4 * number, 20, launched=5)
        rank.gpu("Memcpy HtoD (Pinned -> Device)", 20, 21, launched=6)
        rank.host("record_param_comms", 30, 31, "cpu_op", **{"Collective name": "recv", **OURS})
        rank.host("record_param_comms", 32, 33, "cpu_op", **{"Collective name": "wait", **EP})
        rank.gpu(kernel, 40, 41, launched=34)
        rank.gpu(kernel, 50, 52, launched=50, **ALL_TO_ALL)
        rank.host("fssdp/spRS start 3", 58, 60)
        rank.gpu("void at::native::CUDAFunctor_add<float>", 60, 65, launched=59)
        homes = {"Process Group Description": "fssdp homes", "Process Group Name": "h"}
        rank.gpu(kernel, 70, 78, **{**ALL_TO_ALL, **homes})
    first, second = rank_times(traces_of(ranks, tmp_path))
    expected = {
        "step": 100,
        "FSSDP fetch, moving": 7,
        "FSSDP fetch, hidden and exposed": 7,
        "FSSDP fetch or return, moving": 1,
        "FSSDP fetch or return, hidden and exposed": 1,
        "token all-to-all, moving": 2,
        "FSSDP return, moving": 5,
        "FSSDP return, hidden and exposed": 5,
        "other collectives, moving": 8,
        "host gap": 77,
    }
    assert {name: time * 1000 for name, time in second.items() if time} == pytest.approx(expected)
    assert first["FSSDP fetch, waiting"] == pytest.approx(0.004)


def test_transfers_without_a_rank_are_matched_by_number(tmp_path: Path) -> None:
    """Rank 1 takes no part in the first of two fetches of a layer, nor in the second's last round."""
    ranks = [Rank(0, 100), Rank(0, 100)]
    for begin, lengths in ((10, (20, None)), (50, (9, 4))):
        for rank, length in zip(ranks, lengths, strict=True):
            rank.host("fssdp/spAG start 3", begin, begin + 3)
            if length is not None:
                rank.gpu(
                    "ncclDevKernel_SendRecv", begin + 5, begin + 5 + length, launched=begin + 1
                )
    ranks[0].gpu("ncclDevKernel_SendRecv", 70, 73, launched=52)
    waits = [
        of_rank["FSSDP fetch, waiting"] * 1000 for of_rank in rank_times(traces_of(ranks, tmp_path))
    ]
    assert waits == pytest.approx([5, 0])


def test_an_empty_description_is_read(tmp_path: Path) -> None:
    """Kineto writes nothing at all for an empty text."""
    rank = Rank(0, 100)
    call = {**ALL_TO_ALL, "Process Group Description": ""}
    rank.gpu("ncclDevKernel_SendRecv", 10, 20, **call)
    path = tmp_path / "a-rank0.json"
    path.write_text(rank.text().replace('Description": ""', 'Description": '))
    assert where_time_goes([read(path)])["token all-to-all, moving"] == pytest.approx(0.01)


def test_ranks_that_do_not_fit_are_named(tmp_path: Path) -> None:
    twice, once = Rank(0, 100), Rank(0, 100)
    for begin, rank in ((10, twice), (20, twice), (10, once)):
        rank.gpu("ncclDevKernel_SendRecv", begin, begin + 5, **ALL_TO_ALL)
    message = r"all_to_allv of process group 7: 1 in stock-rank1.json.gz, 2 in stock-rank0.json.gz"
    with pytest.raises(ValueError, match=message):
        where_time_goes(traces_of([twice, once], tmp_path))
    with pytest.raises(ValueError, match=r"rank1\S* begins after the end of stock-rank0"):
        where_time_goes(traces_of([Rank(0, 100), Rank(200, 300)], tmp_path))
