"""``check --settings`` on files in the shapes that people keep settings in, reduced to what matters.

Oracle: literal verdicts; for launch scripts, what bash makes of the same command line.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from megatron_hecate.__main__ import main
from megatron_hecate.tools.files.launch_script import LaunchScript
from megatron_hecate.tools.files.variables import Unresolved

pytestmark = pytest.mark.fast

ON, REFUSED, OPEN = 0, 1, 2  # exit statuses


@pytest.fixture
def check(tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Exit status, and what was printed, for the text of a file and variables of the environment."""

    def run(text: str, name: str = "job.yaml", **environment: str) -> tuple[int, str]:
        path = tmp_path / name
        path.write_text(text)
        for variable in ("EP", "TP", "PR", "MODEL", "X"):
            monkeypatch.delenv(variable, raising=False)
        for variable, value in environment.items():
            monkeypatch.setenv(variable, value)
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
    ("line", "flag"),
    [
        ("moe_megakernel_backend: mok", "--moe-megakernel-backend mok"),
        ("moe_use_offloading_experts: true", "--moe-use-offloading-experts"),
        ("moe_shortcut_connection: true", "--moe-shortcut-connection"),
        ("moe_router_topk_mode: seq_topk", "--moe-router-topk-mode seq_topk"),
        ("moe_ncclep_use_symm_mem: true", "--moe-ncclep-use-symm-mem"),
        ("mxfp8_2d_quantization: true", "--mxfp8-2d-quantization"),
        ("fp8_recipe_attrs: {fp8_dpa: false}", "model.fp8_recipe_attrs.fp8_dpa=false"),
        ("fp4_recipe_attrs: {fp4_mha: true}", '--fp4-recipe-attrs "{fp4_mha: true}"'),
        (
            "moe_flex_dispatcher_backend: moonep, moe_token_dispatcher_type: flex",
            "--moe-flex-dispatcher-backend moonep --moe-token-dispatcher-type flex",
        ),
        ("moe_token_dispatcher_type: moonep", "--moe-token-dispatcher-type moonep"),
    ],
)
def test_settings_of_a_later_megatron(check: Any, line: str, flag: str) -> None:
    """In a settings file and in a launch script, where they are refused by their name."""
    name = line.partition(":")[0]
    script = f"python pretrain_gpt.py --num-experts 8 --expert-model-parallel-size 4 {flag}"
    for said in (
        check(NESTED["Primus"] % f"expert_model_parallel_size: 8, {line}"),
        check(script, "run.sh"),
    ):
        assert said[0] == REFUSED and f"--moe-fssdp with {name}=" in said[1], said


@pytest.mark.parametrize("kind", NESTED)
def test_settings_in_nested_maps(check: Any, kind: str) -> None:
    status, said = check(NESTED[kind] % "expert_model_parallel_size: 8")
    assert status == ON and said.startswith("would switch on\n"), said
    if kind != "sections":
        assert (
            "note: read: expert_model_parallel_size=8 (" in said
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


VERL = (
    "python3 -m verl.trainer.main_ppo actor_rollout_ref.actor.megatron.expert_model_parallel_size=4"
)
NEMO_RL = "uv run examples/run_grpo.py policy.megatron_cfg.expert_model_parallel_size=8"
BRIDGE = "python scripts/training/run_recipe.py model.expert_model_parallel_size=4"
FLAGS = "torchrun train.py --expert-model-parallel-size 8"
NO_RECIPE = "--recipe qwen3_30b_a3b_sft_config"


@pytest.mark.parametrize(
    ("command", "status"),
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
        (f"{BRIDGE} --recipe glm_45v_peft_config --mode lora", REFUSED),
        (f"{BRIDGE} --recipe glm_45v_peft_config", REFUSED),
        (f"{BRIDGE} --recipe qwen3_30b_a3b_peft_8gpu_h100_bf16_config", REFUSED),
        (f"{BRIDGE} --recipe $X_lora_config", OPEN),  # bash: the variable X_lora_config
        (f"{BRIDGE} --recipe ${{X}}_lora_config", REFUSED),
        (f"{BRIDGE} --model qwen3_30b_a3b --mode dora", REFUSED),
        (f"{BRIDGE} --peft_scheme lora {NO_RECIPE}", REFUSED),
        (f"{BRIDGE} --peft lora {NO_RECIPE}", REFUSED),
        (f"{BRIDGE} --peft none {NO_RECIPE} --mode sft", ON),
        (f"{BRIDGE} --mode $X {NO_RECIPE}", ON),
        (f"{BRIDGE} --mode pretrain --recipe $X", ON),
        (f"{BRIDGE} --recipe ${{X}}_pretrain_config", ON),
        (f"{BRIDGE} --mode $X --model qwen3_30b_a3b", OPEN),
        (f"{BRIDGE} --recipe $X", OPEN),
        (f"{BRIDGE} trainer.mode=$X {NO_RECIPE}", ON),
        (f"{FLAGS} --lora-alpha 32 --lora-dim 16", REFUSED),
        (f"{FLAGS} --lora-dim $X", OPEN),
        (f"{FLAGS} --lora-rank 32 --target-modules all-linear", REFUSED),
        (f"{FLAGS} --lora-rank 0", ON),
        (f"{FLAGS} --lora-rank 0 --lora-adapter-path adapter", REFUSED),
        (f"{FLAGS} --lora-rank $X", OPEN),
        (f"{FLAGS} --q-lora-rank 1536 --kv-lora-rank 512", ON),
        (f"{FLAGS} --train_type lora", REFUSED),
        (f"{FLAGS} --tuner_type lora_llm", REFUSED),
        (f"{FLAGS} --tuner_type $X --lora_rank 8", OPEN),
        (f"{FLAGS} --tuner_type full --lora_rank $X", ON),
        (f"{FLAGS} --use-lora", REFUSED),
        (f"{FLAGS} --use_lora false --lora_rank 8", ON),
    ],
)  # fmt: skip
def test_adapters_on_a_command_line(check: Any, command: str, status: int) -> None:
    """verl, NeMo-RL, Megatron-Bridge, LoongForge, miles, ms-swift; $X has no value."""
    found, said = check(f"{command}\n", "run.sh")
    assert found == status, said
    assert ("peft='" in said and "adapters wrap" in said) == (status == REFUSED), said
    assert (" decides peft: give it, as in X" in said) == (status == OPEN), said


@pytest.mark.parametrize(
    ("text", "status"),
    [
        ("actor_rollout_ref: {model: {lora: {type: lora, rank: 32}}, actor: {megatron: {%s}}}", REFUSED),
        ("actor_rollout_ref: {model: {lora: {type: lora, rank: 0, merge: false}}, actor: {megatron: {%s}}}", ON),
        ("policy: {megatron_cfg: {%s, peft: {enabled: true, dim: 8}}}", REFUSED),
        ("policy: {megatron_cfg: {%s, peft: {enabled: '${X:false}', dim: 8}}}", ON),
        ("policy: {megatron_cfg: {%s, peft: {enabled: '${X}', dim: 8}}}", OPEN),
        ("policy.megatron_cfg: {%s, peft.enabled: true}", REFUSED),
        ("actor_train: {model_args: {lora_target: all-linear, lora_rank: 8}, strategy_args: {%s}}", REFUSED),
        ("actor_train: {model_args: {lora_target: null}, strategy_args: {%s}}", ON),
        ("{%s, peft_config: {lora_alpha: 32}}", REFUSED),
        ("{%s, lora: {}}", ON),
        ("{%s, recipe: glm_45v_peft_config}", REFUSED),
        ("{%s, fp8_cfg: {recipe: '${X}'}}", ON),
    ],
)  # fmt: skip
def test_adapters_where_frameworks_keep_them(check: Any, text: str, status: int) -> None:
    found, said = check(text % "expert_model_parallel_size: 8")
    assert found == status and ("adapters wrap" in said) == (status == REFUSED), said
    assert ("X decides peft: " in said) == (status == OPEN), said


def test_adapters_of_one_model_are_not_the_others(check: Any) -> None:
    text = f"{VERL} critic.megatron.expert_model_parallel_size=4 %s.model.lora.rank=8\n"
    for of, refused, other in (
        ("actor_rollout_ref", "command 1, actor", "command 2, critic"),
        ("critic", "command 2, critic", "command 1, actor"),
    ):
        status, said = check(text % of, "run.sh")
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
    is_script = "%s" not in text
    found, said = (
        check(text, "run.sh") if is_script else check(text % "expert_model_parallel_size: 8")
    )
    assert found == status, said
    assert ("modelopt_enabled=True: ModelOpt replaces" in said) == (status == REFUSED), said
    assert ("X decides modelopt_enabled: " in said) == (status == OPEN), said


@pytest.mark.parametrize(
    ("overrides", "status"),
    [
        ("enable_primus_turbo: true, use_turbo_grouped_gemm: true", REFUSED),
        ("enable_primus_turbo: true, use_turbo_deepep: true", REFUSED),
        ("enable_primus_turbo: true, use_turbo_mega_moe: true", REFUSED),
        ("enable_primus_turbo: true, turbo_sync_free_moe_stage: 2", REFUSED),
        ("use_turbo_grouped_gemm: true", REFUSED),
        ("use_turbo_deepep: '${X:true}'", REFUSED),
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
    flags = overrides.replace(": ", " ").replace(", ", " --").replace("'", "")
    if status != OPEN:
        assert check(f"{FLAGS} --{flags}\n", "run.sh")[0] == status


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


@pytest.mark.parametrize(
    "written",
    [
        *(
            "${EP:8}",
            "${EP:-8}",
            "${EP-8}",
            "${oc.env:EP,8}",
            "${parallel.ep}",
            "${oc.select:parallel.ep,1}",
        ),
        *("${oc.decode:${oc.env:EP,8}}", "${EP:${parallel.ep}}"),
    ],
)
def test_variables_of_yaml(check: Any, written: str) -> None:
    text = f"parallel: {{ep: 8}}\nMODEL_ARGS: {{--expert-model-parallel-size: '{written}', --num-experts: 128}}"
    assert check(text)[0] == ON
    if "EP" in written:
        status, said = check(text, EP="1")
        assert status == REFUSED and "expert_model_parallel_size=1" in said


def test_a_variable_without_a_value_is_asked_for(check: Any) -> None:
    text = "MODEL_ARGS:\n  --expert-model-parallel-size: ${EP}\n  --seq-length: ${SEQ_LEN}\n"
    text += "  --moe-grouped-gemm: ${G}\n"
    status, said = check(text)
    assert (
        status == OPEN
        and "cannot be judged yet: EP decides expert_model_parallel_size: give it, as in EP="
        in said
    )
    assert "SEQ_LEN" not in said.partition("cannot be judged")[2], "no rule reads it"
    assert "G decides" not in said, "whatever it is, it is not refused"
    status, said = check(text + "  --fp8-format: hybrid\n")
    assert (
        status == REFUSED
        and "fp8_recipe=None" in said
        and "note: EP decides expert_model_parallel_size" in said
    )
    status, said = check(text + "  --fp8-format: hybrid\n  --fp8-recipe: mxfp8\n")
    assert status == OPEN and "G decides moe_grouped_gemm" in said
    assert check(text, EP="8")[0] == ON and check(text, EP="1")[0] == REFUSED
    status, said = check("expert_model_parallel_size: ${div:8,2}\nnum_experts: 8")
    assert status == OPEN and "div decides expert_model_parallel_size" in said, (
        "a resolver that is not known"
    )


SCRIPT = """#!/bin/bash
set -ex
EP=${EP:-8}   # the group's size, isn't it
if [ -z ${PP} ]; then
  PP=2
fi
MOE_ARGS=(
    --num-experts 128   # a comment's quote
    # --use-megatron-fsdp
    --moe-layer-freq '[1]*58'
    --expert-model-parallel-size ${EP}
)
MOE_ARGS+=(--moe-router-topk 8)
OPTIONS=" \\
   --pipeline-model-parallel-size $PP \\
   --transformer-impl transformer_engine"
OPTIONS="$OPTIONS --moe-grouped-gemm"
PR=${PR:-bf16}
if [ $PR = fp8 ]; then
    PRECISION="--fp8-format hybrid"
elif [[ "$PR" == "mxfp8" ]]; then
    PRECISION="--fp8-format hybrid --fp8-recipe mxfp8"
else
    PRECISION=""
fi
run="torchrun --nproc-per-node 8 pretrain_gpt.py ${MOE_ARGS[@]} $OPTIONS ${PRECISION} --bf16"
echo $run
%s $run > log 2>&1
"""


def test_a_launch_script(check: Any) -> None:
    text = SCRIPT % "eval"
    status, said = check(text, "run.sh")
    assert (
        status == ON
        and "expert_model_parallel_size=8" in said
        and "pipeline_model_parallel_size=2" in said
    ), said
    assert check(text, "run.sh", PR="mxfp8")[0] == ON
    status, said = check(text, "run.sh", PR="fp8")
    assert status == REFUSED and "fp8_recipe=None" in said
    status, said = check(text, "run.sh", EP="1", PR="bf16")
    assert status == REFUSED and "expert_model_parallel_size=1" in said
    status, said = check("#!/bin/bash\npip install x\nray start --head --num-gpus 8\n", "run.sh")
    assert (
        status == OPEN
        and "holds no command with flags of Megatron, such as --expert-model-parallel-size" in said
    )


@pytest.mark.skipif(shutil.which("bash") is None, reason="the oracle is bash")
@pytest.mark.parametrize(
    "environment", [{}, {"EP": "4"}, {"PP": "8", "PR": "fp8"}, {"PR": "mxfp8"}]
)
def test_a_launch_script_is_read_as_bash_runs_it(tmp_path: Path, environment: dict) -> None:
    script = tmp_path / "run.sh"
    stub = "torchrun() { printf '%s\\n' torchrun \"$@\"; }\n"
    text = (SCRIPT % "eval").replace("> log 2>&1", "").replace("echo $run", "")
    script.write_text(stub + text)
    outside = {k: v for k, v in os.environ.items() if k not in ("EP", "PP", "PR")}
    command = ["bash", str(script)]
    done = subprocess.run(
        command, env={**outside, **environment}, capture_output=True, text=True, timeout=20
    )
    words = done.stdout.split("torchrun\n")[-1].splitlines()
    (read,) = LaunchScript(SCRIPT % "eval", environment).commands
    flags = [word[2:] for word in words if word.startswith("--")]
    assert [flag.name for flag in read.flags] == flags
    values = {flag.name: flag.value for flag in read.flags}
    for name, value in values.items():
        after = words[words.index(f"--{name}") + 1 :][:1]
        assert value is True or [value] == after or value[:1] == after, name


@pytest.mark.parametrize(
    ("text", "status"),
    [
        ("TP=2 EP=32 bash ./sbatch.sh --cuda-graph-impl local --expert-model-parallel-size $EP", REFUSED),
        ("megatron sft --tuner_type lora --expert_model_parallel_size 4", REFUSED),
        ("megatron sft --tuner_type full --lora_rank 8 --expert_model_parallel_size 4 --moe_grouped_gemm true", ON),
        ("python -m verl.trainer a.b=1 actor_rollout_ref.actor.megatron.expert_model_parallel_size=8", ON),
        ("python -m verl.trainer --config-name x actor.megatron.expert_model_parallel_size=1", REFUSED),
        ("python run_recipe.py model.expert_model_parallel_size=8 +model.cuda_graph_impl=local", REFUSED),
        ('srun bash -c "torchrun x.py --expert-model-parallel-size 8 --use-torch-fsdp2"', REFUSED),
        ("A=(--expert-model-parallel-size=8)\npython x.py ${A[*]} --use-custom-fsdp", REFUSED),
        ("python x.py --expert-model-parallel-size ${1:-4} \\\n  --cuda-graph-impl transformer_engine \\\n"
         "  --cuda-graph-scope attn moe_router", ON),
        ("N=$(nproc)\npython x.py --expert-model-parallel-size 8 --num-workers $N", ON),
        ("D='a b'\npython x.py --expert-model-parallel-size 8 --data-path \"$D\" --fp8-format none", ON),
        ("if false; then\n python x.py --expert-model-parallel-size 8\nfi", ON),
        ("python x.py --expert-model-parallel-size 4 --expert-model-parallel-size 1", REFUSED),
        ("A='--expert-model-parallel-size 1'\npython x.py $A --expert-model-parallel-size 4", ON),
        ("python x.py --expert-model-parallel-size 4 --use-megatron-fsdp $EXTRA", REFUSED),
        ('python x.py --expert-model-parallel-size 4 --use-torch-fsdp2 "$@"', REFUSED),
        ("torchrun -m megatron_hecate run --moe-fssdp -- x.py --expert-model-parallel-size 4", ON),
        ("torchrun --no-python megatron-hecate run -- x.py --moe-fssdp --expert-model-parallel-size 1", REFUSED),
        ("torchrun -m megatron_hecate run --moe-fssdp -- x.py --expert-model-parallel-size 4\n"
         "megatron-hecate report fssdp-run --out page.html --stages 2", ON),
        ("python x.py --disable-bias-linear --expert-model-parallel-size 8 2>/dev/null &", ON),
    ],
)  # fmt: skip
def test_command_lines(check: Any, text: str, status: int) -> None:
    assert check(f"{text}\n", "run.sh")[0] == status, check(f"{text}\n", "run.sh")[1]


@pytest.mark.skipif(shutil.which("bash") is None, reason="the oracle is bash")
@pytest.mark.parametrize(
    "text",
    [
        '[ -z "$FSDP" ] || F="--use-megatron-fsdp"',
        '[ "$EP" = 8 ] && F="--use-megatron-fsdp"',
        '[ "$EP" = 1 ] && F="--use-megatron-fsdp"',
        '[[ $EP == 8 || $EP == 4 ]] && F="--use-megatron-fsdp"',
        '[[ $EP == 1 || $EP == 4 ]] && F="--use-megatron-fsdp"',
        '[ $EP = 1 ] && [ $EP = 8 ] || F="--use-megatron-fsdp"',
        '[ $EP = 8 ] &&\n  F="" || F="--use-megatron-fsdp"',
        'if [ $EP = 8 ] && [ $EP = 4 ]; then F="--use-megatron-fsdp"; fi',
        'if [[ $EP == 8 && $EP == 4 ]]; then F="--use-megatron-fsdp"; fi',
        'if [[ $EP == 8 && $EP != 4 ]]\nthen\n F="--use-megatron-fsdp"\nelse F=\nfi',
        'if [ $EP = 1 ]; then F=; elif [ $EP = 8 ] && [ $EP = 4 ]; then F=; else F="--use-megatron-fsdp"; fi',
        'if [ $EP = 1 ] || [ $EP = 8 ]; then F=""; else F="--use-megatron-fsdp"; fi',
        'mkdir -p /tmp && F="--use-megatron-fsdp"',
        'true || F="--use-megatron-fsdp"',
    ],
)
def test_conditions_in_one_line_are_read_as_bash_runs_them(check: Any, text: str) -> None:
    script = f"EP=8\n{text}\n%s --expert-model-parallel-size $EP $F\n"
    said = subprocess.run(
        ["bash", "-c", script % "echo"], capture_output=True, text=True, timeout=20
    ).stdout
    status, verdict = check(script % "python x.py", "run.sh")
    assert status == (REFUSED if "--use-megatron-fsdp" in said else ON), verdict


def test_conditions_in_one_line_that_nobody_knows(check: Any) -> None:
    for condition in (
        '[ "$U" = 1 ] &&',
        "nvidia-smi | grep -q H100 &&",
        '[ "$U" = 1 ] ||',
        "[ $EP = 8 ] && [ $U = 1 ] &&",
    ):
        text = f"EP=8\n{condition} F='--use-megatron-fsdp'\npython x.py --expert-model-parallel-size $EP $F\n"
        status, said = check(text, "run.sh")
        assert status == OPEN and "decides use_megatron_fsdp: give it, as in " in said, (
            condition,
            said,
        )


@pytest.mark.skipif(shutil.which("bash") is None, reason="the oracle is bash")
@pytest.mark.parametrize(
    "text",
    [
        "EP=$((GPUS / 2))",
        "EP=$(( ($GPUS-1) * 2 / ${TP} ))",
        "EP=$((GPUS % 5 + NODES))",
        "EP=$((-9 / 2 + 12))",
        "N=$((GPUS / TP))\nEP=$((N + N))",
        "cat > args.txt <<END\npython x.py --expert-model-parallel-size 1 --use-megatron-fsdp\nEND\nEP=8",
        "cat <<-'E O' >/dev/null\nx\nE O\nEP=8",
        "cat <<-EOF > /dev/null\n\tEP=1\n\tEOF\nEP=4",
        "cat <<A <<B >/dev/null\nEP=1\nA\nEP=2\nB\nEP=16",
        "cat <<<'EP=1' >/dev/null; EP=4",
    ],
)
def test_arithmetic_and_here_documents_are_read_as_bash_runs_them(
    text: str, tmp_path: Path
) -> None:
    script = f"GPUS=8\nTP=2\nNODES=4\n{text}\nRUN --expert-model-parallel-size $EP\n"
    done = subprocess.run(
        ["bash", "-c", script.replace("RUN", "echo")],
        capture_output=True,
        text=True,
        timeout=20,
        cwd=tmp_path,
        check=True,
    )
    (command,) = LaunchScript(script.replace("RUN", "python x.py"), {}).commands
    (flag,) = command.flags
    assert f"--{flag.name} {flag.value}" == done.stdout.strip().splitlines()[-1]


def test_arithmetic_that_nobody_knows_asks_for_its_variables(check: Any) -> None:
    text = "python x.py --expert-model-parallel-size $((WORLD / PP)) --num-experts 64\n"
    status, said = check(text, "run.sh", PP="2")
    assert (
        status == OPEN
        and "WORLD decides expert_model_parallel_size: give it, as in WORLD=..." in said
    ), said
    assert check(text, "run.sh", PP="2", WORLD="16")[0] == ON
    assert check(text, "run.sh", PP="16", WORLD="16")[0] == REFUSED
    for broken in ("$((1 / 0))", "$((2 ** (", "$((a = 3))", "$((x[0] + 1))"):
        assert check(text.replace("$((WORLD / PP))", broken), "run.sh")[0] == OPEN, broken


def test_what_a_script_does_not_say_is_asked_for(check: Any) -> None:
    text = 'MODEL=$1\nEP=${2}\nif [ $MODEL = a ]; then\n MOE="--expert-model-parallel-size ${EP}"\nelse\n MOE=\nfi\n'
    text += "source models/qwen.sh\npython x.py $MOE ${MODEL_ARGS[@]} --num-experts 8 --fp8-format $(echo e4m3)\n"
    status, said = check(text, "run.sh")
    assert (
        status == OPEN
        and "MODEL decides expert_model_parallel_size: give it, as in MODEL=..." in said
    ), said
    assert "the output of a command decides fp8" in said and "may hold further flags: MODEL" in said
    assert "MODEL_ARGS" in said and "files that were not read: models/qwen.sh" in said
    status, said = check(text, "run.sh", MODEL="a")
    assert status == OPEN and "EP decides expert_model_parallel_size" in said
    status, said = check(text.replace("--fp8-format $(echo e4m3)", ""), "run.sh", MODEL="a", EP="8")
    assert status == ON, said


def test_several_commands_are_several_jobs(check: Any) -> None:
    text = (
        "python a.py --expert-model-parallel-size 8\npython b.py --expert-model-parallel-size 1\n"
    )
    status, said = check(text, "run.sh")
    assert (
        status == REFUSED
        and "on command 1\n" in said
        and "refused command 2: --moe-fssdp with expert_model" in said
    )


@pytest.mark.parametrize(
    "text",
    [
        '{"expert_model_parallel_size": 8, "args": ["--num-experts", "64", "--use-torch-fsdp2"]}',
        '{"args": ["--expert-model-parallel-size=8", "--use-torch-fsdp2", "--seed", 1]}',
        "model: {expert_model_parallel_size: 8}\nextra_args:\n  - --num-experts 64\n  - --use-torch-fsdp2",
        "job: {cmd_args: '--expert-model-parallel-size ${EP:-8} --use-torch-fsdp2 --num-experts 64'}",
    ],
)
def test_command_lines_in_a_file_of_settings(check: Any, text: str) -> None:
    name = "job.json" if text.startswith("{") else "job.yaml"
    status, said = check(text, name)
    assert (
        status == REFUSED
        and "use_torch_fsdp2=True" in said
        and "expert_model_parallel_size=8" in said
    ), said
    assert check(text.replace("--use-torch-fsdp2", "--bf16"), name)[0] == ON


def test_files_that_go_on_elsewhere_are_named(check: Any) -> None:
    text = "defaults: [grpo_base.yaml]\npolicy: {megatron_cfg: {expert_model_parallel_size: 8}}"
    status, said = check(text)
    assert (
        status == ON
        and "further settings may stand in files that were not read: grpo_base.yaml" in said
    )


def test_a_script_that_is_none_is_an_error_without_a_traceback(check: Any) -> None:
    for text in (
        "",
        "x='",
        "((((",
        "if [",
        "a=(",
        "fi fi done",
        "python x.py --num-experts '8",
        "$(",
        "`",
        "${",
        "\\",
    ):
        status, said = check(text, "run.sh")
        assert status == OPEN and "run.sh: " in said, (text, said)


def test_a_flag_of_unknown_value_is_asked_for_or_does_not_matter(check: Any) -> None:
    """Any setting that rules read. Oracle: verdicts with values for the variable."""
    from megatron_hecate.tools import verdict

    values = "true 1 2 another full e4m3 bf16_with_fp8_delayed_scaling_mixed".split()
    for setting in verdict.READ - verdict.SWITCHES:
        flag = f"--{setting.replace('_', '-')} $X"
        text = f"python x.py --expert-model-parallel-size 8 {flag}\n"
        status, said = check(text, "run.sh")
        is_refused = any(check(text, "run.sh", X=value)[0] == REFUSED for value in values)
        assert status == (OPEN if is_refused else ON), said
        assert (f"X decides {setting}: give it, as in X=" in said) == is_refused, said


@pytest.mark.parametrize(
    ("flags", "asks"),
    [
        ("--fp8-format hybrid --fp8-recipe $X", "fp8_recipe"),
        ("--fp8-format $X --fp8-recipe delayed", "fp8"),
        ("--fp8-format hybrid --fp8-recipe mxfp8 --moe-grouped-gemm ${X}", ""),
        ("--moe-router-dtype $X", "moe_router_dtype"),
        ("--moe-router-dtype fp$X", "moe_router_dtype"),
        ("--moe-router-score-function ${X}", "moe_router_score_function"),
        ("--moe-token-dispatcher-type flex --moe-flex-dispatcher-backend $X", "moe_flex_dispatcher_backend"),
        ("--moe-flex-dispatcher-backend $X", ""),
        ("--moe-fssdp-rehome 4 --ckpt-format $X", "ckpt_format"),
        ("--use-torch-fsdp2 --moe-router-dtype $X", "moe_router_dtype"),
    ],
)  # fmt: skip
def test_a_name_that_only_a_variable_knows(check: Any, flags: str, asks: str) -> None:
    status, said = check(f"{FLAGS} {flags}\n", "run.sh")
    is_refused = "fsdp2" in flags
    assert status == (REFUSED if is_refused else OPEN if asks else ON), said
    assert f"X decides {asks}: give it, as in X=" in said if asks else "X decides" not in said
    assert ("--moe-fssdp with" in said) == is_refused, said


def test_a_flag_that_may_be_absent_has_one_of_megatrons_values(check: Any) -> None:
    text = f'if [ $X ]; then\n A="%s"\nfi\n{FLAGS} $A\n'
    assert check(text % "--moe-router-dtype fp32", "run.sh")[0] == ON
    assert check(text % "--moe-token-dispatcher-type alltoall", "run.sh")[0] == ON
    status, said = check(text % "--fp8-format e4m3", "run.sh")
    assert status == OPEN and "X decides fp8: " in said


def test_a_recipe_or_configuration_that_is_not_read_is_named(check: Any) -> None:
    for flag in ("--recipe qwen3_sft_config", "--config a/grpo.yaml", "--config-file $X"):
        said = check(f"{FLAGS} {flag}\n", "run.sh")[1]
        assert f"files that were not read: {flag.split()[1]}\n" in said, said


def test_arithmetic_on_a_variable_that_names_itself(check: Any) -> None:
    text = "EP=$((EP * 2))\nA=$((B))\nB=$((A + 1))\npython x.py --expert-model-parallel-size $EP --num-experts $A\n"
    status, said = check(text, "run.sh")
    assert status == OPEN and "EP decides expert_model_parallel_size" in said, said
    assert check(text, "run.sh", EP="4")[0] == ON


def test_a_variable_that_names_itself() -> None:
    script = LaunchScript(
        'A=$B\nB=$A\nif [ $Q ]; then\n A="$A --x 1"\nfi\npython x.py $A --num-experts $B\n', {}
    )
    (command,) = script.commands
    assert isinstance(command.flags[-1].value, Unresolved)


def test_aliases_are_names_of_rules() -> None:
    from megatron_hecate.tools import verdict
    from megatron_hecate.tools.files.setting import ALIASES, NEGATED

    assert set(ALIASES.values()) <= verdict.READ and set(NEGATED.values()) <= verdict.READ
    assert set(verdict.WORST) <= verdict.READ and verdict.HELPERS <= verdict.READ
