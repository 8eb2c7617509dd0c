"""Generate docs/recipes.md: jobs that FSSDP supports, and the unsupported settings of the rest.

Run ``python bench/recipes.py > docs/recipes.md``. The settings are those of
``tests/data/recipes.json``. Needs neither ranks nor Megatron.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

from megatron_hecate.megatron.cuda_graphs import captures_iteration
from megatron_hecate.megatron.rules import SettingSources
from megatron_hecate.tools.files.jobs import find_jobs
from megatron_hecate.tools.verdict import judge

RECIPES = Path(__file__).resolve().parent.parent / "tests" / "data" / "recipes.json"
KINDS = {
    "canonical": "Megatron-Bridge, canonical",
    "performance": "Megatron-Bridge, performance",
    "functional": "Megatron-LM, functional tests",
}
HEAD = """\
# Recipes

`python bench/recipes.py > docs/recipes.md` generates this page; `tests/bench/test_recipes.py` keeps
it current. It applies the table of unsupported settings to the
[settings of 426 jobs](../tests/data/README.md): all recipes with experts of Megatron-Bridge 0.6.2,
and Megatron-LM's own functional tests that train experts. Nothing is run; settings that only the
built model reveals are checked at switch-on. For your own job:

```
megatron-hecate check --settings FILE
```

`FILE` holds fields of `TransformerConfig` and arguments of Megatron, as JSON or YAML; Bridge writes
one by `cfg.to_yaml(FILE)`, and `run_config.yaml` next to every checkpoint. With the overrides named
below no job has an unsupported setting left, and a `TransformerConfig` that accepted the job's
settings accepts the changed ones (`test_the_overrides_that_are_named_switch_it_on`).
"""


def refused(recipe: dict) -> dict[str, str]:
    """Return a line for each setting that FSSDP does not combine with, by its name."""
    (job,) = find_jobs(recipe)
    return judge(job.sources).refusals


def page() -> str:
    """Format the whole page."""
    recipes = json.loads(RECIPES.read_text())
    verdicts = [(recipe, refused(recipe)) for recipe in recipes]
    parts = [HEAD, "## Jobs that switch on\n", _counts(verdicts), "\n## Unsupported settings\n"]
    parts += [_reasons(verdicts), "\n## Unsupported jobs\n", _unsupported(verdicts)]
    return "\n".join(parts)


def _counts(verdicts: list) -> str:
    lines = [
        "| | jobs | supported unchanged | of these, without [CUDA graph of whole iterations]"
        "(graphs.md) and without paged stash |",
        "|---|---|---|---|",
    ]
    for kind, title in KINDS.items():
        jobs = [(recipe, found) for recipe, found in verdicts if recipe["kind"] == kind]
        on = [recipe for recipe, found in jobs if not found]
        static = sum(map(_is_static, on))
        lines.append(f"| {title} | {len(jobs)} | {len(on)} | {len(on) - static} |")
    return "\n".join(lines)


def _is_static(recipe: dict) -> bool:
    """Return whether the job needs shapes that do not depend on routes."""
    return captures_iteration(SettingSources(recipe)) or recipe.get("moe_paged_stash", False)


def _reasons(verdicts: list) -> str:
    """Format a row per override, with the part of its message after the setting's value."""
    count: Counter[tuple[str, str]] = Counter()
    for _, found in verdicts:
        for name, line in found.items():
            count[name, line.partition(": ")[2]] += 1
    lines = ["| setting | jobs | reason, and the override |", "|---|---|---|"]
    lines += [f"| `{name}` | {jobs} | {text} |" for (name, text), jobs in count.most_common()]
    return "\n".join(lines)


def _unsupported(verdicts: list) -> str:
    lines = ["| job | setting |", "|---|---|"]
    for recipe, found in verdicts:
        if found:
            lines.append(f"| {recipe['name']} | {', '.join(f'`{name}`' for name in found)} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(page(), end="")
