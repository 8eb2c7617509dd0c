"""Our own flags before Megatron starts: ``check`` refuses what the launcher refuses, wherever they stand.

Oracle: the launcher, which the parametrized flags are given to as well; literal verdicts.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pretraining import ROOT

pytestmark = pytest.mark.fast

# 8 experts over 4 ranks
SIZE = {"num_experts": 8, "expert_model_parallel_size": 4}
MEGATRON = "--num-experts 8 --expert-model-parallel-size 4".split()
# our flags with their values, and a part of the error
WRONG = [
    ({"--moe-fssdp-slot": 2}, "moe-fssdp-slot"),
    ({"--moe-fssdp-slots-per-rank": 2}, "moe-fssdp-slots-per-rank"),
    ({"--moe-fssdpslots": 2}, "moe-fssdpslots"),
    ({"--moe-fssdp-lifetime": "foo"}, "foo"),
    ({"--moe-fssdp-slots": -1}, "-1"),
    ({"--moe-fssdp-slots": 1.5}, "1.5"),
    ({"--moe-fssdp-timeout": 0}, "timeout=0"),
    ({"--moe-fssdp-slots": 0, "--moe-fssdp-late-replicas": 1}, "late_replicas=1"),
    ({"--moe-fssdp-rehome": 10, "--moe-fssdp-observe": True}, "rehome=10"),
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
def launch(cli: Any, started: list, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """What the launcher says of flags in front of a script, and among its arguments."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "script.py").touch()

    def run(flags: dict) -> Iterator[tuple[int, str]]:
        words = _words(flags)
        for line in ([*words, "--", "script.py"], ["--", "script.py", *words]):
            status, out, err = cli("run", "--moe-fssdp", *line)
            yield status, out + err

    return run


@pytest.fixture
def check(cli: Any, tmp_path: Path) -> Any:
    """Status and text of ``check`` for settings in a file, of each of some texts by name."""

    def run(files: dict[str, str]) -> Iterator[tuple[int, str]]:
        for name, text in files.items():
            (tmp_path / name).write_text(text)
            status, out, err = cli("check", "--settings", tmp_path / name)
            yield status, out + err

    return run


@pytest.mark.parametrize(("flags", "part"), WRONG, ids=lambda value: str(value)[:60])
def test_check_refuses_what_the_launcher_refuses(
    flags: dict, part: str, launch: Any, check: Any
) -> None:
    for status, said in launch(flags):
        assert status == 2 and part in said and "Traceback" not in said, said
    for status, said in check(_files(flags)):
        assert status == 2 and part in said and "\n" not in said.strip(), said


@pytest.mark.parametrize("flags", RIGHT, ids=str)
def test_check_accepts_what_the_launcher_accepts(flags: dict, launch: Any, check: Any) -> None:
    assert list(launch(flags)) == 2 * [(0, "")]
    for status, said in check(_files(flags)):
        assert status == 0 and said.startswith(_verdict(flags)), said


def _verdict(flags: dict) -> str:
    return "would observe, " if "--moe-fssdp-observe" in flags else "would switch on\n"


@pytest.mark.newest
def test_command_lines_as_the_launcher(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cli: Any
) -> None:
    """Megatron 0.16.1 has no wheel with a parser."""
    # torch logs a line about GPUs at its import
    pytest.importorskip("megatron.training.arguments")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "script.py").touch()
    for flags, part in [*WRONG, *((flags, None) for flags in RIGHT)]:
        for words in _command_lines(flags):
            status, out, err = cli("check", *words)
            if part is None:
                assert status == 0 and out.startswith(_verdict(flags)), (words, out + err)
                assert "note: " not in out + err, out + err
            else:
                assert status == 2 and part in err and (out + err).count("\n") == 1, (words, err)


# what Megatron's arguments or Bridge's overrides would hold; None is no number of slots either
@pytest.mark.parametrize(
    ("fields", "status", "part"),
    [
        ({"moe_fssdp": {"slots": 2}}, 2, "moe_fssdp={'slots': 2} must be true or false"),
        ({"moe_fssdp": "yess"}, 2, "moe_fssdp='yess' must be true or false"),
        ({"moe_fssdp_settings": {"slots": 2}}, 2, "moe_fssdp_settings"),
        ({"moe_fssdp_slots": None}, 2, "slots=None"),
        ({"moe_fssdp_slots": [2]}, 2, "slots=[2]"),
        # slots that do not fit the job
        ({"moe_fssdp_slots": 7}, 1, "slots=7 is out of range: a rank that is home to 2 of 8 experts can host 0 to 6"),
        ({"moe_fssdp_slots": 6}, 0, "would switch on\n"),
        ({"num_experts": 2, "expert_model_parallel_size": 2}, 1, "slots=2 is out of range"),  # the default
        ({"num_experts": 60, "expert_model_parallel_size": 8}, 1, "num_experts=60 is not divisible by 8 ranks; use 56 or 64"),
        ({"moe_fssdp_slots": "${SLOTS}"}, 2, "moe_fssdp_slots=${SLOTS} is decided elsewhere"),
    ],
)  # fmt: skip
def test_values_that_are_none_or_do_not_fit(
    fields: dict, status: int, part: str, check: Any
) -> None:
    ((found, said),) = check({"job.json": json.dumps({**SIZE, **fields})})
    assert found == status and part in said and said.strip().count("\n") == 0, said
