"""The ways to switch FSSDP on in Megatron-Bridge, and what they refuse.

Oracle: the log of the same script without FSSDP, or literal messages.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import sys
from pathlib import Path
from typing import Any

import bridge_on_cpu
import pytest
import snippets
import torch
import torch.distributed as dist
from ranks import ranks
from recipe_runs import FREE, OVERRIDES, train

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
SCRIPT = (
    str(HERE / "run_recipe.py"),
    "--recipe",
    "qwen3_30b_a3b_pretrain_8gpu_h100_bf16_config",
    *OVERRIDES,
)
FLAGS = ("--moe-fssdp", "--moe-fssdp-slots", "3", "--moe-fssdp-speeds", FREE)
ONCE, TORCH_FSDP = "train.train_iters=1", "dist.use_torch_fsdp2=true"


def launch(*arguments: str) -> str:
    """What our launcher printed on this rank."""
    from megatron_hecate.__main__ import main

    with contextlib.redirect_stdout(io.StringIO()) as said:
        assert main([*arguments]) == 0
    return said.getvalue()


def override(config: Any, *overrides: str) -> None:
    bridge_on_cpu.process_config_with_overrides(config, cli_overrides=[*overrides])


def slots_of(model: list) -> list[int]:
    return [m.fssdp.config.slots for c in model for m in c.modules() if hasattr(m, "fssdp")]


def losses(log: str) -> list[float]:
    return [float(loss) for loss in re.findall(r"lm loss: ([\d.E+-]+)", log)]


@pytest.mark.newest
@ranks(2)
def test_launcher_overrides_and_example_train_as_stock() -> None:
    stock = launch(*SCRIPT)
    assert "FSSDP" not in stock
    free = f"+model.moe_fssdp_speeds={FREE}"
    for slots, arguments in {
        1: (*SCRIPT, "+model.moe_fssdp=true", "+model.moe_fssdp_slots=1", free),
        2: (str(ROOT / "examples" / "bridge_recipe.py"), *OVERRIDES, free),
        3: (*FLAGS, *SCRIPT),
    }.items():
        log = launch(*arguments)
        if dist.get_rank() == 0:  # which says what is on
            on = f"FSSDP on: 2 MoE layers, 8 experts over 2 ranks, {slots} slots per rank and layer"
            assert log.count(on) == 1 and f"cost model with the speeds of {FREE}" in log, log
        else:  # the last rank logs
            assert len(losses(log)) == 4
            assert losses(log) == pytest.approx(losses(stock), rel=1e-5), arguments


@ranks(2)
def test_the_lines_of_the_readme_train_as_stock() -> None:
    runs = [train(bridge_on_cpu.recipe())]
    names = {"cfg": bridge_on_cpu.recipe(), "forward_step": None}
    names["pretrain"] = lambda cfg, _, callbacks: runs.append(train(cfg, *callbacks))
    with contextlib.redirect_stdout(io.StringIO()) as said:
        exec(snippets.block("README.md", 6), names)
    runs[1].assert_same(runs[0])
    if int(os.environ["RANK"]) == 0:
        assert "FSSDP on: 2 MoE layers, 8 experts over 2 ranks, 2 slots" in said.getvalue()


@ranks(2)
def test_an_override_that_does_not_arrive_is_an_error() -> None:
    """Bridge drops overrides of names that it does not know."""
    for override in ("+model.moe_fssdp_slot=1", "+moe_fssdp=true"):
        sys.argv = ["run_recipe.py", override]
        config = bridge_on_cpu.enabled(override)
        message = r"did not reach the model; known are \+model.moe_fssdp, "
        with pytest.raises(ValueError, match=message) as error:
            train(config)
        assert f"the override {override!r} did not" in str(error.value)
    sys.argv = ["run_recipe.py", "logger.wandb_exp_name=moe_fssdp=true", "moe_fssdp.yaml"]
    assert len(train(bridge_on_cpu.recipe(ONCE)).steps) == 1, "these are no overrides of ours"


@pytest.mark.newest
@ranks(2)
def test_overrides_come_before_the_recipe() -> None:
    from megatron.bridge.training.callbacks import Callback

    class Slots(Callback):
        def on_train_start(self, context: Any) -> None:
            self.found = slots_of(context.model)

    def slots(config: Any) -> list[int]:
        callback = Slots()
        train(config, callback)
        return callback.found

    assert slots(bridge_on_cpu.enabled(ONCE, "+model.moe_fssdp_slots=1", slots=2)) == [1, 1]
    file = Path(os.environ["TEST_FOLDER"]) / f"{dist.get_rank()}.yaml"
    file.write_text("model: {moe_fssdp: true, moe_fssdp_slots: 3}")
    config = bridge_on_cpu.process_config_with_overrides(
        bridge_on_cpu.recipe(ONCE), config_filepath=str(file)
    )
    assert slots(config) == [3, 3], "of Bridge's own kind of file"
    config = bridge_on_cpu.enabled(ONCE, slots=2)
    config.model = bridge_on_cpu.as_model_config(config.model)
    assert slots(config) == [2, 2], "a recipe may exchange its model afterwards"
    config = bridge_on_cpu.enabled(ONCE, slots=2)
    override(config, "+model.moe_fssdp=false")
    assert slots(config) == [], "switched off"


@ranks(2)
def test_enabling_twice() -> None:
    from megatron_hecate import bridge

    config = bridge_on_cpu.recipe(ONCE)
    for _ in range(2):
        bridge.enable(config, slots=1)
    message = r"asked for with moe_fssdp_slots=1 before, now with moe_fssdp_slots=3"
    with pytest.raises(ValueError, match=message):
        bridge.enable(config, slots=3)
    with pytest.raises(TypeError, match="unexpected keyword argument 'slot'"):
        bridge.enable(config, slot=3)
    with pytest.raises(ValueError, match="slots=-1 must be a whole number from 0 to"):
        bridge.enable(config, slots=-1)
    assert train(config).replicas.keys() == {"layer 1", "layer 2"}


@ranks(2)
def test_the_recipe_is_checked_as_it_will_run() -> None:
    """Overrides after `enable` are seen, as well those that make a recipe fit as those that break it."""
    from megatron.bridge.peft.lora import LoRA
    from megatron.core import parallel_state

    config = bridge_on_cpu.enabled(ONCE, "model.expert_model_parallel_size=1")
    override(config, "model.expert_model_parallel_size=2")
    train(config)

    config = bridge_on_cpu.enabled("model.expert_model_parallel_size=2")
    override(config, "model.expert_model_parallel_size=1", TORCH_FSDP)
    config.peft, config.checkpoint.pretrained_checkpoint = LoRA(), os.environ["TEST_FOLDER"]
    with pytest.raises(ValueError, match="FSSDP cannot be switched on:\n") as error:
        train(config)
    named = re.findall(r"--moe-fssdp with (\w+)=", str(error.value))
    assert named == ["expert_model_parallel_size", "use_torch_fsdp2", "peft"]
    assert not parallel_state.is_initialized(), "the job must not have started"


@pytest.mark.newest
@ranks(2)
def test_the_overrides_that_are_named_are_ones_that_bridge_takes() -> None:
    """And they switch FSSDP on. Oracle: Bridge's own parser of overrides, which refuses names it does not know."""
    from megatron.bridge.training import pretrain

    from megatron_hecate import bridge

    config = bridge_on_cpu.recipe("model.expert_model_parallel_size=1", TORCH_FSDP)
    config.mixed_precision = "bf16_with_fp8_delayed_scaling_mixed"
    config.model.mlp_chunks_for_training = 2
    config.model.restore_modelopt_state = True
    bridge.enable(config)
    with pytest.raises(ValueError, match="FSSDP cannot be switched on") as error:
        pretrain.runtime_config_update(config)
    overrides = re.findall(r"(?:set|and) ([\w.]+=\w+)", str(error.value))
    assert len(overrides) == 5, error.value
    override(config, *overrides)
    pretrain.runtime_config_update(config)


@ranks(1)
def test_another_bridge_is_refused() -> None:
    from megatron.bridge.training import pretrain

    pretrain.runtime_config_update = lambda config: None
    message = (
        r"does not fit this Megatron-Bridge \d\S+:\n  - megatron.bridge.training.pretrain:.* takes"
    )
    with pytest.raises(ImportError, match=f"{message} cfg"):
        import megatron_hecate.bridge  # noqa: F401


@pytest.mark.parametrize("way", ["flags", "enabled"])
@ranks(2)
def test_a_provider_that_builds_without_pretrain(way: str) -> None:
    """As frameworks of reinforcement learning do, with a hook of their own in place of registered ones; what it asks for
    is checked when the model is built."""
    import megatron_hecate.bridge  # noqa: F401
    from megatron_hecate.switch_on.request import REQUEST

    if way == "flags":
        config = bridge_on_cpu.recipe()
        REQUEST.flags.update(moe_fssdp=True, moe_fssdp_slots=1)
    else:
        config = bridge_on_cpu.enabled(slots=1)
    config.model.finalize()
    config.model.initialize_model_parallel(seed=1)
    seen: list = []
    build = config.model.provide_distributed_model
    model = build(ddp_config=config.ddp, pre_wrap_hook=lambda chunks: seen.extend(chunks) or chunks)
    assert seen and slots_of(model) == [1, 1]
    if way == "enabled":
        message = r"FSSDP cannot be switched on:\n.*use_megatron_fsdp=True"
        with pytest.raises(ValueError, match=message):
            build(ddp_config=config.ddp, use_megatron_fsdp=True)


@ranks(2)
def test_a_recipe_whose_model_is_never_wrapped_does_not_step() -> None:
    """NeMo-RL's `get_model` with its own list of hooks, and a framework that wraps the model itself."""
    from megatron.bridge.models.model_provider import get_model
    from megatron.core.process_groups_config import ProcessGroupCollection

    config = bridge_on_cpu.enabled(slots=1)
    config.model.finalize()
    config.model.initialize_model_parallel(seed=1)
    groups = ProcessGroupCollection.use_mpu_process_groups()

    def build(wrap_with_ddp: bool) -> list:
        settings = dict(pre_wrap_hook=[lambda chunks: chunks], pg_collection=groups)
        return get_model(config.model, config.ddp, wrap_with_ddp=wrap_with_ddp, **settings)

    optimizer = torch.optim.SGD(build(wrap_with_ddp=False)[0].parameters(), lr=0.1)
    with pytest.raises(ValueError, match=r"it was asked for, and SGD is about to step"):
        optimizer.step()
    assert slots_of(build(wrap_with_ddp=True)) == [1, 1]
    optimizer.step()
