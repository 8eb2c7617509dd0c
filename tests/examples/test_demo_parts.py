"""Parts of the demo. Oracles: the order in which steps were written to one file; placement and experts' parameters."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import probe
import pytest
import tiny_gpt
import torch.distributed as dist
from ranks import ranks
from turns import STEPS, VARIABLE, Turns

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
JOB = """
import os, sys, tempfile
sys.path.insert(0, sys.argv[1])
import torch.distributed as dist
from turns import Turns
dist.init_process_group("gloo", init_method=f"file://{tempfile.mktemp()}", rank=0, world_size=1)
turns = Turns.of()
for step in range(int(sys.argv[3])):
    turns.before_step(step)
    with open(sys.argv[2], "a") as file:
        file.write(f"{os.environ['NAME']} {step}\\n")
turns.end()
dist.destroy_process_group()
"""


def test_jobs_take_turns_until_one_has_ended(tmp_path: Path) -> None:
    log, steps = tmp_path / "log", {"first": 3 * STEPS, "second": STEPS + 1}
    running = []
    for name, turn in zip(steps, Turns.begin(tmp_path / "turns", *steps), strict=True):
        command = [sys.executable, "-c", JOB, str(EXAMPLES), str(log), str(steps[name])]
        running.append(
            subprocess.Popen(
                command, env={"NAME": name, VARIABLE: turn, "PATH": "", "OMP_NUM_THREADS": "1"}
            )
        )
    try:
        assert [process.wait(timeout=60) for process in running] == [0, 0]
    finally:
        for process in running:
            process.kill()
    first = [f"first {step}" for step in range(steps["first"])]
    second = [f"second {step}" for step in range(steps["second"])]
    expected = [
        *first[:STEPS],
        *second[:STEPS],
        *first[STEPS : 2 * STEPS],
        *second[STEPS:],
        *first[2 * STEPS :],
    ]
    assert log.read_text().splitlines() == expected


@pytest.mark.fast
def test_both_jobs_pass_on_at_the_same_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second job ends between two file operations of the first job's end."""
    Turns.begin(tmp_path, "first", "second")
    monkeypatch.setattr(dist, "barrier", lambda: None)
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    write_text = Path.write_text
    later = [Turns(tmp_path, "second", "first")]

    def write_then_end(path: Path, text: str) -> int:
        written = write_text(path, text)
        if later:
            later.pop().end()
        return written

    monkeypatch.setattr(Path, "write_text", write_then_end)
    Turns(tmp_path, "first", "second").end()
    assert (tmp_path / "first ended").exists() and (tmp_path / "second ended").exists()


@ranks(2)
def test_bytes_of_replicas() -> None:
    run = tiny_gpt.train(tiny_gpt.initialized(skew=2.5), hook=tiny_gpt.fssdp_hook())
    assert run.replicas > 0
    for layer in tiny_gpt.moe_layers(run.chunks):
        replicas = int(layer.fssdp.placement.is_replica[dist.get_rank()].sum())
        homes = list(layer.experts.parameters())
        each = sum(p.numel() for p in homes) // layer.experts.num_local_experts
        padded = -(-each * 4 // 256) * 256  # fp32, weights and gradients; copies are aligned
        assert probe._replica_bytes(layer) == replicas * 2 * padded
