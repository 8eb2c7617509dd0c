"""The cases of `test_on_shared_gpu` on CPU ranks, over gloo and TransformerEngine's Python, so that none fails by a slip.

Oracle: as there. The transport ``nvlink`` runs its kernels' host build.
"""

from __future__ import annotations

import pytest
import tiny_gpt
from quick import quick
from ranks import ranks
from shared_gpu_cases import compare

pytestmark = pytest.mark.newest
# One of each group; quantizers, fused kernels and attention stand in on CPUs in tests of their own.
NAMES = ["layouts tp2", "settings capacity-padded", "schedules delayed-overlap", "life checkpoints"]


@pytest.mark.parametrize("name", quick(NAMES, ["layouts tp2"]))
@ranks(4, preload="te", timeout=300)
def test_a_case(name: str) -> None:
    tiny_gpt.install_fused_wgrad()
    compare(*name.split())
