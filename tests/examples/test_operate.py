"""Examples for batch systems: they parse, and start what they say.

Oracle: the parsers of bash, YAML, torchrun, our launcher and Megatron; stand-ins for torchrun and Slurm's commands that
note how they are called; NeMo-Run's own way to a command line (`Script.to_command`), written out.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import signal
import subprocess
import time
import types
from pathlib import Path
from typing import Any

import pytest
import yaml
from ranks import ranks

from megatron_hecate import HecateConfig

ROOT = Path(__file__).resolve().parents[2]
MANIFEST = ROOT / "examples" / "kubeflow.yaml"


def _stand_in(folder: Path, name: str, body: str) -> None:
    (folder / name).write_text(f"#!/usr/bin/env bash\n{body}\n")
    (folder / name).chmod(0o755)


def _environment(folder: Path, **settings: str) -> dict[str, str]:
    path = os.pathsep.join((str(folder), os.environ["PATH"]))
    named = {"MEGATRON": "/a checkout", "DATA": "text", "TOKENIZER": "qwen"}
    return {**named, "FOLDER": str(folder), **settings, "PATH": path}


def _parse_flags(words: list[str]) -> tuple[argparse.Namespace, Any, argparse.Namespace]:
    """Parse a command by torchrun, our launcher and Megatron, which must combine with FSSDP; returns what each read."""
    from megatron.training.arguments import add_megatron_arguments
    from torch.distributed.run import parse_args

    from megatron_hecate.switch_on import unsupported

    torchrun = parse_args(words)
    assert torchrun.module and torchrun.training_script == "megatron_hecate"
    arguments = torchrun.training_script_args
    (script,) = (i for i, word in enumerate(arguments) if word.endswith("pretrain_gpt.py"))
    parser = argparse.ArgumentParser(allow_abbrev=False)
    HecateConfig.add_arguments(parser)
    assert (arguments[0], arguments[script - 1]) == ("run", "--")
    ours = HecateConfig.from_arguments(parser.parse_args(arguments[1 : script - 1]))
    megatrons = add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
    theirs = megatrons.parse_args(arguments[script + 1 :])
    assert unsupported.find(theirs, None, slots=2) == []
    return torchrun, ours, theirs


def _assert_flags_exist(words: list[str]) -> argparse.Namespace:
    """Return Megatron's arguments of a job on four nodes that saves when it is told to end."""
    torchrun, ours, arguments = _parse_flags(words)
    assert torchrun.nnodes == "4" and ours
    assert arguments.exit_signal_handler and arguments.save == arguments.load is not None
    assert arguments.expert_model_parallel_size == 32
    return arguments


@pytest.mark.fast
@pytest.mark.parametrize("script", sorted(p.name for p in (ROOT / "examples").glob("*.sh")))
def test_scripts_parse_and_are_executable(script: str) -> None:
    path = ROOT / "examples" / script
    subprocess.run(["bash", "-n", path], check=True)
    assert os.access(path, os.X_OK)


@pytest.mark.fast
def test_what_is_missing_is_named() -> None:
    command = [ROOT / "examples/megatron_lm.sh"]
    done = subprocess.run(command, env={"PATH": os.environ["PATH"]}, capture_output=True, text=True)
    assert done.returncode != 0 and "MEGATRON: a checkout of Megatron-LM" in done.stderr


@pytest.mark.newest
@ranks(1)
def test_one_node_and_every_node_of_slurm() -> None:
    """Further arguments arrive as they were."""
    folder = Path(os.environ["TEST_FOLDER"])
    _stand_in(folder, "torchrun", 'printf "%q " "$@"; echo')
    _stand_in(folder, "scontrol", "echo node7; echo node8")
    each = 'shift; for SLURM_NODEID in 0 1; do export SLURM_NODEID; "$@"; done'
    _stand_in(folder, "srun", each)
    speeds = str(ROOT / "tests" / "data" / "free_copies.json")
    slurm = dict(SLURM_JOB_NUM_NODES="2", SLURM_JOB_NODELIST="node[7-8]")
    for script, nodes, address in (("megatron_lm.sh", 1, "localhost"), ("slurm.sh", 2, "node7")):
        done = subprocess.run(
            [ROOT / "examples" / script, "--train-iters", "20", "--lr", "1e-4"],
            cwd=ROOT,
            env=_environment(folder, SPEEDS=speeds, **slurm),
            text=True,
            capture_output=True,
            timeout=30,
        )
        lines = done.stdout.splitlines()
        assert done.returncode == 0 and len(lines) == nodes, done.stderr
        for rank, line in enumerate(lines):
            torchrun, ours, theirs = _parse_flags(shlex.split(line))
            assert (torchrun.nnodes, torchrun.nproc_per_node) == (str(nodes), "8")
            assert torchrun.master_addr == address and torchrun.node_rank == rank
            assert ours == HecateConfig(slots=2, lifetime="auto", speeds=speeds)
            assert (theirs.train_iters, theirs.lr) == (20, 1e-4)


def _start_requeued(folder: Path, srun: str) -> subprocess.Popen:
    """Start the Slurm script with an ``srun`` of this body."""
    _stand_in(folder, "scontrol", 'echo "$@" >> "$FOLDER/scontrol.log"; echo node7; echo node8')
    _stand_in(
        folder,
        "scancel",
        'echo "$@" > "$FOLDER/scancel.part"; mv "$FOLDER/scancel.part" "$FOLDER/scancel.log"',
    )
    _stand_in(folder, "torchrun", 'printf "%q " "$@" > "$FOLDER/torchrun.log"')
    _stand_in(folder, "srun", srun)
    environment = _environment(
        folder,
        SLURM_JOB_NUM_NODES="4",
        SLURM_JOB_NODELIST="node[7-8]",
        SLURM_JOB_ID="42",
        SLURM_NODEID="1",
        CHECKPOINTS="/run/check points",
    )
    command = [ROOT / "examples" / "slurm_requeue.sh", "--expert-model-parallel-size", "32"]
    return subprocess.Popen(command, cwd=ROOT, env=environment)


RUN = 'shift; "$@"; touch "$FOLDER/started"\n'


@pytest.mark.newest
@ranks(1)
def test_slurm_passes_the_signal_on_and_requeues() -> None:
    folder = Path(os.environ["TEST_FOLDER"])
    wait = 'while [ ! -e "$FOLDER/scancel.log" ]; do sleep 0.05; done; sleep 0.5; touch "$FOLDER/saved"; exit 1'
    job = _start_requeued(folder, RUN + wait)
    try:
        deadline = time.monotonic() + 60
        while not (folder / "started").exists():
            assert time.monotonic() < deadline
            time.sleep(0.05)
        job.send_signal(signal.SIGTERM)
        assert job.wait(60) == 0
    finally:
        job.kill()
        job.wait()
    assert (folder / "saved").exists(), "it waits until the ranks have saved"
    assert (folder / "scancel.log").read_text() == "--signal=TERM 42.0\n"
    assert (folder / "scontrol.log").read_text().splitlines() == [
        "show hostnames node[7-8]",
        "requeue 42",
    ]
    arguments = _assert_flags_exist(shlex.split((folder / "torchrun.log").read_text()))
    assert arguments.save == "/run/check points"


@pytest.mark.fast
@pytest.mark.parametrize("status", [0, 3])
def test_slurm_does_not_requeue_a_job_that_ends_by_itself(status: int, tmp_path: Path) -> None:
    assert _start_requeued(tmp_path, f"exit {status}").wait(60) == status
    assert "requeue" not in (tmp_path / "scontrol.log").read_text()


@pytest.mark.fast
def test_slurm_sends_the_signal_to_the_script_and_leaves_time() -> None:
    """Options as Slurm reads them: comments in front of the first command."""
    script = (ROOT / "examples" / "slurm_requeue.sh").read_text()
    options = dict(re.findall(r"^#SBATCH --([\w-]+)=?(.*)$", script, re.MULTILINE))
    assert options["signal"] == "B:TERM@900" and "requeue" in options
    assert options["open-mode"] == "append", "the log of the first part stays"


@pytest.mark.newest
@ranks(1)
def test_kubernetes_starts_every_pod_and_waits_for_the_checkpoint() -> None:
    folder = Path(os.environ["TEST_FOLDER"])
    job = yaml.safe_load(MANIFEST.read_text())
    assert (job["apiVersion"], job["kind"]) == ("kubeflow.org/v1", "PyTorchJob")
    replicas = job["spec"]["pytorchReplicaSpecs"]
    assert [replicas[kind]["replicas"] for kind in ("Master", "Worker")] == [1, 3]
    assert all(of["restartPolicy"] == "OnFailure" for of in replicas.values())
    _stand_in(folder, "torchrun", 'printf "%q " "$@"; echo; echo $PPID')
    for kind in ("Master", "Worker"):
        pod = replicas[kind]["template"]["spec"]
        (container,) = pod["containers"]
        variables = {of["name"]: of["value"] for of in container["env"]}
        seconds = int(variables["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"])
        assert pod["terminationGracePeriodSeconds"] > seconds > 30
        of_operator = dict(RANK="2", MASTER_ADDR="fssdp-master-0", MASTER_PORT="23456")
        process = subprocess.Popen(
            [*container["command"], *container["args"]],
            cwd=ROOT,
            env=_environment(folder, **variables, **of_operator),
            text=True,
            stdout=subprocess.PIPE,
        )
        words, parent = process.communicate(timeout=60)[0].splitlines()
        assert int(parent) == os.getpid(), "torchrun itself gets the signal"
        assert "--node-rank 2" in words and "--master-port 23456" in words
        _assert_flags_exist(shlex.split(words))
        assert container["resources"]["limits"]["nvidia.com/gpu"] == 8
        mounted = {of["name"] for of in container["volumeMounts"]}
        assert mounted == {of["name"] for of in pod["volumes"]}


@pytest.mark.fast
def test_nemo_run_starts_the_launcher() -> None:
    """``Script.to_command`` puts ``-m`` and the arguments behind the path, for its launcher ``torchrun``."""
    import with_nemo_run

    def as_given(**fields: Any) -> types.SimpleNamespace:
        return types.SimpleNamespace(**fields)

    script = with_nemo_run.script(types.SimpleNamespace(Script=as_given), "/megatron", ["--bf16"])
    assert script.m and script.path == "megatron_hecate" and "python" in script.entrypoint
    at = script.args.index("/megatron/pretrain_gpt.py")
    parser = argparse.ArgumentParser(allow_abbrev=False)
    HecateConfig.add_arguments(parser)
    assert (script.args[0], script.args[at - 1]) == ("run", "--")
    parsed = HecateConfig.from_arguments(parser.parse_args(script.args[1 : at - 1]))
    assert parsed == HecateConfig(slots=2) and script.args[at + 1 :] == ["--bf16"]
