"""``megatron-hecate check --settings FILE``, for people who have a recipe and no ranks yet.

Oracle: literal verdicts and exit statuses, on files in the shapes that people keep settings in.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from megatron_hecate.switch_on import unsupported
from megatron_hecate.tools.files.spellings import ALIASES, NEGATED
from megatron_hecate.tools.verdict import judge

pytestmark = pytest.mark.fast

ON, REFUSED, OPEN = 0, 1, 2  # exit statuses
GRAPHS = (
    "--moe-fssdp with cuda_graph_impl='local': replicas are fetched and returned between CUDA graphs of the parts "
    "attn, mamba, mlp, moe_router and moe_preprocess (cuda_graph_modules, before 0.18 cuda_graph_scope), "
    "or within one of the whole iteration (cuda_graph_impl=full_iteration); other graphs contain the experts; "
    "set model.cuda_graph_impl=none or --cuda-graph-impl none"
)
EP = "expert_model_parallel_size: 8"


@pytest.fixture
def check(cli: Any, tmp_path: Path) -> Any:
    """Exit status, and what was printed, for the text of a file or for its settings."""

    def run(settings: Any, name: str = "job.yaml") -> tuple[int, str]:
        path = tmp_path / name
        path.write_text(settings if isinstance(settings, str) else json.dumps(settings))
        status, out, err = cli("check", "--settings", path)
        return status, (out + err).strip()

    return run


@pytest.mark.parametrize(
    "settings",
    [
        {"expert_model_parallel_size": 8, "cuda_graph_impl": "local", "peft": None, "other": [1]},
        {"model.expert_model_parallel_size": 8, "model.cuda_graph_impl": "local"},
        {"model": {"expert_model_parallel_size": 8, "cuda_graph_impl": "local"}, "ddp": {"use_megatron_fsdp": False}},
        {"model": {"transformer": {"expert_model_parallel_size": 8}, "cuda_graph_impl": "local"}},
        {"MODEL_ARGS": {"--expert-model-parallel-size": 8, "--cuda-graph-impl": "local"}},
        {"+model.expert_model_parallel_size": 8, "++model.cuda_graph_impl": "local"},
    ],
    ids=["fields", "prefixes", "parts", "parts of parts", "flags of functional tests", "overrides"],
)  # fmt: skip
def test_names_as_users_write_them(check: Any, settings: dict) -> None:
    assert check(settings, "job.json") == (REFUSED, GRAPHS)
    assert check(json.dumps(settings).replace('"local"', '"none"')) == (ON, "would switch on")


@pytest.mark.parametrize(
    ("settings", "refused"),
    [
        ({"cuda_graph_impl": "transformer_engine", "cuda_graph_modules": ["attn", "moe_router"]}, ""),
        ({"cuda_graph_impl": "transformer_engine", "cuda_graph_scope": "attn"}, ""),
        ({"cuda_graph_impl": "transformer_engine", "cuda_graph_modules": ["moe"]}, "cuda_graph_impl"),
        ({"cuda_graph_modules": "full_iteration"}, "cuda_graph_impl"),
        ({"moe_fssdp_rehome": 4, "exp_avg_dtype": "torch.uint8"}, "exp_avg_dtype"),
        ({"moe_fssdp_rehome": 4, "exp_avg_dtype": "torch.bfloat16"}, ""),
    ],
)  # fmt: skip
def test_objects_as_bridge_writes_them(check: Any, settings: dict, refused: str) -> None:
    """Enumerators and data types of ``run_config.yaml``. Oracle: the same settings as texts."""

    def as_object(value: Any) -> Any:
        if isinstance(value, list):
            return [as_object(item) for item in value]
        if str(value).startswith("torch."):
            return {"_target_": value, "_call_": False}
        kind = "megatron.core.transformer.enums.CudaGraphModule"
        return {"_target_": kind, "_call_": True, "_args_": [2], "_name_": value}

    names = ("cuda_graph_modules", "cuda_graph_scope", "exp_avg_dtype")
    objects = {key: as_object(v) if key in names else v for key, v in settings.items()}
    ranks = {"expert_model_parallel_size": 8}
    texts, said = (check({"model": {**ranks, **job}}) for job in (settings, objects))
    assert said == texts and said[0] == (REFUSED if refused else ON)
    assert refused in said[1]


@pytest.mark.parametrize(
    ("settings", "refused"),
    [
        ("fp8: e4m3", "fp8_recipe=None"),
        ("fp8: e4m3, mixed_precision.fp8_recipe: mxfp8", None),
        ("fp8: null, fp8_recipe: delayed", None),
        ("model: {fp8: e4m3, fp8_recipe: mxfp8}, mixed_precision.fp8_recipe: delayed", "fp8_recipe="),
        ("model: {fp8: e4m3, fp8_recipe: delayed}, mixed_precision.fp8_recipe: mxfp8", None),
        ("mixed_precision: bf16_with_fp8_delayed_scaling_mixed", "fp8_recipe='delayed'"),
        ("mixed_precision: bf16_with_mxfp8_mixed", None),
        ("fp8_recipe_attrs: {fp8_dpa: false}", "fp8_recipe_attrs="),
        ("--cpu-offloading-num-layers: 2", "cpu_offloading=True"),
        ("cpu_offloading: false, cpu_offloading_num_layers: 2", None),
        ("--kitchen-recipe-number: 0", "use_kitchen=True"),
        ("--tensor-model-parallel-size: 2, --tensor-parallel-num-weight-shards: 4", "gtp_weight_remat_size=2"),
        ("--tensor-model-parallel-size: 2, --tensor-parallel-num-weight-shards: 2", None),
        ("--expert-tensor-parallel-num-weight-shards: 3", "expert_gtp_weight_remat_size=3"),
        ("moe_grouped_gemm: false, fp8: e4m3, fp8_recipe: mxfp8", "moe_grouped_gemm=False"),
        ("moe_token_dispatcher_type: flex, moe_flex_dispatcher_backend: ncclep, moe_expert_capacity_factor: 1",
         "moe_expert_capacity_factor=1"),
        # of a later Megatron
        ("moe_shortcut_connection: true", "moe_shortcut_connection="),
        ("moe_flex_dispatcher_backend: moonep, moe_token_dispatcher_type: flex", "moe_flex_dispatcher_backend="),
    ],
)  # fmt: skip
def test_settings_of_other_names_that_lead_to_refused_ones(
    check: Any, settings: str, refused: str | None
) -> None:
    status, text = check(f"{{{EP}, {settings}}}")
    if refused is None:
        assert (status, text) == (ON, "would switch on")
    else:
        assert status == REFUSED and text.startswith(f"--moe-fssdp with {refused}"), text


def test_without_slots_one_rank_is_enough(check: Any) -> None:
    for slots, status in ((0, ON), (1, REFUSED)):
        assert check(dict(expert_model_parallel_size=1, moe_fssdp_slots=slots))[0] == status


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[]", "holds [], not a mapping of settings or a list of such"),
        ("3", "holds 3, not a mapping"),
        ('[{"expert_model_parallel_size": 2}, 3]', "entry 2 is 3, not a mapping"),
        ("{", "is not JSON: "),
        ("[" * 100_000, "is nested too deeply, or within itself"),
        ('{"use_kitchen": "false"}', "use_kitchen='false' is a text; write true, false or null without quotes"),
        ('{"use_kitchen": 1}', "use_kitchen=1 must be true or false"),
        ('{"cuda_graph_impl": false}', "cuda_graph_impl=False must be a name"),
        ('{"expert_model_parallel_size": "8"}', "expert_model_parallel_size='8' must be a whole number"),
        ('{"moe_fssdp_slots": -3}', "slots=-3 must be a whole number from 0 to 4096"),
        ('{"peft": "none"}', "peft='none' must be null or a value"),
        # also where no rule looks
        ('{"moe_grouped_gemm": "false"}', "moe_grouped_gemm='false' is a text"),
        ('{"fp8": "none"}', "fp8='none' is a text"),
        ('{"moe_expert_capacity_factor": "abc"}', "moe_expert_capacity_factor='abc' must be a number"),
        ('[{"name": "a", "model.use_kitchen": "no"}]', "a: use_kitchen='no' must be true or false"),
    ],
)  # fmt: skip
def test_a_file_that_makes_no_sense_is_one_clear_error(check: Any, text: str, message: str) -> None:
    status, error = check(text, "settings.json")
    assert status == OPEN and message in error and "settings.json: " in error and "\n" not in error


def test_a_file_that_cannot_be_read(check: Any, cli: Any) -> None:
    status, _, error = cli("check", "--settings", "missing.json")
    assert status == OPEN and "missing.json: cannot be read: " in error
    aliases = [f"l{i}: &l{i} [{', '.join(9 * [f'*l{i - 1}'])}]" for i in range(1, 30)]
    status, error = check("\n".join(["l0: &l0 1", *aliases]), "small.yaml")
    assert status == OPEN and "holds more than 100000 values once its aliases" in error
    for text in ("a: [", "a: 1\n---\nb: 2", "&job\nmodel: *job"):
        status, error = check(text, "bad.yaml")
        assert status == OPEN and "bad.yaml: is n" in error and "\n" not in error
    for text, name in (("torchrun x.py\n", "run.sh"), ("#!/usr/bin/env bash\nx='\n", "run.txt")):
        status, said = check(text, name)
        assert status == OPEN and f"{name}: is a shell script, which only a shell can read" in said


NESTED = {
    "Primus": "modules: {pre_trainer: {framework: megatron, overrides: {%s, num_experts: 128}}}",
    "NeMo-RL": "policy: {megatron_cfg: {enabled: true, %s}, generation: {vllm_cfg: {precision: fp8}}}\ngrpo: {n: 1}",
    "ROLL": "actor_train: {strategy_args: {strategy_name: megatron_train, strategy_config: {%s}}}\n"
    "reference: {strategy_args: {strategy_name: megatron_infer, strategy_config: {expert_model_parallel_size: 1}}}",
    "verl": "actor_rollout_ref: {actor: {strategy: megatron, megatron: {override_transformer_config: {%s}}}, "
    "ref: {megatron: {expert_model_parallel_size: 1}}, rollout: {name: vllm}}",
    "dotted": "policy.megatron_cfg: {%s}",
    "a list of parts": "stages: [{name: a}, {megatron: {%s}}]",
    "tags": "policy: !override {megatron_cfg: !merge {%s}}",
}


@pytest.mark.parametrize("kind", NESTED)
def test_settings_in_nested_maps(check: Any, kind: str) -> None:
    status, said = check(NESTED[kind] % EP)
    assert status == ON and said.startswith("would switch on\n"), said
    assert re.search(r"note: read: [\w.]+\.expert_model_parallel_size=8\b", said)
    assert "note: not found, so Megatron's defaults" in said
    status, said = check(NESTED[kind] % f"{EP}, use_megatron_fsdp: true")
    assert status == REFUSED and "--moe-fssdp with use_megatron_fsdp=True: Megatron-FSDP" in said
    status, said = check(NESTED[kind] % "tensor_model_parallel_size: 8")
    assert status == OPEN and "expert_model_parallel_size was not found; FSSDP needs 2 or" in said


@pytest.mark.parametrize(
    "text",
    [
        "learning_rate: 1.0e-5\nmodel: {hidden_size: 64}",
        "policy: {megatron_cfg: {enabled: false, %s}, dtensor_cfg: {enabled: true}}",
        "actor_train: {strategy_args: {strategy_name: fsdp2_train, strategy_config: {%s}}}",
        "actor: {strategy: fsdp, megatron: {%s}}",
        "rollout: {vllm: {%s}}",
        "allocation_mode: sglang:d4t4+archon:(attn:d1p4t2c2|ffn:d1p4t1e4)",
    ],
)
def test_a_file_without_megatron_is_not_judged(check: Any, text: str) -> None:
    status, said = check(text.replace("%s", EP))
    assert status == OPEN and "holds no setting of Megatron that is known here, such as" in said


VERL = "actor_rollout_ref: {actor: {megatron: {%s}}, model: {lora: {%s}}}"
NEMO_RL = "policy: {megatron_cfg: {%s, peft: {%s}}}"
QAT = "actor_rollout_ref: {actor: {megatron: {%s, qat: {enable: %s, mode: w4a16}}}}"
QUANT_CFG = (
    "policy: {quant_cfg: %s, megatron_cfg: {%s}, generation: {quant_cfg: NVFP4_DEFAULT_CFG}}"
)
TURBO = (
    "modules: {pre_trainer: {framework: megatron, overrides: {%s, enable_primus_turbo: %s, %s}}}"
)
# what else owns experts, by names of recipes and frameworks, and whether the job is on
OWNERS = [
    ("peft: null", ON),
    ("peft: {enabled: false}", ON),
    ("peft: {dim: 8}", REFUSED),
    ("tuner_type: full\nlora_rank: 8", ON),
    ("tuner_type: lora", REFUSED),
    ("tuner_type: $X\nlora_rank: 8", OPEN),
    ("use_lora: false\nlora_rank: 8", ON),
    ("lora_rank: 0\nlora_adapter_path: adapter", REFUSED),
    ("q_lora_rank: 1536\nkv_lora_rank: 512", ON),
    ("lora_dim: $X", OPEN),
    ("recipe: qwen3_30b_a3b_sft_config\nmode: sft", ON),
    ("recipe: glm_45v_peft_config", REFUSED),
    ("recipe: ${RECIPE}", OPEN),
    ("peft_config: {peft_type: null}", ON),
    ("model: qwen3_30b_a3b\nmode: dora", REFUSED),
    ("rollout.lora.rank: 32", ON),
    (VERL % (EP, "rank: 32"), REFUSED),
    (VERL % (EP, "rank: 0, type: lora"), ON),
    (VERL % (EP, "rank: $X"), OPEN),
    (NEMO_RL % (EP, "enabled: true, dim: 8"), REFUSED),
    (NEMO_RL % (EP, "enabled: false, dim: 8"), ON),
    (NEMO_RL % (EP, "enabled: '${X}', dim: 8"), OPEN),
    # what only generates is quantized as it likes
    (QUANT_CFG % ("examples/modelopt/nvfp4.yaml", EP), REFUSED),
    (QUANT_CFG % ("null", EP), ON),
    (QUANT_CFG % ("'${X}'", EP), OPEN),
    (QAT % (EP, "true"), REFUSED),
    (QAT % (EP, "false"), ON),
    (TURBO % (EP, "true", "use_turbo_grouped_gemm: true"), REFUSED),
    (TURBO % (EP, "true", "use_turbo_deepep: true"), REFUSED),
    (TURBO % (EP, "true", "use_turbo_mega_moe: true"), REFUSED),
    (TURBO % (EP, "true", "turbo_sync_free_moe_stage: 2"), REFUSED),
    (TURBO % (EP, "'${X}'", "use_turbo_deepep: true"), OPEN),
    (TURBO % (EP, "false", "use_turbo_deepep: true, turbo_sync_free_moe_stage: 2"), ON),
    (TURBO % (EP, "true", "turbo_sync_free_moe_stage: 1, use_turbo_attention: true"), ON),
]


@pytest.mark.parametrize(("text", "status"), OWNERS)
def test_owners_of_experts_by_any_name(check: Any, text: str, status: int) -> None:
    found, said = check(text if EP in text else f"{EP}\n{text}")
    assert found == status, said
    refusal = (
        r"peft='.*adapters wrap the linears|modelopt_enabled=True: ModelOpt repl|"
        r"(\w+)=\w+: .*Primus replaces.*; set \1=(false|1) or enable_primus_turbo=false"
    )
    assert bool(re.search(refusal, said)) == (status == REFUSED), said
    assert bool(re.search(r"=\$\S+ is decided elsewhere", said)) == (status == OPEN), said


def test_several_models_that_train(check: Any) -> None:
    text = f"actor: {{megatron: {{{EP}}}}}\ncritic: {{megatron: {{%s}}, model: {{lora: {{rank: %s}}}}}}"
    assert check(text % (EP, 0))[0] == ON
    for critic, reason in (
        (("expert_model_parallel_size: 1", 0), "expert_model"),
        ((EP, 8), "peft"),
    ):
        status, said = check(text % critic)
        assert status == REFUSED and "on actor\n" in said
        assert f"refused critic: --moe-fssdp with {reason}" in said
    assert check(f"actor: {{megatron: {{{EP}}}}}\ncritic: {{strategy: fsdp, lr: 1}}")[0] == ON


@pytest.mark.parametrize(
    ("backend", "status"),
    [
        ("megatron:(attn:d1p4t2c2|ffn:d1p4t1e4)", ON),
        ("sglang:d4t4+megatron:(attn:d1p4t2|ffn:d1p4e2)", ON),
        ("megatron:d2p2t4", REFUSED),
    ],
)
def test_sizes_in_one_text(check: Any, backend: str, status: int) -> None:
    """AReaL's, for a job."""
    assert check(f'allocation_mode: "{backend}"')[0] == status


@pytest.mark.parametrize(
    ("settings", "asks"),
    [
        ("moe_grouped_gemm: '${X}', seq_length: '${S}'", ""),
        ("moe_grouped_gemm: '${X}', fp8: hybrid, fp8_recipe: mxfp8", "moe_grouped_gemm"),
        ("fp8: hybrid, fp8_recipe: '${X:-mxfp8}'", "fp8_recipe"),
        ("fp8_recipe: '${X}'", ""),
        ("moe_router_dtype: 'fp$X'", "moe_router_dtype"),
        ("moe_fssdp_rehome: 4, ckpt_format: '${oc.env:X,a}'", "ckpt_format"),
        ("ckpt_format: '${X}'", ""),
        ("cuda_graph_impl: local, cuda_graph_modules: [attn, '${X}']", "cuda_graph_modules"),
        # from 0.18 on both settings alone can ask for a graph of the iteration
        *(
            (f"cuda_graph_{name}: '${{X:-attn}}'", "cuda_graph_impl")
            for name in ("modules", "scope")
        ),
        ("cuda_graph_impl: none, cuda_graph_modules: [attn, '${X}']", "cuda_graph_impl"),
        ("cuda_graph_impl: none, cuda_graph_scope: '${X}'", ""),
        ("use_torch_fsdp2: true, moe_router_dtype: '${X}'", "moe_router_dtype"),
        ("cpu_offloading_num_layers: '$((A / 2))'", "cpu_offloading"),
    ],
)
def test_an_unknown_value_is_asked_for_where_it_decides(
    check: Any, settings: str, asks: str
) -> None:
    status, said = check(f"{{{EP}, {settings}}}")
    is_refused = "fsdp2" in settings
    assert status == (REFUSED if is_refused else OPEN if asks else ON), said
    assert (f"{asks}=" in said and "is decided elsewhere" in said) == bool(asks), said


def test_every_rule_asks_for_its_setting(check: Any) -> None:
    """Whatever rule reads it: with a known value the job is on or refused, without it is neither."""
    for rule in unsupported.RULES:
        if rule.unsupported is None and rule.when is None:
            status, said = check(f"{EP}\n{rule.setting}: '${{X}}'")
            assert status == OPEN and f"{rule.setting}=${{X}} is decided elsewhere" in said, said


def test_what_was_not_read_is_named(check: Any) -> None:
    job = {"expert_model_parallel_size": 8, "job": {"cmd_args": "--num-experts 64 --bf16"}}
    status, said = check(job)
    assert status == ON and "note: left out: job.cmd_args (a command line: megatron-hecate" in said
    status, said = check(f"defaults: [grpo_base.yaml]\npolicy: {{megatron_cfg: {{{EP}}}}}")
    assert status == ON and "may stand in files that were not read: grpo_base.yaml" in said


def test_spellings_are_names_of_rules() -> None:
    """Every field that a spelling stands for is read by a rule. Oracle: the rules, run."""
    job = dict(expert_model_parallel_size=8, fp8="e4m3", cuda_graph_impl="local")
    job |= dict(overlap_dispatch_backward_with_experts_wgrad=True)
    names = judge([job]).names
    assert {*ALIASES.values(), *NEGATED.values()} <= names
