"""Every code block of the documentation runs as it stands, and every command exists with its flags.

Oracle: the parsers of our commands, of torchrun, make, pip and each script; reports and simulations of made-up runs;
a tiny model on CPU ranks, in which the Python blocks do what their page says; the lines that are printed there.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import io
import itertools
import os
import re
import runpy
import shutil
import sys
import tomllib
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import recorded
import tiny_gpt
import torch.distributed as dist
from pretraining import ROOT, python
from ranks import ranks
from snippets import Page, block, commands, pages

from megatron_hecate import HecateConfig, fssdp
from megatron_hecate.__main__ import COMMANDS, main

# What each block of a page is, in order: commands, which are parsed; a drawing; Python or output in the test of that
# name below, or in another file.
BLOCKS = {
    "CONTRIBUTING.md": "drawing",
    "README.md": "drawing commands commands commands commands enable tests/bridge/test_ways_in.py loop loop",
    "docs/frameworks.md": "enable launchers",
    "docs/graphs.md": "commands",
    "docs/homes.md": "loop",
    "docs/how-a-layer-decides.md": "drawing drawing commands loop",
    "docs/install.md": "commands commands commands commands commands commands",
    "docs/memory.md": "drawing",
    "docs/observe.md": "commands loop loop",
    "docs/operate.md": "launchers",
    "docs/report.md": "commands",
    "docs/scale.md": "tests/faults/test_watchdog.py",
    "docs/what-if.md": "commands files drawing",
    "tests/README.md": "commands commands",
    "docs/gpu.md": "commands commands",
    "docs/recipes.md": "commands",
}
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def kinds_of(page: Page) -> list[str]:
    """Return what each block of a page is; those of examples are commands."""
    is_example = page.name.startswith("examples/")
    return ["commands"] * len(page.blocks()) if is_example else BLOCKS.get(page.name, "").split()


def _commands() -> dict[str, tuple[str, list[str]]]:
    """Program and further words of each command, by where it stands first and its text."""
    found: dict[str, tuple[str, list[str]]] = {}
    known = set()
    for page in pages():
        kinds = kinds_of(page)
        blocks = zip(kinds, page.blocks(), strict=False)
        texts = [text for kind, (_, text) in blocks if kind == "commands"]
        for program, *words in itertools.chain.from_iterable(map(commands, texts + page.inline())):
            text = " ".join([program, *words])
            if text not in known:
                found[f"{page.name}: {text}"] = (program, words)
            known.add(text)
    return found


ALL = _commands()


@pytest.mark.fast
@pytest.mark.parametrize("page", [p for p in pages() if p.blocks()], ids=lambda page: page.name)
def test_every_block_is_run(page: Page) -> None:
    kinds = kinds_of(page)
    for index, (language, text) in enumerate(page.blocks()):
        assert index < len(kinds), f"say in BLOCKS what runs this:\n{text}"
        if "/" in kinds[index]:
            test = (ROOT / kinds[index]).read_text()
        elif kinds[index] not in ("commands", "drawing"):
            test = inspect.getsource(globals()[f"test_{kinds[index]}"])
        else:
            assert not language, f"nothing runs this:\n{text}"
            continue
        call = f'block("{page.name}", {index})'
        assert call in test or (not language and "/" in kinds[index]), f"{call} is not in its test"
    assert len(kinds) == len(page.blocks())


def _find_script(words: list[str]) -> tuple[Path, list[str]]:
    path = next((f / words[0] for f in (ROOT, ROOT / "examples") if (f / words[0]).is_file()), None)
    assert path is not None, f"{words[0]} does not exist"
    return path, words[1:]


def _module_of(command: str) -> Any:
    return importlib.import_module(f"megatron_hecate.{COMMANDS[command][0]}")


def _check_ours(words: list[str]) -> None:
    """Run ``report`` and ``what-if``, and the launcher up to its target; parse the others."""
    if words == ["COMMAND", "--help"]:
        for name in COMMANDS:
            with pytest.raises(SystemExit, match="0"):
                main([name, "--help"])
    elif len(words) == 1:
        assert words[0] in (*COMMANDS, "--version", "--help")
    elif words and words[0] in ("check", "measure"):
        # a job's command line follows --, which `test_command_line.py` checks
        options = words[1 : words.index("--")] if "--" in words else words[1:]
        _module_of(words[0]).make_parser().parse_args(options)
    elif words:
        assert main(words) == 0


def _check_torchrun(words: list[str]) -> None:
    if not words:
        return
    from torch.distributed.run import parse_args

    parsed = parse_args(words)
    target, behind = parsed.training_script, parsed.training_script_args
    if target.endswith(".py"):
        _find_script([target])
        if behind[:2] == ["-m", "megatron_hecate"]:
            _check_ours(behind[2:])
    else:
        names = {"megatron_hecate": (True, False), "megatron-hecate": (False, True)}
        assert names[target] == (parsed.module, parsed.no_python)
        _check_ours(behind)


def _check_pytest(words: list[str]) -> None:
    options = dict(itertools.pairwise(words))
    paths = [ROOT / word for word in words if "/" in word]
    assert all(path.exists() for path in paths)
    if options.get("-k", "NAME") != "NAME":
        assert options["-k"] in paths[0].read_text()
    markers = PROJECT["tool"]["pytest"]["ini_options"]["markers"]
    assert options.get("-m", "fast") in [marker.split(":")[0] for marker in markers]


def _check_make(words: list[str]) -> None:
    makefile = (ROOT / "Makefile").read_text()
    for word in words:
        name, equals, _ = word.partition("=")
        assert re.search(rf"^{name} \?=" if equals else rf"^{name}:", makefile, re.M), word


def _check_pip(words: list[str]) -> None:
    extras = PROJECT["project"]["optional-dependencies"]
    assert all(word[2:-1] in extras for word in words if word.startswith(".["))


def _check_python(words: list[str]) -> None:
    if words[:1] == ["-c"]:
        done = python(*words)
        assert done.returncode == 0 and "class HecateConfig" in done.stdout, done.stderr
    elif words[:1] == ["-m"]:
        {"pytest": _check_pytest, "megatron_hecate": _check_ours}[words[1]](words[2:])
    elif words:
        _find_script(words)  # a rank parses the flags, below


CHECKS = {
    "make": _check_make, "python": _check_python, "pytest": _check_pytest, "pip": _check_pip,
    "torchrun": _check_torchrun, "megatron-hecate": _check_ours,
    "srun": lambda words: _check_ours(words[1:]),
}  # fmt: skip
# Programs that a machine for tests may lack: only the files that they are given are checked.
ELSEWHERE = {".venv-bridge/bin/python", "sbatch", "kubectl", "rm", "examples/megatron_lm.sh"}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Recorded runs, speeds and scripts, under the names in the commands."""
    folder = tmp_path_factory.mktemp("files")
    size = recorded.Size(layers=2, experts=128, ranks=8)
    folders = ("fssdp-run", "TRACE", "DIR", "STOCK", "FSSDP", "FILLED")
    for name in (*folders, "DIR/model-2", "DIR/2026-11-28T115034.123+0000"):
        held = recorded.arrays(size, fssdp=name in ("DIR", "FSSDP"))
        recorded.write(folder / name, size, held=held)
    for name in ("pretrain_gpt.py", "primus/cli/main.py", "package/module.py"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()
    shutil.copy(ROOT / "tests" / "data" / "free_copies.json", folder / "speeds.json")
    return folder


@pytest.fixture
def started_here(files: Path, started: list[tuple], monkeypatch: pytest.MonkeyPatch) -> list[tuple]:
    """What the launcher would run in the folder of `files`."""
    monkeypatch.chdir(files)
    return started


@pytest.mark.fast
@pytest.mark.parametrize("command", ALL)
def test_commands(command: str, started_here: list[tuple]) -> None:
    program, words = ALL[command]
    for word in (program, *words):
        if word.startswith(("bench/", "docs/", "examples/", "tests/")):
            assert (ROOT / word).exists(), word
    if program not in ELSEWHERE:
        CHECKS[program](words)


@ranks(1, timeout=300)
def test_scripts_take_their_flags() -> None:
    """Each in a process forked from this one, which ends once the script has parsed them."""
    original = ArgumentParser.parse_args

    def parse_and_end(*args: Any, **kwargs: Any) -> None:
        original(*args, **kwargs)
        os._exit(0)

    for command, (program, words) in ALL.items():
        if program != "python" or not words or words[0].startswith("-"):
            continue
        script, arguments = _find_script(words)
        source = script.read_text()
        if "parse_args(" not in source:
            assert not arguments or "sys.argv[1:]" in source, command
            continue
        child = os.fork()
        if child == 0:
            ArgumentParser.parse_args = parse_and_end
            sys.argv = [str(script), *arguments]
            sys.path.insert(0, str(script.parent))
            with contextlib.suppress(BaseException):
                runpy.run_path(str(script), run_name="__main__")
            os._exit(1)
        assert os.waitpid(child, 0)[1] == 0, command


def _printed(act: Callable[[], object]) -> str:
    with contextlib.redirect_stdout(io.StringIO()) as out:
        act()
    return out.getvalue()


def _assert_like(printed: str, shown: str) -> None:
    """Assert that each line was printed, with other numbers; ``...`` stands for any text."""
    for line in shown.splitlines():
        pattern = re.sub(r"-?\d[\d.]*", "NUMBER", line.strip().rstrip("%"))
        pattern = re.escape(pattern).replace("NUMBER", r"-?\d[\d.]*").replace(r"\.\.\.", ".*")
        assert re.search(re.sub(r"(\\ )+", r"\\s+", pattern), printed), f"{line} in\n{printed}"


@pytest.mark.fast
def test_files(started_here: list[tuple]) -> None:
    _assert_like(_printed(lambda: main(["what-if", "fssdp-run"])), block("docs/what-if.md", 1))


@pytest.mark.fast
def test_launchers(started_here: list[tuple], monkeypatch: pytest.MonkeyPatch) -> None:
    """Primus' script runs the launcher with its arguments; NeMo-Run's names ours and Megatron's."""
    monkeypatch.setattr(sys, "argv", ["fssdp_primus.py", "train", "pretrain"])
    with pytest.raises(SystemExit, match="0"):
        exec(block("docs/frameworks.md", 1), {})
    scripts: list[dict[str, Any]] = []
    run = SimpleNamespace(Script=lambda **fields: scripts.append(fields))
    exec(block("docs/operate.md", 0), {"run": run, "megatrons": ["--bf16"]})
    assert main(scripts[0].pop("args")) == 0
    assert scripts == [{"path": "megatron_hecate", "m": True, "entrypoint": "python"}]
    on = {"moe_fssdp": True}
    targets = [(Path(name).name, *rest) for name, *rest in started_here]
    assert targets == [("main.py", on, sys.argv[1:]), ("pretrain_gpt.py", on, ["--bf16"])]


@ranks(1)
def test_enable() -> None:
    """Oracle: Megatron's own parser, with our flags in it."""
    import megatron_on_cpu

    megatron_on_cpu.install()
    from megatron.training.arguments import parse_args

    names: dict[str, Any] = {}
    exec(block("docs/frameworks.md", 0), names)
    names["enable"](arguments := Namespace())
    assert HecateConfig.from_arguments(arguments) == HecateConfig(slots=2)
    exec(block("README.md", 5), {})
    sys.argv = ["pretrain_gpt.py", "--moe-fssdp", "--moe-fssdp-slots", "3"]
    assert HecateConfig.from_arguments(parse_args()) == HecateConfig(slots=3)


@ranks(2)
def test_loop() -> None:
    """Conversion, spans, metrics, homes that move; observing and its record."""
    from rehoming_hooks import rehoming_hook

    os.chdir(os.environ["TEST_FOLDER"])
    case, rank = tiny_gpt.Case(), dist.get_rank()
    tiny_gpt.initialize(case)
    names = {"model_chunks": tiny_gpt.build(case)[0]}
    on = _printed(lambda: exec(block("README.md", 7), names))
    assert all(hasattr(layer, "fssdp") for layer in tiny_gpt.moe_layers(names["model_chunks"]))

    run = tiny_gpt.train(case, steps=1, hook=tiny_gpt.fssdp_hook())
    names = {"model_chunks": run.chunks}
    metrics = _printed(lambda: exec(block("docs/how-a-layer-decides.md", 3), names))
    assert metrics.count("LayerMetrics(layer='layer ") == case.layers
    moved = _printed(lambda: tiny_gpt.train(case, steps=5, hook=rehoming_hook()))
    observe = fssdp(HecateConfig(observe=True))
    observed = _printed(lambda: names.update(run=tiny_gpt.train(case, steps=2, hook=observe)))
    if rank == 0:
        _assert_like(on, block("README.md", 8))
        _assert_like(moved, block("docs/homes.md", 0))
        _assert_like(observed, block("docs/observe.md", 1))
    tiny_gpt.moe_layers(names["run"].chunks)[0].router.observer.stage.close()
    dist.barrier()
    assert _printed(lambda: exec(block("docs/observe.md", 2), names)).count("[") == 3
    assert names["record"].iteration.tolist() == [1, 2] and names["rank_load"].shape == (2, 2, 2)
