"""The command line: commands and errors. Oracle: literal words.

What the commands do is tested beside their modules; here, that the words select them.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import recorded
from pretraining import python

from megatron_hecate import __version__
from megatron_hecate.__main__ import COMMANDS, main, overview

pytestmark = pytest.mark.fast


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A recorded run."""
    size = recorded.Size(num=3, layers=2)
    return recorded.write(tmp_path / "run", size, held=recorded.arrays(size))


OPTIONS = {
    "check": "--settings FILE",
    "report": "--export",
    "what-if": "--step-ms",
    "measure": "FILE",
    "run": "--moe-fssdp-slots N",
}


def test_overview_and_version(cli) -> None:
    assert cli("--version") == (0, f"megatron-hecate {__version__}\n", "")
    assert cli("--help") == cli("-h") == (0, overview() + "\n", "")
    assert list(COMMANDS) == ["check", "report", "what-if", "measure", "run"]
    assert all(f"\n  {name} " in overview() for name in COMMANDS)
    for command, option in OPTIONS.items():
        status, out, _ = cli(command, "--help")
        assert status == 0 and option in out


@pytest.mark.parametrize(
    "words",
    [
        ["--moe-fssdp-slots", "3", "SCRIPT", "report", "--check"],
        ["run", "--moe-fssdp-slots", "3", "--", "SCRIPT", "report", "--check"],
        ["run", "--moe-fssdp-slots", "3", "--", "-m", "target", "report", "--check"],
        ["run", "--moe-fssdp-slots=3", "-m", "target", "report", "--check"],
    ],
    ids=" ".join,
)
def test_forms_of_run(words: list[str], cli, started: list, tmp_path: Path, monkeypatch) -> None:
    """The arguments of the script are its own, whatever they are."""
    monkeypatch.chdir(tmp_path)
    script = tmp_path / "target.py"
    script.touch()
    words = [str(script) if word == "SCRIPT" else word for word in words]
    assert cli(*words, "--", "run") == (0, "", "")
    target = "target" if "-m" in words else str(script)
    assert started == [(target, {"moe_fssdp_slots": 3}, ["report", "--check", "--", "run"])]


def test_a_script_named_like_a_command(cli, started: list, tmp_path: Path, monkeypatch) -> None:
    """After ``run``, and after ``--``, the word is the target."""
    monkeypatch.chdir(tmp_path)
    (script := tmp_path / "report").touch()
    for words in ("run report x", "run -- report x", "-- report x", "./report x"):
        assert cli(*words.split()) == (0, "", "")
    assert started == 4 * [(str(script), {}, ["x"])]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("", "no SCRIPT.py given, nor -m MODULE, nor a console command\n"),
        ("reprt run", "reprt does not exist; give a script, -m MODULE, or a console command of this "
         "Python environment; megatron-hecate --help lists our own commands\n"),
        ("no-such.py report", "megatron-hecate run: error: no-such.py does not exist; give a script, -m"),
        ("--moe-fssdp-slots many x.py", "invalid int value: 'many'"),
        ("--mesure x", "unrecognized arguments: --mesure\n"),
        ("--moe-fssdp --report x", "unrecognized arguments: --report\n"),
        ("run --report x", "megatron-hecate run: error: unrecognized arguments: --report\n"),
        ("run -- --moe-fssdp x.py", "error: --moe-fssdp does not exist; give a script"),
        ("report", "megatron-hecate report: error: the following arguments are required: RUN_DIR"),
        ("measure a b", "megatron-hecate measure: error: unrecognized arguments: b"),
    ],
)  # fmt: skip
def test_wrong_words_name_the_way_out(cli, words: str, message: str) -> None:
    status, out, err = cli(*words.split())
    assert status == 2 and not out and message in err and "usage: " in err, err


def test_commands_import_what_they_need_alone() -> None:
    """``--help`` and ``--version`` answer at once, also where torch takes seconds to import."""
    code = "import sys; from megatron_hecate.__main__ import main; main(['--help']); main(['--version'])\n"
    code += "assert not {'torch', 'numpy', 'numba'} & set(sys.modules)"
    done = python("-c", code)
    assert done.returncode == 0, done.stderr


def test_ranks_other_than_0_print_one_line(cli, monkeypatch) -> None:
    monkeypatch.setitem(os.environ, "RANK", "1")
    message = "megatron-hecate run: error; see the message of rank 0 (this is rank 1)\n"
    assert cli("reprt") == (2, "", message)


@pytest.mark.parametrize("command", ["--moe-fssdp SCRIPT", "measure x"])
@pytest.mark.parametrize(
    ("variable", "value", "least"),
    [("RANK", "-1", 0), ("LOCAL_RANK", "gpu0", 0), ("WORLD_SIZE", "0", 1)],
)
def test_variables_of_torchrun_that_are_no_numbers(
    command: str, variable: str, value: str, least: int, cli, tmp_path: Path, monkeypatch
) -> None:
    (script := tmp_path / "script.py").touch()
    monkeypatch.setenv(variable, value)
    status, out, err = cli(*command.replace("SCRIPT", str(script)).split())
    line = f"{variable}={value!r} in the environment must be a whole number, {least} or more; unset {variable}"
    assert status == 2 and not out and line in err.splitlines()[-1], err


@pytest.mark.parametrize("command", ["check --settings {0}", "report {1}"])
def test_a_reader_that_has_read_enough(
    command: str, folder: Path, tmp_path: Path, monkeypatch, capfd
) -> None:
    """Oracle: what a shell reports of a program that writes to a closed pipe, 128 + SIGPIPE."""
    settings = tmp_path / "job.json"
    settings.write_text('{"num_moe_experts": 8, "expert_model_parallel_size": 2}')
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as closed:
        monkeypatch.setattr(sys, "stdout", closed)
        assert main(command.format(settings, folder).split()) == 141
    assert "no report" not in capfd.readouterr().err
    if "report" in command:
        assert (folder / "report.html").exists()
