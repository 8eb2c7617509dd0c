"""The ways to switch FSSDP on in an unmodified pretraining script, through ``megatron.training.pretrain`` itself.

Oracle: what stock Megatron's own log says for the same arguments, ended and started again alike where a job is.
"""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist
from launch import python_path, torchrun
from pretraining import (
    ROOT,
    SCRIPT,
    SUPPORT,
    losses,
    pretrain,
    pretrain_arguments,
    python,
    run_script,
)
from ranks import ranks

from megatron_hecate.record import run_folder

pytestmark = pytest.mark.newest
TERMINATED = SUPPORT / "scripts" / "terminated_pretrain.py"


def test_a_script_that_starts_itself_again_and_builds_no_model(tmp_path: Path) -> None:
    """As Megatron-Bridge's scripts do, once they know a recipe's environment, and from another folder."""
    script, speeds = tmp_path / "script.py", Path("tests", "data", "free_copies.json")
    script.write_text(
        "import os, sys\n"
        "again = [sys.executable, os.path.abspath(__file__), *sys.argv[1:]]\n"
        "if 'AGAIN' not in os.environ:\n"
        "    os.chdir('/')\n"
        "    os.execvpe(sys.executable, again, {**os.environ, 'AGAIN': '1'})\n"
        "from megatron_hecate.switch_on.request import REQUEST\n"
        "print(REQUEST.flags, sys.argv[1:])\n"
    )
    flags = ["--moe-fssdp", "--moe-fssdp-slots", "3", "--moe-fssdp-speeds", str(speeds)]
    done = python("-m", "megatron_hecate", *flags, str(script), "--flag", "model.x=1", timeout=120)
    launched = {"moe_fssdp": True, "moe_fssdp_slots": 3, "moe_fssdp_speeds": str(ROOT / speeds)}
    assert f"{launched} ['--flag', 'model.x=1']" in done.stdout, done.stdout + done.stderr
    assert done.returncode == 1
    assert "script.py built no model by megatron.training or" in done.stderr


@ranks(2, timeout=300)
def _pretrain_here(
    text: Path, log: Path, launcher: list[str], script: tuple[str, ...] = (str(SCRIPT),)
) -> None:
    """Run the example's script, or another one, in these ranks, with no process of its own.

    The last rank's output goes to ``log``, and rank 0's to ``log`` with the suffix .0.
    """
    import run_on_cpu

    sys.argv = ["run_on_cpu.py", *launcher, *script, *pretrain_arguments(text)]
    last = dist.get_rank() == dist.get_world_size() - 1
    with (
        (log if last else log.with_suffix(f".{dist.get_rank()}")).open("w") as out,
        contextlib.redirect_stdout(out),
    ):
        try:
            run_on_cpu.main()
        except SystemExit as ended:  # our launcher's
            assert not ended.code


LATE = """
import importlib.util, sys
early = [name for name in sys.modules if name.partition(".")[0] == "megatron"]
sys.path.insert(0, sys.argv[1])
found = [importlib.util.find_spec("megatron.training"), importlib.util.find_spec("megatron.core")]
import megatron.training, megatron.core
from megatron.core.distributed import DistributedDataParallel
from megatron.training import arguments
print(early, megatron.core.__file__, megatron.training.__file__)
print([hasattr(arguments.add_megatron_arguments, "__wrapped__"),
       DistributedDataParallel.__new__.__module__ == "megatron_hecate.switch_on.entry"])
"""


def test_a_script_chooses_its_megatron(tmp_path: Path) -> None:
    """Primus puts its own Megatron on the path when it starts; then this one is to be enabled.

    A script may also look for Megatron before it imports it.
    """
    import megatron.core

    (script := tmp_path / "late.py").write_text(LATE)
    (own := tmp_path / "own").mkdir()
    (own / "megatron").symlink_to(Path(megatron.core.__file__).parents[1])
    done = python("-m", "megatron_hecate", "--moe-fssdp", str(script), str(own), timeout=240)
    paths = [str(own / "megatron" / name / "__init__.py") for name in ("core", "training")]
    said = f"[] {' '.join(paths)}\n[True, True]\n"
    assert done.stdout.endswith(said), done.stdout + done.stderr
    assert done.returncode == 1 and "late.py built no model" in done.stderr, done.stderr


GUARDED = """
import builtins, sys
sys.modules["megatron_hecate.enable"] = None
for attempt in range(2):
    try:
        import megatron.training
    except ImportError as error:
        print("refused:", error, flush=True)
# Primus replaces it, too
builtins.print = lambda *words, **settings: None
"""


def test_a_script_that_ignores_errors_of_imports(tmp_path: Path) -> None:
    """Each import of a Megatron that FSSDP does not fit is an error, not just the first one."""
    (script := tmp_path / "guarded.py").write_text(GUARDED)
    done = python("-m", "megatron_hecate", "--moe-fssdp", str(script), timeout=240)
    refused = "refused: import of megatron_hecate.enable halted; None in sys.modules\n"
    assert done.stdout == 2 * refused, done.stdout + done.stderr
    assert done.returncode == 1 and "guarded.py built no model" in done.stderr, done.stderr


def test_flags_hook_and_launcher_train_the_stock_model(text: Path, tmp_path: Path) -> None:
    _pretrain_here(text, tmp_path / "stock", [])
    stock = losses((tmp_path / "stock").read_text())
    assert len(stock) == 6
    free = str(
        ROOT / "tests" / "data" / "free_copies.json"
    )  # else no copy pays on so small a model
    flags, speeds = ["--moe-fssdp", "--moe-fssdp-slots", "3"], ["--moe-fssdp-speeds", free]
    before = ["-m", "megatron_hecate", "run", *flags, "--"]
    log = pretrain(text, *speeds, launcher=[], before=before)
    assert losses(log) == pytest.approx(stock, rel=1e-5)
    assert log.count("FSSDP on: 4 MoE layers, 16 experts over 2 ranks, 3 slots") == 1
    one_line = str(SUPPORT / "scripts" / "enabled_pretrain.py")
    for how, launcher, script in (
        ("launcher", ["-m", "megatron_hecate", *flags, *speeds], (str(SCRIPT),)),
        ("one line", [], (one_line, *flags, *speeds)),
    ):
        _pretrain_here(text, tmp_path / how, launcher, script)
        assert losses((tmp_path / how).read_text()) == pytest.approx(stock, rel=1e-5), how
        assert (tmp_path / f"{how}.0").read_text().count("FSSDP on: 4 MoE layers") == 1, how
    _pretrain_here(text, tmp_path / "off", ["-m", "megatron_hecate", "run", "--"])
    off = (tmp_path / "off").read_text()
    assert losses(off) == stock and "FSSDP" not in off


@pytest.mark.parametrize("holds", ["no flags", "settings"])
def test_arguments_that_a_framework_makes(holds: str, text: Path, tmp_path: Path) -> None:
    """Flags of our launcher reach them, and so does a framework's own setting behind our launcher."""
    launcher = ["-m", "megatron_hecate", "run"]
    if holds != "settings":
        launcher += ["--moe-fssdp", "--moe-fssdp-slots", "3"]
    script = (str(SUPPORT / "scripts" / "ready_arguments.py"), holds)
    _pretrain_here(text, tmp_path / "log", [*launcher, "--"], script)
    log = (tmp_path / "log.0").read_text()
    assert log.count("FSSDP on: 4 MoE layers, 16 experts over 2 ranks, 3 slots") == 1, log
    assert len(losses((tmp_path / "log").read_text())) == 6


HOOKED = """
import tiny_gpt
from megatron_hecate import HecateConfig, fssdp
import torch.distributed as dist
dist.init_process_group("gloo")
case = tiny_gpt.Case()
tiny_gpt.initialize(case)
chunks, config = tiny_gpt.build(case)
config.moe_single_grouped_weight = True
fssdp(HecateConfig(slots=2))(chunks)
"""


def test_the_hook_by_itself_prints_a_list_once(tmp_path: Path) -> None:
    """In a script that neither our launcher nor `enable` is in."""
    (script := tmp_path / "hooked.py").write_text(HOOKED)
    settings = {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", "PYTHONPATH": python_path()}
    done = subprocess.run(
        [*torchrun(2), str(script)],
        env={**os.environ, **settings},
        text=True,
        capture_output=True,
        timeout=120,
        cwd=tmp_path,
    )
    log = done.stdout + done.stderr
    assert done.returncode != 0
    # by rank 0, in a list; by rank 1, one line; and no traceback shows a line of ours
    assert log.count("--moe-fssdp with moe_single_grouped_weight=True") == 1, log
    assert log.count("FSSDP cannot be switched on:\n  - ") == 1, log
    line = "FSSDP cannot be switched on; rank 0 prints the reasons (this is rank 1)"
    assert log.count(line) == 1, log
    assert not re.search(r'File "[^"]*megatron_hecate/', log), log


def _ended_and_continued(text: Path, checkpoints: Path, launcher: list[str]) -> list[list[float]]:
    """Losses of both parts; the launcher gets the signal in the third iteration of six."""
    flags = ["--exit-signal-handler", "--save", str(checkpoints), "--load", str(checkpoints)]
    flags += ["--save-interval", "100"]
    code, log = run_script(text, *flags, launcher=launcher, script=TERMINATED)
    assert code != 0, "torchrun ends with the signal"
    assert "exiting program after receiving SIGTERM" in log, log[-4000:]
    assert (checkpoints / "latest_checkpointed_iteration.txt").read_text() == "3"
    return [losses(log), losses(pretrain(text, *flags, launcher=launcher))]


@pytest.mark.slow
def test_a_job_that_is_ended_goes_on_where_it_was(text: Path, tmp_path: Path) -> None:
    """Experts move to other homes, which a checkpoint does not show. torchrun passes the signal on to the ranks, which
    have 30 s then, or $TORCH_ELASTIC_SHUTDOWN_TIMEOUT."""
    stock = _ended_and_continued(text, tmp_path / "stock", [])
    assert [len(part) for part in stock] == [3, 3]
    free = str(ROOT / "tests" / "data" / "free_copies.json")
    flags = ["--moe-fssdp", "--moe-fssdp-speeds", free, "--moe-fssdp-rehome", "2"]
    record = tmp_path / "run"
    launcher = ["-m", "megatron_hecate", *flags, "--moe-fssdp-record", str(record)]
    ours = _ended_and_continued(text, tmp_path / "ours", launcher)
    for part, expected in zip(ours, stock, strict=True):
        assert part == pytest.approx(expected, rel=1e-5)
    held = run_folder.read(record)
    assert held.iteration.tolist() == [1, 2, 3, 4, 5, 6], "also the last ones of both parts"
    assert (held.replica >= 0).any()
