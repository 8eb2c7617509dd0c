"""Print rows of results and append each to a file at once, so that a killed benchmark loses none.

``$FSSDP_ROWS`` names the file, in JSON lines; `gpu.py` sets it and ``$FSSDP_PART``. Without the
variable rows are only printed.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

FILE = "FSSDP_ROWS"
PART = "FSSDP_PART"


class Table:
    """Table with rows that are added one by one.

    Args:
        title: title; all tables of one title are one table on the page.
    """

    def __init__(self, title: str) -> None:
        self.title = title
        self._columns: list[str] = []

    def add(self, **values: Any) -> None:
        """Add a row of values by column; ``_`` in a name stands for a space."""
        named = {name.replace("_", " "): value for name, value in values.items()}
        write({"table": self.title, "row": named})
        # Other columns than in the previous row begin a new table.
        if list(named) != self._columns:
            self._columns = list(named)
            print("\n".join(["", f"{self.title}:", "", *markdown([], self._columns)]))
        print(markdown([named], self._columns)[-1], flush=True)


def write(record: Mapping[str, Any], *, file: Path | None = None) -> None:
    """Append ``record``, with the part and the time, in one write, and sync it to disk."""
    if (name := file or os.environ.get(FILE)) is None:
        return
    line = json.dumps(
        {"part": os.environ.get(PART, ""), "time": round(time.time(), 3), **record}, default=float
    )
    # O_APPEND and one write: rows of concurrent processes do not interleave.
    descriptor = os.open(name, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(descriptor, f"{line}\n".encode())
        # A row must survive a crash of the machine.
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read(path: Path) -> list[dict[str, Any]]:
    """Read all complete records of the file; a truncated last line is left out."""
    found = []
    for line in path.read_text(errors="replace").splitlines() if path.exists() else ():
        try:
            found.append(json.loads(line))
        # A killed process may leave a truncated last line.
        except json.JSONDecodeError:
            continue
    return found


def markdown(rows: Sequence[Mapping[str, Any]], columns: Sequence[str]) -> list[str]:
    """Format rows as the lines of a Markdown table."""
    lines = [f"| {' | '.join(columns)} |", f"|{'---|' * len(columns)}"]
    return lines + [
        f"| {' | '.join(_text(row.get(column)) for column in columns)} |" for row in rows
    ]


def _text(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return str(value).replace("|", "/").replace("\n", " ")
