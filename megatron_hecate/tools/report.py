"""``megatron-hecate report RUN_DIR [RUN_DIR]``: page about one or two recorded runs.

The page is one file that needs no network: a template, its data, and a small plotting library
(uPlot). Iterations are averaged in groups where a chart has fewer points than the run has
iterations.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_hecate import files
from megatron_hecate.tools.report_content import COLUMNS, Report, as_csv, page_content

PAGE = Path(__file__).with_name("page")
# files that replace their names in the template
PARTS = (
    "uplot.min.css",
    "uplot.min.js",
    "uplot.LICENSE",
    "page.css",
    "charts.js",
    "summary.js",
    "page.js",
)


def make_parser() -> argparse.ArgumentParser:
    """Build the parser of the command line."""
    parser = argparse.ArgumentParser(
        prog="megatron-hecate report", description="Write a page about one or two recorded runs."
    )
    parser.add_argument(
        "run_dirs",
        metavar="RUN_DIR",
        nargs="+",
        type=Path,
        help="folder of a recorded run; of two, the second is shown beside the first",
    )
    parser.add_argument("--out", type=Path, help="the page (default: report.html in RUN_DIR)")
    parser.add_argument(
        "--export",
        type=Path,
        metavar="FILE",
        help="also write the figures of layers as .csv, or all figures as .json",
    )
    return parser


def main(argv: Sequence[str]) -> int:
    """Run the command; returns its exit status."""
    parser = make_parser()
    flags = parser.parse_args(argv)
    if len(flags.run_dirs) > 2:
        parser.error(f"one or two folders, got {len(flags.run_dirs)}")
    if flags.export is not None and flags.export.suffix not in (".csv", ".json"):
        parser.error(f"--export {flags.export}: the name must end with .csv or .json")
    folder = flags.run_dirs[-1]
    out = flags.out or folder / "report.html"
    if flags.export is not None and flags.export.resolve() == out.resolve():
        parser.error(f"--out and --export name the same file, {out}")
    if out.suffix == ".rows":
        parser.error(f"{out} has the name of a recorded file; name another one")
    lines: list[str] = []
    obstacles: list[str] = []
    try:
        runs = [Report.read(one) for one in flags.run_dirs]
        content = page_content(runs[-1], runs[0] if len(runs) > 1 else None)
        _write_page(content, out)
        lines += _summary(content)
        lines.append(f"The page is {out} ({out.stat().st_size / 1e6:.1f} MB).")
        if flags.export is not None:
            _export(content, flags.export)
    except PermissionError as error:
        obstacles.append(f"no report: {error}; name files that you can write, with --out FILE")
    except (ValueError, OSError, MemoryError) as error:
        obstacles.append(f"no report: {error or 'there is not enough memory'}")
    # Not in the `try`: a closed pipe does not mean that there is no page.
    if lines:
        print("\n".join(lines))
    if obstacles:
        print("\n".join(obstacles), file=sys.stderr)
    # As the parser, and as `what_if`.
    return 2 if obstacles else 0


def _summary(content: dict[str, Any]) -> list[str]:
    """Return the verdict, the sentences of the page, and the next command."""
    verdict = content["verdict"]
    lines = [verdict["text"], verdict["reason"], *content["words"]]
    if (compared := content["compared"]) is not None:
        return [*lines, "", *_table(compared["heads"], compared["rows"])]
    return [*lines, verdict["purpose"], f"    {verdict['command']}"]


def _table(heads: Sequence[str], rows: Sequence[Sequence[Any]]) -> list[str]:
    """Format one line for each figure, with a column for each run."""
    columns = [heads, *([_format_cell(cell) for cell in row] for row in rows)]
    widths = [max(map(len, column)) for column in columns]
    return [
        "  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True))
        for line in zip(*columns, strict=True)
    ]


def _format_cell(cell: Any) -> str:
    if cell is None:
        return "-"
    if not isinstance(cell, float):
        return str(cell)
    return f"{cell:,.0f}" if abs(cell) >= 1e4 else f"{cell:.5g}"


def _write_page(content: dict[str, Any], out: Path) -> None:
    """Write the page with its data to ``out``."""
    page = (PAGE / "page.html").read_text("utf-8")
    for name in PARTS:
        page = page.replace(f"/*{name}*/", (PAGE / name).read_text("utf-8"))
    content = {**content, "columns": COLUMNS}
    # "<" is escaped so that no name in the data can close the script element.
    data = json.dumps(content, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    files.replace(out, page.replace("/*data*/", data))


def _export(content: dict[str, Any], path: Path) -> None:
    """Write figures to ``path``: of layers as CSV, or all but the pictures as JSON."""
    if path.suffix == ".csv":
        files.replace(path, as_csv(content))
        return
    pictures = ("loads", "spread", "hot")
    exported = {name: value for name, value in content.items() if name not in pictures}
    files.replace(path, json.dumps({**exported, "columns": COLUMNS}, indent=1) + "\n")
