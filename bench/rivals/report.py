"""Table of the benchmark's rows."""

from __future__ import annotations

from collections.abc import Sequence

Row = dict[str, str | int | float]

# keys: figures of a row; values: heading in the table, and format
COLUMNS: dict[str, tuple[str, str]] = {
    "load": ("load", "s"),
    "ranks": ("ranks", "d"),
    "planner": ("planner", "s"),
    "when": ("plans", "s"),
    "imbalance_mean": ("imbalance mean", ".3f"),
    "imbalance_p95": ("p95", ".3f"),
    "imbalance_p99": ("p99", ".3f"),
    "imbalance_max": ("max", ".3f"),
    "copies": ("copies/rank", ".2f"),
    "late": ("late/rank", ".2f"),
    "extra": ("most extra experts", "d"),
    "intra_gb": ("GB in nodes", ".2f"),
    "inter_gb": ("GB between", ".2f"),
    "crossing": ("tokens crossing", ".1%"),
    "time": ("step time", ".3f"),
    "place_us": ("place us*", ".0f"),
    "split_us": ("split us*", ".0f"),
}


def markdown(rows: Sequence[Row], columns: dict[str, tuple[str, str]]) -> str:
    """Format an aligned Markdown table with one line per row."""
    lines = [[heading for heading, _ in columns.values()]]
    lines += [[format(row[name], spec) for name, (_, spec) in columns.items()] for row in rows]
    left = [spec == "s" for _, spec in columns.values()]
    rule = []
    aligned = []
    for index, is_left in enumerate(left):
        width = max(len(line[index]) for line in lines)
        rule.append("-" * width if is_left else "-" * (width - 1) + ":")
        aligned.append(f"<{width}" if is_left else f">{width}")
    formatted = []
    for line in [lines[0], rule, *lines[1:]]:
        cells = [format(cell, spec) for cell, spec in zip(line, aligned, strict=True)]
        formatted.append(f"| {' | '.join(cells)} |")
    return "\n".join(formatted)
