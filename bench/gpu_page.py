"""Build the page of a run of `gpu.py` from its rows alone; it can be rebuilt at any time.

python bench/gpu_page.py ROWS... [--out PAGE]     from the rows of several runs
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "bench")]

import rows  # noqa: E402

PASSED = ("passed", "left out")
Record = Mapping[str, Any]


def page(records: Sequence[Record]) -> str:
    """Format ``records``, in order of time, as Markdown: machine, results, tables of all parts."""
    # latest result by part, in the order of first results
    last: dict[str, Record] = {}
    for record in records:
        if "ended" in record:
            last[record["part"]] = record
    failed = sum(record["ended"] not in PASSED for record in last.values())
    lines = ["# Results on a GPU", "", "Written by `bench/gpu.py`; do not edit it by hand.", ""]
    machines: list[str] = []
    for record in records:
        machines += record.get("machine", ())
    lines += [f"- {line}" for line in dict.fromkeys(machines)]
    summary = ""
    if failed:
        summary = f"{len(last)} parts, of which {failed} failed, were stopped or were not run."
    lines += ["", summary]
    lines += ["", "| part | ended | seconds | what it shows |", "|---|---|---|---|"]
    for record in last.values():
        how = record["ended"] if record["ended"] in PASSED else f"**{record['ended']}**"
        ended = " ".join((how, record.get("why", ""))).strip()
        lines.append(
            f"| {record['part']} | {ended} | {record.get('seconds', 0.0):.0f} | "
            f"{record.get('shows', '')} |"
        )
    for part, record in last.items():
        own = [other for other in records if other.get("part") == part]
        tables = _tables([other for other in own if "table" in other])
        said = record.get("said") or []
        if tables or said:
            lines += [
                "",
                f"## {part}: {record['ended']}",
                "",
                f"`{record.get('command', '')}`",
                *tables,
            ]
        if said:
            lines += ["", "```", *(line.replace("```", "'''") for line in said), "```"]
    return "\n".join(lines).rstrip() + "\n"


def _tables(records: Sequence[Record]) -> list[str]:
    """Format one table per title and set of columns."""
    grouped: dict[tuple[str, tuple[str, ...]], list[Record]] = {}
    for record in records:
        key = (record["table"], tuple(record["row"]))
        grouped.setdefault(key, []).append(record["row"])
    lines = []
    for (title, columns), found in grouped.items():
        lines += ["", f"**{title}**", "", *rows.markdown(found, columns)]
    return lines


def main() -> None:
    """Write the page of the given files."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("rows", type=Path, nargs="+", help="files that `gpu.py` wrote")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "gpu-results.md")
    options = parser.parse_args()
    records: list[Record] = []
    for path in options.rows:
        records += rows.read(path)
    options.out.write_text(page(records))
    print(f"{options.out}: of {len(options.rows)} files")


if __name__ == "__main__":
    main()
