"""Resolve the settings that FSSDP's rules read with Megatron's ``TransformerConfig``, by recipe.

    PYTHONPATH=<Megatron-LM> python bench/resolve_recipes.py

The output is the content of ``tests/data/recipes_resolved_<version>.json``: for each job of
``tests/data/recipes.json`` the fields that ``__post_init__`` sets to
another value than the recipe or Megatron's default. Needs no ranks.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import unittest.mock
import warnings
from pathlib import Path
from typing import Any

from megatron_hecate.switch_on import unsupported

RECIPES = Path(__file__).resolve().parent.parent / "tests" / "data" / "recipes.json"

# Settings that recipes leave out: required by every model, or by other settings of some recipes. No
# rule reads any of these.
GIVEN = dict(
    num_layers=8,
    hidden_size=64,
    num_attention_heads=4,
    num_moe_experts=128,
    moe_ffn_hidden_size=64,
    # required for CUDA graphs of dense layers
    moe_layer_freq=[0] + [1] * 7,
    # required by fine_grained_activation_offloading, also with graphs of iterations
    offload_modules=["core_attn"],
    fine_grained_offloading_max_inflight_offloads=2,
    moe_grouped_gemm=True,
    add_bias_linear=False,
    bf16=True,
)


def build(recipe: dict[str, Any]) -> Any:
    """Build the installed Megatron's ``TransformerConfig`` with the recipe's settings.

    Raises:
        AssertionError, ValueError: if this Megatron rejects the settings.
    """
    from megatron.core.transformer import transformer_config

    config_class = transformer_config.TransformerConfig
    fields = config_class.__dataclass_fields__
    settings = {name: value for name, value in GIVEN.items() if name in fields}
    own = {name: value for name, value in recipe.items() if name in fields}
    own.pop("quant_recipe", None)
    # Megatron accepts only one of the two flags, and derives the other from it.
    if own.get("external_cuda_graph"):
        own.pop("cuda_graph_impl", None)
    settings |= own
    with (
        warnings.catch_warnings(),
        unittest.mock.patch.object(transformer_config, "is_te_min_version", lambda *_, **__: True),
    ):
        warnings.simplefilter("ignore")
        return config_class(**settings)


def resolved(recipe: dict[str, Any]) -> dict[str, Any]:
    """List the fields read by rules that Megatron sets to a new value.

    A value is new if it differs from the recipe and from Megatron's default.
    """
    config = build(recipe)
    given = {field.name: field.default for field in dataclasses.fields(config)} | GIVEN | recipe
    names = sorted({rule.setting for rule in unsupported.RULES} & vars(config).keys())
    values = {name: getattr(config, name) for name in names}
    return {name: value for name, value in values.items() if value != given[name]}


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
