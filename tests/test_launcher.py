"""The ways to switch FSSDP on in an unmodified pretraining script, through ``megatron.training.pretrain`` itself.

Oracle: what stock Megatron's own log says for the same arguments.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = ROOT / "examples" / "pretrain_gpt.py"


def _python(*arguments: str, timeout: float = 60) -> subprocess.CompletedProcess:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, text=True, capture_output=True, timeout=timeout)


def test_check_prints_what_would_be_used() -> None:
    done = _python("-m", "megatron_hecate", "--check")
    assert done.returncode == 0, done.stderr
    assert re.search(r"megatron-core \S+: fits", done.stdout) and "transports: p2p" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "no SCRIPT.py given"),
        (["--moe-fssdp"], "no SCRIPT.py given"),
        (["missing.py"], "missing.py does not exist"),
        (["--moe-fssdp-slots", "many", str(SCRIPT)], "invalid int value: 'many'"),
        (["--moe-fssdp-slot", "2", str(SCRIPT)], "unrecognized arguments: --moe-fssdp-slot"),
    ],
)
def test_usage_errors(arguments: list[str], message: str) -> None:
    done = _python("-m", "megatron_hecate", *arguments)
    assert done.returncode == 2 and message in done.stderr, done.stderr


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small dataset of this project's own sources."""
    prefix = tmp_path_factory.mktemp("data") / "text"
    done = _python("examples/prepare_bytes.py", str(ROOT / "megatron_hecate"), str(prefix))
    assert done.returncode == 0, done.stderr
    return prefix


def _pretrain(text: Path, *arguments: str, launcher: list[str], script: Path = SCRIPT, settings: str = "") -> str:
    """Train the demo's model, smaller, on 2 processes; returns the log, or raises with it."""
    process, log = _start(text, *arguments, launcher=launcher, script=script, settings=settings)
    try:
        log, _ = process.communicate(timeout=150)
    finally:
        os.killpg(process.pid, signal.SIGKILL) if process.poll() is None else None
    assert process.returncode == 0, log[-6000:]
    return log


def _start(
    text: Path, *arguments: str, launcher: list[str], script: Path = SCRIPT, settings: str = ""
) -> tuple[subprocess.Popen, str]:
    import demo

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", f"--master-port={port}"]
    command += [str(ROOT / "examples" / "run_on_cpu.py"), *launcher, str(script)]
    command += [*demo.MODEL.split(), *demo.TRAINING.split(), *demo.CPU.split()]
    command += "--hidden-size 32 --moe-ffn-hidden-size 64 --micro-batch-size 1 --global-batch-size 4".split()
    command += ["--train-iters", "6", "--data-path", str(text), "--data-cache-path", f"{text}-cache"]
    command += [*settings.split(), *arguments]
    path = os.pathsep.join([str(ROOT / "examples"), str(ROOT / "tests")])
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", "PYTHONPATH": path}
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    return process, ""


def _losses(log: str) -> list[float]:
    return [float(x) for x in re.findall(r"lm loss: ([\d.E+-]+)", log)]


@pytest.mark.newest
def test_flags_hook_and_launcher_train_the_stock_model(text: Path) -> None:
    stock = _losses(_pretrain(text, launcher=[]))
    assert len(stock) == 6
    flags = ["--moe-fssdp", "--moe-fssdp-slots", "3"]
    for how, log in {
        "flags before the script": _pretrain(text, launcher=["-m", "megatron_hecate", *flags]),
        "flags among Megatron's": _pretrain(text, *flags, launcher=["-m", "megatron_hecate"]),
        "one line": _pretrain(text, *flags, launcher=[], script=ROOT / "tests" / "enabled_pretrain.py"),
    }.items():
        assert _losses(log) == pytest.approx(stock, rel=1e-5), how
        assert log.count("FSSDP on: 4 MoE layers on this rank, 16 experts over 2 ranks, 3 slots") == 1, how
    off = _pretrain(text, launcher=["-m", "megatron_hecate"])
    assert _losses(off) == stock and "FSSDP" not in off


@pytest.mark.newest
def test_flags_that_cannot_be_combined_stop_the_run_with_a_list(text: Path) -> None:
    with pytest.raises(AssertionError) as error:
        settings = "--moe-pad-expert-input-to-capacity --moe-expert-capacity-factor 1.0"
        _pretrain(text, launcher=["-m", "megatron_hecate", "--moe-fssdp"], settings=settings)
    assert "FSSDP cannot be switched on" in str(error.value)
    assert "--moe-fssdp with moe_pad_expert_input_to_capacity=True" in str(error.value)


@pytest.mark.newest
def test_a_rank_that_dies_leaves_nothing_behind(text: Path, tmp_path: Path) -> None:
    shared_memory = set(Path("/dev/shm").iterdir()) if Path("/dev/shm").exists() else set()
    save = tmp_path / "checkpoint"
    start = time.monotonic()
    process, _ = _start(
        text,
        "--save",
        str(save),
        "--save-interval",
        "3",
        launcher=["-m", "megatron_hecate", "--moe-fssdp", "--moe-fssdp-timeout", "10"],
        script=ROOT / "tests" / "dying_pretrain.py",
    )
    log, _ = process.communicate(timeout=120)
    assert process.returncode != 0 and time.monotonic() - start < 110, log[-3000:]
    with pytest.raises(ProcessLookupError):  # every process of the run's session is gone
        os.killpg(process.pid, 0)
    left = {p for p in Path("/dev/shm").iterdir()} - shared_memory if Path("/dev/shm").exists() else set()
    assert not [p for p in left if "torch" in p.name or "hecate" in p.name], left
    assert not list(save.rglob("*.distcp")), "a checkpoint was begun"
