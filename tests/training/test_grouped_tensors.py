"""Grouped experts whose token counts stay on the GPU: TransformerEngine's modules over grouped tensors.

Oracle: stock Megatron over the same modules. TE's own Python runs (`grouped_tensors_on_cpu`); its kernels need a GPU.
`test_layouts` switches the path on in modules of the installed Megatron, which passes counts of the host; Megatron 0.20
pads and passes counts by ``moe_use_grouped_tensor``.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import tiny_gpt
import torch
import variants
from layouts import ALLGATHER, FUSED_WGRAD, Layout, flex
from ranks import ranks

pytestmark = pytest.mark.newest


@ranks(2, preload="te")
def test_padding_takes_as_many_experts_as_the_linears() -> None:
    """Empty slots are left out of a forward. Oracle: TE's own module, which asserts its number of splits."""
    from transformer_engine.pytorch import Fp8Padding

    case, _ = variants.case_of(Layout(2, {}, {}, experts="grouped tensors"))
    chunks, _ = tiny_gpt.build(case)
    experts = tiny_gpt.moe_layers(chunks)[0].experts
    experts.quantization_padding = Fp8Padding(4, align_size=16)
    tiny_gpt.fssdp_hook(slots=2)(chunks)
    experts.physical.twin.compute_first(5)
    rows, counts = torch.ones(9, 8), [3, 0, 1, 4, 1]
    padded, padded_counts = experts.physical.twin.module.quantization_padding(rows, counts)
    assert padded_counts == [16, 0, 16, 16, 16] and int(padded.sum()) == 9 * 8
    assert experts.quantization_padding.num_gemms == 4


def _megatron_takes_it() -> bool:
    """Read off the source: ranks are forked from processes that have not imported Megatron."""
    core = Path(importlib.util.find_spec("megatron.core").origin).parent
    return "moe_use_grouped_tensor" in (core / "transformer" / "transformer_config.py").read_text()


def _let_nccl_ep_take_it() -> None:
    """Megatron's main of August 2026 refuses it; what Megatron does without this check is what is run."""
    from megatron.core.transformer import TransformerConfig

    check = TransformerConfig.__post_init__

    def check_without(config: Any) -> None:
        config.moe_use_grouped_tensor = False
        check(config)
        config.moe_use_grouped_tensor = True

    TransformerConfig.__post_init__ = check_without


DISPATCHERS: dict[str, dict[str, Any]] = {
    "alltoall": {},
    "allgather": ALLGATHER,
    "deepep": flex("deepep"),
    "hybridep": flex("hybridep"),
    "hybridep-budget": flex("hybridep", moe_expert_rank_capacity_factor=32.0),
    "ncclep": flex("ncclep"),
}


@pytest.mark.skipif(not _megatron_takes_it(), reason="before 0.20 counts are on the host")
@pytest.mark.parametrize("name", DISPATCHERS)
@ranks(2, preload="te")
def test_dispatchers(name: str) -> None:
    """By the setting: counts on the device, experts' rows padded by Megatron or by the dispatcher."""

    if name == "ncclep":
        _let_nccl_ep_take_it()
    model = dict(DISPATCHERS[name], moe_use_grouped_tensor=True, **FUSED_WGRAD)
    layout = Layout(2, dict(accumulate=2), model, experts="grouped tensors")
    variants.compare(name, layout, layout.names)
