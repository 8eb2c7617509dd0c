"""slime's actor for Megatron, whose checkout $HECATE_SLIME names: equal with FSSDP.

Oracle: the same run without ``--custom-megatron-init-path``. Arguments, loading, model, microbatches, log-probabilities
of reference and policy, advantages, losses, training, swaps of weights and export are slime's (`slime_on_cpu`);
rollouts are random. Layers are TransformerEngine's, over `te_on_cpu`. Packages, with the versions that ran::

    pip install ray==2.60.0 wandb==0.31.0 transformers==5.16.1 httpx==0.28.1 xxhash==4.1.0
    pip install --no-deps torch_memory_saver==0.0.10
"""

from __future__ import annotations

import dataclasses
import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import tiny_qwen3_moe
import torch
import torch.distributed as dist
from pretraining import ROOT
from ranks import ranks
from replica_tokens import ReplicaTokens

pytestmark = [
    pytest.mark.newest,
    pytest.mark.skipif("HECATE_SLIME" not in os.environ, reason="HECATE_SLIME names no checkout"),
]

FREE = str(ROOT / "tests" / "data" / "free_copies.json")
ROLLOUTS = 3
# The flags of scripts/run-qwen3-30B-A3B.sh with smaller numbers, without SGLang's, the optimizer's offloading and
# kernels of GPUs.
FLAGS = """
    --actor-num-nodes 1 --actor-num-gpus-per-node 2 --debug-train-only --num-gpus-per-node 2
    --disable-bias-linear --qk-layernorm --group-query-attention --num-attention-heads 4
    --num-query-groups 2 --kv-channels 8 --num-layers 4 --hidden-size 32 --ffn-hidden-size 64
    --normalization RMSNorm --position-embedding-type rope --norm-epsilon 1e-6 --rotary-percent 1.0
    --swiglu --untie-embeddings-and-output-weights --vocab-size 260 --rotary-base 10000
    --moe-ffn-hidden-size 48 --moe-router-score-function softmax --moe-token-dispatcher-type alltoall
    --moe-router-topk 2 --moe-layer-freq 1 --num-experts 8 --moe-grouped-gemm
    --moe-token-drop-policy probs --moe-router-dtype fp32 --moe-aux-loss-coeff 0
    --moe-router-load-balancing-type none
    --num-rollout 3 --rollout-batch-size 4 --n-samples-per-prompt 4 --rollout-max-response-len 64
    --global-batch-size 8 --use-dynamic-batch-size --max-tokens-per-gpu 96
    --expert-model-parallel-size 2 --recompute-granularity full --recompute-method uniform
    --recompute-num-layers 1 --advantage-estimator grpo --use-kl-loss --kl-loss-coef 0.1
    --kl-loss-type low_var_kl --entropy-coef 0.01 --eps-clip 0.2 --eps-clip-high 0.28
    --optimizer adam --lr 3e-3 --lr-decay-style constant --weight-decay 0.1
    --attention-dropout 0.0 --hidden-dropout 0.0 --accumulate-allreduce-grads-in-fp32
    --attention-softmax-in-fp32 --no-rope-fusion
    --update-weight-transport disk --data-pad-size-multiplier 16
"""


def _rollout(actor: Any, index: int) -> list:
    """Draw prompts and responses with rewards, as ``RolloutManager._split_train_data_by_dp`` packs them."""
    from slime.utils.dp_schedule import build_dp_schedule
    from slime.utils.misc import Box

    args = actor.args
    generator = torch.Generator().manual_seed(index)
    samples = args.rollout_batch_size * args.n_samples_per_prompt

    def draw(low: int, high: int, count: int = 1) -> list[int]:
        return torch.randint(low, high, (count,), generator=generator).tolist()

    lengths = draw(8, 40, samples)
    tokens = [draw(0, 256, 6 + length) for length in lengths]
    rewards = [float(r) for r in draw(0, 2, samples)]
    schedule = build_dp_schedule(
        args,
        actor.train_parallel_config,
        list(map(len, tokens)),
        global_batch_size=args.global_batch_size,
        rollout_indices=list(range(samples)),
    )
    partitions, indices, microbatches, sizes = schedule
    return [
        Box(
            {
                "partition": own,
                "tokens": [torch.tensor(tokens[i]) for i in own],
                "response_lengths": [lengths[i] for i in own],
                "rewards": [rewards[i] - 0.5 for i in own],
                "loss_masks": [torch.ones(lengths[i], dtype=torch.int) for i in own],
                "raw_reward": rewards,
                "total_lengths": list(map(len, tokens)),
                "global_batch_sizes": sizes,
                "num_microbatches": microbatches,
                "micro_batch_indices": indices[rank],
            }
        )
        for rank, own in enumerate(partitions)
    ]


def _log_to(logs: list[dict]) -> None:
    """Keep what slime logs, but for times."""
    from slime.observability import logging_utils

    def log(args: Any, metrics: dict, step_key: str) -> None:
        numbers = {name: float(value) for name, value in metrics.items()}
        logs.append({name: n for name, n in numbers.items() if not name.startswith("perf/")})

    logging_utils.log = log


@ranks(2, timeout=300, preload=None)
def _train(folder: Path, flags: str, keeps_world: bool = False) -> None:
    """Run slime's actor in this rank. What it logs, its parameters and the numbers of tokens are in ``folder``."""
    if keeps_world:
        # set here: ranks are forked from a server that has the environment of the first test
        os.environ["SLIME_DESTROY_WORLD_PROCESS_GROUP"] = "0"
    import slime_on_cpu

    slime_on_cpu.install()
    from slime.backends.megatron_utils.actor import MegatronTrainRayActor
    from slime.utils.arguments import parse_args
    from slime.utils.reloadable_process_group import ReloadableProcessGroup

    rank = dist.get_rank()
    slime_on_cpu.meet_in_store()
    sys.path.insert(0, str(folder))
    sys.argv = ["train.py", *flags.split()]
    logs: list[dict] = []
    _log_to(logs)
    actor = MegatronTrainRayActor(2, rank, "unused", 0)
    actor.init(parse_args(), "actor", with_ref=True)
    tokens = ReplicaTokens()
    for index in range(ROLLOUTS):
        actor.train(index, _rollout(actor, index))
        if actor.args.offload_train:
            actor.wake_up()
        actor.weight_updater.update_weights()
        if actor.args.offload_train:
            actor.sleep()
            groups = ReloadableProcessGroup.GROUPS[os.getpid()]
            assert len(groups) > 5 and all(group.group is None for group in groups)
    params = {name: p.detach() for m in actor.model for name, p in m.named_parameters()}
    result = {"logs": logs, "params": params, "tokens": (tokens.all, tokens.of_replicas)}
    torch.save(result, folder / f"rank-{rank}.pt")


def _enable() -> str:
    """Return the function in the documentation, with free copies."""
    text = (ROOT / "docs" / "frameworks.md").read_text()
    (function,) = re.findall(r"^def enable\(args\):\n(?:\n|    .*\n)+", text, re.MULTILINE)
    settings = {"speeds": FREE, "timeout": 60}
    lines = [f"    args.moe_fssdp_{name} = {value!r}\n" for name, value in settings.items()]
    return "".join([function, *lines])


@dataclasses.dataclass(frozen=True)
class Run:
    """What a run of slime leaves behind."""

    logs: list[dict]
    params: list[dict]
    weights: list[dict]  # exported after each rollout
    computed: int
    by_replicas: int


def train(folder: Path, module: str = "", *, flags: str = "", **run: Any) -> Run:
    """Train with the functions of ``my_module``, if it has any."""
    from safetensors.torch import load_file

    folder.mkdir()
    (folder / "my_module.py").write_text(module)
    (folder / "config.yaml").write_text("bf16: false\n")
    model = folder.parent / "model"
    everything = f"""{FLAGS} {flags} --hf-checkpoint {model} --ref-load {model} --load {model}
        --custom-config-path {folder}/config.yaml --update-weight-disk-dir {folder}/weights"""
    if module:
        everything += " --custom-megatron-init-path my_module.enable"
    _train(folder, everything, **run)
    results = [torch.load(folder / f"rank-{rank}.pt") for rank in (0, 1)]
    versions = sorted((folder / "weights").iterdir())
    weights = [
        {n: w for file in version.glob("*.safetensors") for n, w in load_file(file).items()}
        for version in versions
    ]
    return Run(
        [log for result in results for log in result["logs"]],
        [result["params"] for result in results],
        weights,
        *map(sum, zip(*(result["tokens"] for result in results), strict=True)),
    )


def compare(folder: Path, *, offloads: bool) -> None:
    """Train with and without FSSDP.

    Args:
        folder: of the test.
        offloads: whether the policy is offloaded for rollouts; the default process group stays.
    """
    tiny_qwen3_moe.write(folder / "model", skew=0.5)
    run: dict[str, Any] = {"keeps_world": offloads}
    if offloads:
        run["flags"] = "--offload-train"
    stock = train(folder / "stock", **run)
    ours = train(folder / "ours", _enable(), **run)
    print(stock.logs, ours.logs, f"{ours.by_replicas} of {ours.computed} tokens")
    assert stock.by_replicas == 0 < ours.by_replicas < ours.computed == stock.computed
    assert len(stock.logs) == 4 * ROLLOUTS
    assert len({log["train/grad_norm"] for log in stock.logs if "train/grad_norm" in log}) > 2
    for log, with_fssdp in zip(stock.logs, ours.logs, strict=True):
        assert with_fssdp == pytest.approx(log, rel=1e-6, abs=1e-7)
    torch.testing.assert_close(ours.params, stock.params, rtol=0, atol=1e-6)
    assert len(stock.weights) == ROLLOUTS and len(stock.weights[0]) > 100
    torch.testing.assert_close(ours.weights, stock.weights, rtol=0, atol=1e-6)


@pytest.mark.parametrize("offloads", [False, True])
def test_the_actor_trains_as_stock(offloads: bool, tmp_path: Path) -> None:
    """With the policy on the device throughout; and offloaded for rollouts, with all groups destroyed and made again,
    but for the default one."""
    compare(tmp_path, offloads=offloads)
