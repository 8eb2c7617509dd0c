"""verl's Megatron engine, whose checkout $HECATE_VERL names: equal with FSSDP.

Oracle: the same ``TrainingWorker`` without the line of docs/frameworks.md. Worker, engine, model, loading, optimizer,
loss, log-probabilities, offloading and export are verl's, with mbridge (its checkout is $HECATE_MBRIDGE) or
Megatron-Bridge; layers are TransformerEngine's, over `te_on_cpu`. Ray and the rollout do not run. Packages::

    pip install ray tensordict==0.10.0 transformers==5.10.1 hydra-core codetiming dill datasets accelerate peft
    pip install uvicorn fastapi
    pip install --no-deps megatron-bridge==0.6.2
"""

from __future__ import annotations

import functools
import inspect
import os
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import rehoming_hooks
import tiny_gpt
import tiny_qwen3_moe
import torch
import torch.distributed as dist
from ranks import ranks

pytestmark = [
    pytest.mark.newest,
    pytest.mark.skipif("HECATE_VERL" not in os.environ, reason="HECATE_VERL names no checkout"),
]

VOCAB, LENGTH, SEQUENCES, STEPS = 64, 24, 8, 3
# where the lines of docs/frameworks.md go, in make_megatron_module of verl/utils/megatron_utils.py
AT = "post_model_creation_callbacks = []\n"
LINES = {
    "mbridge": "        post_model_creation_callbacks.append(hook)\n",
    "bridge": "        provider.register_pre_wrap_hook(hook)\n",
}


def install(library: str) -> None:
    """Put verl on the path, and the CPU where it expects a GPU."""
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT="0", VERL_PLATFORM="nvidia")
    sys.path[:0] = [os.environ["HECATE_VERL"], os.environ.get("HECATE_MBRIDGE", "")]
    if library == "bridge":
        sys.path.append(str(Path(__file__).parents[1] / "bridge"))
        import packages_on_cpu  # noqa: F401
    import megatron_on_cpu
    import te_layers_on_cpu

    megatron_on_cpu.for_training()
    te_layers_on_cpu.install()


def write_model(folder: Path) -> None:
    """Write Qwen3-MoE with random weights, made small."""
    from transformers import Qwen3MoeForCausalLM

    torch.manual_seed(1)
    config = tiny_qwen3_moe.config_of(vocab=VOCAB, layers=2)
    Qwen3MoeForCausalLM(config).save_pretrained(folder)


def actor_batch(folder: Path, step: int) -> Any:
    """Prompts and answers of this rank, of unequal length, as verl's trainer passes them to its workers."""
    from tensordict import TensorDict
    from verl.utils import tensordict_utils as tu
    from verl.utils.model import compute_position_id_with_mask
    from verl.workers.utils.padding import left_right_2_no_padding

    generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
    half = LENGTH // 2

    def lengths() -> torch.Tensor:
        return torch.randint(half // 2, half + 1, (SEQUENCES, 1), generator=generator)

    at = torch.arange(half)
    mask = torch.cat([at >= half - lengths(), at < lengths()], dim=1).long()
    tokens = torch.randint(VOCAB, (SEQUENCES, LENGTH), generator=generator) * mask
    response_mask = mask[:, half:]
    data = TensorDict(
        dict(
            input_ids=tokens,
            prompts=tokens[:, :half],
            responses=tokens[:, half:],
            attention_mask=mask,
            response_mask=response_mask,
            position_ids=compute_position_id_with_mask(mask),
            advantages=torch.randn(SEQUENCES, half, generator=generator) * response_mask,
        ),
        batch_size=SEQUENCES,
    )
    data = left_right_2_no_padding(data)
    tu.assign_non_tensor(data, temperature=1.0, compute_loss=False, calculate_entropy=True)
    return data


class Actor:
    """A ``TrainingWorker`` of verl, with the model in ``folder``.

    Args:
        library: which builds the model and exports its weights.
        hook: FSSDP's, or ``None`` for stock.
    """

    def __init__(self, folder: Path, library: str, hook: Callable | None) -> None:
        from verl.utils import megatron_utils
        from verl.workers.config import (
            ActorConfig,
            HFModelConfig,
            McoreEngineConfig,
            McoreOptimizerConfig,
            TrainingWorkerConfig,
        )
        from verl.workers.engine_workers import TrainingWorker
        from verl.workers.utils.losses import ppo_loss

        engine = McoreEngineConfig(
            vanilla_mbridge=library == "mbridge",
            expert_model_parallel_size=2,
            sequence_parallel=False,
            use_dynamic_bsz=True,
            max_token_len_per_gpu=3 * LENGTH,
            infer_max_token_len_per_gpu=3 * LENGTH,
            param_offload=True,
            grad_offload=True,
            optimizer_offload=True,
            override_transformer_config=dict(attention_backend="unfused", persist_layer_norm=False),
        )
        # verl allows 16 bits only, in which rounding may change routes
        vars(engine)["dtype"] = "float32"
        model = HFModelConfig(
            path=str(folder), load_tokenizer=False, override_config={"attn_implementation": "eager"}
        )
        model.tokenizer = types.SimpleNamespace(pad_token_id=0)  # all that is read off it
        optimizer = McoreOptimizerConfig(
            lr=3e-3, lr_decay_style="constant", lr_warmup_steps=0, total_training_steps=STEPS
        )
        self.worker = TrainingWorker(
            TrainingWorkerConfig(
                model_type="language_model",
                model_config=model,
                engine_config=engine,
                optimizer_config=optimizer,
            )
        )

        def convert(chunks: Any, **settings: Any) -> Any:
            for layer in tiny_gpt.moe_layers(chunks if isinstance(chunks, list) else [chunks]):
                tiny_gpt.add_skew(layer, tiny_gpt.Case())
            return chunks if hook is None else hook(chunks, **settings)

        source = inspect.getsource(megatron_utils.make_megatron_module)
        assert source.count(AT) == 1
        exec(
            source.replace(AT, AT + LINES[library]),
            {**vars(megatron_utils), "hook": convert},
            made := {},
        )
        with mock.patch.multiple(megatron_utils, **made):
            self.worker.reset()
        self.engine = self.worker.engine
        actor = ActorConfig(
            strategy="megatron", rollout_n=1, ppo_micro_batch_size_per_gpu=2, entropy_coeff=0.01
        )
        self.worker.set_loss_fn(functools.partial(ppo_loss, config=actor))

    def log_probs(self, data: Any) -> torch.Tensor:
        """Log-probabilities of the answers, [sequences, longest answer]."""
        from verl.utils import tensordict_utils as tu
        from verl.workers.utils.padding import no_padding_2_padding

        return no_padding_2_padding(tu.get(self.worker.infer_batch(data.copy()), "log_probs"), data)

    def update(self, data: Any) -> dict[str, Any]:
        """Metrics of two mini-batches."""
        from verl.utils import tensordict_utils as tu

        data = data.copy()
        tu.assign_non_tensor(
            data,
            global_batch_size=SEQUENCES,
            mini_batch_size=SEQUENCES,
            epochs=1,
            seed=1,
            dataloader_kwargs={"shuffle": True},
            compute_loss=True,
        )
        return tu.get(self.worker.train_mini_batch(data), "metrics")

    def export(self) -> dict[str, torch.Tensor]:
        """Weights for a rollout, by Hugging Face's names."""
        weights, _ = self.engine.get_per_tensor_param()
        weights = {name: weight.detach().clone() for name, weight in weights}
        self.engine.to("cpu", model=True, optimizer=False, grad=False)
        return weights


def train(actor: Actor, folder: Path) -> tuple[list[dict], list[torch.Tensor], list[dict], bool]:
    """Figures of all steps, log-probabilities before each, weights exported after each, and whether experts were
    elsewhere before the last export."""
    figures, probs, exported = [], [], []
    moved = False
    for step in range(STEPS):
        data = actor_batch(folder, step)
        data["old_log_probs"] = actor.log_probs(data)
        probs.append(data["old_log_probs"])
        metrics = actor.update(data)
        figures.append({name: metrics[name] for name in ("loss", "grad_norm")})
        moved = rehoming_hooks.are_moved(actor.engine.module)
        exported.append(actor.export())
    return figures, probs, exported, moved


def compare(library: str, **settings: Any) -> None:
    install(library)
    folder = Path(os.environ["TEST_FOLDER"]) / "model"
    if dist.get_rank() == 0:
        write_model(folder)
    dist.barrier()
    stock = train(Actor(folder, library, None), folder)
    computed = torch.zeros(1)
    actor = Actor(folder, library, tiny_gpt.fssdp_hook(**settings))
    tiny_gpt.counting_hook(lambda converted: converted, computed)(actor.engine.module)
    ours = train(actor, folder)
    dist.all_reduce(computed)
    print("stock", stock[0], "FSSDP", ours[0], computed, flush=True)
    assert computed > 0, "no replica computed anything, so nothing was tested"
    assert ours[3] == ("rehome" in settings)
    for with_fssdp, without in zip(ours[0], stock[0], strict=True):
        assert with_fssdp == {k: pytest.approx(v, rel=1e-6) for k, v in without.items()}
    torch.testing.assert_close(ours[1], stock[1], rtol=0, atol=1e-6)
    torch.testing.assert_close(ours[2], stock[2], rtol=0, atol=1e-6)


@pytest.mark.parametrize("library", LINES)
@ranks(2, timeout=300, preload="te")
def test_an_actor(library: str) -> None:
    compare(library)


@ranks(2, timeout=300, preload="te")
def test_weights_exported_while_experts_are_elsewhere() -> None:
    rehoming_hooks.find()
    compare("bridge", rehome=1)
