"""Resolve the settings that FSSDP's rules read with Megatron's ``TransformerConfig``, by recipe.

``PYTHONPATH=<Megatron-LM> python bench/resolve_recipes.py > tests/data/recipes_resolved_<version>.json`` writes, for
each job of ``tests/data/recipes.json``, the fields that ``__post_init__`` sets to another value than the recipe's own
or Megatron's default. Needs no ranks.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import unittest.mock
import warnings
from pathlib import Path
from typing import Any

from megatron_hecate.settings import unsupported

RECIPES = Path(__file__).resolve().parent.parent / "tests" / "data" / "recipes.json"

# What no rule reads, what every model needs, and what other settings of some recipes ask for; recipes leave it out.
GIVEN = dict(
    num_layers=8,
    hidden_size=64,
    num_attention_heads=4,
    num_moe_experts=128,
    moe_ffn_hidden_size=64,
    moe_layer_freq=[0] + [1] * 7,  # CUDA graphs of dense layers
    offload_modules=[
        "core_attn"
    ],  # fine_grained_activation_offloading, with graphs of iterations too
    fine_grained_offloading_max_inflight_offloads=2,
    moe_grouped_gemm=True,
    add_bias_linear=False,
    bf16=True,
)


def build(recipe: dict[str, Any]) -> Any:
    """The installed Megatron's ``TransformerConfig`` with the recipe's settings.

    Raises:
        AssertionError, ValueError: for settings that this Megatron does not take.
    """
    from megatron.core.transformer import transformer_config

    config_class = transformer_config.TransformerConfig
    known = {
        k: v
        for k, v in recipe.items()
        if k in config_class.__dataclass_fields__ and k != "quant_recipe"
    }
    if known.get(
        "external_cuda_graph"
    ):  # Megatron has derived the other from it, and takes one of them
        known.pop("cuda_graph_impl", None)
    with (
        warnings.catch_warnings(),
        unittest.mock.patch.object(transformer_config, "is_te_min_version", lambda *_, **__: True),
    ):
        warnings.simplefilter("ignore")
        return config_class(
            **{
                **{k: v for k, v in GIVEN.items() if k in config_class.__dataclass_fields__},
                **known,
            }
        )


def resolved(recipe: dict[str, Any]) -> dict[str, Any]:
    """Fields that rules read and Megatron has set to another value than the recipe or its own default."""
    config = build(recipe)
    given = {field.name: field.default for field in dataclasses.fields(config)} | GIVEN | recipe
    names = {rule.setting for rule in unsupported.RULES} & vars(config).keys()
    return {
        name: getattr(config, name)
        for name in sorted(names)
        if getattr(config, name) != given[name]
    }


def main() -> None:
    """Print one line for each job that changes."""
    import megatron.core

    found = {recipe["name"]: resolved(recipe) for recipe in json.loads(RECIPES.read_text())}
    print(f"megatron-core {megatron.core.__version__}", file=sys.stderr)
    lines = [
        f"{json.dumps(name)}: {json.dumps(fields, default=str)}"
        for name, fields in found.items()
        if fields
    ]
    print("{\n" + ",\n".join(lines) + "\n}")


if __name__ == "__main__":
    main()
