"""Experts in fp8 and fp4, over TransformerEngine's own Python: FSSDP trains the model stock Megatron trains.

Oracle: the same model without FSSDP, on the same ranks and data. What is compiled in TransformerEngine is torch here
(`quantizers_on_cpu`, `tex_on_cpu`), so this says nothing of its kernels. Mostly only weights are quantized: then they
are all that replicas could get wrong, and results agree as without quantization. With quantized activations the tokens
that meet in a GEMM share scales, and replicas change which do. `test_layouts` has the layouts in fp8 and fp4.
"""

from __future__ import annotations

import dataclasses
import types

import checkpoints
import pytest
import tiny_gpt
from layouts import SHARDED
from quantized import case_of, fuse_wgrad, hook_of, packages
from quick import quick
from ranks import ranks

pytestmark = pytest.mark.newest


@pytest.mark.slow
@pytest.mark.parametrize(("recipe", "stored"), [("tensorwise", False), ("mxfp8", True)])
@ranks(2, preload=None)
def test_the_oldest_transformer_engine(recipe: str, stored: bool) -> None:
    case = case_of(recipe, stored=stored, version="2.9.0")
    stock = tiny_gpt.train(case, hook=fuse_wgrad)
    ours = tiny_gpt.train(case, hook=hook_of())
    tiny_gpt.assert_trained_alike(stock, ours)


@pytest.mark.parametrize("recipe", quick(["mxfp8", "blockwise"], ["mxfp8"]))
@ranks(2, preload=packages)
def test_quantized_activations(recipe: str) -> None:
    """Which tokens share a scale differs, and gradients with it, by less than what quantization itself does."""
    case = case_of(recipe, exact=False)
    stock = tiny_gpt.train(case, hook=fuse_wgrad)
    ours = tiny_gpt.train(case, hook=hook_of())
    without = tiny_gpt.train(dataclasses.replace(case, settings=()), hook=fuse_wgrad)
    assert ours.replicas
    replicas, quantization = tiny_gpt.difference(stock, ours), tiny_gpt.difference(stock, without)
    assert replicas["loss"] < quantization["loss"] and replicas["grad"] < quantization["grad"]


@ranks(2, preload="te-blackwell")
def test_recipes_linear_by_linear() -> None:
    """The first linear in fp4, the second one in fp8 as the rest of the model, and in bf16 when the model evaluates."""
    case = case_of("mxfp8")
    from megatron.core.quantization.quant_config import RecipeConfig

    kind = {"transformer_engine_config_type": "TEQuantizationParams"}
    configs = {
        "fp4": {**kind, "training_recipe": {"fp4_quantization_recipe": "nvfp4"}},
        "fp8": {
            **kind,
            "training_recipe": {"fp8_quantization_recipe": "mxfp8"},
            "evaluation_recipe": {},
        },
    }
    matchers = {
        f"fc{i}": dict(type="glob", pattern=f"*.experts.linear_fc{i}", config=config, enabled=True)
        for i, config in enumerate(configs, 1)
    }
    recipe = RecipeConfig.from_config_dict({"configs": configs, "matchers": matchers})
    case = dataclasses.replace(case, settings=(*case.settings, ("quant_recipe", recipe)))
    stock = tiny_gpt.train(case, hook=fuse_wgrad)
    ours = tiny_gpt.train(case, hook=hook_of())
    tiny_gpt.assert_trained_alike(stock, ours)
    twin = tiny_gpt.moe_layers(ours.chunks)[0].experts.physical.twin.module
    kinds = [
        type(next(iter(linear._fp8_workspaces.values()))).__name__
        for linear in (twin.linear_fc1, twin.linear_fc2)
    ]
    assert kinds == ["NVFP4Tensor", "MXFP8Tensor"]


@ranks(2, preload="te-blackwell")
def test_experts_that_are_modules_of_their_own_are_refused() -> None:
    case = tiny_gpt.initialized()
    chunks, config = tiny_gpt.build(case)
    config.fp8, config.fp8_recipe = "e4m3", "mxfp8"
    for grouped, said in (
        (False, "SequentialMLP has no replicas in fp8"),
        (True, "SequentialMLP with fp8='e4m3' has"),
    ):
        config.moe_grouped_gemm = grouped  # a spec made by hand may differ from it
        with pytest.raises(
            ValueError, match=said + r".* set model\.moe_grouped_gemm=true or --moe-grouped-gemm"
        ):
            tiny_gpt.fssdp_hook()(chunks)


@ranks(2, preload="te-blackwell")
def test_unknown_quantizers_of_one_linear_are_refused() -> None:
    """Settings of `quant_recipe`, which Megatron keeps on each linear; two of them are of later versions."""
    case = case_of("mxfp8")
    from megatron.core.extensions.transformer_engine import TEQuantizationRecipe

    chunks, _ = tiny_gpt.build(case)
    linear = tiny_gpt.moe_layers(chunks)[1].experts.linear_fc2
    for field, value in (
        ("custom_recipe_factory", "package.factory"),
        ("recipe_attrs", {"fp8_dpa": True}),
        ("mxfp8_2d_quantization", True),
    ):
        recipe = TEQuantizationRecipe(fp8_quantization_recipe="mxfp8")
        setattr(recipe, field, value)
        linear.te_quant_params = types.SimpleNamespace(training_recipe=recipe)
        message = (
            f"layer 2: TEGroupedMLP.linear_fc2 with {field}: custom quantizers are unknown; "
            "change model.quant_recipe"
        )
        with pytest.raises(ValueError, match=message):
            tiny_gpt.fssdp_hook()(chunks)


@ranks(2, preload="te-blackwell")
def test_checkpoints_of_quantized_parameters() -> None:
    """Loaded weights are quantized anew in stock and in FSSDP, and both go on alike."""
    case = case_of("mxfp8", SHARDED, stored=True)
    folder = checkpoints.shared_folder("checkpoint")
    checkpoints.save(tiny_gpt.train(case, hook=hook_of()), folder)
    losses = []
    for hook in (hook_of(), fuse_wgrad):
        run = tiny_gpt.train(case, steps=2, hook=hook)
        checkpoints.load(run, folder)
        losses.append([run.step(step) for step in (3, 4, 5)])
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
