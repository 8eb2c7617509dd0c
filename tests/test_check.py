"""``megatron-hecate check --settings FILE``, for people who have a recipe and no ranks yet.

Oracle: literal verdicts and exit codes.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megatron_hecate.__main__ import main

pytestmark = pytest.mark.fast

GRAPHS = (
    "--moe-fssdp with cuda_graph_impl='local': replicas are fetched and returned between CUDA graphs of the parts "
    "attn, mamba, mlp, moe_router and moe_preprocess (cuda_graph_modules, before 0.18 cuda_graph_scope); "
    "other graphs contain the experts as well; "
    "set model.cuda_graph_impl=none or --cuda-graph-impl none"
)
NO_FSDP = "set ddp.use_megatron_fsdp=false and dist.use_megatron_fsdp=false or leave out --use-megatron-fsdp"


@pytest.fixture
def check(tmp_path: Path, capsys: pytest.CaptureFixture) -> Any:
    """Exit status, and what was printed, for the text of a file."""

    def run(text: str, name: str = "settings.json") -> tuple[int, str]:
        path = tmp_path / name
        path.write_text(text)
        status = main(["check", "--settings", str(path)])
        out, err = capsys.readouterr()
        assert status == 2 or not err
        return status, (err if status == 2 else out).strip()

    return run


def test_one_job(check: Any) -> None:
    works = dict(
        expert_model_parallel_size=8, cuda_graph_impl="none", peft=None, some_other_setting=[1]
    )
    assert check(json.dumps(works)) == (0, "would switch on")
    assert check(json.dumps({**works, "cuda_graph_impl": "local"})) == (1, GRAPHS)
    status, text = check(
        "expert_model_parallel_size: 1\nuse_megatron_fsdp: true\n", "settings.yaml"
    )
    assert status == 1 and text.count("\n") == 1
    assert (
        "set model.expert_model_parallel_size=2 or more or --expert-model-parallel-size 2" in text
    )
    assert NO_FSDP in text


@pytest.mark.parametrize(
    "settings",
    [
        {"model.expert_model_parallel_size": 8, "model.cuda_graph_impl": "local"},
        {
            "model": {"expert_model_parallel_size": 8, "cuda_graph_impl": "local"},
            "ddp": {"use_megatron_fsdp": False},
        },
        {"model": {"transformer": {"expert_model_parallel_size": 8}, "cuda_graph_impl": "local"}},
        {"MODEL_ARGS": {"--expert-model-parallel-size": 8, "--cuda-graph-impl": "local"}},
        {"+model.expert_model_parallel_size": 8, "++model.cuda_graph_impl": "local"},
    ],
    ids=[
        "prefixes",
        "parts",
        "parts of parts",
        "flags of Megatron's functional tests",
        "overrides",
    ],
)
def test_names_as_users_write_them(check: Any, settings: dict) -> None:
    assert check(json.dumps(settings)) == (1, GRAPHS)


def test_a_setting_of_any_part_counts(check: Any) -> None:
    for part in ("ddp", "dist"):
        job = {"model": {"expert_model_parallel_size": 2}, "ddp": {"use_megatron_fsdp": False}}
        job |= {part: {"use_megatron_fsdp": True}}
        assert NO_FSDP in check(json.dumps(job))[1]


def test_rules_on_several_settings(check: Any) -> None:
    job = dict(expert_model_parallel_size=2, fp8="e4m3")
    status, text = check(json.dumps(job))
    assert status == 1 and "fp8_recipe=None" in text, "Megatron's default is delayed scaling"
    assert "set mixed_precision=bf16_with_mxfp8_mixed, " in text
    assert text.endswith("or --fp8-recipe mxfp8, tensorwise or blockwise")
    assert check(json.dumps({**job, "mixed_precision.fp8_recipe": "mxfp8"})) == (
        0,
        "would switch on",
    )
    assert check(json.dumps({**job, "mixed_precision": {"fp8_recipe": "delayed"}}))[0] == 1
    assert check(json.dumps({**job, "fp8": None, "fp8_recipe": "delayed"}))[0] == 0
    stash = dict(expert_model_parallel_size=2, moe_paged_stash=True)
    assert check(json.dumps(stash))[0] == 0
    status, text = check(json.dumps({**stash, "use_transformer_engine_op_fuser": True}))
    assert status == 1 and "moe_paged_stash=True" in text and text.count("\n") == 0


@pytest.mark.parametrize(
    ("settings", "refused"),
    [
        ({"--cpu-offloading-num-layers": 2}, "cpu_offloading=True"),
        ({"cpu_offloading": False, "cpu_offloading_num_layers": 2}, None),
        ({"--kitchen-recipe-number": 0}, "use_kitchen=True"),
        ({"--kitchen-config-file": "a.yaml"}, "use_kitchen=True"),
        (
            {"--tensor-model-parallel-size": 2, "--tensor-parallel-num-weight-shards": 4},
            "gtp_weight_remat_size=2",
        ),
        (
            {"gtp_weight_remat_size": 1, "tensor_parallel_num_weight_shards": 2},
            "gtp_weight_remat_size=2",
        ),
        ({"--tensor-model-parallel-size": 2, "--tensor-parallel-num-weight-shards": 2}, None),
        ({"--expert-tensor-parallel-num-weight-shards": 3}, "expert_gtp_weight_remat_size=3"),
        ({"mixed_precision": "bf16_with_fp8_delayed_scaling_mixed"}, "fp8_recipe='delayed'"),
        ({"mixed_precision": "bf16_with_mxfp8_mixed"}, None),
        (
            {
                "model": {"fp8": "e4m3", "fp8_recipe": "mxfp8"},
                "mixed_precision.fp8_recipe": "delayed",
            },
            "fp8_recipe=",
        ),
        (
            {
                "model": {"fp8": "e4m3", "fp8_recipe": "delayed"},
                "mixed_precision.fp8_recipe": "mxfp8",
            },
            None,
        ),
        (dict(moe_grouped_gemm=False, fp8="e4m3", fp8_recipe="mxfp8"), "moe_grouped_gemm=False"),
        (dict(moe_grouped_gemm=False, delay_wgrad_compute=True), "moe_grouped_gemm=False"),
        (dict(expert_model_parallel_size=1, moe_fssdp_slots=1), "expert_model_parallel_size=1"),
        (dict(expert_model_parallel_size=1, moe_fssdp_slots=0), None),
        (
            dict(
                moe_token_dispatcher_type="flex",
                moe_flex_dispatcher_backend="ncclep",
                moe_expert_capacity_factor=1,
            ),
            "moe_expert_capacity_factor=1",
        ),
        (
            dict(
                moe_token_dispatcher_type="flex",
                moe_flex_dispatcher_backend="ncclep",
                moe_expert_capacity_factor=-1,
            ),
            None,
        ),
    ],
)
def test_settings_of_other_names_that_lead_to_refused_ones(
    check: Any, settings: dict, refused: str | None
) -> None:
    status, text = check(json.dumps({"expert_model_parallel_size": 8, **settings}))
    if refused is None:
        assert (status, text) == (0, "would switch on")
    else:
        assert status == 1 and text.startswith(f"--moe-fssdp with {refused}") and "\n" not in text


def test_a_list_has_a_line_for_each(check: Any) -> None:
    good, bad = (
        dict(name="good", expert_model_parallel_size=4),
        dict(expert_model_parallel_size=4, use_torch_fsdp2=True),
    )
    status, text = check(json.dumps([good, {**bad, "cuda_graph_impl": "local"}]))
    first, second = text.splitlines()
    assert status == 1 and first == "on good"
    assert second.startswith(f"refused entry 2: {GRAPHS} | --moe-fssdp with use_torch_fsdp2=True: ")
    assert check(json.dumps([good])) == (0, "on good")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[]", "holds [], not a mapping of settings or a list of such"),
        ("{}", "holds {}, not a mapping"),
        ("3", "holds 3, not a mapping"),
        ('[{"expert_model_parallel_size": 2}, 3]', "entry 2 is 3, not a mapping"),
        ("{", "is not JSON: "),
        (
            '{"use_kitchen": "false"}',
            "use_kitchen='false' is a text; write true, false or null without quotes",
        ),
        ('{"cuda_graph_impl": "None"}', "cuda_graph_impl='None' is a text"),
        ('{"use_kitchen": 1}', "use_kitchen=1 must be true or false"),
        ('{"cuda_graph_impl": false}', "cuda_graph_impl=False must be a name"),
        (
            '{"expert_model_parallel_size": "8"}',
            "expert_model_parallel_size='8' must be a whole number",
        ),
        (
            '{"expert_model_parallel_size": true}',
            "expert_model_parallel_size=True must be a whole number",
        ),
        ('{"moe_fssdp_slots": -3}', "slots=-3 must be a whole number from 0 to 4096"),
        ('{"moe_fssdp_slots": "2"}', "slots='2' must be a whole number"),
        ('{"moe_fssdp_rehome": "100"}', "rehome='100' must be a whole number"),
        ('{"moe_fssdp_rehome": true}', "rehome=True must be a whole number"),
        (
            '{"moe_token_dispatcher_type": "flex", "moe_flex_dispatcher_backend": "ncclep", '
            '"moe_expert_capacity_factor": [1.0, 1.25]}',
            "moe_expert_capacity_factor=[1.0, 1.25] must be a number",
        ),
        ('{"peft": "none"}', "peft='none' must be null or a value"),
        ('[{"name": "a", "model.use_kitchen": "no"}]', "a: use_kitchen='no' must be true or false"),
    ],
)
def test_a_file_that_makes_no_sense_is_one_clear_error(check: Any, text: str, message: str) -> None:
    status, error = check(text)
    assert status == 2 and message in error and "settings.json: " in error and "\n" not in error


def test_a_file_that_cannot_be_read(
    capsys: pytest.CaptureFixture, tmp_path: Path, check: Any
) -> None:
    assert main(["check", "--settings", str(tmp_path / "missing.json")]) == 2
    assert "missing.json: cannot be read: " in capsys.readouterr().err
    for text in ("a: [", "a: 1\n---\nb: 2", "&job\nmodel: *job"):
        status, error = check(text, "bad.yaml")
        assert status == 2 and "bad.yaml: is n" in error and "\n" not in error
    status, error = check("[" * 100_000)
    assert status == 2 and error.endswith("is nested too deeply, or within itself")


def test_it_needs_no_megatron(tmp_path: Path) -> None:
    """Megatron cannot be imported here."""
    (tmp_path / "megatron.py").write_text("raise ImportError('no Megatron')")
    (tmp_path / "job.json").write_text('{"expert_model_parallel_size": 2}')
    checkout = Path(__file__).resolve().parent.parent
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(checkout)])}
    command = [
        sys.executable,
        "-m",
        "megatron_hecate",
        "check",
        "--settings",
        str(tmp_path / "job.json"),
    ]
    done = subprocess.run(
        command, env=environment, cwd=tmp_path, text=True, capture_output=True, timeout=60
    )
    assert (done.returncode, done.stdout) == (0, "would switch on\n"), done.stderr


def test_kernels_are_checked_without_megatron_and_numba(tmp_path: Path) -> None:
    """A machine with a bare torch: what is missing is said, and so is what the kernels do there."""
    (tmp_path / "numba.py").write_text(
        "raise ImportError('Numba needs NumPy 2.4 or less. Got NumPy 2.5.')\n"
    )
    (tmp_path / "megatron").mkdir()  # a namespace without `core`
    (tmp_path / "megatron" / "__init__.py").touch()
    checkout = Path(__file__).resolve().parent.parent
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(checkout)])}
    command = [sys.executable, "-m", "megatron_hecate", "check"]
    done = subprocess.run(
        command, env=environment, cwd=tmp_path, text=True, capture_output=True, timeout=120
    )
    assert done.returncode == 1, done.stderr
    assert "megatron-core is not installed" in done.stdout
    assert (
        "planner: numba cannot be imported (Numba needs NumPy 2.4 or less. Got NumPy 2.5.)"
        in done.stdout
    )
    assert "kernels, of quotas and of transport nvlink: CPU ranks: compiled, " in done.stdout


def test_a_machine_without_a_compiler(
    tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing compiled, no compiler: ``check`` fails and says what to install; with one it succeeds."""
    monkeypatch.setenv("MEGATRON_HECATE_CACHE", str(tmp_path / "cache"))
    assert main(["check"]) == 0
    assert "CPU ranks: compiled, " in capsys.readouterr().out
    monkeypatch.setenv("MEGATRON_HECATE_CACHE", str(tmp_path / "empty"))
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.delenv("CXX", raising=False)
    assert main(["check"]) == 1
    assert (
        "CPU ranks: no C++ compiler found; install one (apt-get install g++)"
        in capsys.readouterr().out
    )
