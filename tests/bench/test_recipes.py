"""Every recipe with experts of Megatron-Bridge, and Megatron-LM's functional tests: on, or refused for known settings.

Oracle: `REFUSED` and `COUNTS`, written by hand. Removing a rule removes its line in the one and changes the other.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import recipes

CHECKOUT = Path(__file__).resolve().parents[2]
RECIPES = json.loads((CHECKOUT / "tests" / "data" / "recipes.json").read_text())
# Of jobs with the same settings one.
DISTINCT = list(
    {
        json.dumps({**recipe, "name": "", "kind": ""}, sort_keys=True): recipe for recipe in RECIPES
    }.values()
)
RESOLVED = json.loads((CHECKOUT / "tests" / "data" / "recipes_resolved_0.20.json").read_text())
REFUSED: dict[str, Any] = {  # the values that stop a job; `...` is any
    "expert_model_parallel_size": (1,),
    "use_megatron_fsdp": (True,),
    # of whole layers
    "cuda_graph_impl": ("local", "transformer_engine"),
    "external_cuda_graph": (True,),
}
# jobs, and those that switch on
COUNTS = {"canonical": (48, 47), "performance": (308, 297), "functional": (70, 58)}


@pytest.mark.fast
def test_each_is_refused_for_what_stands_in_the_table() -> None:
    for recipe in DISTINCT:
        stops = {name: values for name, values in REFUSED.items() if name in recipe}
        known = {name for name, values in stops.items() if values is ... or recipe[name] in values}
        if recipe.get("cuda_graph_modules"):
            known -= {"cuda_graph_impl", "external_cuda_graph"}
        assert recipes.refused(recipe).keys() == known, recipe["name"]


@pytest.mark.fast
@pytest.mark.parametrize("resolved", [{}, RESOLVED], ids=["as written", "as 0.20 resolves them"])
def test_how_many_switch_on(resolved: dict[str, Any]) -> None:
    jobs, on = Counter(), Counter()
    for recipe in RECIPES:
        jobs[recipe["kind"]] += 1
        settings = {**recipe, **resolved.get(recipe["name"], {})}
        on[recipe["kind"]] += not recipes.refused(settings)
    assert {kind: (jobs[kind], on[kind]) for kind in jobs} == COUNTS


@pytest.mark.newest
def test_megatron_itself_makes_settings_with_the_same_verdict() -> None:
    """Each recipe goes through the ``__post_init__`` of the installed ``TransformerConfig``."""
    import megatron.core
    import resolve_recipes

    for recipe in DISTINCT:
        fields = resolve_recipes.resolved(recipe)
        assert recipes.refused({**recipe, **fields}).keys() == recipes.refused(recipe).keys(), (
            recipe["name"],
            fields,
        )
        if megatron.core.__version__.startswith("0.20"):
            assert fields == RESOLVED.get(recipe["name"], {}), (
                f"bench/resolve_recipes.py says so of {recipe['name']}"
            )


@pytest.mark.fast
@pytest.mark.newest
def test_the_overrides_that_are_named_switch_it_on() -> None:
    """And Megatron's own rules still accept the settings, if they accept those of the recipe."""
    import resolve_recipes

    for recipe in DISTINCT:
        changed = dict(recipe)
        for line in recipes.refused(recipe).values():
            overrides = re.findall(r"(?:set|and) \w+\.(\w+)=(\S+)", line)
            assert overrides, line
            for name, value in overrides:
                changed[name] = value if value == "none" else json.loads(value)
        assert not recipes.refused(changed), recipe["name"]
        if recipe != changed:
            try:
                resolve_recipes.build(recipe)
            except (AssertionError, ValueError):
                continue
            resolve_recipes.build(changed)


@pytest.mark.fast
def test_the_page_is_current() -> None:
    page = (CHECKOUT / "docs" / "recipes.md").read_text()
    assert page == recipes.page(), "python bench/recipes.py > docs/recipes.md"
