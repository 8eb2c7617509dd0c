"""The cases of `test_on_shared_gpu` on CPU ranks, over gloo and TransformerEngine's Python, so that none fails by a slip.

Oracle: as there. The transport ``nvlink`` runs its kernels' host build.
"""

from __future__ import annotations

import pytest
from quick import quick
from ranks import ranks
from shared_gpu_cases import CASES, compare

pytestmark = pytest.mark.newest
# Their quantizers, fused kernels and attention stand in on CPUs in tests of their own.
GPU_ALONE = {"permute-fusion", *CASES["precisions"]}
NAMES = [
    f"{group} {name}" for group, cases in CASES.items() for name in cases if name not in GPU_ALONE
]


@pytest.mark.parametrize("name", quick(NAMES, ["layouts tp2", "life checkpoints"]))
@ranks(4, preload="te", timeout=300)
def test_a_case(name: str) -> None:
    import tiny_gpt

    tiny_gpt.install_fused_wgrad()
    compare(*name.split())
