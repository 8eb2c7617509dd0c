"""Grouped experts whose token counts stay on the GPU: TransformerEngine's modules over grouped tensors.

Oracle: stock Megatron over the same modules. TE's own Python runs (`grouped_tensors_on_cpu`); its kernels need a GPU.
`test_linears` switches the path on in TE's modules of the installed Megatron, which passes counts of the host.
Megatron 0.20 pads and passes counts by ``moe_use_grouped_tensor``, in the other tests.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
from layouts import DELAYED, FULL
from layouts import FUSED_WGRAD as FUSED
from quick import quick
from ranks import ranks

pytestmark = pytest.mark.newest
FLEX = dict(moe_token_dispatcher_type="flex")
# fields of tiny_gpt.Case, of TransformerConfig, settings of FSSDP
CASES: dict[str, tuple[dict, dict, dict]] = {
    "unfused": (dict(accumulate=2), {}, {}),
    "fused-bias": (dict(accumulate=3), dict(FUSED, add_bias_linear=True), {}),
    "fused-late": (dict(accumulate=2), FUSED, dict(lifetime="layer", late_replicas=2)),
    "recompute-layer": (dict(accumulate=2), dict(FUSED, **FULL), dict(lifetime="layer")),
    "delayed-bias": (dict(accumulate=4), dict(DELAYED, add_bias_linear=True), {}),
    "delayed-fused": (dict(accumulate=4), dict(DELAYED, **FUSED), {}),
    "bf16-main-grads": (dict(accumulate=2, bf16=True, grad_reduce_in_fp32=False), FUSED, {}),
}
DISPATCHERS: dict[str, dict[str, Any]] = {
    "allgather": dict(moe_token_dispatcher_type="allgather"),
    "deepep": dict(FLEX, moe_flex_dispatcher_backend="deepep"),
    "hybridep": dict(FLEX, moe_flex_dispatcher_backend="hybridep"),
    "hybridep-budget": dict(
        FLEX, moe_flex_dispatcher_backend="hybridep", moe_expert_rank_capacity_factor=32.0
    ),
    "ncclep": dict(FLEX, moe_flex_dispatcher_backend="ncclep"),
}


def _start() -> None:
    import te_on_cpu

    te_on_cpu.install()
    import grouped_tensors_on_cpu

    grouped_tensors_on_cpu.install()


def _compare(fields: dict, settings: dict, ours_: dict, prepare: Any = None) -> None:
    import flex_backends
    import tex_on_cpu
    import tiny_gpt

    case = tiny_gpt.Case(grouped=True, **fields, settings=tuple(settings.items()))
    tiny_gpt.initialize(case)
    tiny_gpt.install_fused_wgrad()

    def train(**of_ours: Any) -> Any:
        hook = tiny_gpt.fssdp_hook(**of_ours) if of_ours else (lambda chunks: chunks)
        tex_on_cpu.GEMMS.clear()
        run = tiny_gpt.train(case, hook=lambda chunks: hook(prepare(chunks) if prepare else chunks))
        assert {"grouped TN", "grouped NN", "grouped NT"} == {
            layout for layout, *_ in tex_on_cpu.GEMMS
        }
        flex_backends.forget()
        return run

    stock = train()
    assert tiny_gpt.difference(stock, train(slots=0)) == tiny_gpt.SAME
    tolerance = tiny_gpt.BF16_TOLERANCE if case.bf16 else 1e-5
    tiny_gpt.assert_trained_alike(stock, train(**{"slots": 2, **ours_}), tolerance=tolerance)


def _use_grouped_tensors(chunks: list) -> list:
    import tiny_gpt

    for layer in tiny_gpt.moe_layers(chunks):
        layer.experts.linear_fc1.use_grouped_tensor = True
        layer.experts.linear_fc2.use_grouped_tensor = True
    return chunks


@pytest.mark.parametrize("name", quick(CASES, ["fused-bias", "delayed-fused"]))
@ranks(2, preload="te")
def test_linears(name: str) -> None:
    _start()
    _compare(*CASES[name], _use_grouped_tensors)


@ranks(2, preload="te")
def test_padding_takes_as_many_experts_as_the_linears() -> None:
    """Empty slots are left out of a forward. Oracle: TE's own module, which asserts its number of splits."""
    _start()
    import tiny_gpt
    import torch
    from transformer_engine.pytorch import Fp8Padding

    case = tiny_gpt.Case(grouped=True)
    tiny_gpt.initialize(case)
    chunks, _ = tiny_gpt.build(case)
    experts = tiny_gpt.moe_layers(chunks)[0].experts
    experts.quantization_padding = Fp8Padding(4, align_size=16)
    tiny_gpt.fssdp_hook(slots=2)(chunks)
    experts.physical.grouped.compute_first(5)
    rows, counts = torch.ones(9, 8), [3, 0, 1, 4, 1]
    padded, padded_counts = experts.physical.twin.quantization_padding(rows, counts)
    assert padded_counts == [16, 0, 16, 16, 16] and int(padded.sum()) == 9 * 8
    assert experts.quantization_padding.num_gemms == 4


def _megatron_takes_it() -> bool:
    """Read off the source: ranks are forked from processes that have not imported Megatron."""
    core = Path(importlib.util.find_spec("megatron.core").origin).parent
    return "moe_use_grouped_tensor" in (core / "transformer" / "transformer_config.py").read_text()


def _settings_of(name: str) -> dict[str, Any]:
    """Settings of a dispatcher, with grouped tensors.

    Megatron's main of August 2026 refuses them with NCCL EP; what it does without this check is what is run.
    """
    from megatron.core.transformer import TransformerConfig

    settings = dict(DISPATCHERS.get(name, {}), moe_use_grouped_tensor=True, **FUSED)
    if name == "ncclep":
        check = TransformerConfig.__post_init__

        def check_without(config: Any) -> None:
            config.moe_use_grouped_tensor = False
            check(config)
            config.moe_use_grouped_tensor = True

        TransformerConfig.__post_init__ = check_without
    return settings


@pytest.mark.skipif(not _megatron_takes_it(), reason="before 0.20 counts are on the host")
@pytest.mark.parametrize("name", ["alltoall", *DISPATCHERS])
@ranks(2, preload="te")
def test_dispatchers(name: str) -> None:
    """By the setting: counts on the device, experts' rows padded by Megatron or by the dispatcher."""
    _start()
    import flex_backends

    flex_backends.install()
    _compare(dict(accumulate=2), _settings_of(name), {})
