"""Several ranks in one process: on a GPU, where there is one, in one launch; on the host by threads.

Oracle: what the scripts state (`kernel_scripts`), bit for bit. On a GPU the ranks of a transfer are one cooperative
launch: all blocks are resident and may wait for each other.
"""

from __future__ import annotations

import os

import pytest
import torch
from kernel_scripts import CHECK, Setup
from virtual_ranks import VirtualRanks, check_one_hot_experts, check_random_placements

from megatron_hecate.comm.transport import Copy

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


@pytest.mark.fast
def test_a_wrong_byte_is_found() -> None:
    """What the script compares is compared: of slots, sums, and memory that nobody may write."""
    for memory in ("slot", "main_grad", "guard"):
        ranks = VirtualRanks(Setup(2, 1, 1, (4000, 33)), "cpu", blocks=1)
        ranks.script.iteration([Copy(0, 0, 1, 0)])
        if memory == "guard":
            ranks.run()
            ranks._memory[1, ranks.script.regions["send", 0][0][0] - 1] ^= 1
        else:
            (rank,) = {"slot": (1,), "main_grad": (0,)}[memory]
            at = ranks.script.bases[rank] + ranks.script.regions[memory, 0][0][0]
            operations = ranks.script.operations[rank]
            (number,) = [
                i for i, op in enumerate(operations) if (op.kind, op.address) == (CHECK, at)
            ]
            wrong = operations[number].data.clone()
            wrong[-1] ^= 1
            operations[number] = operations[number]._replace(data=wrong)
        with pytest.raises(
            pytest.fail.Exception, match=r"byte \d+ of \d+ at 0x\w+ is not as it should be"
        ):
            ranks.finish()
