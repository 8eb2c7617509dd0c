"""Every recipe with experts of Megatron-Bridge, and Megatron-LM's functional tests: on, or refused for known settings.

Oracle: `REFUSED` and `COUNTS`, written by hand. Removing a rule removes its line in the one and changes the other.
"""

from __future__ import annotations

import importlib.util
import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.fast

CHECKOUT = Path(__file__).resolve().parents[2]
RECIPES = json.loads((CHECKOUT / "tests" / "data" / "recipes.json").read_text())
RESOLVED = json.loads((CHECKOUT / "tests" / "data" / "recipes_resolved_0.20.json").read_text())
REFUSED: dict[str, Any] = {  # the values that stop a job; `...` is any
    "expert_model_parallel_size": (1,),
    "use_megatron_fsdp": (True,),
    "cuda_graph_impl": ("local", "transformer_engine", "full_iteration"),  # not of parts
    "external_cuda_graph": (True,),  # not of parts
    "moe_paged_stash": (True,),  # with the op fuser
}
COUNTS = {  # kind: jobs, on, not refused for CUDA graphs, on of these
    "canonical": (48, 47, 48, 47),
    "performance": (308, 246, 256, 246),
    "functional": (70, 58, 70, 58),
}


def _module(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, CHECKOUT / "bench" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def bench() -> Any:
    return _module("recipes")


def test_each_is_refused_for_what_stands_in_the_table(bench: Any) -> None:
    for recipe in RECIPES:
        stops = {name: values for name, values in REFUSED.items() if name in recipe}
        known = {name for name, values in stops.items() if values is ... or recipe[name] in values}
        if not recipe.get("use_transformer_engine_op_fuser"):
            known -= {"moe_paged_stash"}
        if {*recipe.get("cuda_graph_modules", [])} - {"full_iteration"}:
            known -= {"cuda_graph_impl", "external_cuda_graph"}
        assert bench.refused(recipe).keys() == known, recipe["name"]


@pytest.mark.parametrize("resolved", [{}, RESOLVED], ids=["as written", "as 0.20 resolves them"])
def test_how_many_switch_on(bench: Any, resolved: dict[str, Any]) -> None:
    jobs, on, eager, eager_on = Counter(), Counter(), Counter(), Counter()
    for recipe in RECIPES:
        kind, found = recipe["kind"], bench.refused({**recipe, **resolved.get(recipe["name"], {})})
        graphs = bench.GRAPHS & found.keys()
        jobs[kind] += 1
        on[kind] += not found
        eager[kind] += not graphs
        eager_on[kind] += not found and not graphs
    assert {kind: (jobs[kind], on[kind], eager[kind], eager_on[kind]) for kind in jobs} == COUNTS


@pytest.mark.newest
def test_megatron_itself_makes_settings_with_the_same_verdict(bench: Any) -> None:
    """Each recipe goes through the ``__post_init__`` of the installed ``TransformerConfig``."""
    import megatron.core

    module = _module("resolve_recipes")
    for recipe in RECIPES:
        fields = module.resolved(recipe)
        assert bench.refused({**recipe, **fields}).keys() == bench.refused(recipe).keys(), (
            recipe["name"],
            fields,
        )
        if megatron.core.__version__.startswith("0.20"):
            assert fields == RESOLVED.get(recipe["name"], {}), (
                f"bench/resolve_recipes.py says so of {recipe['name']}"
            )


def test_only_the_op_fuser_quantizes_over_grouped_tensors(bench: Any) -> None:
    job = dict(expert_model_parallel_size=8, moe_use_grouped_tensor=True)
    assert not bench.refused(job)
    job |= dict(fp8="e4m3", fp8_recipe="mxfp8")
    (line,) = bench.refused(job).values()
    assert (
        "with moe_use_grouped_tensor=True: " in line
        and "set model.moe_use_grouped_tensor=false" in line
    )
    assert not bench.refused({**job, "use_transformer_engine_op_fuser": True})
    for other in (dict(fp8=None, fp4="e2m1"), dict(fp8=None, quant_recipe="recipes.yaml")):
        assert bench.refused({**job, **other}).keys() == {"moe_use_grouped_tensor"}
    one_weight = dict(use_transformer_engine_op_fuser=True, moe_single_grouped_weight=True)
    assert bench.refused({**job, **one_weight}).keys() == {"moe_single_grouped_weight"}


def test_the_overrides_that_are_named_switch_it_on(
    bench: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And Megatron's own rules still accept the settings."""
    from megatron.core.transformer import transformer_config

    monkeypatch.setattr(transformer_config, "is_te_min_version", lambda *_, **__: True)
    for recipe in RECIPES:
        changed = dict(recipe)
        for line in bench.refused(recipe).values():
            overrides = re.findall(r"(?:set|and) \w+\.(\w+)=(\S+)", line)
            assert overrides, line
            changed |= {
                name: value if value == "none" else json.loads(value) for name, value in overrides
            }
        assert not bench.refused(changed), recipe["name"]
        if recipe != changed:
            _configure(transformer_config.TransformerConfig, recipe, changed)


def _configure(config_class: type, recipe: dict[str, Any], changed: dict[str, Any]) -> None:
    """A ``TransformerConfig`` takes these settings, or did not take those before the overrides either."""

    def build(settings: dict[str, Any]) -> None:
        known = {
            k: v
            for k, v in settings.items()
            if k in config_class.__dataclass_fields__ and k != "quant_recipe"
        }
        size = dict(
            num_layers=8,
            hidden_size=64,
            num_attention_heads=4,
            num_moe_experts=128,
            moe_ffn_hidden_size=64,
        )
        config_class(
            **{**size, "moe_grouped_gemm": True, "add_bias_linear": False, "bf16": True, **known}
        )

    try:
        build(recipe)
    except (AssertionError, ValueError):
        return
    build(changed)


def test_the_page_is_current(bench: Any) -> None:
    page = (CHECKOUT / "docs" / "recipes.md").read_text()
    assert page == bench.page(), "python bench/recipes.py > docs/recipes.md"
