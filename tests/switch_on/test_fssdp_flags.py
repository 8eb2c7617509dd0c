"""Our own flags before Megatron starts: ``check`` refuses what the launcher refuses, wherever they stand.

Oracle: the launcher, which the parametrized flags are given to as well; literal verdicts.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from pretraining import ROOT

from megatron_hecate.__main__ import main
from megatron_hecate.switch_on import launcher

pytestmark = pytest.mark.fast

# 8 experts over 4 ranks
SIZE = {"num_experts": 8, "expert_model_parallel_size": 4}
MEGATRON = "--num-experts 8 --expert-model-parallel-size 4".split()
# our flags with their values, and a part of the error
WRONG = [
    ({"--moe-fssdp-slot": 2}, "moe-fssdp-slot"),
    ({"--moe-fssdp-slots-per-rank": 2}, "moe-fssdp-slots-per-rank"),
    ({"--moe-fssdp-life-time": "layer"}, "moe-fssdp-life-time"),
    ({"--moe-fssdpslots": 2}, "moe-fssdpslots"),
    ({"--moe-fssdp-prefetch": True}, "moe-fssdp-prefetch"),
    ({"--moe-fssdp-lifetime": "foo"}, "foo"),
    ({"--moe-fssdp-transport": "nccl"}, "nccl"),
    ({"--moe-fssdp-slots": -1}, "-1"),
    ({"--moe-fssdp-slots": 1.5}, "1.5"),
    ({"--moe-fssdp-slots": 100_000}, "100000"),
    ({"--moe-fssdp-timeout": 0}, "timeout=0"),
    ({"--moe-fssdp-slots": 0, "--moe-fssdp-late-replicas": 1}, "late_replicas=1"),
    ({"--moe-fssdp-rehome": 10, "--moe-fssdp-observe": True}, "rehome=10"),
    ({"--moe-fssdp-speeds": "missing.json"}, "missing.json"),
    ({"--moe-fssdp-speeds": "/nowhere/speeds.json"}, "/nowhere/speeds.json"),
    ({"--moe-fssdp-speeds": str(ROOT / "README.md")}, "does not hold measured speeds"),
    ({"--moe-fssdp-record": str(ROOT / "README.md")}, "README.md' must be the name of a folder"),
]
RIGHT = [
    {},
    {"--moe-fssdp-slots": 6},
    {"--moe-fssdp-observe": True},
    {"--moe-fssdp-record": "2026"},
    {"--moe-fssdp-lifetime": "auto", "--moe-fssdp-timeout": 0.5, "--moe-fssdp-overlap-degree": 2},
    {"--moe-fssdp-speeds": str(ROOT / "tests" / "data" / "free_copies.json")},
]


def _words(flags: dict[str, Any]) -> list[str]:
    words = []
    for flag, value in flags.items():
        words += [flag] if value is True else [flag, str(value)]
    return words


def _fields(flags: dict[str, Any]) -> dict[str, Any]:
    return {flag.removeprefix("--").replace("-", "_"): value for flag, value in flags.items()}


def _files(flags: dict[str, Any]) -> dict[str, str]:
    """Text of a file by name, with the same flags in each place."""
    fields = {**SIZE, **_fields(flags)}
    return {
        "fields.json": json.dumps(fields),
        "fields.yaml": json.dumps({**fields, "moe_fssdp": True}),
        "nested.yaml": json.dumps({"modules": {"trainer": {"overrides": fields}}}),
        "dotted.json": json.dumps({**SIZE, **{f"model.{k}": v for k, v in _fields(flags).items()}}),
        "flags.json": json.dumps({"MODEL_ARGS": {**SIZE, **flags}}),
    }


def _command_lines(flags: dict[str, Any]) -> list[list[str]]:
    """Words behind ``check``, with the same flags in each place."""
    words = _words(flags)
    run = "torchrun --nproc-per-node 8 -m megatron_hecate run --moe-fssdp".split()
    return [
        ["--moe-fssdp", *words, "--", "script.py", *MEGATRON],
        ["--", *run, *words, "--", "script.py", *MEGATRON],
        ["--", "script.py", *MEGATRON, "--moe-fssdp", *words],
    ]


@pytest.fixture
def launch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> Any:
    """What the launcher says of flags in front of a script, and among its arguments."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(launcher, "_run", lambda *_: 0)
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "script.py").touch()

    def run(*words: str) -> tuple[int, str]:
        try:
            status = main(["run", "--moe-fssdp", *words])
        except SystemExit as end:
            status = end.code
        return status, capsys.readouterr().err

    return run


def _check(path: Path, capsys: pytest.CaptureFixture) -> tuple[int, str]:
    return _run(["--settings", str(path)], capsys)


def _run(words: list[str], capsys: pytest.CaptureFixture) -> tuple[int, str]:
    status = main(["check", *words])
    printed = capsys.readouterr()
    return status, printed.out + printed.err


@pytest.mark.parametrize(("flags", "part"), WRONG, ids=lambda value: str(value)[:60])
def test_check_refuses_what_the_launcher_refuses(
    flags: dict, part: str, launch: Any, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    words = _words(flags)
    for line in ([*words, "--", "script.py"], ["--", "script.py", *words]):
        status, said = launch(*line)
        assert status == 2 and part in said and "Traceback" not in said, said
    for name, text in _files(flags).items():
        (tmp_path / name).write_text(text)
        status, said = _check(tmp_path / name, capsys)
        assert status == 2 and part in said and said.count("\n") == 1, (name, said)


@pytest.mark.parametrize("flags", RIGHT, ids=str)
def test_check_accepts_what_the_launcher_accepts(
    flags: dict, launch: Any, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    words = _words(flags)
    for line in ([*words, "--", "script.py"], ["--", "script.py", *words]):
        assert launch(*line) == (0, "")
    for name, text in _files(flags).items():
        (tmp_path / name).write_text(text)
        status, said = _check(tmp_path / name, capsys)
        assert status == 0 and said.startswith(_verdict(flags)), (name, said)


def _verdict(flags: dict) -> str:
    return "would observe: " if "--moe-fssdp-observe" in flags else "would switch on\n"


@pytest.mark.newest
def test_command_lines_as_the_launcher(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """Megatron 0.16.1 has no wheel with a parser."""
    # torch logs a line about GPUs at its import
    pytest.importorskip("megatron.training.arguments")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "script.py").touch()
    for flags, part in WRONG:
        for words in _command_lines(flags):
            status, said = _run(words, capsys)
            assert status == 2 and part in said and said.count("\n") == 1, (words, said)
    for flags in RIGHT:
        for words in _command_lines(flags):
            status, said = _run(words, capsys)
            assert status == 0 and said.startswith(_verdict(flags)), (words, said)
            assert "note: " not in said, said


def test_sections_and_values_that_are_no_values(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    """What Megatron's arguments or Bridge's overrides would hold; None is no number of slots either."""
    for fields, part in (
        ({"moe_fssdp": {"slots": 2}}, "moe_fssdp={'slots': 2} must be true or false"),
        ({"moe_fssdp": "yess"}, "moe_fssdp='yess' must be true or false"),
        ({"moe_fssdp_settings": {"slots": 2}}, "moe_fssdp_settings"),
        ({"moe_fssdp_slots": None}, "slots=None"),
        ({"moe_fssdp_slots": [2]}, "slots=[2]"),
    ):
        (path := tmp_path / "job.json").write_text(json.dumps({**SIZE, **fields}))
        status, said = _check(path, capsys)
        assert status == 2 and part in said and said.count("\n") == 1, said


@pytest.mark.parametrize(
    ("experts", "ranks", "slots", "refused"),
    [
        (8, 4, 7, "slots=7 is out of range: a rank that is home to 2 of 8 experts can host 0 to 6"),
        (8, 4, 6, None),
        (2, 2, None, "slots=2 is out of range"),  # the default
        (60, 8, 1, "num_experts=60 is not divisible by 8 ranks; use 56 or 64"),
        (8, 4, "${SLOTS}", "moe_fssdp_slots=${SLOTS} is decided elsewhere"),
    ],
)
def test_slots_that_do_not_fit_the_job(
    experts: int,
    ranks: int,
    slots: Any,
    refused: str | None,
    tmp_path: Path,
    capsys: pytest.CaptureFixture,
) -> None:
    fields = {"num_moe_experts": experts, "expert_model_parallel_size": ranks}
    if slots is not None:
        fields["moe_fssdp_slots"] = slots
    (path := tmp_path / "job.json").write_text(json.dumps(fields))
    status, said = _check(path, capsys)
    if refused is None:
        assert (status, said) == (0, "would switch on\n")
    else:
        assert status == (2 if isinstance(slots, str) else 1) and refused in said, said
