"""``megatron sft`` of ms-swift, whose checkout $HECATE_SWIFT names: equal with FSSDP.

Oracle: the same run without ``examples/swift_plugin.py``. Arguments, dataset, model (``mcore-bridge``), loading,
training, evaluation and saving are ms-swift's; layers are TransformerEngine's, over `te_on_cpu`. Packages, with the
versions that ran (ms-swift names upper bounds)::

    pip install mcore-bridge==1.6.5 modelscope==1.40.2 transformers==5.16.1 datasets==4.8.4 peft==0.20.0
    pip install trl==0.29.1 accelerate==1.15.0 dacite json_repair msgspec pandas tensorboard
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import tiny_gpt
import tiny_qwen3_moe
import torch
import torch.distributed as dist
from ranks import ranks

pytestmark = [
    pytest.mark.newest,
    pytest.mark.skipif("HECATE_SWIFT" not in os.environ, reason="HECATE_SWIFT names no checkout"),
]

PLUGIN = Path(__file__).parents[2] / "examples" / "swift_plugin.py"
TEXTS = 64
# Batches without padding and the distributed optimizer are ms-swift's defaults.
FLAGS = """
    --model_type qwen3_moe --template qwen3 --max_length 128 --split_dataset_ratio 0.25
    --load_from_cache_file false --dataloader_num_workers 0 --check_model false --ddp_backend gloo
    --expert_model_parallel_size 2 --micro_batch_size 2 --global_batch_size 8
    --train_iters 4 --lr 3e-3 --logging_steps 1 --eval_steps 2 --add_version false
"""
FIGURES = ("loss", "eval_loss", "grad_norm")
FP32 = "--torch_dtype float32 --fp16 false --bf16 false"


def write_texts(path: Path) -> None:
    """Write dialogues of unequal length."""
    lines = []
    for i in range(TEXTS):
        answer = {"role": "assistant", "content": f"{2 * i} " * (1 + i % 3)}
        lines.append({"messages": [{"role": "user", "content": f"{i} + {i}"}, answer]})
    path.write_text("\n".join(map(json.dumps, lines)))


def install() -> None:
    """Put ms-swift on the path, and the CPU where it expects a GPU."""
    import te_layers_on_cpu

    te_layers_on_cpu.install()
    sys.path.insert(0, os.environ["HECATE_SWIFT"])
    # A module of the other trainers compiles a function when it is imported. TorchScript cannot
    # compile the functions of torch that stand-ins replace.
    torch.jit.script = lambda function, *_, **__: function


class Runs:
    """Runs of ms-swift on the same model and dataset, in fp32.

    Args:
        flags: of all runs.
    """

    def __init__(self, flags: str) -> None:
        from megatron.core.transformer.module import Float16Module, MegatronModule

        class Float32Module(Float16Module):
            """Megatron's wrapper of models in 16 bits, which changes nothing: `forward_step` of ms-swift's trainers
            reads ``model.module.module``, and so runs no model in fp32."""

            def __init__(self, module: Any) -> None:
                MegatronModule.__init__(self, module.config)
                self.module, self.vp_stage = module, module.vp_stage

            def forward(self, *inputs: Any, **settings: Any) -> Any:
                return self.module(*inputs, **settings)

        self.flags, self.wrapped = f"{FP32} {flags}", Float32Module
        self.folder = Path(os.environ["TEST_FOLDER"])
        if dist.get_rank() == 0:
            tiny_qwen3_moe.write(self.folder / "model")
            write_texts(self.folder / "texts.jsonl")
        dist.barrier()
        self.computed = torch.zeros(1)  # tokens, by replicas

    def write_plugin(self) -> str:
        """Write the example with free copies; returns the flag."""
        given = {"slots": 2, "speeds": tiny_gpt.FREE, "timeout": 60}
        path = self.folder / "swift_plugin.py"
        if dist.get_rank() == 0:
            text = PLUGIN.read_text().replace("HecateConfig(slots=2)", f"HecateConfig(**{given!r})")
            path.write_text(text)
        dist.barrier()
        return f"--external_plugins {path}"

    def train(self, name: str, flags: str = "") -> tuple[list[dict], dict[str, torch.Tensor]]:
        """Logs of all steps and evaluations, and parameters."""
        from swift.megatron.callbacks import MegatronCallback, megatron_callbacks_map
        from swift.megatron.pipelines.train.sft import MegatronSft
        from swift.megatron.trainers import base

        logs: list[dict] = []
        chunks: list = []

        class Keep(MegatronCallback):
            def on_log(self, logs: dict, kept: list[dict] = logs) -> None:
                kept.append({name: logs[name] for name in FIGURES if name in logs})

        build, wrap_model = base.get_mcore_model, base.wrap_model

        def build_skewed(*args: Any) -> list:
            models = build(*args)
            for layer in tiny_gpt.moe_layers(models):
                tiny_gpt.add_skew(layer, tiny_gpt.Case())
            return models

        def wrap(args: Any, models: list) -> list:
            chunks[:] = models
            if hasattr(tiny_gpt.moe_layers(models)[0], "fssdp"):
                tiny_gpt.counting_hook(lambda converted: converted, self.computed)(models)
            return wrap_model(args, [self.wrapped(model) for model in models])

        everything = f"""{FLAGS} {self.flags} {flags} --model {self.folder}/model --callbacks keep
            --dataset {self.folder}/texts.jsonl --output_dir {self.folder / name}"""
        megatron_callbacks_map["keep"] = Keep
        patches = dict(get_mcore_model=build_skewed, wrap_model=wrap)
        # a run of ms-swift ends with the process group
        kept_group = mock.patch.object(dist, "destroy_process_group")
        with mock.patch.multiple(base, **patches), kept_group:
            MegatronSft(everything.split()).run()
        named = enumerate(chunk.named_parameters() for chunk in chunks)
        return logs, {f"{i} {n}": p.detach().clone() for i, ps in named for n, p in ps}

    def exported(self, name: str) -> dict[str, torch.Tensor]:
        """Weights of the last checkpoint, as Hugging Face names them."""
        from safetensors.torch import load_file

        files = sorted((self.folder / name / "checkpoint-4").glob("*.safetensors"))
        return {n: w for file in files for n, w in load_file(file).items()}


def compare(runs: Runs) -> None:
    """Train with and without FSSDP."""
    logs, params = runs.train("stock")
    ours, our_params = runs.train("ours", runs.write_plugin())
    dist.all_reduce(runs.computed)
    assert runs.computed > 0, "no replica computed anything, so nothing was tested"
    if dist.get_rank() == dist.get_world_size() - 1:
        print("stock", logs, "FSSDP", ours, runs.computed, flush=True)
    assert len(logs) == 6
    for stock, with_fssdp in zip(logs, ours, strict=True):
        assert with_fssdp == pytest.approx(stock, rel=1e-6)
    torch.testing.assert_close(our_params, params, rtol=0, atol=1e-6)
    exported = runs.exported("ours")
    assert exported
    torch.testing.assert_close(exported, runs.exported("stock"), rtol=0, atol=1e-6)


@ranks(2, timeout=300, preload="te")
def test_a_run() -> None:
    install()
    compare(Runs("--overlap_grad_reduce true --overlap_param_gather true"))
