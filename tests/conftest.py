"""Command lines as a user gives them, and what several folders of tests start from."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import rank_modules

# Ranks share a pipe. Their lines stay whole, since a buffered print is a single write.
os.environ.pop("PYTHONUNBUFFERED", None)
rank_modules.install()


@pytest.fixture(autouse=True)
def _search_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """Restore after each test what commands change: ranks of later tests search their modules there."""
    monkeypatch.setattr(sys, "path", [*sys.path])


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prefix of a small dataset."""
    from pretraining import prepare_text

    return prepare_text(tmp_path_factory.mktemp("data"))


@pytest.fixture
def cli(capsys: pytest.CaptureFixture) -> Callable[..., tuple[int, str, str]]:
    """Exit status, standard output and standard error of a command line."""
    from megatron_hecate.__main__ import main

    def run(*words: object) -> tuple[int, str, str]:
        capsys.readouterr()
        try:
            status = main([str(word) for word in words])
        except SystemExit as end:
            status = end.code
        out, err = capsys.readouterr()
        return status or 0, out, err

    return run


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, dict, list[str]]]:
    """Targets that the launcher would run: name, our flags, its arguments. Megatron is not imported."""
    from megatron_hecate.switch_on import launcher

    targets = []

    def note(target: str, flags: dict, arguments: list[str], *, is_module: bool) -> int:
        targets.append((target, flags, arguments))
        return 0

    monkeypatch.setattr(launcher, "_run", note)
    monkeypatch.setattr(launcher, "_stay_in_front", lambda *_: None)
    return targets
