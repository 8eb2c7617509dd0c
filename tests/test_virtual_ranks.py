"""Several ranks in one launch on a GPU, where there is one; the same scripts by threads on the host."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import virtual_ranks
from kernel_scripts import Script, hot, random_loans

DEVICES = [
    "cpu",
    pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")),
]
# elements of an expert's tensors: two of SwiGLU's and one
EXPERTS = {"mixtral": (2 * 14336 * 4096, 4096 * 14336), "deepseek-v3": (2 * 2048 * 7168, 7168 * 2048)}
EXPERTS["qwen3-30b"] = (2 * 768 * 2048, 2048 * 768)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("half", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("shift", [0, 1], ids=["aligned", "unaligned"])
def test_random_placements(device: str, half: bool, shift: int) -> None:
    """Bitwise; what must come out is said by the script, from the loans alone."""
    rng = np.random.default_rng(half + 2 * shift)
    script = Script(6, slots=3, lent=2, sizes=(40000, 33, 50000, 7), half=half, begin=2**32 - 20, shift=shift)
    script.iteration(hot(6, 1, 5))
    for i in range(4):
        script.iteration(random_loans(rng, ranks=6, slots=3, lent=2, fill=0.7), copies=i % 2 == 1)
    virtual_ranks.run(script, device, blocks=2)


def test_a_wrong_value_is_found() -> None:
    script = Script(2, slots=1, lent=1, sizes=(100,))
    script.iteration(hot(2, 0, 1))
    at = next(i for i, word in enumerate(script.words[0]) if word == script.regions["home", 0][0] + (1 << 40))
    script.words[0][at + 3] += 1  # another seed: other weights than those that are checked
    with pytest.raises(AssertionError, match=r"rank 1: byte \d+ of 200"):
        virtual_ranks.run(script, "cpu", blocks=1)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("name", list(EXPERTS))
@pytest.mark.parametrize("half", [False, True], ids=["fp32", "bf16"])
def test_experts_of_real_size(name: str, half: bool) -> None:
    script = Script(4, slots=1, lent=1, sizes=EXPERTS[name], half=half)
    script.iteration(hot(4, 1, 3))
    script.iteration(hot(4, 2, 3), copies=True)
    virtual_ranks.run(script, "cuda", blocks=8)
