"""A run of the tests ends with its time by folder."""

from __future__ import annotations

from collections import defaultdict

import pytest

_seconds: dict[str, float] = defaultdict(float)
_items: dict[str, int] = defaultdict(int)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    folder = report.nodeid.split("::")[0].rpartition("/")[0]
    _seconds[folder] += report.duration
    _items[folder] += report.when == "call"


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if len(_seconds) < 2:
        return
    terminalreporter.section("time by folder")
    for folder, seconds in sorted(_seconds.items(), key=lambda item: -item[1]):
        terminalreporter.write_line(f"{seconds:7.0f} s  {_items[folder]:5d} tests  {folder}")
    total = sum(_seconds.values())
    terminalreporter.write_line(f"{total:7.0f} s  {sum(_items.values()):5d} tests  in all")
