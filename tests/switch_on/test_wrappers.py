"""Whatever else owns the experts' weights is refused on every way in. Oracle: literal messages; the model is untouched.

FSDP2 and Megatron's builder are the real ones; Bridge and its adapters are stand-ins with the names of its modules.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import tiny_gpt
import torch
from model_state import snapshot
from ranks import ranks

FSDP2 = r"use_torch_fsdp2=True: .* set dist.use_torch_fsdp2=false or leave out --use-torch-fsdp2"
MEGATRON_FSDP = r"use_megatron_fsdp=True: .* set ddp.use_megatron_fsdp=false and dist.use_megatron_fsdp=false or leave"


def _forward(chunks: list) -> None:
    case = tiny_gpt.Case()
    tiny_gpt.forward_step(iter([tiny_gpt.batch(case, 0, 0)]), chunks[0], case=case)


def _shard(chunks: list) -> None:
    """As Megatron's ``TorchFullyShardedDataParallel`` does to every layer."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    for layer in chunks[0].decoder.layers:
        fully_shard(layer, mesh=init_device_mesh("cpu", (2,)))


def _adapt(module: Any, name: str) -> None:
    """What Bridge's LoRA does to a linear."""

    class LoRALinear(torch.nn.Module):
        def __init__(self, to_wrap: torch.nn.Module) -> None:
            super().__init__()
            self.to_wrap = to_wrap

        def forward(self, *inputs: Any) -> Any:
            return self.to_wrap(*inputs)

    LoRALinear.__module__ = "megatron.bridge.peft.lora_layers"
    setattr(module, name, LoRALinear(getattr(module, name)))


def _adapt_experts(chunks: list) -> None:
    # the attention's are no concern of ours
    _adapt(chunks[0].decoder.layers[0].self_attention, "linear_proj")
    _adapt(tiny_gpt.moe_layers(chunks)[1].experts.local_experts[0], "linear_fc1")


def _quantize_experts(chunks: list) -> None:
    """ModelOpt gives linears another class in place: before DDP, or after it, as NeMo-RL and verl do."""
    for linear in (
        chunks[0].decoder.layers[0].self_attention.linear_proj,
        tiny_gpt.moe_layers(chunks)[1].experts.local_experts[0].linear_fc1,
    ):
        fields = {"__module__": "modelopt.torch.opt.dynamic"}
        linear.__class__ = type("QuantLinear", (type(linear),), fields)


# who takes the experts' weights, and the setting and the way out of the message
OWNERS: dict[str, tuple[Callable[[list], None], str]] = {
    "FSDP2": (_shard, FSDP2),
    "adapters": (
        _adapt_experts,
        "peft='LoRALinear': adapters wrap .* set its peft to None",
    ),
    "ModelOpt": (
        _quantize_experts,
        "modelopt_enabled=True: ModelOpt replaces .* a script that trains without ModelOpt",
    ),
}


@ranks(2)
def test_owners_of_experts() -> None:
    """Before the hook, which leaves the model as it was, and after it, in every forward."""
    case = tiny_gpt.initialized()
    for take, message in OWNERS.values():
        chunks, _ = tiny_gpt.build(case)
        take(chunks)
        before = snapshot(chunks)
        with pytest.raises(
            ValueError, match=f"cannot be switched on:\n  - --moe-fssdp with {message}"
        ):
            tiny_gpt.fssdp_hook()(chunks)
        assert snapshot(chunks) == before
        chunks, _ = tiny_gpt.build(case)
        tiny_gpt.fssdp_hook()(chunks)
        take(chunks)
        for _ in range(2):
            with pytest.raises(
                ValueError, match=f"FSSDP cannot run:\n  - --moe-fssdp with {message}"
            ):
                _forward(chunks)


@pytest.mark.newest
@ranks(2)
@pytest.mark.parametrize("setting", ["use_megatron_fsdp", "use_torch_fsdp2"])
def test_megatrons_builder_runs_the_hook_and_then_wraps(setting: str) -> None:
    """``ModelConfig.pre_wrap_hooks`` go into this function as one."""
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.training.models import dist_utils

    chunks, config = tiny_gpt.build(tiny_gpt.initialized())

    def build(**settings: Any) -> None:
        dist_utils.unimodal_build_distributed_models(
            lambda *_, **__: chunks[0],
            config,
            ProcessGroupCollection.use_mpu_process_groups(),
            DistributedDataParallelConfig(),
            pre_wrap_hook=tiny_gpt.fssdp_hook(),
            **settings,
        )

    with pytest.raises(
        ValueError, match=MEGATRON_FSDP if setting == "use_megatron_fsdp" else FSDP2
    ):
        build(**{setting: True})
    build()


@pytest.mark.newest
@ranks(2)
def test_the_hook_by_hand_in_a_job_with_arguments() -> None:
    from megatron.training import global_vars

    chunks, config = tiny_gpt.build(tiny_gpt.initialized())
    config.cuda_graph_impl = "local"
    global_vars._GLOBAL_ARGS = SimpleNamespace(use_megatron_fsdp=True, modelopt_enabled=True)
    with pytest.raises(ValueError, match=MEGATRON_FSDP) as error:
        tiny_gpt.fssdp_hook()(chunks)
    for problem in ("cuda_graph_impl='local'", "modelopt_enabled=True"):
        assert f"  - --moe-fssdp with {problem}: " in str(error.value), (
            "one message lists model and job"
        )


@ranks(2)
def test_megatron_fsdp_by_hand() -> None:
    """It runs on CUDA only, so its mark on the parameters that it takes is put there by hand."""
    from megatron.core.distributed.fsdp.src.megatron_fsdp import megatron_fsdp

    chunks, _ = tiny_gpt.build(tiny_gpt.initialized())
    tiny_gpt.fssdp_hook()(chunks)
    assert "param.__fsdp_param__ = True" in inspect.getsource(megatron_fsdp)
    for param in chunks[0].parameters():
        param.__fsdp_param__ = True
    with pytest.raises(ValueError, match=MEGATRON_FSDP):
        _forward(chunks)
