"""A run of the tests ends with its time by folder; the time of each test is kept beside pytest's cache."""

from __future__ import annotations

import json
import os
from collections import defaultdict
from pathlib import Path

import pytest

KEPT = Path(".pytest_cache", "seconds.json")
_of_tests: dict[str, float] = defaultdict(float)
# Ranks share a pipe. Their lines stay whole, since a buffered print is a single write.
os.environ.pop("PYTHONUNBUFFERED", None)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prefix of a small dataset."""
    from pretraining import prepare_text

    return prepare_text(tmp_path_factory.mktemp("data"))


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    _of_tests[report.nodeid] += report.duration


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    by_folder: dict[str, float] = defaultdict(float)
    tests_of: dict[str, int] = defaultdict(int)
    for test, seconds in _of_tests.items():
        folder = test.split("::")[0].rpartition("/")[0]
        by_folder[folder] += seconds
        tests_of[folder] += 1
    if len(by_folder) < 2:
        return
    path = terminalreporter.config.rootpath / KEPT
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(_of_tests, indent=0))
    terminalreporter.section("time by folder")
    for folder, seconds in sorted(by_folder.items(), key=lambda item: -item[1]):
        terminalreporter.write_line(f"{seconds:7.0f} s  {tests_of[folder]:5d} tests  {folder}")
    total = sum(by_folder.values())
    terminalreporter.write_line(f"{total:7.0f} s  {sum(tests_of.values()):5d} tests  in all")
