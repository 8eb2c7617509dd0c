"""NeMo-RL's own policy worker for Megatron, where $HECATE_NEMO_RL names a checkout: equal with FSSDP.

The worker runs as a plain object, not as an actor of Ray: it imports a model of Hugging Face, sets up model, optimizer
and reference model, computes log-probabilities, trains by GRPO's loss, and exports weights for a rollout. Its
configuration is NeMo-RL's example for Qwen3-30B-A3B, made small. Oracle: the same worker without FSSDP. Further
packages for ``.venv-bridge``, with the versions that ran::

    pip install "transformers==5.8.1" ray pyzmq nvidia-ml-py rich
"""

from __future__ import annotations

import contextlib
import gc
import os
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from ranks import ranks
from recipe_runs import FREE

CHECKOUT = Path(os.environ.get("HECATE_NEMO_RL", "no checkout")).resolve()
EXAMPLE = CHECKOUT / "examples" / "configs" / "grpo_math_qwen30ba3b_megatron.yaml"
STEPS, SEQUENCES, LENGTH = 3, 8, 32
SMALL = """
policy.train_global_batch_size=16 policy.train_micro_batch_size=4 policy.logprob_batch_size=4
policy.max_total_sequence_length=32 policy.make_sequence_length_divisible_by=1
policy.megatron_cfg.tensor_model_parallel_size=1 policy.megatron_cfg.sequence_parallel=false
policy.megatron_cfg.expert_model_parallel_size=2 +policy.megatron_cfg.train_iters=3
policy.megatron_cfg.optimizer.lr=3e-3 policy.megatron_cfg.optimizer.min_lr=3e-3
policy.megatron_cfg.scheduler.lr_warmup_iters=0 policy.megatron_cfg.scheduler.lr_warmup_init=0
""".split()
# kernels of a GPU, and bf16, in which rounding changes routes
ON_CPU = """
policy.precision=float32 policy.megatron_cfg.optimizer.bf16=false
policy.megatron_cfg.optimizer.use_precision_aware_optimizer=false policy.megatron_cfg.apply_rope_fusion=false
policy.megatron_cfg.bias_activation_fusion=false policy.megatron_cfg.moe_permute_fusion=false
policy.megatron_cfg.checkpoint.async_save=false policy.megatron_cfg.moe_router_dtype=fp32
policy.megatron_cfg.use_gloo_process_groups=true +policy.megatron_cfg.transformer_impl=local
""".split()
# settings of FSSDP, and whether a step is made of several calls
CASES = {"train_microbatch": ({}, True), "homes that move": ({"rehome": 1}, False)}
# Loggers, a server of vLLM and the transport of batches, which need further packages.
NOT_USED = (
    "nemo_rl.utils.logger",
    "nemo_rl.models.generation.vllm.vllm_worker_async",
    "tensordict",
)

pytestmark = [
    pytest.mark.newest,
    pytest.mark.skipif(not EXAMPLE.is_file(), reason="HECATE_NEMO_RL names no checkout"),
]


def install() -> Any:
    """Put NeMo-RL on the path and the CPU where it expects a GPU; returns the worker's module."""
    import megatron.core.distributed.fsdp.mcore_fsdp_adapter as fsdp
    import packages_on_cpu

    packages_on_cpu.ABSENT += NOT_USED
    # NeMo-RL is written for a newer main of Megatron-LM, with two classes in the place of one.
    for name in ("FullyShardedDataParallelV1", "FullyShardedDataParallelV2"):
        setattr(fsdp, name, getattr(fsdp, name, type(name, (), {})))
    sys.path.insert(0, str(CHECKOUT))
    import ray
    from nemo_rl.models.megatron import community_import
    from nemo_rl.models.policy.workers import megatron_policy_worker as workers

    # writes by a package that is a stand-in here
    community_import._prefer_nvrx_for_dist_ckpt_save = contextlib.nullcontext
    # Megatron keeps offloaded weights in ``cpu().pin_memory()``, which is no copy here
    torch.Tensor.pin_memory = torch.Tensor.clone
    ray.get_gpu_ids = lambda: [0]  # no actor
    torch.cuda.current_device = lambda: 0
    workers.apply_transformer_engine_patch = lambda: None  # writes into the installed package
    start = torch.distributed.init_process_group
    store = f"file://{os.environ['TEST_FOLDER']}/nccl"
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.distributed.init_process_group = lambda backend: start(
        "gloo", init_method=store, rank=rank, world_size=size
    )
    return workers


def configuration(model: Path) -> dict:
    """The example's policy, made small."""
    from nemo_rl.utils.config import (
        load_config,
        parse_hydra_overrides,
        register_omegaconf_resolvers,
    )
    from omegaconf import OmegaConf

    register_omegaconf_resolvers()
    overrides = [f"policy.model_name={model}", *SMALL, *ON_CPU]
    config = parse_hydra_overrides(load_config(EXAMPLE), overrides)
    return OmegaConf.to_container(config, resolve=True)["policy"]


def write_model(folder: Path) -> None:
    """Write Qwen3-MoE with random weights, made small, and a tokenizer of bytes."""
    from bridge_on_cpu import model_of_the_hub
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3MoeForCausalLM

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>"
    ).save_pretrained(folder)
    torch.manual_seed(1)
    Qwen3MoeForCausalLM(model_of_the_hub(str(folder))).save_pretrained(folder)


class Worker:
    """NeMo-RL's worker with skewed routing, and what it did.

    Args:
        folder: of model and converted model.
        settings: of FSSDP; ``None`` for stock Megatron.
    """

    def __init__(self, folder: Path, settings: dict | None) -> None:
        import tiny_gpt

        from megatron_hecate import bridge

        workers = install()
        self.settings = settings
        from nemo_rl.distributed.named_sharding import NamedSharding
        from transformers import AutoTokenizer

        os.environ["NRL_MEGATRON_CHECKPOINT_DIR"] = str(folder / "converted")
        model = folder / "Qwen3-30B-A3B"
        if os.environ["RANK"] == "0" and not model.exists():
            write_model(model)
        torch.distributed.barrier()
        setup = workers.setup_model_and_optimizer

        def set_up(policy_cfg: dict, megatron_cfg: Any, *args: Any, **kwargs: Any) -> Any:
            megatron_cfg.dist.distributed_backend = "gloo"
            if settings is not None:
                # the line of docs/frameworks.md
                bridge.enable(megatron_cfg, slots=2, speeds=FREE, timeout=60, **settings)
            return setup(policy_cfg, megatron_cfg, *args, **kwargs)

        with mock.patch.object(workers, "setup_model_and_optimizer", set_up):
            self.worker = workers.MegatronPolicyWorkerImpl(
                configuration(model),
                AutoTokenizer.from_pretrained(model),
                worker_sharding_annotations=NamedSharding([[[[0, 1]]]], names=AXES),
            )
        self.layers = tiny_gpt.moe_layers([self.worker.model])
        gc.collect()
        alive = sum(issubclass(type(thing), type(self.layers[0])) for thing in gc.get_objects())
        assert alive == len(self.layers), "the reference model outlives its setup"
        self.computed = torch.zeros(1)
        for layer in self.layers:
            tiny_gpt.add_skew(layer, tiny_gpt.Case())
        if settings is not None:
            assert all(layer.fssdp.config.slots == 2 for layer in self.layers)
            tiny_gpt.counting_hook(lambda chunks: chunks, self.computed)([self.worker.model])
        self.results: list[dict] = []

    def step(self, index: int, *, in_parts: bool) -> None:
        """One step of GRPO: log-probabilities, an update, and the export for the next rollout."""
        from nemo_rl.algorithms.loss.loss_functions import ClippedPGLossConfig, ClippedPGLossFn

        worker, data = self.worker, batch(index)
        worker.prepare_for_lp_inference()
        known = worker.get_logprobs(data=data)["logprobs"]
        reference = worker.get_reference_policy_logprobs(data=data)["reference_logprobs"]
        data.update(
            prev_logprobs=known, generation_logprobs=known, reference_policy_logprobs=reference
        )
        worker.prepare_for_training()
        loss = ClippedPGLossFn(ClippedPGLossConfig())
        if in_parts:
            worker.begin_train_step(loss)
            for start in range(0, SEQUENCES, 4):
                worker.train_microbatch(data.slice(start, start + 4))
            metrics = worker.finish_train_step()
        else:
            metrics = worker.train(data, loss)
        if self.settings:
            homes = self.layers[0].prefetcher.rehoming.homes
            assert homes.are_moved == (index > 0), "no expert was elsewhere when weights were read"
        worker.offload_before_refit()
        if index == 0:
            worker.prepare_refit_info()
        weights = {n: w.clone() for n, w in worker._iter_params_with_optional_kv_scales()}
        worker.offload_after_refit()
        self.results.append(
            dict(
                loss=metrics["global_loss"],
                norm=metrics["grad_norm"],
                known=known,
                reference=reference,
                weights=weights,
            )
        )


AXES = ["pipeline_parallel", "context_parallel", "tensor_parallel", "data_parallel"]


def batch(step: int) -> Any:
    """Sequences of unequal length with advantages, of this rank."""
    from nemo_rl.distributed.batched_data_dict import BatchedDataDict

    rank = torch.distributed.get_rank()
    numbers = torch.Generator().manual_seed(10 * step + rank)
    lengths = torch.randint(LENGTH // 2, LENGTH + 1, (SEQUENCES,), generator=numbers)
    mask = torch.arange(LENGTH) < lengths[:, None]
    tokens = torch.randint(0, 256, (SEQUENCES, LENGTH), generator=numbers)
    advantages = torch.randn(SEQUENCES, 1, generator=numbers).expand(-1, LENGTH)
    return BatchedDataDict(
        input_ids=tokens * mask,
        input_lengths=lengths,
        token_mask=mask.float(),
        sample_mask=torch.ones(SEQUENCES),
        advantages=advantages.contiguous(),
    )


@ranks(2, timeout=300)
def run(folder: Path, settings: dict | None, in_parts: bool) -> None:
    """Train in these ranks; results of each are in ``folder``."""
    if settings:
        import rehoming_hooks

        rehoming_hooks.find()
    worker = Worker(folder, settings)
    for index in range(STEPS):
        worker.step(index, in_parts=in_parts)
    name = "stock" if settings is None else "ours"
    rank = torch.distributed.get_rank()
    torch.save((worker.results, worker.computed), folder / f"{name}-{rank}.pt")


@pytest.mark.parametrize("case", CASES)
def test_steps_of_grpo(case: str, tmp_path: Path) -> None:
    settings, in_parts = CASES[case]
    run(tmp_path, None, in_parts)
    run(tmp_path, settings, in_parts)
    replicas = 0
    for rank in range(2):
        stock, none = torch.load(tmp_path / f"stock-{rank}.pt")
        ours, computed = torch.load(tmp_path / f"ours-{rank}.pt")
        assert not none
        replicas += int(computed)
        print([(r["loss"], r["norm"]) for r in stock], [(r["loss"], r["norm"]) for r in ours])
        assert len(stock) == STEPS and stock[0]["weights"]
        torch.testing.assert_close(ours, stock, rtol=1e-5, atol=1e-6)
        first, last = stock[0]["weights"], stock[-1]["weights"]
        assert any((first[n] - last[n]).abs().max() > 1e-3 for n in first), "nothing was trained"
    print(replicas, "tokens of replicas")
    assert replicas
