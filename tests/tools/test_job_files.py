"""``check --settings`` on files in the shapes that people keep settings in, reduced to what matters.

Oracle: literal verdicts.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from megatron_hecate.__main__ import main
from megatron_hecate.switch_on import unsupported
from megatron_hecate.tools.files.spellings import ALIASES, NEGATED
from megatron_hecate.tools.verdict import judge

pytestmark = pytest.mark.fast

ON, REFUSED, OPEN = 0, 1, 2  # exit statuses


@pytest.fixture
def check(tmp_path: Path, capsys: pytest.CaptureFixture) -> Any:
    """Exit status, and what was printed, for the text of a file."""

    def run(text: str, name: str = "job.yaml") -> tuple[int, str]:
        path = tmp_path / name
        path.write_text(text)
        status = main(["check", "--settings", str(path)])
        printed = capsys.readouterr()
        return status, printed.out + printed.err

    return run


NESTED = {
    "Primus": "modules: {pre_trainer: {framework: megatron, overrides: {%s, num_experts: 128}}}",
    "NeMo-RL": "policy: {megatron_cfg: {enabled: true, %s}, generation: {vllm_cfg: {precision: fp8}}}\ngrpo: {n: 1}",
    "ROLL": "actor_train: {strategy_args: {strategy_name: megatron_train, strategy_config: {%s}}}\n"
    "reference: {strategy_args: {strategy_name: megatron_infer, strategy_config: {expert_model_parallel_size: 1}}}",
    "verl": "actor_rollout_ref: {actor: {strategy: megatron, megatron: {override_transformer_config: {%s}}}, "
    "ref: {megatron: {expert_model_parallel_size: 1}}, rollout: {name: vllm}}",
    "sections": "ENV_VARS: {NVTE_FUSED_ATTN: 'true', QUOTED: 'none'}\nMODEL_ARGS: {%s}",
    "dotted": "policy.megatron_cfg: {%s}",
    "a list of parts": "stages: [{name: a}, {megatron: {%s}}]",
    "tags": "policy: !override {megatron_cfg: !merge {%s}}",
}


@pytest.mark.parametrize(
    "line",
    [
        "moe_megakernel_backend: mok",
        "moe_use_offloading_experts: true",
        "moe_shortcut_connection: true",
        "moe_router_topk_mode: seq_topk",
        "moe_ncclep_use_symm_mem: true",
        "mxfp8_2d_quantization: true",
        "fp8_recipe_attrs: {fp8_dpa: false}",
        "fp4_recipe_attrs.fp4_mha: true",
        "moe_flex_dispatcher_backend: moonep, moe_token_dispatcher_type: flex",
        "moe_token_dispatcher_type: moonep",
    ],
)
def test_settings_of_a_later_megatron(check: Any, line: str) -> None:
    """They are refused by their name."""
    name = line.partition(":")[0].partition(".")[0]
    status, said = check(NESTED["Primus"] % f"expert_model_parallel_size: 8, {line}")
    assert status == REFUSED and f"--moe-fssdp with {name}=" in said, said


@pytest.mark.parametrize("kind", NESTED)
def test_settings_in_nested_maps(check: Any, kind: str) -> None:
    status, said = check(NESTED[kind] % "expert_model_parallel_size: 8")
    assert status == ON and said.startswith("would switch on\n"), said
    if kind != "sections":
        assert (
            re.search(r"note: read: [\w.]+\.expert_model_parallel_size=8\b", said)
            and "note: not found, so Megatron's defaults" in said
        )
    status, said = check(NESTED[kind] % "expert_model_parallel_size: 8, use_megatron_fsdp: true")
    assert (
        status == REFUSED and "--moe-fssdp with use_megatron_fsdp=True: Megatron-FSDP owns" in said
    )
    status, said = check(
        NESTED[kind] % "expert_model_parallel_size: 8, fp8_cfg: {fp8: hybrid, fp8_recipe: delayed}"
    )
    assert (
        status == REFUSED and "--moe-fssdp with fp8_recipe='delayed': delayed scaling keeps" in said
    )
    status, said = check(NESTED[kind] % "tensor_model_parallel_size: 8")
    assert (
        status == OPEN and "expert_model_parallel_size was not found; FSSDP needs 2 or more" in said
    )


@pytest.mark.parametrize(
    "text",
    [
        "learning_rate: 1.0e-5\nmodel: {hidden_size: 64}",
        "fp8: true\npeft: {r: 8}",
        "policy: {megatron_cfg: {enabled: false, expert_model_parallel_size: 8}, dtensor_cfg: {enabled: true}}",
        "actor_train: {strategy_args: {strategy_name: fsdp2_train, strategy_config: {expert_model_parallel_size: 8}}}",
        "actor: {strategy: fsdp, megatron: {expert_model_parallel_size: 8}}",
        "rollout: {vllm: {expert_model_parallel_size: 8}}",
        "allocation_mode: sglang:d4t4+archon:(attn:d1p4t2c2|ffn:d1p4t1e4)",
    ],
)
def test_a_file_without_megatron_is_not_judged(check: Any, text: str) -> None:
    status, said = check(text)
    assert status == OPEN and "holds no setting of Megatron that is known here, such as" in said, (
        said
    )
    assert "would switch on" not in said and "refused" not in said.replace("job.yaml", "")


@pytest.mark.parametrize(
    ("text", "status"),
    [
        ("peft: {enabled: false}", ON),
        ("peft: null", ON),
        ("peft: {enabled: true, dim: 8}", REFUSED),
        ("peft: {dim: 8}", REFUSED),
        ("tuner_type: lora", REFUSED),
        ("tuner_type: full\nlora_rank: 8", ON),
        ("train_type: lora\nlora_rank: 8", REFUSED),
        ("use_lora: true", REFUSED),
        ("use_lora: false\nlora_rank: 0", ON),
        ("model: {lora_rank: 16}", REFUSED),
        ("lora: {rank: 0}", ON),
        ("lora: {rank: 32, type: lora}", REFUSED),
        ("lora_cfg: {enabled: false, dim: 8}", ON),
        ("finetuning_type: lora", REFUSED),
        ("peft_scheme: dora", REFUSED),
    ],
)
def test_adapters_by_any_name(check: Any, text: str, status: int) -> None:
    found, said = check(f"expert_model_parallel_size: 8\n{text}")
    assert found == status and ("adapters wrap the linears" in said) == (status == REFUSED), said


VERL = "actor_rollout_ref.actor.megatron.expert_model_parallel_size=4"
NEMO_RL = "policy.megatron_cfg.expert_model_parallel_size=8"
BRIDGE = "model.expert_model_parallel_size=4"
FLAGS = "expert_model_parallel_size=8"


def _overrides(words: str) -> str:
    """Dotted keys in YAML of overrides as on a command line."""
    return "\n".join(word.replace("=", ": ", 1) for word in words.split())


@pytest.mark.parametrize(
    ("overrides", "status"),
    [
        (f"{VERL} actor_rollout_ref.model.lora.rank=32", REFUSED),
        (f"{VERL} +actor_rollout_ref.model.lora.rank=16 actor_rollout_ref.model.lora.type=dora", REFUSED),
        (f"{VERL} actor_rollout_ref.model.lora.rank=0 actor_rollout_ref.model.lora.type=lora", ON),
        (f"{VERL} actor_rollout_ref.model.lora.rank=null actor_rollout_ref.model.lora.dtype=None", ON),
        (f"{VERL} actor_rollout_ref.model.lora_rank=16", REFUSED),
        (f"{VERL} actor_rollout_ref.model.lora_rank=0 actor_rollout_ref.model.lora_alpha=16", ON),
        (f"{VERL} actor_rollout_ref.rollout.lora.rank=32", ON),
        (f"{VERL} critic.enable=False critic.model.lora.rank=8", ON),
        (f"{VERL} actor_rollout_ref.model.lora.rank=$X", OPEN),
        (f"{VERL} actor_rollout_ref.model.lora.rank=0 actor_rollout_ref.model.lora.type=$X", ON),
        (f"{NEMO_RL} policy.megatron_cfg.peft.enabled=true policy.megatron_cfg.peft.dim=32", REFUSED),
        (f"{NEMO_RL} ++policy.megatron_cfg.peft.enabled=True", REFUSED),
        (f"{NEMO_RL} policy.megatron_cfg.peft.enabled=false policy.megatron_cfg.peft.dim=32", ON),
        (f"{NEMO_RL} policy.megatron_cfg.peft.enabled=$X policy.megatron_cfg.peft.dim=32", OPEN),
        (f"{NEMO_RL} policy.dtensor_cfg.lora_cfg.enabled=true", ON),
        (f"{BRIDGE} recipe=glm_45v_peft_config mode=lora", REFUSED),
        (f"{BRIDGE} recipe=glm_45v_peft_config", REFUSED),
        (f"{BRIDGE} recipe=qwen3_30b_a3b_peft_8gpu_h100_bf16_config", REFUSED),
        (f"{BRIDGE} recipe=${{X}}_lora_config", REFUSED),
        (f"{BRIDGE} model=qwen3_30b_a3b mode=dora", REFUSED),
        (f"{BRIDGE} peft_scheme=lora recipe=qwen3_30b_a3b_sft_config", REFUSED),
        (f"{BRIDGE} mode=sft recipe=qwen3_30b_a3b_sft_config", ON),
        (f"{FLAGS} lora_alpha=32 lora_dim=16", REFUSED),
        (f"{FLAGS} lora_dim=$X", OPEN),
        (f"{FLAGS} --lora-rank=32 target_modules=all-linear", REFUSED),
        (f"{FLAGS} lora_rank=0", ON),
        (f"{FLAGS} lora_rank=0 lora_adapter_path=adapter", REFUSED),
        (f"{FLAGS} lora_rank=$X", OPEN),
        (f"{FLAGS} q_lora_rank=1536 kv_lora_rank=512", ON),
        (f"{FLAGS} tuner_type=lora_llm", REFUSED),
        (f"{FLAGS} tuner_type=$X lora_rank=8", OPEN),
        (f"{FLAGS} tuner_type=full lora_rank=$X", ON),
        (f"{FLAGS} use_lora=false lora_rank=8", ON),
    ],
)  # fmt: skip
def test_adapters_in_dotted_keys(check: Any, overrides: str, status: int) -> None:
    """verl, NeMo-RL, Megatron-Bridge, LoongForge, miles, ms-swift; $X has no value."""
    found, said = check(_overrides(overrides))
    assert found == status, said
    assert ("peft='" in said and "adapters wrap" in said) == (status == REFUSED), said
    assert ("peft=$X is decided elsewhere" in said) == (status == OPEN), said


@pytest.mark.parametrize(
    ("text", "status"),
    [
        ("actor_rollout_ref: {model: {lora: {type: lora, rank: 32}}, actor: {megatron: {%s}}}", REFUSED),
        ("actor_rollout_ref: {model: {lora: {type: lora, rank: 0, merge: false}}, actor: {megatron: {%s}}}", ON),
        ("policy: {megatron_cfg: {%s, peft: {enabled: true, dim: 8}}}", REFUSED),
        ("policy: {megatron_cfg: {%s, peft: {enabled: '${X}', dim: 8}}}", OPEN),
        ("policy.megatron_cfg: {%s, peft.enabled: true}", REFUSED),
        ("actor_train: {model_args: {lora_target: all-linear, lora_rank: 8}, strategy_args: {%s}}", REFUSED),
        ("actor_train: {model_args: {lora_target: null}, strategy_args: {%s}}", ON),
        ("{%s, peft_config: {lora_alpha: 32}}", REFUSED),
        ("{%s, lora: {}}", ON),
        ("{%s, recipe: glm_45v_peft_config}", REFUSED),
    ],
)  # fmt: skip
def test_adapters_where_frameworks_keep_them(check: Any, text: str, status: int) -> None:
    found, said = check(text % "expert_model_parallel_size: 8")
    assert found == status and ("adapters wrap" in said) == (status == REFUSED), said
    assert ("peft=${X} is decided elsewhere" in said) == (status == OPEN), said


def test_adapters_of_one_model_are_not_the_others(check: Any) -> None:
    for section, refused, other in (
        ("actor_rollout_ref", "actor", "critic"),
        ("critic", "critic", "actor"),
    ):
        overrides = (
            f"{VERL} critic.megatron.expert_model_parallel_size=4 {section}.model.lora.rank=8"
        )
        status, said = check(_overrides(overrides))
        assert status == REFUSED and f"refused {refused}: " in said and f"on {other}\n" in said


@pytest.mark.parametrize(
    ("text", "status"),
    [
        ("policy: {quant_cfg: examples/modelopt/nvfp4.yaml, megatron_cfg: {%s}}", REFUSED),
        ("policy: {quant_cfg: null, megatron_cfg: {%s}}", ON),
        ("policy: {quant_cfg: '${X}', megatron_cfg: {%s}}", OPEN),
        ("policy: {megatron_cfg: {%s}, generation: {quant_cfg: NVFP4_DEFAULT_CFG}}", ON),
        ("{policy: {megatron_cfg: {%s}}, teacher: {quant_cfg: NVFP4_DEFAULT_CFG}}", ON),
        ("actor_rollout_ref: {actor: {megatron: {%s, qat: {enable: true, mode: w4a16}}}}", REFUSED),
        ("actor_rollout_ref: {actor: {megatron: {%s, qat: {enable: false, mode: w4a16}}}}", ON),
        (f"{NEMO_RL} policy.quant_cfg=NVFP4_DEFAULT_CFG", REFUSED),
        (f"{NEMO_RL} policy.quant_cfg=$X policy.generation.quant_cfg=$X", OPEN),
        (f"{VERL} actor_rollout_ref.actor.megatron.qat.enable=True", REFUSED),
        (f"{VERL} actor_rollout_ref.actor.megatron.qat.enable=False", ON),
    ],
)
def test_modelopt_by_other_names(check: Any, text: str, status: int) -> None:
    """NeMo-RL's and verl's; what only generates is quantized as it likes."""
    text = text % "expert_model_parallel_size: 8" if "%s" in text else _overrides(text)
    found, said = check(text)
    assert found == status, said
    assert ("modelopt_enabled=True: ModelOpt replaces" in said) == (status == REFUSED), said
    assert ("modelopt_enabled=$" in said) == (status == OPEN), said


@pytest.mark.parametrize(
    ("overrides", "status"),
    [
        ("enable_primus_turbo: true, use_turbo_grouped_gemm: true", REFUSED),
        ("enable_primus_turbo: true, use_turbo_deepep: true", REFUSED),
        ("enable_primus_turbo: true, use_turbo_mega_moe: true", REFUSED),
        ("enable_primus_turbo: true, turbo_sync_free_moe_stage: 2", REFUSED),
        ("use_turbo_grouped_gemm: true", REFUSED),
        ("enable_primus_turbo: '${X}', use_turbo_deepep: true", OPEN),
        ("enable_primus_turbo: true, use_turbo_deepep: '${X}'", OPEN),
        ("enable_primus_turbo: true, turbo_sync_free_moe_stage: '${X}'", OPEN),
        ("enable_primus_turbo: false, use_turbo_deepep: true, turbo_sync_free_moe_stage: 2", ON),
        ("enable_primus_turbo: true, turbo_sync_free_moe_stage: 1, use_turbo_attention: true", ON),
    ],
)
def test_primus_kernels(check: Any, overrides: str, status: int) -> None:
    text = "modules: {pre_trainer: {framework: megatron, overrides: {%s}}}"
    found, said = check(text % f"expert_model_parallel_size: 8, {overrides}")
    assert found == status and ("Primus replaces" in said) == (status == REFUSED), said


def test_several_models_that_train(check: Any) -> None:
    text = "actor: {megatron: {expert_model_parallel_size: 8}}\ncritic: {megatron: {expert_model_parallel_size: %s}}"
    status, said = check(text % 1 + "\nuse_torch_fsdp2: false")
    assert (
        status == REFUSED
        and "on actor\n" in said
        and "refused critic: --moe-fssdp with expert_model" in said
    )
    assert check(text % 4)[0] == ON
    assert (
        check(
            "actor: {megatron: {expert_model_parallel_size: 8}}\ncritic: {strategy: fsdp, lr: 1}"
        )[0]
        == ON
    )


@pytest.mark.parametrize(
    ("backend", "status"),
    [
        ("megatron:(attn:d1p4t2c2|ffn:d1p4t1e4)", ON),
        ("sglang:d4t4+megatron:(attn:d1p4t2|ffn:d1p4e2)", ON),
        ("megatron:d2p2t4", REFUSED),
    ],
)
def test_sizes_in_one_text(check: Any, backend: str, status: int) -> None:
    """AReaL's, for a job or for each of its engines."""
    assert check(f'allocation_mode: "{backend}"')[0] == status
    assert (
        check(f'rollout: {{backend: "sglang:d4"}}\nactor: {{backend: "{backend.split("+")[-1]}"}}')[
            0
        ]
        == status
    )


@pytest.mark.parametrize("written", ["${EP:8}", "${EP:-8}", "$EP", "${oc.env:EP,8}", "$((A / 2))"])
def test_a_variable_is_asked_for(check: Any, written: str) -> None:
    """Oracle: verdicts with values in its place. Only what a rule reads is asked for."""
    text = (
        "MODEL_ARGS: {--expert-model-parallel-size: '%s', --num-experts: 128, --seq-length: '${S}'}"
    )
    line = f"cannot be judged yet: expert_model_parallel_size={written} is decided elsewhere. Write"
    status, said = check(text % written)
    assert status == OPEN and line in said and "S}" not in said.partition("cannot be")[2], said
    assert check(text.replace("'%s'", "8"))[0] == ON
    assert check(text.replace("'%s'", "1"))[0] == REFUSED


@pytest.mark.parametrize(
    ("settings", "asks"),
    [
        ("moe_grouped_gemm: '${X}'", ""),
        ("moe_grouped_gemm: '${X}', fp8: hybrid, fp8_recipe: mxfp8", "moe_grouped_gemm"),
        ("fp8: hybrid, fp8_recipe: '${X}'", "fp8_recipe"),
        ("fp8_recipe: '${X}'", ""),
        ("fp8: '${X}', fp8_recipe: delayed", "fp8"),
        ("moe_router_dtype: 'fp${X}'", "moe_router_dtype"),
        ("moe_token_dispatcher_type: '${X}'", "moe_token_dispatcher_type"),
        ("moe_flex_dispatcher_backend: '${X}'", ""),
        ("moe_fssdp_rehome: 4, ckpt_format: '${X}'", "ckpt_format"),
        ("ckpt_format: '${X}'", ""),
        ("cuda_graph_impl: local, cuda_graph_modules: [attn, '${X}']", "cuda_graph_modules"),
        ("use_torch_fsdp2: true, moe_router_dtype: '${X}'", "moe_router_dtype"),
        ("cpu_offloading_num_layers: '${X}'", "cpu_offloading"),
        ("tensor_model_parallel_size: '${X}', tensor_parallel_num_weight_shards: 2", "gtp_weight_remat_size"),
    ],
)  # fmt: skip
def test_an_unknown_value_is_asked_for_where_it_decides(
    check: Any, settings: str, asks: str
) -> None:
    status, said = check(f"{{expert_model_parallel_size: 8, {settings}}}")
    is_refused = "fsdp2" in settings
    assert status == (REFUSED if is_refused else OPEN if asks else ON), said
    assert (f"{asks}=" in said and "is decided elsewhere" in said) == bool(asks), said
    assert ("--moe-fssdp with" in said) == is_refused, said


def test_every_rule_asks_for_its_setting(check: Any) -> None:
    """Whatever rule reads it: with a known value the job is on or refused, without it is neither."""
    for rule in unsupported.RULES:
        if rule.unsupported is None:
            status, said = check(f"expert_model_parallel_size: 8\n{rule.setting}: '${{X}}'")
            assert status == OPEN and f"{rule.setting}=${{X}} is decided elsewhere" in said, said


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("torchrun pretrain_gpt.py --num-experts 8\n", "run.sh"),
        ("#!/bin/bash\nsrun pretrain.py\n", "run"),
        ("#!/usr/bin/env bash\nx='\n", "run.txt"),
        ("", "job.slurm"),
    ],
)
def test_a_shell_script_is_refused_with_the_way_out(check: Any, text: str, name: str) -> None:
    status, said = check(text, name)
    assert status == OPEN and said.count("\n") == 1
    assert f"{name}: is a shell script, which only a shell can read; write megatron-hecate" in said


@pytest.mark.parametrize("value", ["--num-experts 64 --bf16", ["--num-experts", "64"]])
def test_a_command_line_in_a_file_is_named(check: Any, value: Any) -> None:
    job = {"expert_model_parallel_size": 8, "job": {"cmd_args": value}}
    status, said = check(json.dumps(job), "job.json")
    assert status == ON and "note: left out: job.cmd_args (a command line: megatron-hecate" in said


def test_files_that_go_on_elsewhere_are_named(check: Any) -> None:
    text = "defaults: [grpo_base.yaml]\npolicy: {megatron_cfg: {expert_model_parallel_size: 8}}"
    status, said = check(text)
    assert (
        status == ON
        and "further settings may stand in files that were not read: grpo_base.yaml" in said
    )


def test_spellings_are_names_of_rules() -> None:
    """Every field that a spelling stands for is read by a rule. Oracle: the rules, run."""
    job = dict(expert_model_parallel_size=8, fp8="e4m3", cuda_graph_impl="local")
    job |= dict(overlap_dispatch_backward_with_experts_wgrad=True)
    names = judge([job]).names
    assert {*ALIASES.values(), *NEGATED.values()} <= names
