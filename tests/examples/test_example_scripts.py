"""The shell scripts in ``examples/`` start what they say. Oracle: the parsers of torchrun, our launcher and Megatron.

``torchrun``, ``srun`` and ``scontrol`` are stand-ins that print what they were called with. No GPU was at hand.
"""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
from pathlib import Path

import pytest
from ranks import ranks

ROOT = Path(__file__).resolve().parents[2]
STAND_INS = {
    "torchrun": 'printf "%q " "$@"; echo',
    "scontrol": "echo node7; echo node8",
    "srun": 'shift; for SLURM_NODEID in 0 1; do export SLURM_NODEID; "$@"; done',
}


def _run(script: str, folder: Path, *arguments: str, **settings: str) -> list[list[str]]:
    """The arguments of every ``torchrun`` that it starts."""
    for name, body in STAND_INS.items():
        (folder / name).write_text(f"#!/usr/bin/env bash\n{body}\n")
        (folder / name).chmod(0o755)
    path = os.pathsep.join((str(folder), os.environ["PATH"]))
    environment = {
        "MEGATRON": "/a checkout",
        "DATA": "text",
        "TOKENIZER": "qwen",
        **settings,
        "PATH": path,
    }
    command = [ROOT / "examples" / script, *arguments]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, text=True, capture_output=True, timeout=30
    )
    assert done.returncode == 0, done.stderr
    return [shlex.split(line) for line in done.stdout.splitlines()]


@pytest.mark.fast
@pytest.mark.parametrize("script", sorted(p.name for p in (ROOT / "examples").glob("*.sh")))
def test_scripts_parse_and_are_executable(script: str) -> None:
    path = ROOT / "examples" / script
    subprocess.run(["bash", "-n", path], check=True)
    assert os.access(path, os.X_OK)


@pytest.mark.fast
def test_what_is_missing_is_named(tmp_path: Path) -> None:
    done = subprocess.run(
        [ROOT / "examples/megatron_lm.sh"],
        env={"PATH": os.environ["PATH"]},
        capture_output=True,
        text=True,
    )
    assert done.returncode != 0 and "MEGATRON: a checkout of Megatron-LM" in done.stderr


@pytest.mark.newest
@ranks(1)
def test_every_flag_exists_and_fssdp_is_on(tmp_path: Path) -> None:
    """In the newest Megatron; what it would not combine with FSSDP is found by our table."""
    from megatron.training.arguments import add_megatron_arguments
    from torch.distributed.run import parse_args

    from megatron_hecate import HecateConfig
    from megatron_hecate.switch_on import unsupported

    speeds = ROOT / "tests" / "data" / "free_copies.json"
    (words,) = _run("megatron_lm.sh", tmp_path, "--train-iters", "20", SPEEDS=str(speeds))
    torchrun = parse_args(words)
    assert torchrun.module and torchrun.training_script == "megatron_hecate"
    assert (torchrun.nnodes, torchrun.nproc_per_node, torchrun.master_addr) == (
        "1",
        "8",
        "localhost",
    )
    at = torchrun.training_script_args.index("/a checkout/pretrain_gpt.py")
    ours, megatrons = torchrun.training_script_args[:at], torchrun.training_script_args[at + 1 :]
    assert (ours[0], ours[-1]) == ("run", "--")
    parser = argparse.ArgumentParser(allow_abbrev=False)
    HecateConfig.add_arguments(parser)
    settings = HecateConfig.from_arguments(parser.parse_args(ours[1:-1]))
    assert settings == HecateConfig(slots=2, lifetime="auto", speeds=str(speeds))
    arguments = add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False)).parse_args(
        megatrons
    )
    assert arguments.train_iters == 20
    assert unsupported.find(arguments, None, slots=2) == []


@pytest.mark.fast
def test_slurm_starts_every_node(tmp_path: Path) -> None:
    nodes = _run(
        "slurm.sh",
        tmp_path,
        "--lr",
        "1e 4",
        SLURM_JOB_NUM_NODES="2",
        SLURM_JOB_NODELIST="node[7-8]",
    )
    assert [words[:8] for words in nodes] == [
        [
            "--nnodes",
            "2",
            "--node-rank",
            str(rank),
            "--nproc-per-node",
            "8",
            "--master-addr",
            "node7",
        ]
        for rank in (0, 1)
    ]
    assert all(words[-2:] == ["--lr", "1e 4"] for words in nodes), (
        "further arguments arrive as they were"
    )


@pytest.mark.fast
@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"HECATE_SKEW": "3"}, "HECATE_SKEW=3 needs HECATE_PROBE=FOLDER"),
        ({"HECATE_SKEW": "3", "HECATE_PROBE": ""}, "HECATE_SKEW=3 needs HECATE_PROBE=FOLDER"),
        ({"HECATE_SKEW": "much", "HECATE_PROBE": "x"}, "HECATE_SKEW='much' must be a number"),
        ({"HECATE_SKEW": "0"}, None),
        ({"HECATE_SKEW": "3", "HECATE_PROBE": "x"}, None),
        ({}, None),
    ],
    ids=str,
)
def test_skew_needs_the_probe(
    environment: dict[str, str], message: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(ROOT / "examples")
    # the import loads Megatron
    import pretrain_gpt

    for variable in ("HECATE_SKEW", "HECATE_PROBE"):
        monkeypatch.delenv(variable, raising=False)
    for variable, value in environment.items():
        monkeypatch.setenv(variable, value)
    if message is None:
        pretrain_gpt.probe_settings()
        return
    with pytest.raises(SystemExit, match=message) as ended:
        pretrain_gpt.main()
    assert isinstance(ended.value.code, str)
