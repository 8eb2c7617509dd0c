"""Several ranks in one process: on a GPU, where there is one, in one launch; on the host by threads.

Oracle: what the scripts state (`kernel_scripts`), bit for bit. On a GPU the ranks of a transfer are one cooperative
launch: all blocks are resident and may wait for each other.
"""

from __future__ import annotations

import os

import pytest
import torch
from virtual_ranks import check_one_hot_experts, check_random_placements

DEVICES = [
    pytest.param("cpu", marks=pytest.mark.fast),
    pytest.param(
        "cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
    ),
]
# Elements of an expert's tensors; where a whole command of `bench/gpu.py` is only rehearsed, few of them.
SHRUNK = 4096 if os.environ.get("FSSDP_TINY") else 1
EXPERTS = {
    name: (2 * hidden * ffn // SHRUNK, hidden * ffn // SHRUNK)
    for name, hidden, ffn in (
        ("mixtral", 4096, 14336),
        ("deepseek-v3", 7168, 2048),
        ("qwen3-30b", 2048, 768),
    )
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("shift", [0, 1], ids=["aligned", "unaligned"])
def test_random_placements(device: str, shift: int) -> None:
    check_random_placements(device, shift)


@pytest.mark.parametrize("device", DEVICES[1:])
@pytest.mark.parametrize("name", list(EXPERTS))
def test_experts_of_real_size(device: str, name: str) -> None:
    """All is drawn and compared on the GPU, in some 30 GB for Mixtral."""
    check_one_hot_experts(device, EXPERTS[name])
